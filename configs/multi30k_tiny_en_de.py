"""Image captions, English to German, with a model small enough for a CPU.

    python train.py --config=configs/multi30k_tiny_en_de.py --data.path=PATH --workdir=runs/tiny

PATH is a folder with train, valid and test .en and .de (or .en.gz and .de.gz): the raw text of
Multi30k, task 1 (Elliott et al. 2016). As it is in github.com/multi30k/dataset, data/task1/raw, it
needs `--data.valid-split=val --data.test-split=test_2016_flickr`.

The model is the Transformer-Tiny of Wu et al. 2021, "Good for Misconceived Reasons: An Empirical
Revisiting on the Need for Visual Context in Multimodal Machine Translation". The learning rate has
one cycle, which needs fewer updates than their schedule; benchmarks/reproduction/multi30k.py has
their whole recipe.

Expected on `test` (2016 Flickr; cased, detokenized,
nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:2.6.0): sacreBLEU of 39.1, after 1.2 hours on
one CPU core (`multi30k-en-de-cased` of docs/results.md).
"""

from flaxformer_mt import presets
from flaxformer_mt.config import (
    DataConfig,
    DecodeConfig,
    ExperimentConfig,
    OptimizerConfig,
    TrainConfig,
)


def get_config() -> ExperimentConfig:
    """4 + 4 layers of width 128 on a joint vocabulary of 10,000 pieces."""
    return ExperimentConfig(
        model=presets.fairseq(
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
        ),
        data=DataConfig(
            corpus="text",
            source_language="en",
            target_language="de",
            vocab_size=10000,
        ),
        optimizer=OptimizerConfig(
            schedule="one_cycle",
            learning_rate=5e-3,
            warmup=0.3125,
            epsilon=1e-8,
            clip_norm=25.0,
        ),
        train=TrainConfig(
            num_steps=3584,
            batch_tokens=4096,
            label_smoothing=0.1,
            label_smoothing_convention="others",
            # 4 epochs.
            eval_every=448,
            checkpoint_every=448,
        ),
        decode=DecodeConfig(beam_size=5, length_penalty=1.0, length_penalty_kind="average"),
    )
