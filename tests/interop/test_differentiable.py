"""Our parameters as a function of the reference's: values and gradients."""

from typing import Any

import chex
import jax
import numpy as np
import pytest
import torch
from toy_references import ALL, VARIANTS, others_are_slow

from flaxformer_mt import interop
from flaxformer_mt.errors import UserError
from flaxformer_mt.interop.weight_maps import checkpoints

QUICK = {"xla_backend_optimization_level": 0}


def named_parameters(reference: torch.nn.Module) -> dict[str, np.ndarray]:
    return {name: tensor.detach().numpy() for name, tensor in reference.named_parameters()}


@pytest.mark.parametrize("name", others_are_slow(quick=["opennmt_shared", "double_projection"]))
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
