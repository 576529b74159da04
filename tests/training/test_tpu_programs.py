"""What TPUs would send to each other, from the compiler for TPUs, which needs none.

In a virtual environment of its own: pip install '.[tpu,test-core]'; pytest -m slow THIS_FILE
"""

import os
import re
from unittest import mock

import pytest

from benchmarks.compiled.program import Collective, collectives, parse
from benchmarks.compiled.targets import describe, prepare
from flaxformer_mt.config import DataConfig, ExperimentConfig, TransformerConfig

VOCABULARY, WIDTH = 32_000, 512
# Sums over tensor: of the vectors looked up, of the outputs of attention and feed-forward,
# and of the gradients of their inputs, of the encoder's output and of the loss's vectors.
LOOKUPS, OUTPUTS, GRADIENTS = 2, 3 + 2, 3 + 2 + 1 + 1
EXPERIMENT = ExperimentConfig(
    model=TransformerConfig(
        num_encoder_layers=1, num_decoder_layers=1, dtype="bfloat16", dropout_rate=0.0
    ),
    data=DataConfig(source_row_length=256, target_row_length=256),
)


def elements(operation: Collective) -> int:
    """The size of the largest array of its result."""
    sizes = []
    for dims in re.findall(r"\[([\d,]*)\]", operation.result):
        size = 1
        for each in filter(None, dims.split(",")):
            size *= int(each)
        sizes.append(size)
    return max(sizes)


def check(operations: list[Collective], mesh: dict[str, int]) -> None:
    """Asserts that only what the rules call for is sent."""
    sums = [each for each in operations if each.kind in ("all-reduce", "reduce-scatter")]
    others = [each for each in operations if each not in sums]
    if mesh["tensor"] == 1:
        # Only gradients and metrics are added up.
        assert {name for each in sums for name in each.dtypes} == {"f32"}
    else:
        activations = sum(each.times * each.dtypes.count("bf16") for each in sums)
        assert activations == LOOKUPS + OUTPUTS + GRADIENTS
    if mesh["fsdp"] == 1:
        assert {each.kind for each in operations} == {"all-reduce"}
        return
    scatters = [each for each in sums if each.kind == "reduce-scatter"]
    assert all(set(each.dtypes) == {"f32"} for each in scatters)
    table = VOCABULARY // mesh["tensor"] * WIDTH
    assert any(elements(each) == table for each in scatters)
    # What is added up over all devices is a shard by then.
    whole = [each for each in sums if each.kind == "all-reduce" and "f32" in each.dtypes]
    assert max(map(elements, whole)) <= table // mesh["fsdp"]
    # Parameters are gathered; of activations, only the vectors of tokens change their sharding.
    for each in others:
        assert each.kind in ("all-gather", "all-to-all", "collective-permute")
        if each.kind == "all-to-all" and mesh["tensor"] == 1:
            assert "embedding" in each.source


@pytest.mark.slow
@pytest.mark.usefixtures("usual_optimizations")
@pytest.mark.parametrize(
    ("device", "topology", "mesh"),
    [
        ("v5e", "4x4", {"data": 16, "fsdp": 1, "tensor": 1}),
        ("v5e", "4x4", {"data": 4, "fsdp": 4, "tensor": 1}),
        ("v5e", "4x4", {"data": 2, "fsdp": 4, "tensor": 2}),
        ("v5p", "4x4x4", {"data": 64, "fsdp": 1, "tensor": 1}),
        ("v5p", "4x4x4", {"data": 16, "fsdp": 4, "tensor": 1}),
        ("v5p", "4x4x4", {"data": 4, "fsdp": 4, "tensor": 4}),
    ],
)
def test_tpus_send_only_what_the_rules_call_for(device, topology, mesh):
    pytest.importorskip("libtpu", reason="needs the compiler for TPUs: pip install '.[tpu]'")
    from benchmarks.compiled.steps import compile_training, on_mesh

    with mock.patch.dict(os.environ):
        prepare(device, topology)
        config = on_mesh(EXPERIMENT, mesh, positions=4096, vocabulary=VOCABULARY)
        program = compile_training(config, describe(device, topology)).text
    check(collectives(parse(program)), mesh)
