"""Multi30k with the Transformer-Tiny of Wu et al. 2021, as published and with what we add."""

import dataclasses
from typing import Literal

from flaxformer_mt import presets
from flaxformer_mt.config import (
    DataConfig,
    DecodeConfig,
    ExperimentConfig,
    OptimizerConfig,
    TrainConfig,
)
from reproduction.recipe import Recipe
from reproduction.texts import MULTI30K_TESTS
from reproduction.texts import multi30k as text

WU = "Wu et al. 2021, Good for Misconceived Reasons, table 2 (text only, Transformer-Tiny)"
WU_BLEU = {
    "de": dict(zip(MULTI30K_TESTS, (41.02, 33.36, 29.88), strict=True)),
    "fr": dict(zip(MULTI30K_TESTS, (61.80, 53.46, 44.52), strict=True)),
}
_LANGUAGES = {"de": "German", "fr": "French"}
NOTE = (
    "The published command names two devices, each with 4,096 tokens a batch; here a batch has the "
    "4,096 tokens of the paper, packed, so that an epoch has some 110 steps, and as many updates "
    "see half the text."
)


def multi30k(
    target: Literal["de", "fr"], *, published: bool, steps: int = 8000
) -> ExperimentConfig:
    """Returns the published configuration; `published=False` adds what the toolkit offers.

    As in fairseq, which the publication used, each epoch ends with a validation and a checkpoint,
    and training ends after 10 epochs without a better loss.
    """
    model = presets.fairseq(
        d_model=128,
        num_heads=4,
        d_ff=256,
        num_encoder_layers=4,
        num_decoder_layers=4,
        dropout_rate=0.3,
        tie_embeddings="all",
        # The tokenizer's own ids.
        pad_id=0,
        eos_id=2,
    )
    train = TrainConfig(
        num_steps=steps,
        batch_tokens=4096,
        label_smoothing=0.1,
        label_smoothing_convention="others",
        eval_every=112,
        eval_sentences=100,
        checkpoint_every=112,
        keep_last=10,
        log_every=112,
        early_stopping_patience=10,
    )
    data = DataConfig(corpus="text", source_language="en", target_language=target, vocab_size=10000)
    if not published:
        model = dataclasses.replace(model, norm_position="pre", final_norm=True)
        train = dataclasses.replace(train, r_drop=5.0)
        data = dataclasses.replace(data, subword_sampling=0.1)
    return ExperimentConfig(
        model=model,
        data=data,
        optimizer=OptimizerConfig(
            schedule="inverse_square_root",
            learning_rate=5e-3,
            warmup_steps=2000,
            epsilon=1e-8,
            # The default of the publication's copy of fairseq.
            clip_norm=25.0,
        ),
        train=train,
        decode=DecodeConfig(beam_size=5, length_penalty=1.0, length_penalty_kind="average"),
    )


def _of_pair(target: Literal["de", "fr"]) -> dict[str, Recipe]:
    name, title = f"multi30k-en-{target}", f"Multi30k, English to {_LANGUAGES[target]}"
    published = Recipe(
        f"{title}, as published",
        "multi30k",
        lambda: multi30k(target, published=True),
        text=text(target, tokenized=True),
        averaged=10,
        tests=MULTI30K_TESTS,
        published=WU_BLEU[target],
        source=WU,
        note=NOTE,
    )
    best = dataclasses.replace(
        published,
        title=f"{title}, with what the toolkit offers",
        config=lambda: multi30k(target, published=False),
    )
    cased = dataclasses.replace(
        best,
        title=f"{title}, cased and detokenised",
        text=text(target, tokenized=False),
        published={},
        source="",
    )
    return {name: published, f"{name}-best": best, f"{name}-cased": cased}


RECIPES = _of_pair("de") | _of_pair("fr")
