"""PyTorch files are read as PyTorch reads them, but damage is detected and claims are checked."""

import argparse
import contextlib
import io
import os
import pickle
import random
import struct
import zipfile

import pytest
import torch

from flaxformer_mt import interop
from flaxformer_mt.errors import UserError
from flaxformer_mt.interop import torch_files

OLD = {"_use_new_zipfile_serialization": False}


def refusal(path):
    with pytest.raises(UserError) as caught:
        torch_files.read(path)
    message = str(caught.value)
    assert message.isprintable()
    return message


def checkpoint():
    layer = torch.nn.Linear(2, 3)
    optimizer = torch.optim.Adam(layer.parameters(), lr=torch.tensor(0.5))
    layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return {
        "model": layer.state_dict() | {"tied": layer.weight.detach(), "parameter": layer.weight},
        "optim": optimizer.state_dict(),
        "args": argparse.Namespace(heads=2, names=["a", None, True, 1.5]),
        "others": [torch.arange(6).reshape(2, 3).T, torch.zeros(0, 2), torch.tensor(3.0)],
        "types": {
            "half": torch.ones(2, dtype=torch.float16),
            "brain": torch.ones(2, dtype=torch.bfloat16),
            "bool": torch.tensor([True, False]),
            "values": (torch.Size([1, 2]), {1, 2}, 1j, b"ab", 2**70, -5, 300, 70000),
        },
    }


def same(ours, theirs):
    """Whether what we read equals what PyTorch reads."""
    if isinstance(theirs, torch.Tensor):
        return ours.dtype == theirs.dtype and torch.equal(ours, theirs)
    if isinstance(theirs, argparse.Namespace):
        return same(vars(ours), vars(theirs))
    if isinstance(theirs, dict):
        return list(ours) == list(theirs) and all(same(ours[key], theirs[key]) for key in theirs)
    if isinstance(theirs, list | tuple):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    return ours == theirs


@pytest.mark.parametrize("options", [{}, OLD], ids=["archive", "old"])
def test_the_content_is_that_of_pytorch(tmp_path, options):
    path = tmp_path / "model.pt"
    content = checkpoint()
    torch.save(content, path, **options)
    assert same(torch_files.read(path), content)


def save_model(path, **options):
    draw = torch.Generator().manual_seed(0)
    torch.save({"a": torch.randn(5, 4, generator=draw), "b": torch.randn(7, generator=draw)}, path)
    return path.read_bytes()


def test_every_flipped_bit_is_named_or_without_effect(tmp_path):
    path = tmp_path / "model.pt"
    whole = save_model(path)
    expected = torch_files.read(path)
    draw = random.Random(0)
    outcomes = {"named": 0, "equal": 0}
    for _ in range(400):
        place = draw.randrange(len(whole))
        damaged = bytearray(whole)
        damaged[place] ^= 1 << draw.randrange(8)
        path.write_bytes(damaged)
        try:
            found = torch_files.read(path)
        except UserError:
            outcomes["named"] += 1
        else:
            assert found.keys() == expected.keys(), place
            assert all(torch.equal(found[key], expected[key]) for key in found), place
            outcomes["equal"] += 1
    assert min(outcomes.values()) > 20, outcomes


def test_an_old_file_with_flipped_bits_is_read_or_refused(tmp_path):
    path = tmp_path / "model.pt"
    torch.save(checkpoint(), path, **OLD)
    whole = path.read_bytes()
    draw = random.Random(0)
    for _ in range(300):
        damaged = bytearray(whole)
        damaged[draw.randrange(len(whole))] ^= 1 << draw.randrange(8)
        path.write_bytes(damaged)
        with contextlib.suppress(UserError):
            torch_files.read(path)


def test_a_flipped_bit_in_a_tensor_names_file_and_member(tmp_path):
    path = tmp_path / "model.pt"
    whole = save_model(path)
    numbers = torch_files.read(path)["a"].numpy().tobytes()
    place = whole.index(numbers) + 3
    path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
    with pytest.raises(UserError) as caught:
        interop.load("tunz", path, num_heads=2)
    assert str(path) in str(caught.value)
    assert "Bad CRC-32 for file 'model/data/0'" in str(caught.value)


