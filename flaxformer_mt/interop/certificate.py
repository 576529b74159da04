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
from collections.abc import Mapping, Sequence
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
TOLERANCE = 1e-4
"""Of log-probabilities that the same weights give in two programs, in float32, relative to the
largest."""
_QUANTIZED_TOLERANCE = 5e-2
"""Of those of quantized weights: int8 differs by 1.6e-2 and bfloat16 by 0.7e-2 in a small model."""
_LENGTHS = (1, 2, 5, 9, 40, 200)
"""The numbers of tokens in the sentences that are compared, without the end token."""
_PADDING = -2
_Computed = tuple[list[np.ndarray], dict[str, np.ndarray]]
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
    forbidden: Sequence[int] = (),
) -> Notes:
    """Compares an export with the model that it was written from, and writes its certificate.

    Layers without embeddings, which take no tokens, get none.

    Args:
      model: that was read.
      source: where it was read from; only the name is recorded.
      family: of the export.
      export: the folder or file.
      settings: configuration fields without which a file cannot be read, or how weights are
        quantized.
      forbidden: tokens that have probability 0 in the export.

    Returns:
      A note if they differ by more than `TOLERANCE`, as they do with quantized weights.

    Raises:
      UserError: the export cannot be read, or the certificate cannot be written.
    """
    config, params = model.config, model.params
    if not config.target_vocab_size:
        return ()
    tokens = _example(config)
    ours, sites = _compute(config, params, tokens, forbidden)
    with prefixed("the export cannot be read again (--no-certificate keeps it all the same): "):
        theirs, their_sites = _compute_export(family, export, settings, tokens)
    largest = _difference(np.concatenate(ours), np.concatenate(theirs))
    rows: list[dict[str, Any]] = [
        {"site": "log_probabilities", "shape": [sum(map(len, ours))]} | largest,
        *(
            {"site": site, "shape": value.shape} | _difference(sites[site], value)
            for site, value in their_sites.items()
            # Conversion may add biases, heads or entries of the vocabulary.
            if site in sites and sites[site].shape == value.shape
        ),
    ]
    content = {
        "family": family,
        "source": {"name": source.name, "parameters_sha256": _digest(params)},
        "files": manifest.entries(export),
        "versions": _versions(),
        "settings": dict(settings),
        "tokens": dataclasses.asdict(tokens),
        "log_probabilities": [row.tolist() for row in ours],
        "sites": rows,
    }
    atomic.write_text(path_of(export), json.dumps(content, indent=1) + "\n")
    if largest["relative"] <= TOLERANCE:
        return ()
    return (f"log-probabilities differ by up to {largest['difference']:.1e} from {source}'s",)


