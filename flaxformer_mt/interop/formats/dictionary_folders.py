"""Reads folders of fairseq and OpenNMT-py 3: a checkpoint, dictionaries, and what segments texts.

The checkpoint is `model.pt` or the only other .pt file. fairseq's dictionaries are `dict.en.txt`
and `dict.de.txt`, or one of both sides; those of OpenNMT-py are in the checkpoint. A SentencePiece
model (.model or .spm) or the codes of subword-nmt (`bpecodes`, `code`, `bpe.codes`) are those of
both sides, or one for each, with the language in its name. The options of OpenNMT-py name the
transforms of training and the models of these, which are looked for in the folder.

Source: OpenNMT-py 3.5.1, onmt/inputters/inputter.py (`vocabs_to_dict`) and onmt/transforms/
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path, PureWindowsPath
from typing import Any, NamedTuple

from flaxformer_mt import interop
from flaxformer_mt.config import DecodeConfig
from flaxformer_mt.data.tokenizers import dictionary_tokenizer
from flaxformer_mt.data.tokenizers.dictionary_tokenizer import (
    CODES_FILE,
    PIECES_FILE,
    DictionaryTokenizer,
)
from flaxformer_mt.data.tokenizers.tokenizer import Tokenizers
from flaxformer_mt.errors import UserError, prefixed
from flaxformer_mt.input_files import MAX_MODEL_BYTES, read_bytes, read_text
from flaxformer_mt.interop import checkpoint_files
from flaxformer_mt.interop.formats.bundle import ModelBundle, Notes, experiment
from flaxformer_mt.interop.weight_maps.family import check_kinds, check_supported
from flaxformer_mt.interop.weight_maps.mapping import model_params

_CHECKPOINTS = ("model.pt", "checkpoint_best.pt", "checkpoint_last.pt")
_PATTERNS = {PIECES_FILE: ("*.model", "*.spm"), CODES_FILE: ("*codes*", "code", "code.*")}
_TRANSFORMS = {"sentencepiece": PIECES_FILE, "bpe": CODES_FILE}
_OF_TRAINING = {"bart", "clean", "filtertoolong", "switchout", "tokendrop", "tokenmask"}
"""Transforms that leave out pairs or add noise, and so do not change what is translated."""
_SUPPORTED = {"src_vocab_threshold": (0, None), "tgt_vocab_threshold": (0, None)}


class _Vocabularies(NamedTuple):
    files: dict[str, bytes]
    """Those of both sides, as files of the tokenizer."""
    labels: dict[str, str]
    """Where the vocabulary of each side is from, for messages."""
    languages: dict[str, str]
    """Fields of `DataConfig`."""


def read(folder: Path, overrides: Mapping[str, Any], family: str) -> tuple[ModelBundle, Notes]:
    """Reads a model with its vocabularies.

    Args:
      folder: its folder.
      overrides: configuration fields that override those of the checkpoint.
      family: "fairseq" or "opennmt".

    Returns:
      The model, and a line about what its texts have to be.

    Raises:
      UserError: a file is missing, damaged or not supported, or files contradict each other.
    """
    checkpoint = _find_checkpoint(folder)
    read_vocabularies = _of_fairseq if family == "fairseq" else _of_opennmt
    files, labels, languages = read_vocabularies(checkpoint)
    source = DictionaryTokenizer(files, "source", str(folder))
    target = DictionaryTokenizer(files, "target", str(folder))
    ids = {name: getattr(target, name) for name in ("pad_id", "bos_id", "eos_id")}
    config, params = interop.load(family, checkpoint, **ids | dict(overrides))
    for side, tokenizer in (("source", source), ("target", target)):
        size = getattr(config, f"{side}_vocab_size")
        if tokenizer.vocab_size != size:
            raise UserError(
                f"{labels[side]} has {tokenizer.vocab_size} tokens, with the special ones, but the "
                f"{side} embedding of {checkpoint} {size}: they do not match"
            )
        if tokenizer.pad_id != config.pad_id:
            raise UserError(f"{labels[side]} has pad_id={tokenizer.pad_id}, not {config.pad_id}")
    notes: Notes = ()
    if PIECES_FILE.format(side="source") not in files:
        has_codes = CODES_FILE.format(side="source") in files
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


def _find_checkpoint(folder: Path) -> Path:
    found = sorted(folder.glob("*.pt"))
    named = [path for name in _CHECKPOINTS for path in found if path.name == name]
    if not named and len(found) != 1:
        raise UserError(f"{folder} has {len(found)} .pt files, and no {_CHECKPOINTS[0]}")
    return (named or found)[0]


def _of_fairseq(checkpoint: Path) -> _Vocabularies:
    folder = checkpoint.parent
    with prefixed(f"{checkpoint}: "):
        settings = checkpoint_files.read(checkpoint).settings
        # Older checkpoints have the name of the task there.
        nested = settings.get("task")
        task = {**settings, **(nested if isinstance(nested, Mapping) else {})}
        check_kinds(task, {"source_lang": str, "target_lang": str})
    found = _Vocabularies({}, {}, {})
    for side in ("source", "target"):
        language = task.get(f"{side}_lang")
        path = _of_side(folder, ("dict.*txt",), side, language)
        if path is None:
            raise UserError(f"{folder} has no dictionary: dict.txt, or dict.{language or 'en'}.txt")
        tokens = dictionary_tokenizer.read_fairseq(read_text(path, MAX_MODEL_BYTES), str(path))
        found.files.update(_token_file(side, tokens) | _segmenters(folder, side, language))
        found.labels[side] = str(path)
        if language:
            found.languages[f"{side}_language"] = language
    return found


def _of_opennmt(checkpoint: Path) -> _Vocabularies:
    folder = checkpoint.parent
    with prefixed(f"{checkpoint}: "):
        content = checkpoint_files.read(checkpoint)
        transform = _transform(content.settings)
    vocab = content.vocabularies if isinstance(content.vocabularies, Mapping) else {}
    start = vocab.get("decoder_start_token", "<s>")
    found = _Vocabularies({}, {}, {})
    for side, short in {"source": "src", "target": "tgt"}.items():
        found.labels[side] = f"{checkpoint}: vocab[{short}]"
        tokens = vocab.get(short)
        if not isinstance(tokens, list) or not all(map(_is_token, [start, *tokens])):
            raise UserError(
                f"{found.labels[side]} is not a list of tokens, as OpenNMT-py 3 writes it"
            )
        patterns: Mapping[str, Sequence[str]] = _PATTERNS
        if transform is not None:
            option = f"{'src' if content.settings.get('share_vocab') else short}_subword_model"
            # The path is that on the computer of training.
            name = PureWindowsPath(str(content.settings.get(option))).name
            patterns = {_TRANSFORMS[transform]: [name]}
        segmenters = _segmenters(folder, side, short, patterns)
        if transform is not None and not segmenters:
            raise UserError(f"{folder} has no {name}, the {option} of {checkpoint}: copy it there")
        found.files.update(_token_file(side, tokens) | segmenters)
    found.files[dictionary_tokenizer.OPENNMT_FILE] = start.encode()
    return found


def _token_file(side: str, tokens: Sequence[str]) -> dict[str, bytes]:
    return {dictionary_tokenizer.TOKENS_FILE.format(side=side): "\n".join(tokens).encode()}


def _segmenters(
    folder: Path,
    side: str,
    language: str | None,
    patterns: Mapping[str, Sequence[str]] = _PATTERNS,
) -> dict[str, bytes]:
    """Returns what the folder has to segment the texts of a side, as files of the tokenizer."""
    paths = {
        name.format(side=side): _of_side(folder, known, side, language)
        for name, known in patterns.items()
    }
    return {name: read_bytes(path, MAX_MODEL_BYTES) for name, path in paths.items() if path}


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


def _transform(options: Mapping[str, Any]) -> str | None:
    """Returns the transform that segments texts; None = none."""
    check_supported(options, _SUPPORTED)
    given = options.get("_all_transform", options.get("transforms")) or ()
    if not isinstance(given, list | tuple | set):
        raise UserError(f"its transforms are not a list: {given!r}")
    names = {*map(str, given)} - _OF_TRAINING
    known = sorted(names & {*_TRANSFORMS})
    if others := sorted(names - {*known}) or known[1:]:
        raise UserError(
            f"texts are not prepared by the transform {others[0]}, only by sentencepiece or bpe: "
            "to use the weights without vocabularies, convert the file, not the folder, to "
            ".safetensors"
        )
    return known[0] if known else None


def _is_token(token: Any) -> bool:
    return isinstance(token, str) and not re.search("[\n\ud800-\udfff]", token)
