"""Activations are sharded by the names of their axes, and by nothing else."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from flaxformer_mt.model.logical_axes import constrain, mesh_device_kind, mesh_platform

RULES = (("batch", ("data", "fsdp")), ("lookup_batch", ("data",)), ("lookup_embed", ("fsdp",)))


@pytest.fixture(name="mesh")
def mesh_of_eight():
    return Mesh(
        np.array(jax.devices()[:8]).reshape(2, 4), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2
    )


def lowered(mesh, function, *arguments):
    """The program of a function that is traced with the mesh and the rules."""

    def traced(*arguments):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), nn.logical_axis_rules(RULES):
            return function(*arguments)

    everywhere = NamedSharding(mesh, PartitionSpec())
    return jax.jit(traced, in_shardings=everywhere).lower(*arguments)


def output_sharding(mesh, function, *arguments):
    return lowered(mesh, function, *arguments).compile().output_shardings


def test_names_decide_and_not_the_class_of_a_module(mesh):
    """A module that the library does not know is sharded by the names that it gives."""

    class Table(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            table = self.param("rows", nn.initializers.ones, (16, 8))
            vectors = constrain(table[tokens], "lookup_batch", "length", "lookup_embed")
            return constrain(vectors, "batch", "length", "embed")

    tokens = jnp.zeros((8, 3), jnp.int32)
    params = Table().init(jax.random.key(0), tokens)
    vectors = output_sharding(mesh, Table().apply, params, tokens)
    assert vectors.shard_shape((8, 3, 8)) == (1, 3, 8)
    program = lowered(mesh, Table().apply, params, tokens).as_text()
    assert program.count("sharding_constraint") == 2


def test_an_unnamed_value_of_rank_3_is_not_touched(mesh):
    """[H, T, S] looks like [B, T, D]; its heads must not be sharded like rows."""

    class Scores(nn.Module):
        def __call__(self, x):
            return jnp.einsum("htk,hsk->hts", x, x)

    x = jnp.ones((8, 4, 4))
    assert "sharding_constraint" not in lowered(mesh, Scores().apply, {}, x).as_text()
    assert output_sharding(mesh, Scores().apply, {}, x).is_fully_replicated


def test_names_must_be_as_many_as_axes():
    with pytest.raises(ValueError, match=r"2 logical axes .* shape \(2, 3, 4\)"):
        constrain(jnp.ones((2, 3, 4)), "batch", "embed")


def test_without_a_mesh_without_rules_and_under_pmap_nothing_is_added(mesh):
    x = jnp.ones((8, 4))

    def name(x):
        return constrain(x, "batch", "embed")

    assert constrain(x, "batch", "embed") is x
    with nn.logical_axis_rules(RULES):
        assert constrain(x, "batch", "embed") is x
        mapped = jax.pmap(name, axis_name="data", devices=jax.devices()[:8])
        np.testing.assert_array_equal(mapped(jnp.ones((8, 1, 4))), 1)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        assert "sharding_constraint" not in str(jax.make_jaxpr(name)(x))


def test_the_platform_is_that_of_the_mesh_not_of_the_process(mesh):
    gpu = jax.sharding.AbstractDevice("NVIDIA H100", 132, "gpu")
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh.update(abstract_device=gpu)):
        assert mesh_platform() == "gpu"
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        assert mesh_platform() == "cpu"
    assert mesh_platform() == jax.default_backend()


def test_without_a_mesh_the_platform_is_that_of_the_default_device(monkeypatch):
    cpu = jax.devices("cpu")[0]
    gpu = types.SimpleNamespace(platform="gpu", device_kind="NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(jax, "local_devices", lambda backend=None: [gpu])
    assert mesh_platform() == "gpu"
    assert mesh_device_kind() == gpu.device_kind
    with jax.default_device(cpu):
        assert mesh_platform() == "cpu"
