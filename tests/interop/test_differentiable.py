"""Our parameters as a function of the reference's: values and gradients."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from toy_references import ALL, DOUBLE_PROJECTION, ONE_OF_EACH, VARIANTS, others_are_slow

from flaxformer_mt import interop
from flaxformer_mt.errors import UserError
from flaxformer_mt.interop.weight_maps import checkpoints
from flaxformer_mt.model.transformer import Transformer

QUICK = {"xla_backend_optimization_level": 0}

SOURCE = np.array([[5, 3, 8, 2, 0, 0], [4, 7, 2, 0, 0, 0], [9, 3, 10, 6, 5, 2]])
TARGET = np.array([[1, 4, 9, 3, 7], [1, 6, 2, 0, 0], [1, 3, 0, 0, 0]])


def named_parameters(reference: torch.nn.Module) -> dict[str, np.ndarray]:
    return {name: tensor.detach().numpy() for name, tensor in reference.named_parameters()}


@pytest.mark.parametrize("name", others_are_slow())
def test_the_function_returns_what_load_returns(name):
    variant = ALL[name]
    reference = variant.build()
    config, params = interop.load(variant.family, reference.state_dict(), **variant.hints)
    state, constants = reference.state_dict(), interop.FAMILIES[variant.family].constants
    tensors = named_parameters(reference) | {name: state[name].numpy() for name in constants}
    function = interop.differentiable(variant.family, config, tensors)
    chex.assert_trees_all_equal(function(tensors), interop.model_params(params))
    # Compiled, only the products of double_projection round differently.
    compiled = jax.jit(function, compiler_options=QUICK)(tensors)
    chex.assert_trees_all_close(compiled, interop.model_params(params), rtol=0, atol=1e-6)


def gradients_and_expected(
    reference: torch.nn.Module, expected: torch.Tensor, loss: Any, tensors: Any
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], float]:
    """Returns both sides' gradients by name, and the largest absolute value."""
    expected.backward()
    theirs = {name: tensor.grad.numpy() for name, tensor in reference.named_parameters()}
    ours = jax.jit(jax.grad(loss), compiler_options=QUICK)(tensors)
    return ours, theirs, max(np.abs(gradient).max() for gradient in theirs.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["annotated_1000_shared", pytest.param("jadore801120_prj_all", marks=pytest.mark.slow)]
)
def test_gradients_in_the_reference_s_own_tensors(name):
    variant = VARIANTS[name]
    reference = variant.build()
    config, _ = interop.load(variant.family, reference.state_dict(), **variant.hints)
    tensors = named_parameters(reference)
    function = interop.differentiable(variant.family, config, tensors)
    real = (TARGET != 0)[:, :, None]
    cotangent = np.random.default_rng(0).normal(size=(*TARGET.shape, config.target_vocab_size))
    cotangent = np.float32(cotangent * real)

    def loss(tensors):
        params = {"params": function(tensors)}
        logits = Transformer(config).apply(params, jnp.int32(SOURCE), jnp.int32(TARGET))
        return jnp.vdot(logits, cotangent)

    logits = reference(torch.tensor(SOURCE), torch.tensor(TARGET))
    ours, theirs, largest = gradients_and_expected(
        reference, (logits * torch.tensor(cotangent)).sum(), loss, tensors
    )
    chex.assert_trees_all_close(ours, theirs, rtol=0, atol=1e-5 * largest)


@pytest.mark.slow
def test_gradients_through_the_fold_of_double_projection():
    layer = DOUBLE_PROJECTION.build().encoder[0]
    config, _ = interop.load("double_projection", layer.state_dict())
    tensors = named_parameters(layer)
    function = interop.differentiable("double_projection", config, tensors)
    generator = np.random.default_rng(0)
    x, cotangent = generator.normal(size=(2, 3, 5, config.d_model)).astype(np.float32)
    mask = np.ones((3, 1, 5), bool)

    def loss(tensors):
        output = Transformer(config).apply(
            {"params": function(tensors)}, method=lambda model: model.encoder(x, mask[:, None])[0]
        )
        return jnp.vdot(output, cotangent)

    output = layer(torch.tensor(x), torch.tensor(mask))
    ours, theirs, largest = gradients_and_expected(
        layer, (output * torch.tensor(cotangent)).sum(), loss, tensors
    )
    chex.assert_trees_all_close(ours, theirs, rtol=0, atol=1e-5 * largest)


def test_a_missing_name_is_reported():
    variant = VARIANTS["tunz"]
    reference = variant.build()
    config, _ = interop.load("tunz", reference.state_dict(), **variant.hints)
    names = set(named_parameters(reference)) - {"decoder.last_norm.bias"}
    with pytest.raises(UserError, match=r"decoder\.last_norm\.bias of tunz is missing"):
        interop.differentiable("tunz", config, names)


def check(name: str, module: torch.nn.Module, **overrides: Any) -> None:
    variant = ALL[name]
    hints = variant.hints | overrides
    config, _ = interop.load(variant.family, module.state_dict(), **hints)
    family = interop.FAMILIES[variant.family]
    checkpoints.check_module(family, config, module.state_dict(keep_vars=True))


@pytest.mark.parametrize("name", ONE_OF_EACH.values())
def test_every_reference_can_be_compared_by_name(name):
    check(name, ALL[name].build())


def test_layers_that_share_tensors_are_named():
    module = VARIANTS["annotated_1000"].build()
    module.encoder.layers[1] = module.encoder.layers[0]
    shared = (
        r"encoder\.layers\.0\.self_attn\.linears\.0\.weight and "
        r"encoder\.layers\.1\.self_attn\.linears\.0\.weight are one tensor \(shared\), but "
        "annotated has one for each"
    )
    with pytest.raises(UserError, match=shared):
        check("annotated_1000", module)
    # A module lists them once.
    config, _ = interop.load("annotated", module.state_dict(), **VARIANTS["annotated_1000"].hints)
    with pytest.raises(UserError, match="if the module shares this one, give each layer its own"):
        interop.differentiable("annotated", config, named_parameters(module))
    # Tensors without gradient may be shared.
    check("annotated_1000", module.requires_grad_(False))


def test_a_tied_table_is_one_tensor_only_if_the_configuration_ties_it():
    module = VARIANTS["jadore801120_prj_all"].build()
    with pytest.raises(UserError, match=r"src_word_emb\.weight and .*trg_word_emb\.weight are one"):
        check("jadore801120_prj_all", module, tie_embeddings="none", scale_logits=False)


def test_a_wrapped_module_is_named():
    module = torch.nn.DataParallel(VARIANTS["torch_post"].build())
    with pytest.raises(
        UserError, match=r"begin with 'module\.'.*give the module inside, module\.mod"
    ):
        check("torch_post", module)