def verify(export: Path) -> Verification:
    """Checks the files of an export, and what it computes, against its certificate.

    It may compute twice the difference that it had when it was written, or `TOLERANCE` if that is
    more; where weights are quantized, the difference that quantization can make is the limit.

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
    is_quantized = content.settings.get("quantization") not in (None, "float32")
    limit = _QUANTIZED_TOLERANCE if is_quantized else TOLERANCE
    tolerance = min(max(2 * content.sites[0].relative, TOLERANCE), limit)
    with prefixed(f"{path}: "):
        try:
            found, _ = _compute_export(content.family, export, content.settings, content.tokens)
            counts = [[*map(len, rows)] for rows in (found, content.log_probabilities)]
            if counts[0] != counts[1]:
                raise ValueError(f"{counts[0]} log-probabilities instead of {counts[1]}")
            expected = np.concatenate(content.log_probabilities)
            largest = _difference(expected, np.concatenate(found))["relative"]
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


def _example(config: TransformerConfig) -> _Tokens:
    """Returns random sentences; the last one is the longest."""
    random = np.random.default_rng(0)
    special = [config.pad_id, config.bos_id, config.eos_id]
    sizes = config.source_vocab_size or config.target_vocab_size, config.target_vocab_size
    lengths = [min(length, config.max_length - 1) for length in _LENGTHS]
    sources, targets = (
        [random.choice(np.setdiff1d(range(size), special), length).tolist() for length in lengths]
        for size in sizes
    )
    return _Tokens(
        [[*row, config.eos_id] for row in sources],
        [[config.bos_id, *row] for row in targets],
        [[*row, config.eos_id] for row in targets],
    )


def values_of_modules(
    config: TransformerConfig, params: Any, source: np.ndarray, target_input: np.ndarray
) -> dict[str, np.ndarray]:
    """Returns what each module of a model computes in float32, by path, and the "logits".

    `source` [B, S] and `target_input` [B, T] are tokens, and -2 for padding.
    """
    model = dataclasses.replace(config, dtype="float32", param_dtype="float32")
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float32), model_params(params))
    return dict(jax.device_get(_values_of_modules(model, params, source, target_input)))


@functools.partial(jax.jit, static_argnums=0)
def _values_of_modules(
    config: TransformerConfig, params: Any, source: jax.Array, target_input: jax.Array
) -> dict[str, jax.Array]:
    segments = [(tokens != _PADDING).astype(jnp.int32) for tokens in (source, target_input)]
    source, target_input = (
        jnp.where(tokens == _PADDING, config.eos_id, tokens) for tokens in (source, target_input)
    )
    with jax.default_matmul_precision("highest"):
        _, kept = Transformer(config).apply(
            {"params": params},
            source if config.has_inputs else None,
            target_input,
            encoder_segment_ids=segments[0] if config.has_inputs else None,
            decoder_segment_ids=segments[1],
            capture_intermediates=True,
            mutable=["intermediates"],
        )
    leaves = jax.tree_util.tree_leaves_with_path(kept["intermediates"])
    names = [jax.tree_util.keystr(path[:-1], simple=True, separator="/") for path, _ in leaves]
    return {
        name.replace("/__call__", "").replace("__call__", "logits"): leaf
        for name, (_, leaf) in zip(names, leaves, strict=True)
    }


def _padded(rows: Sequence[Sequence[int]], fill: int) -> np.ndarray:
    padded = np.full((len(rows), max(map(len, rows))), fill, np.int32)
    for row, tokens in zip(padded, rows, strict=True):
        row[: len(tokens)] = tokens
    return padded


def _compute(
    config: TransformerConfig, params: Any, tokens: _Tokens, forbidden: Sequence[int] = ()
) -> _Computed:
    """Returns the log-probabilities of the targets, and the values of all modules for the last."""
    found = []
    # One sentence at a time: the logits of a large vocabulary take much memory.
    for *inputs, targets in zip(
        _padded(tokens.source, _PADDING),
        _padded(tokens.target_input, _PADDING),
        tokens.target_output,
        strict=True,
    ):
        sites = values_of_modules(config, params, *(row[None] for row in inputs))
        found.append(_of_targets(sites["logits"][0, : len(targets)], targets, forbidden))
    return found, sites


def _of_targets(logits: Any, targets: Sequence[int], forbidden: Sequence[int] = ()) -> np.ndarray:
    allowed = np.array(logits, np.float32)  # [T, V]
    allowed[:, list(forbidden)] = -np.inf
    normalized = jax.nn.log_softmax(allowed)
    return np.asarray(jnp.take_along_axis(normalized, np.array(targets)[:, None], axis=-1)[:, 0])


def _compute_export(
    family: str, export: Path, settings: Mapping[str, Any], tokens: _Tokens
) -> _Computed:
    """As `_compute`; of an export to another program, the log-probabilities alone."""
    if family == "ctranslate2":
        from flaxformer_mt.interop.formats import ctranslate2

        return ctranslate2.log_probabilities(export, tokens.source, tokens.target_output), {}
    if family == "jax":
        return _by_exported_functions(export, tokens), {}
    if export.is_dir():
        bundle, _ = read_bundle(family, export, {})
        return _compute(bundle.config.model, bundle.params, tokens)
    return _compute(*interop.load(family, export, **settings), tokens)


def _by_exported_functions(folder: Path, tokens: _Tokens) -> list[np.ndarray]:
    from flaxformer_mt.interop.formats.jax_server import Model

    model = Model(folder)
    source = _padded(tokens.source, model.facts["pad_id"])
    target_input = _padded(tokens.target_input, model.facts["eos_id"])
    cache = model.encode(model.parameters, source, np.zeros((1, target_input.shape[1]), np.bool_))
    logits = []
    for position, column in enumerate(target_input.T):
        positions = np.full(len(column), position, np.int32)
        found, cache = model.step(model.parameters, column[:, None], cache, positions)
        logits.append(np.asarray(found[:, 0]))
    rows = zip(np.stack(logits, axis=1), tokens.target_output, strict=True)
    return [_of_targets(row[: len(targets)], targets) for row, targets in rows]


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
