"""Whole steps are lowered for GPUs and TPUs without one, and without a warning of a deprecation."""

import dataclasses
from types import SimpleNamespace

import jax
import pytest
from backends import needs_gpu_interpreter

from benchmarks.compiled.steps import on_mesh, trace_decoding, trace_training
from flaxformer_mt import presets
from flaxformer_mt.config.files import load_config
from flaxformer_mt.model import logical_axes

DEVICES = {
    "cuda": SimpleNamespace(platform="gpu", device_kind="NVIDIA H100 80GB HBM3"),
    "tpu": SimpleNamespace(platform="tpu", device_kind="TPU v5 lite"),
}
KERNELS = {"cuda": "mosaic_gpu", "tpu": "tpu_custom_call"}
CONFIGS = ("wmt14_en_de_base", "wmt14_en_de_big", "t5", "forkme")


def configured(name):
    """A recipe of the project, or base with the model of T5 1.1 base."""
    config = load_config(f"configs/{name if name != 't5' else 'wmt14_en_de_base'}.py")
    if name == "t5":
        model = presets.t5(
            d_model=768,
            num_heads=12,
            d_ff=2048,
            num_encoder_layers=12,
            num_decoder_layers=12,
            feed_forward_gate=True,
            activation="gelu_tanh",
            tie_embeddings="source_target",
            dtype="bfloat16",
        )
        config = dataclasses.replace(config, model=model)
    return on_mesh(config, {"data": 1, "fsdp": 1, "tensor": 1}, 4096, 32_000)


@pytest.mark.slow
@needs_gpu_interpreter
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("platform", DEVICES)
def test_a_step_is_lowered_with_its_kernels(name, platform, monkeypatch):
    monkeypatch.setattr(logical_axes, "_mesh_device", lambda: DEVICES[platform])
    config = configured(name)
    trained, _ = trace_training(config, jax.devices()[:1])
    assert KERNELS[platform] in trained.lower(lowering_platforms=(platform,)).as_text()
    decoded, _ = trace_decoding(config, jax.devices()[0])
    assert decoded.lower(lowering_platforms=(platform,)).as_text()
