"""An attention of your own, in a file of your own: cosine similarity with a learned temperature.

    python examples/own_attention.py --workdir runs/cosine

The class is a subclass, because it has a parameter of its own and shares the projections; it is
registered by a name, because a run folder records names and no code. To use the run later, import
this file first, as the last lines do for the command line:

    python examples/own_attention.py translate --run runs/cosine/cosine < source.txt
"""

import argparse
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp

import flaxformer_mt as fmt
from flaxformer_mt.cli import main as command_line
from flaxformer_mt.config import (
    DataConfig,
    DecodeConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainConfig,
)


@fmt.register_attention("cosine")
class CosineAttention(fmt.MultiHeadAttention):
    """Attention by cosine similarity (Henry et al. 2020): queries and keys have length 1."""

    def setup(self) -> None:
        """Adds a temperature per head."""
        super().setup()
        self.temperature = self.param("temperature", nn.initializers.constant(8.0),
                                      (self.config.num_heads,))  # fmt: skip

    def attend(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        mask: jax.Array | None,
        bias: jax.Array | None,
        deterministic: bool,
    ) -> tuple[jax.Array, jax.Array]:
        """See `MultiHeadAttention.attend`."""
        scale = self.temperature[:, None, None] * key.shape[-1] ** 0.5
        query = (unit(query) * scale).astype(query.dtype)
        return super().attend(query, unit(key), value, mask, bias, deterministic)


def unit(x: jax.Array) -> jax.Array:
    """Returns vectors [..., K] divided by their lengths."""
    return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), -1, keepdims=True) + 1e-6)


def train(kind: str, options: argparse.Namespace) -> fmt.Run:
    """Trains a model on phrases that are generated, from English to French."""
    config = fmt.ExperimentConfig(
        model=fmt.TransformerConfig(
            attention_kind=kind, d_model=options.width, num_heads=4, d_ff=4 * options.width,
            num_encoder_layers=2, num_decoder_layers=2, norm_position="pre", final_norm=True,
        ),
        data=DataConfig(
            corpus="phrases", generated_pairs=options.pairs, vocab_size=500, target_language="fr",
            test_split="",
        ),
        optimizer=OptimizerConfig(learning_rate=2e-3, warmup_steps=150),
        train=TrainConfig(
            num_steps=options.steps, batch_tokens=options.batch_tokens, eval_sentences=20,
            log_every=max(options.steps // 20, 1),
        ),
        parallel=ParallelConfig(num_devices=options.devices),
        decode=DecodeConfig(beam_size=options.beam_size),
    )  # fmt: skip
    return fmt.train(config, f"{options.workdir}/{kind}")


def main() -> None:
    """Trains with both kinds of attention, and draws their curves beside each other."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workdir", default="runs/cosine")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--pairs", type=int, default=30_000)
    parser.add_argument("--batch-tokens", type=int, default=2048)
    parser.add_argument("--beam-size", type=int, default=4)
    parser.add_argument("--devices", type=int, default=0, help="0 = all")
    parser.add_argument("--kinds", nargs="+", default=("cosine", "dot_product"))
    options = parser.parse_args()
    cosine, *others = [train(kind, options) for kind in options.kinds]
    cosine.plot(beside=others).save(f"{options.workdir}/curves.png")
    print(cosine.translator().translate(["twelve kilometers", "Friday, Tuesday, and Monday"]))


if __name__ == "__main__":
    if sys.argv[1:2] and not sys.argv[1].startswith("-"):
        sys.exit(command_line())
    main()