@pytest.mark.parametrize("options", [{}, OLD], ids=["archive", "old"])
def test_a_truncated_file_is_damaged(tmp_path, options):
    path = tmp_path / "model.pt"
    torch.save(checkpoint(), path, **options)
    whole = path.read_bytes()
    for part in range(16):
        path.write_bytes(whole[: len(whole) * part // 16])
        refusal(path)


def archive(path, program, members=(), compression=zipfile.ZIP_STORED):
    with zipfile.ZipFile(path, "w", compression) as file:
        file.writestr("model/data.pkl", program)
        file.writestr("model/version", "3\n")
        for name, content in dict(members).items():
            file.writestr(f"model/{name}", content)


def tensor(key=b"0", length=1, offset=0, shape=(1,), strides=(1,)):
    """The instructions that push a tensor."""

    def number(value):
        return b"J" + struct.pack("<i", value)

    numbers = (b"(" + b"".join(map(number, each)) + b"t" for each in (shape, strides))
    storage = b"(X\7\0\0\0storagectorch\nFloatStorage\nX\1\0\0\0" + key + b"X\0\0\0\0"
    return (
        b"ctorch._utils\n_rebuild_tensor_v2\n("
        + storage
        + (b"\x8a\x08" + struct.pack("<q", length) if length >= 2**31 else number(length))
        + b"tQ"
        + number(offset)
        + b"".join(numbers)
        + b"\x89Ntq\0R"
    )


CLAIMS = {
    "a shape": tensor(shape=(10**9, 10**9), strides=(0, 0)),
    "an end": tensor(shape=(1, 1), strides=(1, 1), offset=1),
    "a stride": tensor(length=1, shape=(2,), strides=(10**9,)),
    "a negative stride": tensor(shape=(3,), strides=(-1,)),
    "a length": tensor(length=10**12, shape=(10**6,)),
    "a negative length": tensor(length=-1),
    "a missing storage": tensor(key=b"9"),
    "axes": tensor(shape=(1,) * 100, strides=(1,) * 100),
}


@pytest.mark.parametrize("name", CLAIMS)
def test_a_tensor_lies_in_its_storage(tmp_path, name):
    path = tmp_path / "model.pt"
    archive(path, b"\x80\x02}X\1\0\0\0a" + tensor() + b"s.", {"data/0": b"\0\0\x80\x3f"})
    assert torch_files.read(path)["a"] == 1
    archive(path, b"\x80\x02}X\1\0\0\0a" + CLAIMS[name] + b"s.", {"data/0": b"\0\0\x80\x3f"})
    assert "damaged" in refusal(path)


def calls(function, argument, arguments):
    """A function that is called 10,000 times with the same argument."""
    name = b"c" + function.replace(" ", "\n").encode() + b"\nq\1"
    return b"](" + argument + name + (b"h\1" + arguments + b"R") * 10_000 + b"e", "too many items"


BOMBS = {
    "bytearray": (
        b"c__builtin__\nbytearray\nJ\x00\xe4\x0b\x54\x85R",
        "would run builtins.bytearray",
    ),
    "storage": (b"ctorch\nFloatTensor\nJ\xff\xff\xff\x7f\x85R", "a torch.FloatTensor"),
    "repetition": (b"c_operator\nmul\n(X\1\0\0\0aJ\xff\xff\xff\x7ftR", "would run _operator.mul"),
    "memo": (b"Nr\xff\xff\xff\xff", "no error"),
    "depth": (b"]" * 1000 + b"a" * 999, "nested too deeply"),
    "great depth": (b"]" * 100_000 + b"a" * 99_999, "too many items"),
    "itself": (b"]q\0h\0a", "nested too deeply"),
    "text": (b"X\xff\xff\xff\xffabc", "damaged"),
    "integer": (b"\x8a\xff" + b"\x7f" * 255, "too many digits"),
    "many": (b"](" + b"N" * 1_500_000 + b"e", "too many values"),
    "sharing": (b"]q\0(" + b"N" * 1000 + b"e](" + b"h\0" * 100_000 + b"e", "too many items"),
    "sizes": calls("torch Size", b"]q\0(" + b"K\1" * 100_000 + b"e", b"h\0\x85"),
    "sets": calls("__builtin__ set", b"]q\0(" + b"M\1\2" * 100_000 + b"e", b"h\0\x85"),
    "counters": calls("collections Counter", b"]q\0(" + b"N" * 100_000 + b"e", b"h\0\x85"),
    "dicts": calls("collections OrderedDict", b"]q\0(" + b"NN\x86" * 50_000 + b"e", b"h\0\x85"),
    "encoded": calls(
        "_codecs encode",
        b"X\x20\xa1\7\0" + b"a" * 500_000 + b"q\0X\6\0\0\0latin1q\2",
        b"h\0h\2\x86",
    ),
    "keys": (b"](N(" + b"N" * 100_000 + b"tq\0e}(" + b"h\0N" * 10_000 + b"u", "too many items"),
    "key": (b"}" + b")" + b"".join(b"q\0h\0\x86" for _ in range(60)) + b"Ns", "damaged"),
    "set": (b"c__builtin__\nset\n]]a\x85R", "damaged"),
    "stack": (b"\x86", "damaged"),
    "mark": (b"t", "damaged"),
    "code": (b"cposix\nsystem\nX\4\0\0\0true\x85R", "would run posix.system"),
    "object": (b"c__builtin__\nobject\n)\x81", "would run builtins.object"),
    "protocol 4": (b"\x8c\5posix\x8c\6system\x93", "damaged"),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name == "many")) for name in BOMBS],
)
@pytest.mark.parametrize("is_old", [False, True])
def test_a_pickle_allocates_no_more_than_it_holds(tmp_path, name, is_old):
    path = tmp_path / "model.pt"
    instructions, reason = BOMBS[name]
    program = b"\x80\x02" + instructions + b"."
    if is_old:
        start = [
            torch.serialization.MAGIC_NUMBER,
            torch.serialization.PROTOCOL_VERSION,
            {"little_endian": True},
        ]
        parts = [pickle.dumps(each, 2) for each in start]
        path.write_bytes(b"".join([*parts, program, pickle.dumps([], 2)]))
    else:
        archive(path, program)
    if reason == "no error":
        assert torch_files.read(path) is None
    else:
        assert reason in refusal(path)


