"""WMT 2014 English to German, as in "Attention Is All You Need": the base model.

    python train.py --config=configs/wmt14_en_de_base.py --workdir=runs/wmt14_base
    flaxformer-mt average --run runs/wmt14_base --last 5

The text (4.5 million pairs; newstest2013 to validate, newstest2014 to test) comes from TensorFlow
Datasets, which needs TensorFlow once, to prepare it:

    pip install 'flaxformer_mt[data,tensorflow]'
    python -c "import tensorflow_datasets as tfds; \
        tfds.builder('wmt14_translate/de-en', file_format='array_record').download_and_prepare()"

A folder that `flaxformer-mt prepare` made of your own copy needs none: --data.path=FOLDER.

Devices, from the compilers (benchmarks/accelerators.py): a step of 16,384 target positions needs
3.8 GiB of one H100 (80 GiB), without any mesh; one of 8,192 per chip needs 2.9 of the 16 GiB of
each TPU of v5e:4x4, with parallel.fsdp=4.

Source: Vaswani et al. 2017, sections 5 and 6.1, table 3, "base". Its batches hold about 25,000
source and 25,000 target tokens; it averages the last 5 checkpoints, written every 10 minutes
(1,500 steps of 0.4 s).

Expected: 27.3 BLEU on newstest2014 is what the paper reports (table 2), tokenized and with
hyphenated compounds split (see Post 2018). The sacreBLEU printed here is computed on detokenized
text, and is usually lower for the same translations. Neither score nor time was measured with this
code.
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
    """6 + 6 layers of width 512 on a joint vocabulary of 37,000 pieces, in bfloat16."""
    return ExperimentConfig(
        model=TransformerConfig(
            d_model=512,
            num_heads=8,
            d_ff=2048,
            num_encoder_layers=6,
            num_decoder_layers=6,
            dropout_rate=0.1,
            dtype="bfloat16",
            # On a GPU: a seventh less temporary memory, for 2% more time.
            remat="projections",
        ),
        data=DataConfig(
            corpus="tfds",
            path="wmt14_translate/de-en",
            source_language="en",
            target_language="de",
            train_split="train",
            valid_split="validation",
            test_split="test",
            tokenizer="bpe",
            vocab_size=37000,
            # Web text has characters of all scripts; the rare ones are spelled in bytes.
            character_coverage=0.9995,
            source_row_length=0,
            target_row_length=256,
        ),
        optimizer=OptimizerConfig(
            schedule="noam",
            learning_rate=1.0,
            warmup=0.04,
            beta1=0.9,
            beta2=0.98,
            epsilon=1e-9,
        ),
        train=TrainConfig(
            num_steps=100_000,
            # 104 rows; at least 95% of their 26,624 positions are filled.
            batch_tokens=104 * 256,
            label_smoothing=0.1,
            checkpoint_every=1500,
            keep_last=5,
            eval_every=1500,
        ),
        # A translation has at most 50 tokens more than its source.
        decode=DecodeConfig(
            beam_size=4, length_penalty=0.6, max_length_factor=1.0, max_length_extra=50
        ),
    )
