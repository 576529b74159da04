"""Image captions, English to German, with a model that can be exported to Hugging Face's Marian.

    python train.py --config=configs/multi30k_marian_en_de.py --data.path=PATH --workdir=runs/marian

PATH is a folder with train, valid and test .en and .de (or .en.gz and .de.gz): the raw text of
Multi30k, task 1 (Elliott et al. 2016). As it is in github.com/multi30k/dataset, data/task1/raw, it
needs `--data.valid-split=val --data.test-split=test_2016_flickr`.

The model has the size of `multi30k_tiny_en_de.py` and the architecture of the OPUS-MT models, so
that it can be exported by `flaxformer-mt convert --from flaxformer_mt --to marian` (or `--to
ctranslate2`); see docs/opus-mt.md.

Expected on `test` (2016 Flickr; cased, detokenized): sacreBLEU of 35.9, after 45 minutes on one CPU
core (`multi30k-en-de-marian` of docs/results.md).
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
        model=presets.marian(
            d_model=128,
            num_heads=4,
            d_ff=256,
            num_encoder_layers=4,
            num_decoder_layers=4,
            dropout_rate=0.3,
            # The tokenizer's own ids; as in Marian, padding starts decoding.
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
            schedule="one_cycle", learning_rate=5e-3, warmup=0.3125, clip_norm=25.0
        ),
        train=TrainConfig(
            num_steps=2240,
            batch_tokens=4096,
            label_smoothing=0.1,
            # 4 epochs.
            eval_every=448,
            checkpoint_every=448,
            best_metric="bleu",
        ),
        decode=DecodeConfig(beam_size=4, length_penalty=0.6),
    )
