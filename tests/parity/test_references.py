"""Our model equals every published Transformer in logits and attention.

The parity tool is not used here; `test_compare.py` uses it to compare all values, and float64.

Compared are the rows of real target tokens. Where a row is padding its values mean nothing and may
differ: in a sentence padded on the left such a row may attend to nothing at all, which gives zeros
here and the mean of all values in the published code (which writes -1e9 over every score).
"""

import contextlib
import copy
import functools
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax.traverse_util import flatten_dict, unflatten_dict
from torch import nn
from toy_references import DOUBLE_PROJECTION, VARIANTS, Variant, others_are_slow
from transformers import PreTrainedModel

from flaxformer_mt import interop
from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.model.transformer import Transformer

LOGITS = {"float32": 2e-5, "float64": 1e-10}
WEIGHTS = {"float32": 1e-6, "float64": 1e-10}
GRADIENTS = {"float32": 1e-5, "float64": 1e-10}
"""Of the largest gradient."""

SOURCE = np.array([[5, 3, 8, 2, 0, 0], [4, 7, 2, 0, 0, 0], [9, 3, 10, 6, 5, 2], [8, 2, 0, 0, 0, 0]])
TARGET = np.array([[1, 4, 9, 3, 7], [1, 6, 2, 0, 0], [1, 3, 0, 0, 0], [1, 10, 5, 2, 0]])
LEFT_PADDED_TARGET = np.array([[0, 0, 1, 9, 4]])


class Batch(NamedTuple):
    """The inputs of both sides."""

    source: np.ndarray
    """[B, S]"""
    target: np.ndarray
    """[B, T], the decoder's input."""
    source_positions: np.ndarray
    """[B, S], each token's position in its sentence."""
    real_source: np.ndarray
    """bool [B, S], False = padding."""
    real: np.ndarray
    """bool [B, T], the same for the target."""


def batch_of(variant: Variant, config: TransformerConfig) -> Batch:
    """Sentences with the family's special tokens and padding."""
    source, target = SOURCE, TARGET
    # Marian starts with padding; fairseq and PyTorch hide scores with -inf, so that a row which
    # sees nothing is NaN; and tunz' start stands in the first column.
    if variant.family not in ("marian", "mbart", "m2m100", "t5", "fairseq", "torch", "tunz"):
        target = np.concatenate([TARGET[:-1], LEFT_PADDED_TARGET])
    if variant.family == "fairseq":
        source = np.stack([np.roll(row, np.sum(row == 0)) for row in source])
    special = [config.pad_id, config.bos_id, config.eos_id]
    words = [token for token in range(config.target_vocab_size) if token not in special]
    numbers = np.array(special + words)
    positions = np.maximum(np.cumsum(source != 0, axis=1) - 1, 0)
    return Batch(numbers[source], numbers[target], np.int32(positions), source != 0, target != 0)


@functools.cache
def compiled(config: TransformerConfig) -> Any:
    """A function of (params, source, target, positions) to logits and attention."""

    def run(params, source, target, source_positions):
        return Transformer(config).apply(
            {"params": params},
            source if config.has_inputs else None,
            target,
            encoder_positions=source_positions if config.has_inputs else None,
            return_attention=True,
        )

    # Nearly all of the time would go into compiling; CompilationTest takes the usual options.
    return jax.jit(run, compiler_options={"xla_backend_optimization_level": 0})


def to_numpy(array: Any) -> np.ndarray:
    return array.detach().numpy() if isinstance(array, torch.Tensor) else np.asarray(array)


class Attention(NamedTuple):
    """A reference's weights, one tensor per layer."""

    encoder_self: list[torch.Tensor]
    decoder_self: list[torch.Tensor]
    decoder_cross: list[torch.Tensor]


def with_attention(reference: nn.Module, *inputs: torch.Tensor) -> tuple[torch.Tensor, Attention]:
    """Runs a reference; returns its output and attention weights."""
    if isinstance(reference, PreTrainedModel):
        source, target = inputs
        padding = source == reference.config.pad_token_id
        outputs = super(type(reference).__bases__[0], reference).forward(
            input_ids=source,
            attention_mask=(~padding).long(),
            decoder_input_ids=target,
            output_attentions=True,
        )
        return outputs.logits, Attention(
            outputs.encoder_attentions, outputs.decoder_attentions, outputs.cross_attentions
        )
    weights = Attention([], [], [])

    def keep(in_encoder, module, args, output):
        found = weights.decoder_self if args[0] is args[1] else weights.decoder_cross
        (weights.encoder_self if in_encoder else found).append(output[1])

    with contextlib.ExitStack() as stack:
        for name, module in reference.named_modules():
            if type(module).__name__.lower() in ("multiheadattention", "multiheadedattention"):
                in_encoder = "encoder" in name.split(".")
                handle = module.register_forward_hook(functools.partial(keep, in_encoder))
                stack.callback(handle.remove)
        return reference(*inputs), weights


def stacked(attention: Any, batch: Batch) -> dict[str, np.ndarray]:
    """Either side's weights [L, B, H, Q, K], those of real queries only."""
    maps = {
        "encoder_self": (attention.encoder_self, batch.real_source),
        "decoder_self": (attention.decoder_self, batch.real),
        "decoder_cross": (attention.decoder_cross, batch.real),
    }
    return {
        name: np.stack([to_numpy(layer) for layer in layers]) * queries[:, None, :, None]
        for name, (layers, queries) in maps.items()
        if layers is not None and len(layers)
    }


