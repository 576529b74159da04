"""What folders of fairseq and OpenNMT-py have in common.

They have a checkpoint (`model.pt`, or the only .pt file) and may have what segments the text: a
SentencePiece model (.model or .spm) or the codes of subword-nmt (`bpecodes`, `code`, `bpe.codes`),
of both sides or one for each, with the language or the side in its name.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flaxformer_mt.config import DataConfig, DecodeConfig, TransformerConfig
from flaxformer_mt.data.tokenizers import dictionary_tokenizer
from flaxformer_mt.data.tokenizers.dictionary_tokenizer import DictionaryTokenizer
from flaxformer_mt.data.tokenizers.tokenizer import Tokenizers
from flaxformer_mt.errors import UserError
from flaxformer_mt.input_files import MAX_MODEL_BYTES, read_bytes
from flaxformer_mt.interop.formats.bundle import ModelBundle, experiment
from flaxformer_mt.interop.weight_maps.mapping import model_params

SIDES = ("source", "target")
_CHECKPOINTS = ("model.pt", "checkpoint_best.pt", "checkpoint_last.pt")
_SEGMENTERS = {
    dictionary_tokenizer.PIECES_FILE: ("*.model", "*.spm"),
    dictionary_tokenizer.CODES_FILE: ("*codes*", "code", "code.*"),
}


def find_checkpoint(folder: Path) -> Path:
    """Returns the checkpoint of a folder; UserError if there is none, or which one is unclear."""
    found = sorted(folder.glob("*.pt"))
    named = [path for name in _CHECKPOINTS for path in found if path.name == name]
    if not named and len(found) != 1:
        raise UserError(f"{folder} has {len(found)} .pt files, and no {_CHECKPOINTS[0]}")
    return (named or found)[0]


def of_side(folder: Path, patterns: Sequence[str], side: str, language: str | None) -> Path | None:
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


def segmenters(folder: Path, side: str, language: str | None) -> dict[str, bytes]:
    """Returns what the folder has to segment the texts of a side, as files of the tokenizer."""
    paths = {
        name.format(side=side): of_side(folder, patterns, side, language)
        for name, patterns in _SEGMENTERS.items()
    }
    return {name: read_bytes(path, MAX_MODEL_BYTES) for name, path in paths.items() if path}


def tokenizers_of(files: Mapping[str, bytes], folder: Path) -> Tokenizers:
    """Returns the vocabularies of both sides, given the files of the tokenizer."""
    source, target = (DictionaryTokenizer(files, side, str(folder)) for side in SIDES)
    return Tokenizers(source, target)


def bundle(
    folder: Path,
    config: TransformerConfig,
    params: Any,
    tokenizers: Tokenizers,
    labels: Mapping[str, str],
    languages: Mapping[str, str] | None = None,
) -> tuple[ModelBundle, tuple[str, ...]]:
    """Returns the whole model, and a line about what its texts have to be.

    Args:
      folder: the folder, for messages.
      config: the model's configuration.
      params: its parameters.
      tokenizers: its vocabularies.
      labels: where the vocabulary of each side is from, for messages.
      languages: fields of `DataConfig`.

    Raises:
      UserError: a vocabulary does not have the size of its embedding table.
    """
    for side, label in labels.items():
        tokenizer, size = getattr(tokenizers, side), getattr(config, f"{side}_vocab_size")
        if tokenizer.vocab_size != size:
            raise UserError(
                f"{label} has {tokenizer.vocab_size} tokens, with the special ones, but the {side} "
                f"embedding of {find_checkpoint(folder)} {size}: they do not match"
            )
    files, notes = tokenizers.files, ()
    if dictionary_tokenizer.PIECES_FILE.format(side="source") not in files:
        has_codes = dictionary_tokenizer.CODES_FILE.format(side="source") in files
        what = "words as for training (such as by Moses)" if has_codes else "its tokens"
        notes = (f"{folder} has no SentencePiece model: texts must be split into {what}",)
    data = DataConfig(
        **(languages or {}),
        vocab_size=config.target_vocab_size,
        joint_vocabulary=tokenizers.source.fingerprint == tokenizers.target.fingerprint,
        byte_fallback=False,
        target_row_length=128,
    )
    return ModelBundle(
        experiment(config, data, DecodeConfig()), model_params(params), tokenizers
    ), notes
