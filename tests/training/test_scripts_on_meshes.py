"""What scripts do on a mesh besides training steps: evaluation, and axes of their own."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn_params import drawn_params
from jax.sharding import NamedSharding, PartitionSpec

import flaxformer_mt as fmt
from benchmarks.compiled.program import collectives, parse
from flaxformer_mt.data.stream.placement import place_batch

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
    return drawn_params(config)


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


def trained(config, mesh, params, batch, **options):
    """The parameters after a step of gradient descent in two parts, and the lowered step."""

    def update(state, batch, key, frozen):
        def gradient(rows, part):
            del part
            return jax.grad(lambda params: fmt.cross_entropy(config, params, rows).loss)(
                state["params"]
            )

        total = fmt.accumulate(gradient, batch, parts=2)
        params = jax.tree.map(lambda x, g: x - 0.01 * g, state["params"], total)
        return {"params": params, "step": state["step"] + 1}, ()

    rules = options.get("rules", ())
    state = fmt.place({"params": params, "step": np.int32(0)}, mesh, rules)
    step = fmt.compile_step(update, mesh, **options)
    rows = place_batch(batch, mesh)
    text = step.lower(state, rows).as_text()
    return jax.device_get(step(state, rows)[0]["params"]), state["params"], text


def test_axes_of_ones_own_train_alike(config, params, tokenizers):
    """Positions over an axis of their own, and a table over two axes."""
    batch = fmt.padded(PAIRS[:8], tokenizers, config, length=16)
    expected, *_ = trained(config, fmt.make_mesh(devices=jax.devices()[:1]), params, batch)
    mesh = fmt.make_mesh(fsdp=2, sequence=2)
    assert dict(mesh.shape) == {"data": 2, "fsdp": 2, "tensor": 1, "sequence": 2}
    rules = [("target_embedding/embedding$", (None, ("fsdp", "sequence")))]
    options = {"rules": rules, "activations": [("length", "sequence")]}
    found, placed, text = trained(config, mesh, params, batch, **options)
    chex.assert_trees_all_close(found, expected, rtol=1e-4, atol=1e-6)
    table = placed["target_embedding"]["embedding"]
    assert table.sharding.spec == PartitionSpec(None, ("fsdp", "sequence"))
    assert '{"data", "fsdp"}, {"sequence"}' in text  # Rows and positions.
    with pytest.raises(fmt.UserError, match="unknown mesh axis 'sequences': use data, fsdp, tens"):
        trained(config, mesh, params, batch, activations=[("length", "sequences")])
    with pytest.raises(fmt.UserError, match=r"8 devices are not a multiple of fsdp=1 .* experts=3"):
        fmt.make_mesh(experts=3)


def test_parts_have_rows_of_every_device():
    mesh = fmt.make_mesh()
    rows = jax.device_put(np.arange(32, dtype=np.int32), NamedSharding(mesh, ROWS))
    sums = fmt.compile_eval(
        lambda _, rows: fmt.accumulate(lambda own, part: own * (1 + part), rows, 4), mesh,
        results="rows",
    )  # fmt: skip
    text = sums.lower({}, rows).compile().as_text()
    assert not collectives(parse(text))
    np.testing.assert_array_equal(sums({}, rows), np.arange(32).reshape(8, 4) @ [1, 2, 3, 4])
    for parts in (0, 3, 8):
        with pytest.raises(fmt.UserError, match=rf"32 rows cannot .* into {parts} parts on 8 dev"):
            fmt.compile_eval(lambda _, rows, n=parts: fmt.accumulate(max, rows, n), mesh)({}, rows)


def test_a_state_is_restored_without_creating_it(tmp_path):
    mesh = fmt.make_mesh(fsdp=2)

    def create(key):
        kernel = jax.random.normal(key, (3, 4, 8))
        return {"params": {"query": {"kernel": kernel}}, "step": jnp.int32(7)}

    state = fmt.create(create, mesh)
    with fmt.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(7, state)
        found, _ = checkpoints.restore_or(fmt.abstract(create, mesh), None)
    chex.assert_trees_all_equal(found, state)
    assert found["params"]["query"]["kernel"].sharding.spec == PartitionSpec(None, "fsdp", None)
