"""Reads and writes adapters of PEFT: folders with matrices that are added to those of a base model.

LoRA (Hu et al. 2021) adds scale * B A to a matrix W [out, in], with A [r, in] and B [out, r]. DoRA
(Liu et al. 2024) then gives each row of the sum a trained length.

Source: PEFT 0.21, src/peft/tuners/lora/ and src/peft/utils/save_and_load.py.
"""

import collections
import json
import os
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import numpy as np

from flaxformer_mt import atomic
from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.errors import UserError, prefixed
from flaxformer_mt.input_files import first_present, read_json
from flaxformer_mt.interop import checkpoint_files
from flaxformer_mt.interop.checkpoint_files import Tensors
from flaxformer_mt.interop.weight_maps.family import Family
from flaxformer_mt.interop.weight_maps.mapping import WeightMap, rules_of
from flaxformer_mt.interop.weight_maps.validation import check_switches

CONFIG = "adapter_config.json"
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
_WRAPPER = re.compile(r"^((base_model\.model|base_model|module|_orig_mod)\.)+")
_WRAPPED = re.compile(r"\.(base_layer|modules_to_save)\.")
_MERGE = (
    "merge it by PEFT, PeftModel.from_pretrained(BASE, FOLDER).merge_and_unload()"
    ".save_pretrained(NEW), and read NEW"
)

_KNOWN = {
    "alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "corda_config",
    "eva_config", "exclude_modules", "fan_in_fan_out", "inference_mode", "init_lora_weights",
    "layers_pattern", "layers_to_transform", "loftq_config", "lora_alpha", "lora_bias",
    "lora_dropout", "lora_ga_config", "megatron_core", "modules_to_save", "peft_type",
    "peft_version", "qalora_group_size", "r", "rank_pattern", "revision", "runtime_config",
    "target_modules", "task_type", "use_dora", "use_rslora",
}  # fmt: skip
"""Settings that are applied, that the names of the tensors say already, or that trained them. Any
other may change how the tensors are applied."""
_INITIAL = (None, True, False, "gaussian", "eva", "orthogonal", "mica")
"""Initial values that leave the base as it is; others subtract the adapter's from it."""


class _Settings(TypedDict, total=False):
    peft_type: str
    base_model_name_or_path: str | None
    r: int
    lora_alpha: float
    alpha_pattern: dict[str, float] | None
    rank_pattern: dict[str, int] | None
    use_rslora: bool | None
    use_dora: bool | None


class _Changes(NamedTuple):
    """The arrays of an adapter for one tensor of the base."""

    matrices: dict[str, np.ndarray]
    """By the names of PEFT: "lora_A.weight", "lora_embedding_B", "lora_magnitude_vector"."""
    whole: list[np.ndarray]
    """The values that replace it, if any."""


def is_adapter(folder: Path) -> bool:
    """Returns whether a folder holds an adapter, also if a whole model lies beside it."""
    return any((folder / name).exists() for name in (CONFIG, *WEIGHTS))


def chain(
    folder: Path, base: Path | None, has_model: Callable[[Path], bool]
) -> tuple[Path, list[Path]]:
    """Returns the folder of the model that adapters change, and these, the first to apply first.

    The base of an adapter is the folder that is given, the adapter's own if it holds a model
    (`has_model`), or the one that its settings name; it may have an adapter itself.

    Raises:
      UserError: none of them is a folder with a model.
    """
    found: list[Path] = []
    while is_adapter(folder) and folder not in found:
        found.insert(0, folder)
        if base is None and not has_model(folder):
            named = _settings(folder).get("base_model_name_or_path") or "another model"
            places = [path for path in (folder / named, Path(named)) if os.path.isdir(path)]
            if not places or places[0] in found:
                raise UserError(
                    f"{folder} is an adapter of {named}, which is not beside it: give its folder, "
                    "--base FOLDER or load(base=)"
                )
            folder = places[0]
        folder, base = base or folder, None
    return folder, found


def _settings(folder: Path) -> _Settings:
    path = folder / CONFIG
    if not path.exists():
        raise UserError(f"{folder} has {WEIGHTS[0]}, but no {CONFIG}, which says how to apply it")
    settings: _Settings = read_json(path, _Settings)
    return settings


def merged(
    folder: Path, tensors: Tensors, ties: Collection[Collection[str]], base: str
) -> dict[str, np.ndarray]:
    """Returns the tensors of a base model with an adapter applied.

    Args:
      folder: of the adapter.
      tensors: the base's, by the family's names.
      ties: the names of each tensor that the family has several names for.
      base: what these names begin with, in a module without an output layer; see `Family.base`.

    Raises:
      UserError: the adapter is damaged, of another base, or of a kind that is not supported.
    """
    settings = _settings(folder)
    with prefixed(f"{folder / CONFIG}: "):
        _check_supported(settings)
    path = first_present(folder, WEIGHTS)
    found, _ = checkpoint_files.read_widened([path], lambda name: False, is_adapter=True)
    result = dict(tensors)
    with prefixed(f"{path}: "):
        changes = _by_tensor(found, {*tensors, *(name for names in ties for name in names)}, base)
        for names in ties:
            # PEFT changes one of the names, and leaves the others as they are.
            present = next((name for name in names if name in tensors), None)
            if present and any(name in changes for name in names):
                result = dict.fromkeys(names, tensors[present]) | result
        for name, own in changes.items():
            if name not in result:
                raise UserError(f"its base has no tensor {name}: it is an adapter of another model")
            result[name] = _changed(name, result[name], own, settings)
    return result


