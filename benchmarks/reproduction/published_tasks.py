"""What the published implementations themselves were trained on."""

import dataclasses

from flaxformer_mt import presets
from flaxformer_mt.config import (
    DataConfig,
    DecodeConfig,
    ExperimentConfig,
    OptimizerConfig,
    TrainConfig,
)
from flaxformer_mt.config.experiment import with_changes
from reproduction.families import SIZES, tiny
from reproduction.recipe import Recipe
from reproduction.texts import COPIES, QUESTIONS
from reproduction.texts import multi30k as multi30k_text


def questions() -> ExperimentConfig:
    """French questions to English: ten epochs of one cycle, some 145 steps each."""
    model = presets.preset(
        "annotated_wide_heads", num_encoder_layers=6, num_decoder_layers=6, d_ff=2048
    )
    steps = 145
    return ExperimentConfig(
        model=model,
        data=DataConfig(
            corpus="text",
            source_language="fr",
            target_language="en",
            vocab_size=6000,
            joint_vocabulary=False,
            source_row_length=36,
            target_row_length=32,
        ),
        optimizer=OptimizerConfig(
            schedule="one_cycle",
            learning_rate=1e-3,
            warmup_steps=3 * steps,
            beta2=0.99,
            epsilon=1e-5,
        ),
        train=TrainConfig(
            num_steps=10 * steps,
            batch_tokens=576,
            label_smoothing=0.0,
            log_every=steps,
            eval_every=steps,
            checkpoint_every=steps,
            eval_sentences=0,
            teacher_forced_metrics=("seq2seq_acc", "teacher_forced_bleu"),
        ),
    )


def annotated_copy() -> ExperimentConfig:
    """The copy task: 2 + 2 layers, 20 batches of 80 lines an epoch, no smoothing; 40 epochs."""
    return ExperimentConfig(
        model=presets.preset(
            "annotated",
            num_encoder_layers=2,
            num_decoder_layers=2,
            position_base=10000.0,
            kernel_init="xavier_uniform",
            embedding_init="xavier_uniform",
        ),
        data=DataConfig(
            corpus="text",
            source_language="in",
            target_language="out",
            vocab_size=32,
            byte_fallback=False,
            # One line a row.
            source_row_length=11,
            target_row_length=11,
        ),
        optimizer=OptimizerConfig(schedule="noam", learning_rate=0.5, warmup_steps=400),
        train=TrainConfig(
            num_steps=800,
            batch_tokens=80 * 11,
            label_smoothing=0.0,
            label_smoothing_convention="non_pad_kl",
            log_every=20,
            eval_every=100,
            checkpoint_every=100,
            eval_sentences=100,
        ),
        decode=DecodeConfig(beam_size=1, length_penalty=0.0),
    )


def annotated_de_en() -> ExperimentConfig:
    """German to English: 6 + 6 layers of width 512, 8 epochs.

    The published loop has batches of 32 sentences, makes an update after each 10 (`accum_iter`),
    and advances the rate, of a warm-up of 3,000, with every batch. In updates, that is a warm-up
    of 300 and a factor of 10^-0.5.
    """
    model = dataclasses.replace(annotated_copy().model, num_encoder_layers=6, num_decoder_layers=6)
    steps = 29_000 // 320
    return ExperimentConfig(
        model=model,
        data=DataConfig(
            corpus="text",
            source_language="de",
            target_language="en",
            vocab_size=8000,
            joint_vocabulary=False,
        ),
        optimizer=OptimizerConfig(schedule="noam", learning_rate=10**-0.5, warmup_steps=300),
        train=TrainConfig(
            num_steps=8 * steps,
            batch_tokens=5120,  # 320 sentences.
            accumulation_steps=10,
            label_smoothing=0.1,
            label_smoothing_convention="non_pad_kl",
            log_every=steps,
            eval_every=steps,
            eval_sentences=100,
            checkpoint_every=steps,
        ),
        decode=DecodeConfig(beam_size=1, length_penalty=0.0),
    )


def jadore801120() -> ExperimentConfig:
    """The command of the README: 256 sentences a batch, 400 epochs, warm-up of 128,000 steps."""
    steps = 29_000 // 256
    return ExperimentConfig(
        model=presets.preset("jadore801120", scale_logits=True),
        data=DataConfig(
            corpus="text", source_language="de", target_language="en", vocab_size=10000
        ),
        optimizer=OptimizerConfig(schedule="noam", learning_rate=2.0, warmup_steps=128_000),
        train=TrainConfig(
            num_steps=400 * steps,
            batch_tokens=4096,  # 256 sentences.
            label_smoothing=0.1,
            label_smoothing_convention="others",
            log_every=steps,
            eval_every=5 * steps,
            eval_sentences=100,
            checkpoint_every=5 * steps,
        ),
        decode=DecodeConfig(beam_size=5, length_penalty=0.7),
    )


