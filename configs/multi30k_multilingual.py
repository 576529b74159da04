"""Image captions, English to German and to French, with one model: a tag names the language.

    python train.py --config=configs/multi30k_multilingual.py --workdir=runs/multilingual \
        --data.path=PATH

PATH is a folder with train, valid and test .en, .de and .fr (or .gz): the raw text of Multi30k,
task 1 (Elliott et al. 2016, 2017). As it is in github.com/multi30k/dataset, data/task1/raw, it
needs `--data.valid-split=val --data.test-split=test_2016_flickr`. To translate, put the tag before
each sentence:

    echo "<2fr> A dog runs." | flaxformer-mt translate --run runs/multilingual

Source: Johnson et al. 2017, "Google's Multilingual Neural Machine Translation System", for the
tags; Arivazhagan et al. 2019, "Massively Multilingual Neural Machine Translation in the Wild", for
the temperature, which balances corpora of different sizes. These two have the same size, so that
it has no effect until a third one is added. The sizes are those of multi30k_tiny_en_de.py. Scores
have not been measured; by its compiled program a step takes at least 1.04 ms on an H100
(benchmarks/accelerators.py).
"""

from flaxformer_mt.config import (
    CorpusConfig,
    DataConfig,
    DecodeConfig,
    ExperimentConfig,
    OptimizerConfig,
    TrainConfig,
    TransformerConfig,
)


def get_config() -> ExperimentConfig:
    """4 + 4 layers of width 128 on a joint vocabulary of 12,000 pieces."""
    languages = (
        CorpusConfig(target_language="de", tag="<2de>"),
        CorpusConfig(target_language="fr", tag="<2fr>"),
    )
    return ExperimentConfig(
        model=TransformerConfig(
            d_model=128,
            num_heads=4,
            d_ff=256,
            num_encoder_layers=4,
            num_decoder_layers=4,
            dropout_rate=0.3,
        ),
        data=DataConfig(
            corpus="text",
            source_language="en",
            train_corpora=languages,
            valid_corpora=languages,
            test_corpora=languages,
            mixture_temperature=5.0,
            vocab_size=12000,
        ),
        optimizer=OptimizerConfig(schedule="inverse_square_root", learning_rate=5e-3, warmup=0.125),
        train=TrainConfig(
            num_steps=16_000,
            batch_tokens=4096,
            label_smoothing=0.1,
            eval_every=1000,
            eval_sentences=0,
            checkpoint_every=250,
            best_metric="bleu",
        ),
        decode=DecodeConfig(beam_size=4, length_penalty=0.6),
    )
