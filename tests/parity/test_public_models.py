"""GPT-2 by its own code against a short JAX function, which uses nothing of ours."""

import numpy as np
import pytest
import torch
from jax_models import GPT2_WEIGHTS, gpt2, shapes

from flaxformer_mt import parity
from flaxformer_mt.parity import Tap, references

transformers = pytest.importorskip("transformers")


def third(index):
    """Selects the queries, keys or values of a joint projection."""
    return lambda value, shape: value[..., index * shape[-1] : (index + 1) * shape[-1]]


BLOCK = "transformer.h.{layer}"
NAMES = {
    "embedded": "transformer.drop",
    "norm": "transformer.ln_f",
    **parity.for_layers(
        2,
        {
            "layers/{layer}/norm_1": Tap(f"{BLOCK}.ln_1"),
            **{
                f"layers/{{layer}}/attention/{part}": Tap(
                    f"{BLOCK}.attn.c_attn", reshape=third(index)
                )
                for index, part in enumerate(("query", "key", "value"))
            },
            "layers/{layer}/attention/scores": parity.softmax_input(f"{BLOCK}.attn"),
            "layers/{layer}/attention/weights": parity.softmax_output(f"{BLOCK}.attn"),
            "layers/{layer}/attention/output": Tap(f"{BLOCK}.attn.c_proj"),
            "layers/{layer}/attended": Tap(f"{BLOCK}.ln_2", "input"),
            "layers/{layer}/norm_2": Tap(f"{BLOCK}.ln_2"),
            "layers/{layer}/hidden": Tap(f"{BLOCK}.mlp.c_fc"),
            "layers/{layer}/activated": Tap(f"{BLOCK}.mlp.act"),
            "layers/{layer}/output": Tap(BLOCK),
        },
    ),
}


def test_gpt2_in_float64():
    config = transformers.GPT2Config(
        vocab_size=13,
        n_positions=9,
        n_embd=16,
        n_layer=2,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
        initializer_range=0.3,
        attn_implementation="eager",
    )
    with references.default_dtype("float64"):
        torch.manual_seed(0)
        module = references.perturb(transformers.GPT2LMHeadModel(config))
    report = parity.compare_models(
        module,
        gpt2,
        shapes(GPT2_WEIGHTS, module, 2),
        np.random.default_rng(0).integers(13, size=(3, 8)),
        names=NAMES,
        weights=GPT2_WEIGHTS,
        forward=lambda module, tokens: module(tokens).logits,
    )
    assert report.passed, report
    assert max(row.max_rel for row in report.rows) < 1e-10
