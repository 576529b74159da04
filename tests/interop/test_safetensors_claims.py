"""Headers of safetensors files that claim more than there is are refused quickly, by name."""

import json
import struct

import numpy as np
import pytest
import safetensors.numpy
from drawn_params import drawn_params

from flaxformer_mt import interop
from flaxformer_mt.config import TransformerConfig, to_dict
from flaxformer_mt.errors import UserError
from flaxformer_mt.interop.formats import own_format


def entry(shape, end):
    return {"dtype": "F32", "shape": shape, "data_offsets": [0, end]}


def own(config):
    return {"__metadata__": {"format": "flaxformer_mt", "config": json.dumps(config)}}


HEADERS = {
    "a large tensor": {"a": entry([10**12], 4 * 10**12)},
    "a shape that overflows": {"a": entry([2**62, 4], 0)},
    "many axes": {"a": entry([0] * 1000, 0)},
    "many tensors": {f"tensor{number}": entry([0], 0) for number in range(50_000)},
    "a long name": {"a" * 1_000_000: entry([0], 0)},
    "a long name with a line end": {"a\nb": entry([0], 0)},
    "deep": b'{"a":' * 50_000,
    "digits": b'{"a":' + b"1" * 5000 + b"}",
    "a wide model": own({"d_model": 10**9}),
    "many layers": own({"num_encoder_layers": 10**9}),
    "the largest model": own({"d_model": 2**20, "num_encoder_layers": 10_000}),
    "a list": b"[]",
}


@pytest.mark.parametrize("name", [*HEADERS, "a large header", "a hole"])
def test_a_header_is_compared_with_the_file(name, tmp_path):
    path = tmp_path / "model.safetensors"
    header = HEADERS.get(name, b"{}")
    content = header if isinstance(header, bytes) else json.dumps(header).encode()
    size = 50_000_000 if name == "a large header" else len(content)
    path.write_bytes(struct.pack("<Q", size) + content.ljust(size))
    if name == "a hole":
        with path.open("r+b") as file:
            file.truncate(2**40)
    for read in (lambda: own_format.read(path, {}), lambda: interop.load("torch", path)):
        with pytest.raises(UserError) as caught:
            read()
        assert str(path) in str(caught.value)
        assert str(caught.value).isprintable()


def test_a_tensor_of_many_names_is_compared_with_the_file(tmp_path):
    path = tmp_path / "model.safetensors"
    names = {f"name{number}": "a" for number in range(10_000)}
    safetensors.numpy.save_file({"a": np.zeros(10**6, np.float32)}, path, names)
    with pytest.raises(UserError, match=r"model\.safetensors .*its tensors are far larger than"):
        interop.load("torch", path)


NAMES = [("a/b", "a"), ("adam/mean/a", "adam/mean/a/b"), ("carried/x", "carried")]


@pytest.mark.parametrize("names", NAMES)
def test_a_name_that_is_a_group_of_others_is_refused(names, tmp_path):
    path = tmp_path / "model.safetensors"
    metadata = {"format": "flaxformer_mt", "config": json.dumps(to_dict(TransformerConfig()))}
    metadata |= {"adam_step": "1", "adam_settings": "{}"}
    safetensors.numpy.save_file(dict.fromkeys(names, np.zeros(1, np.float32)), path, metadata)
    with pytest.raises(UserError, match=r"model\.safetensors .*is that of a group of others"):
        own_format.read(path, {})


def test_a_carried_name_may_contain_slashes(tmp_path):
    path = tmp_path / "model.safetensors"
    model = TransformerConfig(
        target_vocab_size=3, source_vocab_size=3, d_model=8, num_heads=1, d_ff=8
    )
    params = drawn_params(model)
    params |= {"carried": {"a/b.c": np.ones(2, np.float32)}}
    own_format.write(path, interop.TrainingState(model, params, None), "a family of the user")
    state, _ = own_format.read(path, {})
    assert [*state.params["carried"]] == ["a/b.c"]
