"""Numbers, dates, times, units, currencies and lists, English to French; nothing to download.

    python train.py --config=configs/quickstart.py --workdir=runs/quickstart

The sentences are generated with num2words and Babel (Unicode CLDR). Expected: sacreBLEU of 98.9 on
`test`, after less than two minutes on two CPU cores.
"""

from flaxformer_mt.config import (
    DataConfig,
    ExperimentConfig,
    OptimizerConfig,
    TrainConfig,
    TransformerConfig,
)


def get_config() -> ExperimentConfig:
    """2 + 2 layers of width 128."""
    return ExperimentConfig(
        model=TransformerConfig(
            d_model=128,
            num_heads=4,
            d_ff=512,
            num_encoder_layers=2,
            num_decoder_layers=2,
            norm_position="pre",
            final_norm=True,
            dropout_rate=0.0,
        ),
        data=DataConfig(
            corpus="phrases",
            source_language="en",
            target_language="fr",
            vocab_size=1000,
            generated_pairs=30000,
        ),
        optimizer=OptimizerConfig(schedule="inverse_square_root", learning_rate=2e-3, warmup=0.5),
        train=TrainConfig(
            num_steps=600,
            batch_tokens=2048,
            label_smoothing=0.05,
            log_every=50,
            eval_every=300,
            eval_sentences=200,
            checkpoint_every=300,
        ),
    )
