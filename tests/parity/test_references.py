"""Our model equals every published Transformer: logits, attention and gradients.

Compared are the rows of real target tokens. Where a row is padding its values mean nothing and may
differ: in a sentence padded on the left such a row may attend to nothing at all, which gives zeros
here and the mean of all values in the published code (which writes -1e9 over every score).
"""

import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from absl.testing import parameterized
from flax.traverse_util import flatten_dict, unflatten_dict
from toy_references import NOTEBOOK, VARIANTS, Variant

from flaxformer_mt import interop
from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.interop import weights
from flaxformer_mt.model.transformer import Transformer

LOGITS = {"float32": 2e-5, "float64": 1e-10}
WEIGHTS = {"float32": 1e-6, "float64": 1e-10}
GRADIENTS = {"float32": 1e-5, "float64": 1e-10}
"""Of the largest gradient."""

DIFFERENTIATED = {
    "jadore801120_prj_all", "annotated_1000", "annotated_1000_shared", "tunz", "torch_pre_gelu"
}  # fmt: skip
"""The variants whose gradients are compared. Each of the others differs from one of these in what
its logits already show."""

SOURCE = np.array([[5, 3, 8, 2, 0, 0], [4, 7, 2, 0, 0, 0], [9, 3, 10, 6, 5, 2], [8, 2, 0, 0, 0, 0]])
TARGET = np.array([[1, 4, 9, 3, 7], [1, 6, 2, 0, 0], [1, 3, 0, 0, 0], [1, 10, 5, 2, 0]])
LEFT_PADDED_TARGET = np.array([[0, 0, 1, 9, 4]])


def batch(variant: Variant) -> tuple[np.ndarray, np.ndarray]:
    """Source [B, S] and decoder input [B, T], padded on the right, in one row on the left."""
    if variant.family == "tunz":
        return SOURCE, np.concatenate([np.full((4, 1), -1), TARGET[:, 1:]], axis=1)
    if variant.family == "torch":  # It hides scores with -inf: a row that sees nothing is NaN.
        return SOURCE, TARGET
    return SOURCE, np.concatenate([TARGET[:-1], LEFT_PADDED_TARGET])


@functools.cache
def compiled(config: TransformerConfig, differentiated: bool) -> Any:
    """A function of (params, source, target, cotangent) to gradients, logits and attention."""

    def loss(params, source, target, cotangent):
        logits, attention = Transformer(config).apply(
            {"params": params}, source if config.has_inputs else None, target, return_attention=True
        )
        return jnp.vdot(logits, cotangent), (logits, attention)

    def run(params, *arguments):
        if differentiated:
            return jax.grad(loss, has_aux=True)(params, *arguments)
        return None, loss(params, *arguments)[1]

    # Nearly all of the time would go into compiling; CompilationTest takes the usual options.
    return jax.jit(run, compiler_options={"xla_backend_optimization_level": 0})


def to_numpy(array: Any) -> np.ndarray:
    return array.detach().numpy() if isinstance(array, torch.Tensor) else np.asarray(array)


def stacked(attention: Any, real_queries: np.ndarray) -> dict[str, np.ndarray]:
    """Either side's decoder and encoder weights [L, B, H, Q, K], real target tokens only."""
    real_queries = real_queries[:, None, :, None]
    maps = {
        "encoder_self": attention.encoder_self,
        "decoder_self": attention.decoder_self,
        "decoder_cross": attention.decoder_cross,
    }
    arrays = {
        name: np.stack([to_numpy(layer) for layer in layers])
        for name, layers in maps.items()
        if layers is not None and len(layers)
    }
    return {
        name: array if name == "encoder_self" else np.where(real_queries, array, 0)
        for name, array in arrays.items()
    }


def gradients_of(reference: torch.nn.Module, variant: Variant, config: TransformerConfig) -> Any:
    """The reference's gradients by our paths."""
    family = interop.FAMILIES[variant.family]
    state = reference.state_dict(keep_vars=True)
    tensors = {
        name: np.zeros(tensor.shape, config.param_dtype) if tensor.grad is None else tensor.grad
        for name, tensor in state.items()
    }
    rules = family.rules(config, family.layout_of_tensors(state))
    arrays = {name: np.asarray(tensor) for name, tensor in tensors.items()}
    return weights.from_reference(rules, config, arrays)


