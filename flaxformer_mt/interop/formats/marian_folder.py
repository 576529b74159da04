"""Reads and writes models in Marian's own format, including those for browsers.

Models for browsers (Firefox Translations, Bergamot) have a recurrent unit in the decoder instead of
self-attention, and 8-bit weights, which are converted to float32.

`marian_files.py` implements the file formats, `families/marian_native.py` the weight map.
"""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from flaxformer_mt import atomic
from flaxformer_mt.config import DecodeConfig, TransformerConfig
from flaxformer_mt.data.tokenizers.sentencepiece_tokenizer import SentencePieceTokenizer
from flaxformer_mt.data.tokenizers.tokenizer import Tokenizer, Tokenizers
from flaxformer_mt.errors import UserError, prefixed
from flaxformer_mt.input_files import MAX_MODEL_BYTES, read_bytes
from flaxformer_mt.interop.exports import marian_native_obstacle
from flaxformer_mt.interop.families.marian_native import END, FAMILY, NO_TOKEN, options
from flaxformer_mt.interop.formats import bundle as bundles
from flaxformer_mt.interop.formats import marian_files
from flaxformer_mt.interop.formats.bundle import ModelBundle, Notes
from flaxformer_mt.interop.weight_maps import checkpoints
from flaxformer_mt.interop.weight_maps.family import check_kinds

_MODEL, _OPTIONS = "model.npz", "config.yml"


class MarianFiles(NamedTuple):
    """The files of a model in Marian's format."""

    model: Path
    source: Path
    """The source vocabulary."""
    target: Path
    """The target vocabulary; may be the same file."""
    options: Mapping[str, Any]
    """The options of Marian's decoder; empty if there is no such file."""


def read(path: Path, overrides: Mapping[str, Any] = {}) -> tuple[ModelBundle, Notes]:
    """Reads a model with its vocabularies and search options.

    `path` is the model's file, .npz or .bin, in the same folder as its vocabularies; or the folder.
    If the folder has a decoder configuration (YAML), the files that it names are used.

    Returns:
      The model, and a line about each unsupported option.

    Raises:
      UserError: a file is missing, damaged or not supported, or files contradict each other.
    """
    files = find(path)
    config, params = load(files.model, **overrides)
    source = target = _read_vocabulary(files.source, config.source_vocab_size)
    if files.source != files.target:
        target = _read_vocabulary(files.target, config.target_vocab_size)
    tokenizers = Tokenizers(source, target)
    data = {"vocab_size": config.target_vocab_size, "joint_vocabulary": tokenizers.joint}
    with prefixed(f"the decoder's options beside {files.model}: "):
        decode, notes = to_decode(files.options, tokenizers.target)
    return ModelBundle(bundles.experiment(config, decode, **data), params, tokenizers), notes


def write(bundle: ModelBundle, folder: Path, accepted: Collection[str] = ()) -> Notes:
    """Writes a folder for Marian's decoder: a float32 model, vocabularies, options.

    Returns a line about each unsupported search option; UserError if Marian cannot run the model.
    """
    model, tokenizers = bundle.config.model, bundle.tokenizers
    tensors = checkpoints.to_state_dict(FAMILY, model, bundle.params)
    names = ("vocab.spm",) if tokenizers.joint else ("source.spm", "target.spm")
    vocabularies = {
        name: _checked(tokenizer, "the run's vocabulary").model
        for name, tokenizer in zip(names, (tokenizers.source, tokenizers.target), strict=False)
    }
    if obstacle := marian_native_obstacle(model):
        raise UserError(f"its models cannot have {obstacle}")
    search, notes = from_decode(bundle.config.decode, tokenizers.target)
    settings = {"relative-paths": True, "models": [_MODEL], "vocabs": [names[0], names[-1]]}
    with atomic.new_folder(folder) as partial:
        marian_files.write_npz(partial / _MODEL, tensors, options(model))
        for name, content in vocabularies.items():
            (partial / name).write_bytes(content)
        (partial / _OPTIONS).write_text(yaml.safe_dump(settings | search, sort_keys=False))
    return notes


def load(path: Path, **overrides: Any) -> tuple[TransformerConfig, dict[str, Any]]:
    """Reads configuration and parameters, in float32, of a model's file; errors as of `read`."""
    with checkpoints.error_context(path, FAMILY.name):
        return checkpoints.from_checkpoint(FAMILY, marian_files.read(path), overrides)


def find(path: Path) -> MarianFiles:
    """Finds the files of the model at `path`, a file or a folder; errors as of `read`."""
    if not path.exists():
        raise UserError(f"{path} does not exist")
    folder = path if path.is_dir() else path.parent
    for settings in filter(None, map(_read_options, sorted(folder.glob("*.yml")))):
        model, (source, target) = settings["models"][0], settings["vocabs"]
        if path in (folder, folder / model):
            return MarianFiles(folder / model, folder / source, folder / target, settings)
    model = _only_model(folder) if path.is_dir() else path
    return MarianFiles(model, *_only_vocabularies(folder), {})


def _read_options(path: Path) -> Mapping[str, Any] | None:
    """Returns the options of a decoder with one model; None if the file contains something else."""
    with prefixed(f"{path} cannot be read: "):
        text = read_bytes(path)
        if len(text) > marian_files.MAX_YAML_BYTES:
            return None  # A vocabulary.
        content = marian_files.parse_yaml(text)
    match content:
        case {"models": [str()], "vocabs": [str(), str()]}:
            return content
    return None


