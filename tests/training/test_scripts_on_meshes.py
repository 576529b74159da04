"""What scripts do on a mesh besides training steps: evaluation, and axes of their own."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import flaxformer_mt as fmt

ROWS = PartitionSpec(("data", "fsdp"))


@pytest.fixture(scope="module")
def tokenizers():
    return fmt.train_tokenizers(PAIRS, size=400)


@pytest.fixture(scope="module")
def config(tokenizers):
    return fmt.TransformerConfig(
        d_model=16, num_heads=2, d_ff=32, num_encoder_layers=1, num_decoder_layers=1,
        dropout_rate=0.0, has_inputs=False, **tokenizers.fields,
    )  # fmt: skip


@pytest.fixture(scope="module")
def params(config):
    return jax.jit(fmt.init, static_argnums=0)(config, jax.random.key(0))


PAIRS = [(f"the dog {number} runs", f"der Hund {number} rennt") for number in range(30)]
LONG = ("the dog runs " * 9, "der Hund rennt " * 9)


def test_a_corpus_is_evaluated_alike_on_every_mesh(tokenizers, config, params):
    """And nothing is donated."""
    found = []
    for mesh in (fmt.make_mesh(devices=jax.devices()[:1]), fmt.make_mesh(fsdp=2, tensor=2)):
        of = functools.partial(fmt.evaluation_batches, mesh=mesh, rows=8, length=24)
        batches, placed = of(PAIRS, tokenizers, config), fmt.place(params, mesh)
        assert len(of([*PAIRS, LONG], tokenizers, config)) == len(batches) + 1
        evaluate = fmt.compile_eval(functools.partial(fmt.cross_entropy, config), mesh)
        sums = [evaluate(placed, batch) for batch in batches]
        assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(placed))
        assert all(leaf.is_fully_replicated for leaf in jax.tree.leaves(sums))
        found.append(jax.tree.map(lambda *each: np.sum(each), *jax.device_get(sums)))
    chex.assert_trees_all_close(*found, rtol=1e-5)
    texts = tokenizers.target.encode([target for _, target in PAIRS])
    assert found[0].tokens == sum(len(tokens) + 1 for tokens in texts)


def test_results_can_stay_on_their_devices(tokenizers, config, params):
    mesh = fmt.make_mesh(fsdp=4)
    (batch,) = fmt.evaluation_batches(PAIRS[:8], tokenizers, config, mesh, rows=8, length=24)
    placed = fmt.place(params, mesh)

    def logits(params, batch):
        return fmt.apply(config, params, batch), jnp.int32(7), jnp.zeros(3)

    of_rows, *others = fmt.compile_eval(logits, mesh, results="rows")(placed, batch)
    assert of_rows.sharding.spec == ROWS
    assert all(each.is_fully_replicated for each in others)

    def gradient(params, batch):
        return jax.grad(lambda params: fmt.cross_entropy(config, params, batch).loss)(params)

    found = fmt.compile_eval(gradient, mesh, results="rules")(placed, batch)
    for ours, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(placed), strict=True):
        assert ours.sharding.is_equivalent_to(wanted.sharding, ours.ndim)
    with pytest.raises(fmt.UserError, match='results=\'row\': choose "replicated", "rows" or'):
        fmt.compile_eval(gradient, mesh, results="row")
