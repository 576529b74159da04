r"""One file of your own, on a laptop; docs/first-hour.md has the whole way.

    flaxformer-mt train --config=configs/first_hour.py --workdir=runs/mine \
        --data.path=fra.txt --data.columns 1 2 --data.hold-out 1000 \
        --data.source-language=en --data.target-language=fr

A small model for some 100,000 pairs of short sentences. Expected on Tatoeba's, English to French:
sacreBLEU of 20.9 on the test pairs after 800 steps, one epoch, in 5 minutes on one CPU core
(`first-hour` of docs/results.md). More steps (--train.num-steps) translate better.
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
            tie_embeddings="all",
        ),
        data=DataConfig(source_language="en", target_language="fr", vocab_size=4000),
        optimizer=OptimizerConfig(schedule="inverse_square_root", learning_rate=2e-3, warmup=0.375),
        train=TrainConfig(
            num_steps=800,
            batch_tokens=2048,
            log_every=100,
            eval_every=400,
            eval_sentences=200,
            checkpoint_every=400,
            best_metric="bleu",
        ),
    )