def _check_supported(settings: Mapping[str, Any]) -> None:
    if settings.get("peft_type") != "LORA":
        raise UserError(f"peft_type={settings.get('peft_type')} is not supported: {_MERGE}")
    for name, value in settings.items():
        if (name == "init_lora_weights" and value not in _INITIAL) or (
            name not in _KNOWN and value not in (None, False, {}, [])
        ):
            raise UserError(f"{name}={value} is not supported: {_MERGE}")


def _by_tensor(found: Tensors, known: Collection[str], base: str) -> dict[str, _Changes]:
    changes: dict[str, _Changes] = collections.defaultdict(lambda: _Changes({}, []))
    for name, tensor in found.items():
        if ".original_module." in name:  # That of the base, beside one that replaces it.
            continue
        module, is_matrix, part = name.partition(".lora_")
        whole = f"{module}.{'bias' if part == 'B.bias' else 'weight'}" if is_matrix else name
        whole = _WRAPPED.sub(".", _WRAPPER.sub("", whole, count=1))
        own = changes[base + whole if base + whole in known else whole]
        if is_matrix:
            own.matrices[f"lora_{part}"] = tensor
        else:
            own.whole.append(tensor)
    return changes


def _changed(name: str, tensor: np.ndarray, changes: _Changes, settings: _Settings) -> np.ndarray:
    matrices = dict(changes.matrices)
    for whole in changes.whole:
        # A table may have more rows than that of the base.
        if whole.shape[1:] != tensor.shape[1:]:
            raise UserError(f"{name} has shape {whole.shape}, and {tensor.shape} in the base")
        tensor = whole.astype(tensor.dtype)
    if not matrices:
        return tensor
    module = name.rpartition(".")[0]
    rank = int(_of_pattern(settings, "rank_pattern", "r", module))
    scale = _of_pattern(settings, "alpha_pattern", "lora_alpha", module)
    scale /= (rank**0.5 if settings.get("use_rslora") else rank) or 1
    if (bias := matrices.pop("lora_B.bias", None)) is not None and bias.shape == tensor.shape:
        return (tensor + scale * bias).astype(tensor.dtype)
    # Tables [V, D] have matrices for their transpose.
    is_table = "lora_embedding_A" in matrices
    kind, end = ("lora_embedding_", "") if is_table else ("lora_", ".weight")
    factors = [matrices.pop(f"{kind}{part}{end}", np.empty(0)) for part in "BA"]
    length = matrices.pop("lora_magnitude_vector", None)
    matrix = tensor.T if is_table else tensor
    expected = [(len(matrix), rank), (rank, *matrix.shape[1:])]
    lengths = [] if length is None else [length.shape]
    fits = [each.shape for each in factors] == expected
    if matrices or not fits or lengths != [matrix.shape[:1]] * bool(settings.get("use_dora")):
        shapes = ", ".join(f"{each} {array.shape}" for each, array in changes.matrices.items())
        raise UserError(f"{name} {tensor.shape} with r={rank} cannot be changed by {shapes}")
    left, right = (factor.astype(np.float64) for factor in factors)
    matrix = matrix + scale * left @ right
    if length is not None:
        matrix = matrix * (length / np.linalg.norm(matrix, axis=1))[:, None]
    return (matrix.T if is_table else matrix).astype(tensor.dtype)


def _of_pattern(settings: Mapping[str, Any], patterns: str, default: str, module: str) -> float:
    """Returns a setting of a module: that of the first pattern that its name ends with."""
    for pattern, value in (settings.get(patterns) or {}).items():
        if re.search(r"\)[*+{]", pattern):  # It could take forever to match.
            raise UserError(f"{patterns}: repeated groups, as in {pattern}, are not supported")
        try:
            if re.fullmatch(rf"(.*\.)?({pattern})", module):
                return float(value)
        except re.error as error:
            raise UserError(f"{patterns} is damaged: {pattern}: {error}") from error
    return float(settings.get(default, 8))


def write(
    folder: Path,
    family: Family,
    config: TransformerConfig,
    pairs: Mapping[str, Mapping[str, Any]],
    alpha: float,
    base: str,
) -> None:
    """Writes an adapter that PEFT loads, atomically; arguments and errors as of `save_adapter`."""
    check_switches(family, config)
    rules = rules_of(family, config, family.layout_of_params({}, {}))
    tensors: dict[str, np.ndarray] = {}
    unknown = {*pairs}
    ranks = {np.shape(pair["b"])[-2] for pair in pairs.values()}
    for applied in WeightMap(family, config, rules).applications():
        path = applied.ours[0]
        if path not in pairs:
            continue
        module = applied.theirs[0].removesuffix(".weight")
        for name, part in (("A", "a"), ("B", "b")):
            matrix = np.asarray(pairs[path][part], np.float32)
            matrix = matrix if applied.layer is None else matrix[applied.layer]
            written = applied.rule.to_theirs(matrix)
            if len(applied.ours) > 1 or not np.array_equal(written[0], matrix.T):
                raise UserError(f"{path} is not one matrix of {family.name}, as PEFT adapts them")
            tensors[f"base_model.model.{module}.lora_{name}.weight"] = written[0]
        unknown.discard(path)
    for path in sorted(unknown):
        raise UserError(f"{path} is no parameter of {family.name}")
    if len(ranks) != 1:
        raise UserError(f"the adapters have the ranks {sorted(ranks)}: PEFT has one for all")
    modules = {name.split(".lora_")[0].removeprefix("base_model.model.") for name in tensors}
    settings = {
        "peft_type": "LORA",
        "task_type": "SEQ_2_SEQ_LM",
        "base_model_name_or_path": base,
        "r": ranks.pop(),
        "lora_alpha": alpha,
        "target_modules": sorted(modules),
        "inference_mode": True,
    }
    with atomic.new_folder(folder) as partial:
        checkpoint_files.write(partial / WEIGHTS[0], tensors)
        (partial / CONFIG).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
