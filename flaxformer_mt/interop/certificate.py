"""Certificates of exports: what was written computes what was read.

`convert` writes one beside each export: `parity.json` in a folder, `NAME.parity.json` beside a
file. The model that was read and the export, read again, compute on the same tokens; the
certificate has the largest difference of every value, the log-probabilities by which the export can
be tested wherever it is, the versions of the libraries, and hashes. It is not signed: whoever can
edit it can make it fit another export.
"""

import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import msgspec
import numpy as np

from flaxformer_mt import atomic, interop
from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.errors import UserError, first_line, prefixed
from flaxformer_mt.input_files import Count, Finite, read_json
from flaxformer_mt.interop.formats.bundle import Notes, read_bundle
from flaxformer_mt.interop.weight_maps.adam_state import TrainingState
from flaxformer_mt.interop.weight_maps.mapping import by_path, model_params
from flaxformer_mt.model.transformer import Transformer
from flaxformer_mt.runs import manifest

FILE = "parity.json"
TOLERANCE = 1e-3
"""Of log-probabilities that the same weights give in two programs, in float32, relative to the
largest. Random sentences, as they are compared on, amplify rounding."""
_QUANTIZED_TOLERANCE = 5e-2
"""Of those of quantized weights: int8 differs by 1.6e-2 and bfloat16 by 0.7e-2 in a small model."""
_ROWS, _LENGTH = 4, 8
_LOG_PROBABILITIES = "log_probabilities"
_PACKAGES = ("flaxformer_mt", "jax", "flax", "numpy", "ctranslate2")


@dataclasses.dataclass(frozen=True)
class _Source:
    name: str
    parameters_sha256: str


_Item = TypeVar("_Item")
_Some = Annotated[list[_Item], msgspec.Meta(min_length=1)]


@dataclasses.dataclass(frozen=True)
class _Tokens:
    source: _Some[_Some[Count]]
    target_input: _Some[_Some[Count]]
    target_output: _Some[_Some[Count]]


@dataclasses.dataclass(frozen=True)
class _Site:
    relative: Finite


@dataclasses.dataclass(frozen=True)
class _Certificate:
    family: str
    source: _Source
    files: Annotated[dict[str, manifest.Entry], msgspec.Meta(min_length=1)]
    settings: dict[str, Any]
    tokens: _Tokens
    log_probabilities: _Some[_Some[Finite]]
    sites: _Some[_Site]


class Verification(NamedTuple):
    """The result of `verify`."""

    headline: str
    problems: tuple[str, ...]
    """In one line each; none if the export is as it was certified."""


def path_of(export: Path) -> Path:
    """Returns where the certificate of an export is."""
    return export / FILE if export.is_dir() else export.with_name(f"{export.name}.{FILE}")


def write(
    model: TrainingState,
    source: Path,
    family: str,
    export: Path,
    settings: Mapping[str, Any],
) -> Notes:
    """Compares an export with the model that it was written from, and writes its certificate.

    Layers without embeddings, which take no tokens, get none.

    Args:
      model: that was read.
      source: where it was read from; only the name is recorded.
      family: of the export.
      export: the folder or file.
      settings: configuration fields without which a file cannot be read.

    Returns:
      A note if they differ by more than `TOLERANCE`, as they do with quantized weights.

    Raises:
      UserError: the export cannot be read, or the certificate cannot be written.
    """
    config, params = model.config, model.params
    if not config.target_vocab_size:
        return ()
    tokens = _example(config)
    ours = _compute(config, params, tokens)
    with prefixed("the export cannot be read again (--no-certificate keeps it all the same): "):
        theirs = _compute_export(family, export, settings, tokens)
    rows: list[dict[str, Any]] = [
        {"site": site, "shape": value.shape} | _difference(ours[site], value)
        for site, value in theirs.items()
        # Conversion may add biases, heads or entries of the vocabulary.
        if site in ours and ours[site].shape == value.shape
    ]
    content = {
        "family": family,
        "source": {"name": source.name, "parameters_sha256": _digest(params)},
        "files": manifest.entries(export),
        "versions": _versions(),
        "settings": dict(settings),
        "tokens": {name: each.tolist() for name, each in zip(_TOKENS, tokens, strict=True)},
        "log_probabilities": ours[_LOG_PROBABILITIES].tolist(),
        "sites": rows,
    }
    atomic.write_text(path_of(export), json.dumps(content, indent=1) + "\n")
    largest = rows[0]
    if largest["relative"] <= TOLERANCE:
        return ()
    return (f"log-probabilities differ by up to {largest['difference']:.1e} from {source}'s",)


def verify(export: Path) -> Verification:
    """Checks the files of an export, and what it computes, against its certificate.

    It may compute twice the difference that it had when it was written, or `TOLERANCE` if that is
    more; where weights may be quantized, the difference that quantization can make is the limit.

    Raises:
      UserError: there is no such export, it has no certificate, or either cannot be read.
    """
    path = path_of(export)
    if not path.is_file():
        raise UserError(
            f"{path} is missing: convert writes it beside each export, except run folders"
        )
    content: _Certificate = read_json(path, _Certificate)
    entries = content.files
    folder = export if export.is_dir() else export.parent
    problems = [manifest.difference(folder / file, entries[file], file) for file in entries]
    if any(problems):
        headline = f"{export} is not the export that was certified"
        return Verification(headline, tuple(filter(None, problems)))
    limit = _QUANTIZED_TOLERANCE if content.family == "ctranslate2" else TOLERANCE
    tolerance = min(max(2 * content.sites[0].relative, TOLERANCE), limit)
    with prefixed(f"{path}: "):
        try:
            tokens = tuple(np.array(getattr(content.tokens, name), np.int32) for name in _TOKENS)
            expected = np.array(content.log_probabilities, np.float64)
            sites = _compute_export(content.family, export, content.settings, tokens)
            found = sites[_LOG_PROBABILITIES]
            if found.shape != expected.shape:
                raise ValueError(f"{found.shape} log-probabilities instead of {expected.shape}")
            largest = _difference(expected, found)["relative"]
        except UserError:
            raise
        except Exception as error:  # What another program makes of tokens that are not its own.
            reason = first_line(error)
            raise UserError(f"its tokens or settings do not fit the export: {reason}") from error
    headline = (
        f"{export} computes the log-probabilities of {content.source.name} up to a relative "
        f"difference of {largest:.1e}; the tolerance is {tolerance:.1e}"
    )
    if largest <= tolerance:
        return Verification(headline, ())
    return Verification(headline, ("they differ by more than when it was written",))