def check(name: str, dtype: str) -> None:
    variant = VARIANTS[name]
    reference = variant.build(dtype)
    config, params = interop.load(variant.family, reference.state_dict(), **variant.hints)
    source, target = batch(variant)
    real = target != config.pad_id
    cotangent = np.random.default_rng(0).normal(size=(*target.shape, config.target_vocab_size))
    cotangent = (cotangent * real[:, :, None]).astype(dtype)

    logits, attention = reference(*map(torch.tensor, (source, target)), return_attention=True)
    expected = logits.detach().numpy()
    gradients, (ours, our_attention) = compiled(config, name in DIFFERENTIATED)(
        interop.model_params(params), np.int32(source), np.int32(target), cotangent
    )

    close = functools.partial(chex.assert_trees_all_close, rtol=0)
    chex.assert_trees_all_equal_dtypes(ours, expected)
    close(np.asarray(ours) * real[:, :, None], expected * real[:, :, None], atol=LOGITS[dtype])
    maps, their_maps = stacked(our_attention, real), stacked(attention, real)
    chex.assert_trees_all_equal_dtypes(maps, their_maps)
    close(maps, their_maps, atol=WEIGHTS[dtype])

    if gradients is not None:
        logits.backward(torch.tensor(cotangent))
        shared = variant.sizes.get("source_attention") == "self_attn"
        found = by_path(gradients, shared)
        expected = gradients_of(reference, variant, config)
        largest = max(np.abs(array).max() for array in expected.values())
        close(found, expected, atol=GRADIENTS[dtype] * largest)


def by_path(gradients: Any, shared: bool) -> dict[str, np.ndarray]:
    """Our gradients; where one attention does the work of two, each is the sum of both."""
    found = {path: np.asarray(g) for path, g in flatten_dict(gradients, sep="/").items()}
    for path in [path for path in found if shared and "/cross_attention/" in path]:
        other = path.replace("/cross_attention/", "/self_attention/")
        found[path] = found[other] = found[path] + found[other]
    return found


@pytest.mark.parametrize("name", VARIANTS)
def test_equals_the_reference_in_float32(name):
    check(name, "float32")


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.usefixtures("float64")
def test_equals_the_reference_in_float64(name):
    check(name, "float64")


class CompilationTest(chex.TestCase):
    """Compiled or not, the logits are those of the reference."""

    @chex.variants(with_jit=True, without_jit=True)
    @parameterized.parameters("jadore801120_prj_all", "tunz")
    def test_logits(self, name):
        variant = VARIANTS[name]
        reference = variant.build()
        config, params = interop.load(variant.family, reference.state_dict(), **variant.hints)
        source, target = batch(variant)
        real = (target != config.pad_id)[:, :, None]
        with torch.no_grad():
            expected = reference(torch.tensor(source), torch.tensor(target)).numpy()
        apply = self.variant(Transformer(config).apply)
        logits = np.asarray(apply({"params": params}, np.int32(source), np.int32(target)))
        chex.assert_trees_all_close(logits * real, expected * real, rtol=0, atol=2e-5)


def folded(state: dict[str, Any], name: str, num_heads: int) -> tuple[jax.Array, jax.Array]:
    """A head's two linear maps in one, by the formula: kernel [D, H*K] and bias [H*K]."""
    prefix, projection = name.rsplit(".", 1)
    first, bias = state[f"{name}.weight"], state[f"{name}.bias"]
    second, second_bias = (
        state[f"{prefix}.attention.{projection}.{part}"] for part in ("weight", "bias")
    )
    heads = first.reshape(num_heads, -1, first.shape[-1])  # [H, K, D]
    kernel = jnp.einsum("ok,hkd->dho", second, heads).reshape(first.shape)
    return kernel, (bias.reshape(num_heads, -1) @ second.T + second_bias).reshape(-1)


def unfolded_params(state: dict[str, Any], params: Any, num_heads: int) -> Any:
    """`params` with their projections replaced by functions of the notebook's tensors."""
    flat = flatten_dict(params, sep="/")
    for stack, depth in (("encoder", 3), ("decoder", 2)):
        for attention in ("self_attention", "cross_attention"):
            for projection in ("query", "key", "value"):
                path = f"{stack}/layers/{attention}/{projection}"
                if f"{path}/kernel" not in flat:
                    continue
                pairs = [
                    folded(state, f"{stack}.{layer}.{attention}.W_{projection[0]}", num_heads)
                    for layer in range(depth)
                ]
                kernels, biases = zip(*pairs, strict=True)
                flat |= {f"{path}/kernel": jnp.stack(kernels), f"{path}/bias": jnp.stack(biases)}
    return unflatten_dict(flat, sep="/")