@pytest.mark.parametrize("name", others_are_slow(VARIANTS))
def test_equals_the_reference(name):
    variant = VARIANTS[name]
    reference = variant.build()
    config, params = interop.load(variant.family, reference.state_dict(), **variant.hints)
    batch = batch_of(variant, config)
    source, target, positions, _, real = batch
    with torch.no_grad():
        logits, attention = with_attention(reference, *map(torch.tensor, (source, target)))
        exact = copy.deepcopy(reference).double()
        _, exact_attention = with_attention(exact, *map(torch.tensor, (source, target)))
    expected = logits.numpy()
    ours, our_attention = compiled(config)(
        interop.model_params(params), np.int32(source), np.int32(target), positions
    )

    close = functools.partial(chex.assert_trees_all_close, rtol=0)
    chex.assert_trees_all_equal_dtypes(ours, expected)
    close(np.asarray(ours) * real[:, :, None], expected * real[:, :, None], atol=2e-5)
    maps, their_maps = stacked(our_attention, batch), stacked(attention, batch)
    chex.assert_trees_all_equal_dtypes(maps, their_maps)
    # Against float64: both sides round, and neither may be much worse than the other.
    exact_maps = stacked(exact_attention, batch)
    rounding = max(np.abs(their_maps[name] - exact_maps[name]).max() for name in maps)
    close(maps, jax.tree.map(np.float32, exact_maps), atol=max(1e-6, 2 * rounding))


def check_logits(compile_or_not: Any) -> None:
    variant = VARIANTS["tunz"]
    reference = variant.build()
    config, params = interop.load(variant.family, reference.state_dict(), **variant.hints)
    source, target, _, _, real = batch_of(variant, config)
    real = real[:, :, None]
    with torch.no_grad():
        expected = reference(torch.tensor(source), torch.tensor(target)).numpy()
    apply = compile_or_not(Transformer(config).apply)
    variables = {"params": jax.tree.map(jnp.asarray, params)}
    logits = np.asarray(apply(variables, jnp.int32(source), jnp.int32(target)))
    chex.assert_trees_all_close(logits * real, expected * real, rtol=0, atol=2e-5)


@pytest.mark.slow  # As in `test_equals_the_reference`.
class CompilationTest(chex.TestCase):
    """Compiled, the logits are those of the reference."""

    @chex.variants(with_jit=True)
    def test_logits(self):
        check_logits(self.variant)


@pytest.mark.slow  # Other tests evaluate single modules operation by operation.
class NoCompilationTest(chex.TestCase):
    """So are they operation by operation."""

    @chex.variants(without_jit=True)
    def test_logits(self):
        check_logits(self.variant)


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


def check_double_projection(dtype: str) -> None:
    reference = DOUBLE_PROJECTION.build(dtype)
    config, params = interop.load("double_projection", reference.state_dict())
    generator = np.random.default_rng(0)
    source = generator.normal(size=(*SOURCE.shape, config.d_model)).astype(dtype)
    target = generator.normal(size=(*TARGET.shape, config.d_model)).astype(dtype)
    real = (TARGET != 0)[:, :, None]
    cotangent = (generator.normal(size=target.shape) * real).astype(dtype)
    source_mask = (SOURCE != 0)[:, None, :]
    target_mask = (TARGET != 0)[:, None, :] & np.tril(np.ones((5, 5), bool))

    state = {name: tensor.numpy() for name, tensor in reference.state_dict().items()}
    vectors, attention = with_attention(
        reference, *map(torch.tensor, (source, target, source_mask, target_mask))
    )
    vectors.backward(torch.tensor(cotangent))
    their_maps = [np.stack([w.detach().numpy() for w in layers]) for layers in attention]

    def run(model):
        x, y, x_mask, y_mask = map(jnp.asarray, (source, target, source_mask, target_mask))
        encoded, encoder_self = model.encoder(x, x_mask[:, None], return_attention=True)
        y, decoder_self, decoder_cross = model.decoder(
            y, encoded, y_mask[:, None], x_mask[:, None], return_attention=True
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


@pytest.mark.slow  # What float32 adds is its rounding, which other families show.
def test_double_projection_layers_equal_ours_in_float32():
    check_double_projection("float32")


@pytest.mark.slow
@pytest.mark.usefixtures("float64")
def test_double_projection_layers_equal_ours_in_float64():
    check_double_projection("float64")


def test_double_projection_joins_heads_in_its_own_way_only_on_request():
    correct, published = (
        Variant("double_projection", {"published_head_join": join}).build().encoder[0]
        for join in (False, True)
    )
    x, mask = torch.randn(3, 5, 16), torch.ones(1, 5, 5, dtype=torch.bool)
    with torch.no_grad():
        assert not torch.allclose(correct(x, mask), published(x, mask), atol=1e-2)
    one_head = [
        Variant("double_projection", {"published_head_join": join, "num_heads": 1})
        .build()
        .encoder[0]
        for join in (False, True)
    ]
    with torch.no_grad():
        assert torch.equal(one_head[0](x, mask), one_head[1](x, mask))


@pytest.mark.slow
def test_a_source_of_padding_alone_disturbs_no_other_sentence():
    variant = VARIANTS["jadore801120_prj_all"]
    reference = variant.build()
    config, params = interop.load(variant.family, reference.state_dict(), **variant.hints)
    source, target, positions, _, real = batch_of(variant, config)
    source = np.where(np.arange(4)[:, None] == 1, 0, source)
    with torch.no_grad():
        expected = reference(torch.tensor(source), torch.tensor(target)).numpy()
    logits, _ = compiled(config)(
        interop.model_params(params), np.int32(source), np.int32(target), positions
    )
    chex.assert_tree_all_finite(logits)
    others = real & (np.arange(4) != 1)[:, None]
    chex.assert_trees_all_close(
        np.asarray(logits)[others], expected[others], rtol=0, atol=LOGITS["float32"]
    )
