"""Converts models between published families, whole-model formats and our own.

A checkpoint file contains weights, possibly with Adam's state. A folder contains a whole model with
its vocabularies and search options (`formats.bundle.ModelBundle`). `OWN` stands for our parameters
as a file (`formats/own_format.py`), or for a run folder.
"""

import dataclasses
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from flaxformer_mt import atomic, interop
from flaxformer_mt.decoding.search.options import forbidden_token_ids
from flaxformer_mt.errors import UserError, prefixed
from flaxformer_mt.interop import FAMILIES, certificate
from flaxformer_mt.interop.adaptation import adapt
from flaxformer_mt.interop.checkpoint_files import TORCH_SUFFIXES
from flaxformer_mt.interop.formats import bundle as bundles
from flaxformer_mt.interop.formats import own_format
from flaxformer_mt.interop.formats.bundle import READERS, WRITERS, ModelBundle, Notes
from flaxformer_mt.interop.formats.own_format import OWN
from flaxformer_mt.interop.vocabulary.changes import with_vocabulary
from flaxformer_mt.interop.vocabulary.tokens import extended, trimmed
from flaxformer_mt.interop.weight_maps.adam_state import TrainingState
from flaxformer_mt.presets import canonical_family

FILE_SUFFIXES = (".safetensors", *TORCH_SUFFIXES)
"""Suffixes of outputs that are checkpoint files, not folders."""
OTHER_SUFFIXES = (
    ".npz", ".npy", ".h5", ".hdf5", ".keras", ".msgpack", ".pkl", ".pickle", ".onnx", ".pb",
    ".tflite", ".gguf", ".zip", ".tar", ".gz", ".tgz", ".json", ".yml", ".yaml", ".txt", ".spm",
)  # fmt: skip
"""Suffixes of other files, which are rejected: users expect a file with this suffix."""


@dataclasses.dataclass(frozen=True)
class VocabularyEdits:
    """What a conversion changes of a vocabulary: tokens to remove, then tokens to add."""

    texts: tuple[str, ...] = ()
    """Sentences whose tokens are kept; without any, all are."""
    tokens: tuple[str, ...] = ()
    languages: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """New languages with those whose rows theirs begin with."""


_UNCHANGED = VocabularyEdits()


def convert(
    source_family: str,
    target_family: str,
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    overrides: Mapping[str, Any] = {},
    accepted: Collection[str] = (),
    quantization: str | None = None,
    certified: bool = True,
    vocabulary: VocabularyEdits = _UNCHANGED,
    base: str | os.PathLike[str] | None = None,
) -> Notes:
    """Converts a model of one family or format to another.

    Args:
      source_family: a key of `interop.FAMILIES` (or an alias) or of `READERS`, or `OWN`.
      target_family: a key of `interop.FAMILIES` (or an alias) or of `WRITERS`, or `OWN`.
      source: a checkpoint file or the folder of a whole model.
      target: the output: a file if it ends in one of `FILE_SUFFIXES`, otherwise a new folder.
      overrides: configuration fields that cannot be read from the source, see `interop.load`.
      accepted: switches in which the result may differ slightly: "norm_epsilon" or nothing.
      quantization: for "ctranslate2", see its `write`.
      certified: whether to read what was written again, and to write a certificate beside it
        (`certificate.py`); not of run folders and parameters of our own.
      vocabulary: what to remove from the vocabulary, and to add to it.
      base: the folder of the model that an adapter, `source`, changes, if it is not beside it.

    Returns:
      What was changed or lost, in one line each.

    Raises:
      UserError: the source cannot be read; the families differ in a switch for which no equivalent
        weights exist; a vocabulary is missing, or cannot be changed like this; the target cannot be
        written, is the source, or is an existing folder.
    """
    source, target = Path(source), Path(target)
    origin = None if base is None else Path(base)
    source_family, target_family = canonical_family(source_family), canonical_family(target_family)
    _check_family("--from", source_family, {OWN, *READERS, *FAMILIES})
    _check_family("--to", target_family, {OWN, *WRITERS, *FAMILIES})
    for name in accepted:
        if name != "norm_epsilon":
            raise UserError(f"--accept {name}: only norm_epsilon can be accepted")
    if quantization is not None and target_family != "ctranslate2":
        raise UserError("--quantization is for --to ctranslate2 only: remove it")
    if target.suffix in FILE_SUFFIXES:
        if vocabulary != _UNCHANGED:
            raise UserError(f"{target}: the vocabulary is changed in folders, which hold it")
        if source.exists() and target.exists() and source.samefile(target):
            raise UserError(f"{target}: the output must not be the input")
        with atomic.new_file(target) as partial:
            found, written, notes = _convert_to_file(
                source_family, target_family, source, partial, overrides, accepted, origin
            )
            if certified and target_family != OWN:
                # Sizes that are 0 follow from others.
                sizes = ("head_dim", "value_dim", "num_kv_heads")
                fields = dataclasses.asdict(written.config).items()
                settings = {name: value for name, value in fields if value or name not in sizes}
                notes += certificate.write(found, source, target_family, partial, settings)
                if certificate.path_of(partial).is_file():
                    atomic.rename(certificate.path_of(partial), certificate.path_of(target))
        return notes
    if target_family not in (OWN, *WRITERS):
        raise UserError(f"{target}: use the suffix .safetensors or .pt")
    if target.suffix in OTHER_SUFFIXES:
        raise UserError(
            f"{target}: {target.suffix} is not written; {target_family} is a folder, whose name "
            f"has no such suffix{', or a .safetensors file' if target_family == OWN else ''}"
        )
    atomic.require_absent(target)  # Fails before the source is read.
    bundle, notes = bundles.read_bundle(source_family, source, overrides, origin)
    with prefixed(f"{source}: "):
        bundle, changes = _with_options(bundle, vocabulary)
    notes += changes
    if target_family == OWN:
        bundle.write_run(target)
        return notes
    options = {} if quantization is None else {"quantization": quantization}
    # The certificate lies in the folder, which appears with it.
    with atomic.staged_folder(target) as partial:
        with prefixed(f"{source} cannot be converted to {target_family}: "):
            notes += bundles.write_bundle(target_family, bundle, partial, accepted, **options)
        if certified:
            state = TrainingState(bundle.config.model, bundle.params, None)
            forbidden: tuple[int, ...] = ()
            if target_family == "ctranslate2":
                forbidden = forbidden_token_ids(state.config, bundle.config.decode)
            notes += certificate.write(
                state, source, target_family, partial, options, forbidden=forbidden
            )
    return notes


