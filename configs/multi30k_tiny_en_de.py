"""Image captions, English to German, with a model small enough for a CPU.

    python train.py --config=configs/multi30k_tiny_en_de.py --data.path=PATH --workdir=runs/tiny

PATH is a folder with train, valid and test .en and .de (or .en.gz and .de.gz): the raw text of
Multi30k, task 1 (Elliott et al. 2016), github.com/multi30k/dataset.

Size and learning rate: Wu et al. 2021, "Good for Misconceived Reasons: An Empirical Revisiting on
the Need for Visual Context in Multimodal Machine Translation"; benchmarks/reproduction/multi30k.py
has the whole recipe.

Expected on `test` (2016 Flickr; cased, detokenised,
nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:2.6.0): sacreBLEU of 37.2 after 3,500 steps,
which took 90 minutes on two CPU cores shared with other work; on an idle machine a step of 3,900
target tokens takes 0.8 s. The validation score was still rising.
"""

from flaxformer_mt.config import (
    DataConfig,
    DecodeConfig,
    ExperimentConfig,
    OptimizerConfig,
    TrainConfig,
    TransformerConfig,
)


def get_config() -> ExperimentConfig:
    """4 + 4 layers of width 128 on a joint vocabulary of 10,000 pieces."""
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
            target_language="de",
            vocab_size=10000,
        ),
        optimizer=OptimizerConfig(
            schedule="inverse_square_root", learning_rate=5e-3, warmup_steps=2000
        ),
        train=TrainConfig(
            num_steps=8000,
            batch_tokens=4096,
            label_smoothing=0.1,
            eval_every=500,
            checkpoint_every=250,
            best_metric="bleu",
        ),
        decode=DecodeConfig(beam_size=4, length_penalty=0.6),
    )
