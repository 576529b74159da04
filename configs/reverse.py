"""Learns to write digits in reverse order: a minimal end-to-end check.

    python train.py --config=configs/reverse.py --workdir=runs/reverse

The sentences are generated: "4 0 7" becomes "7 0 4". Expected: at least 99% of the test sentences
exactly right (BLEU of nearly 100), after about 80 seconds on two CPU cores.
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
    """2 + 2 layers of width 64 on a vocabulary of digits."""
    return ExperimentConfig(
        model=TransformerConfig(
            d_model=64,
            num_heads=4,
            d_ff=128,
            num_encoder_layers=2,
            num_decoder_layers=2,
            norm_position="pre",
            final_norm=True,
            dropout_rate=0.0,
        ),
        data=DataConfig(
            corpus="reverse",
            source_language="digits",
            target_language="reversed",
            vocab_size=32,
            byte_fallback=False,
            generated_pairs=100_000,
            source_row_length=32,
            target_row_length=32,
        ),
        # A rate that falls to nearly nothing: the last mistakes are in strings that are rare.
        optimizer=OptimizerConfig(schedule="one_cycle", learning_rate=3e-3, warmup=0.273),
        train=TrainConfig(
            num_steps=1100,
            batch_tokens=2048,
            label_smoothing=0.0,
            eval_every=550,
            checkpoint_every=550,
            eval_sentences=100,
        ),
        decode=DecodeConfig(beam_size=1, length_penalty=0.0),
    )