def _with_options(bundle: ModelBundle, options: VocabularyEdits) -> tuple[ModelBundle, Notes]:
    notes: Notes = ()
    if options.texts:
        bundle, lines = with_vocabulary(bundle, trimmed(bundle.tokenizers, options.texts))
        notes += lines
    if options.tokens or options.languages:
        change = extended(bundle.tokenizers, options.tokens, options.languages)
        bundle, lines = with_vocabulary(bundle, change)
        notes += lines
    return bundle, notes


def not_written(family: str, target: str | os.PathLike[str]) -> Notes:
    """Returns a note if the published program reads more from a checkpoint than is in `target`."""
    family = canonical_family(family)
    if family not in FAMILIES or Path(target).suffix not in FILE_SUFFIXES:
        return ()
    needs = FAMILIES[family].also_reads
    return (f"{target} has the tensors of {family}; its program also reads {needs}",) * bool(needs)


def _convert_to_file(
    source_family: str,
    target_family: str,
    source: Path,
    target: Path,
    overrides: Mapping[str, Any],
    accepted: Collection[str],
    base: Path | None,
) -> tuple[TrainingState, TrainingState, Notes]:
    """Returns the model that was read, that which was written, and the notes."""
    notes: Notes = ()
    if source.is_dir() or base is not None or source_family not in (OWN, *FAMILIES):
        bundle, notes = bundles.read_bundle(source_family, source, overrides, base)
        state, origin = TrainingState(bundle.config.model, bundle.params, None), OWN
    elif source_family == OWN:
        state, origin = own_format.read(source, overrides)
    else:
        state, origin = _training_state(source_family, source, overrides), source_family
    found = state
    with prefixed(f"{source} cannot be converted to {target_family}: "):
        if target_family == OWN:
            own_format.write(target, state, origin)
            return found, state, notes + state.notes
        if target_family not in FAMILIES:
            raise UserError(f"{target} names a file: {target_family} is written as a folder")
        if target_family != origin:
            state = adapt(state, FAMILIES[target_family], accepted)
        if state.adam is not None and target.suffix == ".safetensors":
            note = "Adam's state is dropped: PyTorch reads it from .pt files only"
            state = state._replace(adam=None, notes=(*state.notes, note))
        interop.save(target_family, state.config, state.params, target, state.adam)
    return found, state, notes + state.notes


def _training_state(family: str, source: Path, overrides: Mapping[str, Any]) -> TrainingState:
    try:
        return interop.load_training(family, source, **overrides)
    except UserError as error:
        config, params = interop.load(family, source, **overrides)
        return TrainingState(config, params, None, (f"the optimizer's state is dropped: {error}",))


def _check_family(option: str, family: str, known: Collection[str]) -> None:
    if family not in known:
        raise UserError(
            f"{option} {family}: unknown family; choose one of {', '.join(sorted(known))}"
        )