def check_notebook(dtype: str) -> None:
    reference = NOTEBOOK.build(dtype)
    config, params = interop.load("notebook", reference.state_dict())
    generator = np.random.default_rng(0)
    source = generator.normal(size=(*SOURCE.shape, config.d_model)).astype(dtype)
    target = generator.normal(size=(*TARGET.shape, config.d_model)).astype(dtype)
    real = (TARGET != 0)[:, :, None]
    cotangent = (generator.normal(size=target.shape) * real).astype(dtype)
    source_mask = (SOURCE != 0)[:, None, :]
    target_mask = (TARGET != 0)[:, None, :] & np.tril(np.ones((5, 5), bool))

    state = {name: tensor.numpy() for name, tensor in reference.state_dict().items()}
    vectors, attention = reference(
        *map(torch.tensor, (source, target, source_mask, target_mask)), return_attention=True
    )
    vectors.backward(torch.tensor(cotangent))
    their_maps = [np.stack([w.detach().numpy() for w in layers]) for layers in attention]

    def run(model):
        encoded, encoder_self = model.encoder(source, source_mask[:, None], return_attention=True)
        y, decoder_self, decoder_cross = model.decoder(
            target, encoded, target_mask[:, None], source_mask[:, None], return_attention=True
        )
        return y, (encoder_self, decoder_self, decoder_cross)

    def loss(state):
        variables = {"params": unfolded_params(state, params, config.num_heads)}
        y, _ = Transformer(config).apply(variables, method=run)
        return jnp.vdot(y, cotangent)

    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def results(params, state):
        return jax.grad(loss)(state), Transformer(config).apply({"params": params}, method=run)

    gradients, (ours, maps) = results(interop.model_params(params), state)

    chex.assert_trees_all_equal_dtypes(ours, vectors.detach().numpy())
    close = functools.partial(chex.assert_trees_all_close, rtol=0)
    close(np.asarray(ours) * real, vectors.detach().numpy() * real, atol=LOGITS[dtype])
    # The notebook returns weights averaged over heads.
    close([np.mean(layers, axis=2) for layers in maps], their_maps, atol=WEIGHTS[dtype])
    expected = {
        name: parameter.grad.numpy()
        for name, parameter in reference.named_parameters()
        if ".W_q" in name or ".W_k" in name or ".W_v" in name
    }
    largest = max(np.abs(array).max() for array in expected.values())
    found = {name: gradients[name] for name in expected}
    close(found, expected, atol=GRADIENTS[dtype] * largest)


def test_notebook_layers_equal_ours_in_float32():
    check_notebook("float32")


@pytest.mark.usefixtures("float64")
def test_notebook_layers_equal_ours_in_float64():
    check_notebook("float64")


def test_notebook_joins_heads_in_its_own_way_only_on_request():
    correct, published = (
        Variant("notebook", {"published_head_join": join}).build().encoder[0]
        for join in (False, True)
    )
    x = torch.randn(3, 5, 16)
    with torch.no_grad():
        assert not torch.allclose(correct(x)[0], published(x)[0], atol=1e-2)
    one_head = [
        Variant("notebook", {"published_head_join": join, "num_heads": 1}).build().encoder[0]
        for join in (False, True)
    ]
    with torch.no_grad():
        assert torch.equal(one_head[0](x)[0], one_head[1](x)[0])


def test_a_source_of_padding_alone_disturbs_no_other_sentence():
    variant = VARIANTS["jadore801120_prj_all"]
    reference = variant.build()
    config, params = interop.load(variant.family, reference.state_dict(), **variant.hints)
    source, target = batch(variant)
    source = np.where(np.arange(4)[:, None] == 1, 0, source)
    with torch.no_grad():
        expected = reference(torch.tensor(source), torch.tensor(target)).numpy()
    cotangent = np.zeros((*target.shape, config.target_vocab_size), np.float32)
    _, (logits, _) = compiled(config, True)(params, np.int32(source), np.int32(target), cotangent)
    chex.assert_tree_all_finite(logits)
    others = (target != config.pad_id) & (np.arange(4) != 1)[:, None]
    chex.assert_trees_all_close(
        np.asarray(logits)[others], expected[others], rtol=0, atol=LOGITS["float32"]
    )