def _only_model(folder: Path) -> Path:
    # Lexical shortlists have the same suffix.
    found = [path for path in folder.glob("*.bin") if not path.name.startswith("lex")]
    models = sorted([*folder.glob("*.npz"), *found])
    if len(models) != 1:
        names = ", ".join(path.name for path in models) or "no .npz, no .bin"
        raise UserError(f"{folder} has {len(models)} models ({names}): name the file of one")
    return models[0]


def _only_vocabularies(folder: Path) -> tuple[Path, Path]:
    match sorted(folder.glob("*.spm")):
        case [one]:
            return one, one
        # source.spm and target.spm, or srcvocab.deen.spm and trgvocab.deen.spm.
        case [source, target] if source.name[0] == "s" and target.name[0] == "t":
            return source, target
        case others:
            raise UserError(
                f"{folder} has {len(others)} vocabularies (.spm), and no YAML file that names the "
                "model's: name them vocab.spm, or source.spm and target.spm"
            )


def _read_vocabulary(path: Path, size: int) -> SentencePieceTokenizer:
    if path.suffix != ".spm":
        raise UserError(f"{path}: only SentencePiece vocabularies (.spm) are supported")
    tokenizer = SentencePieceTokenizer(read_bytes(path, MAX_MODEL_BYTES), str(path))
    _checked(tokenizer, str(path))
    if tokenizer.vocab_size != size:
        raise UserError(
            f"{path} has {tokenizer.vocab_size} tokens, but the model {size}: they do not match"
        )
    return tokenizer


def _checked(tokenizer: Tokenizer, name: str) -> SentencePieceTokenizer:
    if not isinstance(tokenizer, SentencePieceTokenizer):
        raise UserError(
            f"{name} cannot be written: Marian supports SentencePiece vocabularies only"
        )
    for field, wanted in (("eos_id", END), ("pad_id", NO_TOKEN)):
        given = getattr(tokenizer, field)
        if given != wanted:
            raise UserError(f"{name} has {field}={given}, but Marian requires {wanted}")
    return tokenizer


# Options with a counterpart, and Marian's defaults.
_SAME = {
    "beam-size": ("beam_size", 12),
    "normalize": ("length_penalty", 0.0),
    "max-length-factor": ("max_length_factor", 3.0),
}
_CONTROL_PIECES = frozenset(f"<0x{byte:02X}>" for byte in range(32))


def to_decode(options: Mapping[str, Any], target: Tokenizer) -> tuple[DecodeConfig, Notes]:
    """Converts options of Marian's decoder to search options.

    Without options, which Marian then takes from its command line, beam and lengths are our
    defaults.

    Returns:
      The search options, and a line about each unsupported option.

    Raises:
      UserError: a value is invalid.
    """
    check_kinds(options, dict.fromkeys(("allow-unk", "allow-special"), bool))
    fields: dict[str, Any] = {}
    if options:
        given = {name: value for name, value in options.items() if value is not None}
        fields = {ours: given.get(theirs, value) for theirs, (ours, value) in _SAME.items()}
    suppressed = [
        *([] if options.get("allow-unk") else [target.unk_id]),
        *([] if options.get("allow-special") else _control_ids(target)),
    ]
    decode = DecodeConfig(
        length_penalty_kind="average", bad_word_ids=tuple(map(str, suppressed)), **fields
    )
    notes = []
    if options.get("shortlist"):
        notes.append("its shortlist is ignored: translations may contain any token")
    notes += [
        f"{name}={options[name]} is not supported, and ignored"
        for name in ("word-penalty", "output-sampling", "force-decode")
        if options.get(name)
    ]
    return decode, tuple(notes)


def from_decode(decode: DecodeConfig, target: Tokenizer) -> tuple[dict[str, Any], Notes]:
    """Converts search options to options of Marian's decoder.

    Returns:
      The options, and a line about each option without a counterpart.
    """
    forbidden = set(decode.bad_word_ids)
    unknown, control = {str(target.unk_id)}, set(map(str, _control_ids(target)))
    options = {theirs: getattr(decode, ours) for theirs, (ours, _) in _SAME.items()}
    supported = {"length_penalty_kind", "max_length_extra", *(ours for ours, _ in _SAME.values())}
    notes = []
    if decode.length_penalty_kind != "average":
        options["normalize"] = 0.0
        if decode.length_penalty and decode.beam_size > 1:
            notes.append(
                f"decode.length_penalty={decode.length_penalty} of length_penalty_kind=gnmt is not "
                "supported by Marian, which divides scores by length**normalize: adjust normalize "
                "in config.yml if needed"
            )
    if not unknown <= forbidden:
        options["allow-unk"] = True
    if not control <= forbidden:
        options["allow-special"] = True
    if forbidden <= unknown | control:
        supported.add("bad_word_ids")
    return options, (*notes, *bundles.unsupported_options(decode, supported, "Marian"))


def _control_ids(tokenizer: Tokenizer) -> list[int]:
    """Returns the ids of the bytes 0 to 31, which a vocabulary with byte fallback has."""
    pieces = tokenizer.pieces(range(tokenizer.vocab_size))
    return [token for token, piece in enumerate(pieces) if piece in _CONTROL_PIECES]
