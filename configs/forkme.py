"""A template for your own parallel text, with the fields that are usually changed.

    python train.py --config=configs/forkme.py --data.path=PATH --workdir=runs/mine

PATH is a folder with train.en, train.de, valid.en, valid.de, test.en and test.de (or .gz), or one
file (docs/data.md).
`python train.py --config=configs/forkme.py --help` documents every field; each can also be set on
the command line.

Devices, from the compilers (benchmarks/accelerators.py): a step of 16,384 target positions needs
2.4 of the 80 GiB of one H100, without any mesh.
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
    """A pre-norm Transformer at a size for one accelerator, which CTranslate2 can serve."""
    return ExperimentConfig(
        # Or a published model by name, `preset("marian", d_model=256, ...)`: see
        # flaxformer_mt/presets.py.
        model=TransformerConfig(
            d_model=256,
            num_heads=4,
            d_ff=1024,
            num_encoder_layers=6,
            num_decoder_layers=6,
            norm_position="pre",
            final_norm=True,
            tie_embeddings="all",
            dtype="bfloat16",
        ),
        data=DataConfig(
            corpus="text",
            source_language="en",
            target_language="de",
            vocab_size=16000,
            # Longer sentences are dropped from training, and counted.
            source_row_length=128,
            target_row_length=128,
        ),
        optimizer=OptimizerConfig(
            schedule="inverse_square_root", learning_rate=1e-3, warmup=0.08, clip_norm=1.0
        ),
        train=TrainConfig(
            num_steps=50_000,
            # Target tokens per update. To save memory, increase accumulation_steps.
            batch_tokens=16_384,
            accumulation_steps=1,
            best_metric="bleu",
        ),
        # CTranslate2 has the same search.
        decode=DecodeConfig(
            beam_size=4,
            length_penalty=1.0,
            length_penalty_kind="average",
            early_stopping="first",
            renormalize=True,
        ),
    )