_TOKENS = ("source", "target_input", "target_output")


def _example(config: TransformerConfig) -> tuple[np.ndarray, ...]:
    """Returns random sentences without padding: [B, S], [B, T] and [B, T]."""
    random = np.random.default_rng(0)
    special = [config.pad_id, config.bos_id, config.eos_id]
    start, end = (np.full((_ROWS, 1), token) for token in (config.bos_id, config.eos_id))
    length = min(_LENGTH, config.max_length - 1)
    sizes = config.source_vocab_size or config.target_vocab_size, config.target_vocab_size
    sides = [random.choice(np.setdiff1d(range(n), special), (_ROWS, length)) for n in sizes]
    joined = ([sides[0], end], [start, sides[1]], [sides[1], end])
    return tuple(np.concatenate(parts, axis=1).astype(np.int32) for parts in joined)


def values_of_modules(
    config: TransformerConfig, params: Any, source: np.ndarray, target_input: np.ndarray
) -> dict[str, np.ndarray]:
    """Returns what each module of a model computes in float32, by path, and the "logits".

    `source` [B, S] and `target_input` [B, T] are tokens.
    """
    model = dataclasses.replace(config, dtype="float32", param_dtype="float32")
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float32), model_params(params))
    return dict(jax.device_get(_values_of_modules(model, params, source, target_input)))


@functools.partial(jax.jit, static_argnums=0)
def _values_of_modules(
    config: TransformerConfig, params: Any, source: jax.Array, target_input: jax.Array
) -> dict[str, jax.Array]:
    with jax.default_matmul_precision("highest"):
        _, kept = Transformer(config).apply(
            {"params": params},
            source if config.has_inputs else None,
            target_input,
            capture_intermediates=True,
            mutable=["intermediates"],
        )
    leaves = jax.tree_util.tree_leaves_with_path(kept["intermediates"])
    names = [jax.tree_util.keystr(path[:-1], simple=True, separator="/") for path, _ in leaves]
    return {
        name.replace("/__call__", "").replace("__call__", "logits"): leaf
        for name, (_, leaf) in zip(names, leaves, strict=True)
    }


def _compute(
    config: TransformerConfig, params: Any, tokens: tuple[np.ndarray, ...]
) -> dict[str, np.ndarray]:
    """Returns the log-probabilities of the target tokens [B, T], and the values of all modules."""
    source, target_input, target_output = tokens
    sites = values_of_modules(config, params, source, target_input)
    return {_LOG_PROBABILITIES: _of_targets(sites["logits"], target_output), **sites}


def _of_targets(logits: Any, targets: np.ndarray) -> np.ndarray:
    normalized = jax.nn.log_softmax(jnp.asarray(logits, jnp.float32))
    return np.asarray(jnp.take_along_axis(normalized, targets[..., None], axis=-1)[..., 0])


def _compute_export(
    family: str, export: Path, settings: Mapping[str, Any], tokens: tuple[np.ndarray, ...]
) -> dict[str, np.ndarray]:
    """As `_compute`; of an export to another program, the log-probabilities alone."""
    if family == "ctranslate2":
        from flaxformer_mt.interop.formats import ctranslate2

        return {_LOG_PROBABILITIES: ctranslate2.log_probabilities(export, tokens[0], tokens[2])}
    if family == "jax":
        return {_LOG_PROBABILITIES: _by_exported_functions(export, tokens)}
    if export.is_dir():
        bundle, _ = read_bundle(family, export, {})
        return _compute(bundle.config.model, bundle.params, tokens)
    return _compute(*interop.load(family, export, **settings), tokens)


def _by_exported_functions(folder: Path, tokens: tuple[np.ndarray, ...]) -> np.ndarray:
    from flaxformer_mt.interop.formats.jax_server import Model

    source, target_input, target_output = tokens
    model = Model(folder)
    cache = model.encode(model.parameters, source, np.zeros((1, target_input.shape[1]), np.bool_))
    logits = []
    for position, column in enumerate(target_input.T):
        positions = np.full(len(column), position, np.int32)
        found, cache = model.step(model.parameters, column[:, None], cache, positions)
        logits.append(found[:, 0])
    return _of_targets(jnp.stack(logits, axis=1), target_output)


def _difference(ours: np.ndarray, theirs: np.ndarray) -> dict[str, float]:
    largest = float(np.max(np.abs(ours - theirs), initial=0.0))
    scale = float(np.max(np.abs(ours), initial=0.0))
    return {"difference": largest, "relative": largest / scale if scale else largest}


def _digest(params: Any) -> str:
    digest = hashlib.sha256()
    for name, leaf in sorted(by_path(params).items()):
        digest.update(f"{name} {leaf.dtype} {leaf.shape}\n".encode())
        digest.update(np.ascontiguousarray(leaf).tobytes())
    return digest.hexdigest()


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
