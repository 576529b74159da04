"""Reads folders of fairseq: a checkpoint, its dictionaries, and what segments the text.

These are `model.pt` (or the only other .pt file), `dict.en.txt` and `dict.de.txt` (or one
dictionary of both sides), and a SentencePiece model (.model or .spm) or the codes of subword-nmt
(`bpecodes`, `code`, `bpe.codes`), of both sides or one for each, with the language in its name.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flaxformer_mt import interop
from flaxformer_mt.config import DecodeConfig
from flaxformer_mt.data.tokenizers import dictionary_tokenizer
from flaxformer_mt.data.tokenizers.dictionary_tokenizer import DictionaryTokenizer
from flaxformer_mt.data.tokenizers.tokenizer import Tokenizers
from flaxformer_mt.errors import UserError, prefixed
from flaxformer_mt.input_files import MAX_MODEL_BYTES, read_bytes, read_text
from flaxformer_mt.interop import checkpoint_files
from flaxformer_mt.interop.formats.bundle import ModelBundle, experiment
from flaxformer_mt.interop.weight_maps.family import check_kinds
from flaxformer_mt.interop.weight_maps.mapping import model_params

_CHECKPOINTS = ("model.pt", "checkpoint_best.pt", "checkpoint_last.pt")
_SEGMENTERS = {
    dictionary_tokenizer.PIECES_FILE: ("*.model", "*.spm"),
    dictionary_tokenizer.CODES_FILE: ("*codes*", "code", "code.*"),
}


def read(
    folder: Path, overrides: Mapping[str, Any] | None = None
) -> tuple[ModelBundle, tuple[str, ...]]:
    """Reads a model with its vocabularies.

    Returns:
      The model, and a line about what its texts have to be.

    Raises:
      UserError: a file is missing, damaged or not supported, or files contradict each other.
    """
    checkpoint = find_checkpoint(folder)
    with prefixed(f"{checkpoint}: "):
        settings = checkpoint_files.read(checkpoint).settings
        # Older checkpoints have the name of the task there.
        nested = settings.get("task")
        task = {**settings, **(nested if isinstance(nested, Mapping) else {})}
        check_kinds(task, {"source_lang": str, "target_lang": str})
    sides = {"source": task.get("source_lang"), "target": task.get("target_lang")}
    files: dict[str, bytes] = {}
    labels = {}
    for side, language in sides.items():
        path = _of_side(folder, ("dict.*txt",), side, language)
        if path is None:
            raise UserError(f"{folder} has no dictionary: dict.txt, or dict.{language or 'en'}.txt")
        labels[side] = str(path)
        tokens = dictionary_tokenizer.read_fairseq(read_text(path, MAX_MODEL_BYTES), str(path))
        files[dictionary_tokenizer.TOKENS_FILE.format(side=side)] = "\n".join(tokens).encode()
        files |= segmenters(folder, side, language)
    languages = {f"{side}_language": name for side, name in sides.items() if name}
    return bundle("fairseq", checkpoint, files, labels, overrides, languages)


def find_checkpoint(folder: Path) -> Path:
    """Returns the checkpoint of a folder; UserError if there is none, or which one is unclear."""
    found = sorted(folder.glob("*.pt"))
    named = [path for name in _CHECKPOINTS for path in found if path.name == name]
    if not named and len(found) != 1:
        raise UserError(f"{folder} has {len(found)} .pt files, and no {_CHECKPOINTS[0]}")
    return (named or found)[0]


def _of_side(folder: Path, patterns: Sequence[str], side: str, language: str | None) -> Path | None:
    """Returns the file of a side, which is the only one or has the side's name; None = no file."""
    found = sorted({path for pattern in patterns for path in folder.glob(pattern)})
    if len(found) < 2:
        return next(iter(found), None)
    names = {side, side[:3], language}
    own = [path for path in found if names & {*re.split("[._-]", path.name)}]
    if len(own) != 1:
        raise UserError(
            f"{folder}: which of {', '.join(path.name for path in found)} is that of the {side}? "
            f"Name it {'.'.join((found[0].name.split('.')[0], side, found[0].name.split('.')[-1]))}"
        )
    return own[0]


def segmenters(
    folder: Path,
    side: str,
    language: str | None,
    patterns: Mapping[str, Sequence[str]] = _SEGMENTERS,
) -> dict[str, bytes]:
    """Returns what the folder has to segment the texts of a side, as files of the tokenizer."""
    paths = {
        name.format(side=side): _of_side(folder, known, side, language)
        for name, known in patterns.items()
    }
    return {name: read_bytes(path, MAX_MODEL_BYTES) for name, path in paths.items() if path}


def bundle(
    family: str,
    checkpoint: Path,
    files: Mapping[str, bytes],
    labels: Mapping[str, str],
    overrides: Mapping[str, Any] | None = None,
    languages: Mapping[str, Any] = {},
) -> tuple[ModelBundle, tuple[str, ...]]:
    """Reads the checkpoint of vocabularies.

    Args:
      family: that of the checkpoint.
      checkpoint: its path.
      files: the vocabularies of both sides, as files of the tokenizer.
      labels: where the vocabulary of each side is from, for messages.
      overrides: configuration fields that override those of the checkpoint.
      languages: fields of `DataConfig`.

    Returns:
      The whole model, and a line about what its texts have to be.

    Raises:
      UserError: the checkpoint or a vocabulary is damaged, or they do not match.
    """
    folder = checkpoint.parent
    source = DictionaryTokenizer(files, "source", str(folder))
    target = DictionaryTokenizer(files, "target", str(folder))
    ids = {name: getattr(target, name) for name in ("pad_id", "bos_id", "eos_id")}
    config, params = interop.load(family, checkpoint, **ids | dict(overrides or {}))
    for side, tokenizer in (("source", source), ("target", target)):
        size = getattr(config, f"{side}_vocab_size")
        if tokenizer.vocab_size != size:
            raise UserError(
                f"{labels[side]} has {tokenizer.vocab_size} tokens, with the special ones, but the "
                f"{side} embedding of {checkpoint} {size}: they do not match"
            )
        if tokenizer.pad_id != config.pad_id:
            raise UserError(f"{labels[side]} has pad_id={tokenizer.pad_id}, not {config.pad_id}")
    notes: tuple[str, ...] = ()
    if dictionary_tokenizer.PIECES_FILE.format(side="source") not in files:
        has_codes = dictionary_tokenizer.CODES_FILE.format(side="source") in files
        what = "words as for training (such as by Moses)" if has_codes else "its tokens"
        notes = (f"{folder} has no SentencePiece model: texts must be split into {what}",)
    whole = experiment(
        config,
        DecodeConfig(),
        **languages,
        vocab_size=config.target_vocab_size,
        joint_vocabulary=source.fingerprint == target.fingerprint,
    )
    return ModelBundle(whole, model_params(params), Tokenizers(source, target)), notes
