"""Image captions, English to German, at the size of the paper's base model.

    python train.py --config=configs/multi30k_en_de.py --data.path=PATH --workdir=runs/multi30k

PATH is a folder with train, valid and test .en and .de (or .en.gz and .de.gz): the raw text of
Multi30k, task 1 (Elliott et al. 2016). As it is in github.com/multi30k/dataset, data/task1/raw, it
needs `--data.valid-split=val --data.test-split=test_2016_flickr`.

Source of the model: Vaswani et al. 2017, table 3, "base", with more dropout, since 29,000 pairs
are few. A step takes about 30 times as long as one of multi30k_tiny_en_de.py. Its score has not
been measured yet.

Devices, from the compilers (benchmarks/accelerators.py): meant for one accelerator, without any
mesh; a step of 4,096 target positions needs 1.5 of the 80 GiB of an H100.
"""

from flaxformer_mt.config import (
    DataConfig,
    ExperimentConfig,
    OptimizerConfig,
    TrainConfig,
    TransformerConfig,
)


def get_config() -> ExperimentConfig:
    """6 + 6 layers of width 512, in bfloat16."""
    return ExperimentConfig(
        model=TransformerConfig(dropout_rate=0.3, dtype="bfloat16"),
        data=DataConfig(corpus="text", source_language="en", target_language="de"),
        optimizer=OptimizerConfig(schedule="inverse_square_root", learning_rate=1e-3, warmup=0.2),
        train=TrainConfig(
            num_steps=10_000,
            batch_tokens=4096,
            eval_every=500,
            checkpoint_every=500,
            best_metric="bleu",
        ),
    )