def jadore801120_small() -> ExperimentConfig:
    """A small model with the command's loss, ties and batches, and the README's pictured schedule.

    That has 200 epochs, a warm-up of 4,000 updates and a factor of 0.5; here are a fifth of the
    epochs and of the warm-up.
    """
    steps = 29_000 // 256
    return with_changes(
        jadore801120(),
        {
            "model": SIZES,
            "optimizer": {"learning_rate": 0.5, "warmup_steps": 800},
            "train": {"num_steps": 40 * steps, "eval_every": steps, "checkpoint_every": steps},
        },
    )


def tunz_language_model() -> ExperimentConfig:
    """A model of the size of `families.tiny` without encoder, on English: some 9 epochs."""
    return ExperimentConfig(
        model=tiny("tunz", has_inputs=False, num_encoder_layers=0, tie_embeddings="target_output"),
        data=DataConfig(corpus="text", target_language="en", vocab_size=4000),
        optimizer=OptimizerConfig(
            schedule="tensor2tensor", learning_rate=2.0, warmup_steps=1000, beta2=0.997
        ),
        train=TrainConfig(
            num_steps=2000,
            batch_tokens=2048,
            label_smoothing=0.1,
            label_smoothing_convention="others_kl",
            log_every=100,
            eval_every=200,
            checkpoint_every=200,
        ),
    )


JADORE_SMALL_NOTE = (
    "2 + 2 layers of width 128 instead of 6 + 6 of width 512, and 40 epochs. Loss, accuracy and "
    "perplexity are per token, as that code prints them; its perplexity of the training text "
    "includes label smoothing, that of the development text does not."
)

_GERMAN_ENGLISH = multi30k_text("de", tokenized=False)

RECIPES = {
    "questions": Recipe(
        "`questions`: French questions to English",
        "published-tasks",
        questions,
        text=QUESTIONS,
        by_epoch=("loss", "seq2seq_acc", "teacher_forced_bleu"),
        source="the last epoch of the notebook: train_loss 0.0420, valid_loss 1.7106, seq2seq_acc "
        "0.7496, bleu 0.5904 (of 1), on a corpus of 50,000 questions",
        note="That corpus is not available. The text here is the English wh-questions of Tatoeba "
        "and their translations: 9,283 pairs to train, 72 to validate, 80 to test. The published "
        "BLEU counts words and padding, from 0 to 1; `teacher_forced_bleu` counts subword tokens, "
        "from 0 to 100. The 72 validation sentences are two batches of `seq2seq_acc`, of 64 and "
        "of 8. This run weighted them by their positions; the code now weights them by their "
        "sentences, as fast.ai does.",
    ),
    "annotated-copy": Recipe(
        "`annotated`: the copy task",
        "published-tasks",
        annotated_copy,
        text=COPIES,
        note="The published run has 20 epochs, in which the learning rate only rises; here 20 "
        "more follow. The validation BLEU is 93.8 after the first 20, and 99.5 after 30. In the "
        "tests, a model of width 64, without dropout, learns to copy every line of the test set.",
    ),
    "annotated-de-en": Recipe(
        "`annotated`: German to English",
        "published-tasks",
        annotated_de_en,
        text=_GERMAN_ENGLISH,
        note="The published text is tokenized by spaCy into words; here it has 8,000 subword "
        "pieces per side.",
    ),
    "jadore801120-de-en": Recipe(
        "`jadore801120`: German to English",
        "published-tasks",
        jadore801120,
        text=_GERMAN_ENGLISH,
    ),
    "jadore801120-de-en-small": Recipe(
        "`jadore801120`: German to English, a small model",
        "published-tasks",
        jadore801120_small,
        text=_GERMAN_ENGLISH,
        by_epoch=("loss", "perplexity", "accuracy"),
        note=JADORE_SMALL_NOTE,
    ),
    "tunz-language-model": Recipe(
        "`tunz`: a language model of English",
        "published-tasks",
        tunz_language_model,
        text=_GERMAN_ENGLISH,
        tests=(),
    ),
}