def test_tensors_that_share_a_storage_are_no_larger_than_checkpoints_are(tmp_path):
    path = tmp_path / "model.pt"
    one = tensor(length=1000, shape=(1000,))
    content = {"data/0": bytes(4000)}
    archive(path, b"\x80\x02](" + one * 4 + b"e.", content)
    assert len(torch_files.read(path)) == 4
    archive(path, b"\x80\x02](" + one + b"q\0" + b"h\0" * 4000 + b"e.", content)
    assert "its tensors are far larger than the file" in refusal(path)


def test_archives_of_other_kinds_are_refused(tmp_path):
    path = tmp_path / "model.pt"
    archive(path, b"\x80\x02}.", compression=zipfile.ZIP_DEFLATED)
    assert "data.pkl is compressed" in refusal(path)
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as file:
        file.writestr("readme.txt", "no checkpoint")
    path.write_bytes(content.getvalue())
    assert "it has no data.pkl" in refusal(path)
    archive(path, b"\x80\x02}.", {"byteorder": b"big"})
    assert "big-endian" in refusal(path)
    path.unlink()
    os.mkfifo(path)
    assert "a named pipe, not a file" in refusal(path)
    with (tmp_path / "hole.pt").open("wb") as file:
        file.write(b"\x80\x02")
        file.truncate(2**40)
    assert "damaged" in refusal(tmp_path / "hole.pt")


def test_sparse_tensors_are_refused(tmp_path):
    path = tmp_path / "model.pt"
    torch.save({"a": torch.eye(3).to_sparse()}, path)
    assert "it contains a torch._utils._rebuild_sparse_tensor" in refusal(path)
