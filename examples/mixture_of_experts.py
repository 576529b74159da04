"""A mixture of experts in a file of your own: each token goes to 2 of 4 feed-forward networks.

    python examples/mixture_of_experts.py --workdir runs/experts

The router is trained by the cross-entropy and by a loss that balances the load of the experts
(Fedus et al. 2021, equation 4, with the top-2 routing of Lepikhin et al. 2020). Every expert
computes every token here, which is simple and exact; a large model would dispatch them.
"""

import argparse

import jax
import jax.numpy as jnp

import flaxformer_mt as fmt
from flaxformer_mt.config import DataConfig, ParallelConfig, TrainConfig


@fmt.register_feed_forward("experts")
class Experts(fmt.FeedForward):
    """The `top` of `count` networks that the router gives the highest probabilities."""

    count: int = 4
    top: int = 2
    balance: float = 0.01

    def setup(self) -> None:
        """Creates the matrices of all experts, and the router."""
        c, init = self.config, jax.nn.initializers.variance_scaling(1.0, "fan_avg", "uniform")
        experts = jax.nn.initializers.variance_scaling(1.0, "fan_avg", "uniform", batch_axis=0)
        self.router = self.param("router", init, (c.d_model, self.count))
        self.wide = self.param("wide", experts, (self.count, c.d_model, c.d_ff))
        self.narrow = self.param("narrow", experts, (self.count, c.d_ff, c.d_model))

    def __call__(
        self,
        x: jax.Array,
        deterministic: bool,
        add_bias: bool = True,
        is_token: jax.Array | None = None,
    ) -> jax.Array:
        """See `FeedForward.__call__`."""
        chances = jax.nn.softmax((x @ self.router.astype(x.dtype)).astype(jnp.float32))
        chosen = chances >= jax.lax.top_k(chances, self.top)[0][..., -1:]
        gates = jnp.where(chosen, chances, 0)
        gates = (gates / gates.sum(-1, keepdims=True)).astype(x.dtype)

        real = (jnp.ones(x.shape[:2], bool) if is_token is None else is_token)[..., None]
        tokens = jnp.maximum(real.sum(), 1).astype(jnp.float32)
        share, chance = (
            jnp.sum(y.astype(jnp.float32), (0, 1), where=real) / tokens for y in (chosen, chances)
        )
        balance = self.count / self.top * jnp.sum(share * chance)
        self.add_loss("balance", self.balance * balance * tokens)

        hidden = jax.nn.relu(jnp.einsum("btd,edf->btef", x, self.wide.astype(x.dtype)))
        return jnp.einsum("btef,efd,bte->btd", hidden, self.narrow.astype(x.dtype), gates)


def main() -> None:
    """Trains a small model with experts on generated pairs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workdir", default="runs/experts")
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    config = fmt.ExperimentConfig(
        model=fmt.TransformerConfig(
            d_model=64, num_heads=4, d_ff=128, num_encoder_layers=2, num_decoder_layers=2,
            feed_forward_kind="experts(count=4, top=2)",
        ),
        data=DataConfig(vocab_size=600),
        train=TrainConfig(num_steps=options.steps, batch_tokens=4096),
        parallel=ParallelConfig(),
    )  # fmt: skip
    fmt.train(config, options.workdir)


if __name__ == "__main__":
    main()
