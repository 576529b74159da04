"""Reads folders of OpenNMT-py 3: a checkpoint with its vocabularies, and what segments the text.

The options in the checkpoint name the transforms of training and the models of these, which are
looked for in the folder; the other files are those of `dictionary_folder`. A checkpoint without
vocabularies needs those that it was trained with, such as `src.vocab` and `tgt.vocab`.

Source: OpenNMT-py 3.5.1, onmt/inputters/inputter.py and onmt/transforms/
"""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path, PureWindowsPath
from typing import Any

from flaxformer_mt import interop
from flaxformer_mt.data.tokenizers import dictionary_tokenizer
from flaxformer_mt.errors import UserError, prefixed
from flaxformer_mt.input_files import MAX_MODEL_BYTES, read_bytes, read_text
from flaxformer_mt.interop import checkpoint_files
from flaxformer_mt.interop.formats import dictionary_folder
from flaxformer_mt.interop.formats.bundle import ModelBundle
from flaxformer_mt.interop.weight_maps.family import check_supported

_SHORT = {"source": "src", "target": "tgt"}
_SEGMENTERS = {
    "sentencepiece": dictionary_tokenizer.PIECES_FILE,
    "bpe": dictionary_tokenizer.CODES_FILE,
}
_OF_TRAINING = {"bart", "clean", "filtertoolong", "switchout", "tokendrop", "tokenmask"}
"""Transforms that leave out pairs or add noise, and so do not change what is translated."""
_SUPPORTED = {"src_vocab_threshold": (0, None), "tgt_vocab_threshold": (0, None)}
_SPECIAL = ("<unk>", "<blank>", "<s>", "</s>")


def read(
    folder: Path, overrides: Mapping[str, Any] | None = None
) -> tuple[ModelBundle, tuple[str, ...]]:
    """Reads a model with its vocabularies.

    Returns:
      The model, and a line about what its texts have to be.

    Raises:
      UserError: a file is missing, damaged or not supported, or files contradict each other.
    """
    checkpoint = dictionary_folder.find_checkpoint(folder)
    with prefixed(f"{checkpoint}: "):
        content = checkpoint_files.read(checkpoint)
        kind = _segmenter(content.settings)
        stored = content.vocabularies or {}
        if not isinstance(stored, Mapping):
            raise UserError("vocab is not a dict, as in OpenNMT-py 3")
    start = {"decoder_start_token": stored.get("decoder_start_token", "<s>")}
    files = {dictionary_tokenizer.OPENNMT_FILE: json.dumps(start).encode()}
    labels = {}
    for side, short in _SHORT.items():
        if stored:
            labels[side] = f"{checkpoint}: vocab[{short}]"
            tokens = stored.get(short)
        else:
            path = dictionary_folder.of_side(folder, ("*vocab*",), side, short)
            if path is None:
                raise UserError(
                    f"{checkpoint} has no vocab, and {folder} no file {short}.vocab: copy the "
                    f"{short}_vocab that the model was trained with to it"
                )
            labels[side] = str(path)
            text = read_text(path, MAX_MODEL_BYTES)
            tokens = _read_vocabulary(text, labels[side], content.settings, short)
        if not isinstance(tokens, list) or not all(map(_is_token, tokens)):
            raise UserError(f"{labels[side]} is not a list of tokens, as in OpenNMT-py 3")
        files[dictionary_tokenizer.TOKENS_FILE.format(side=side)] = "\n".join(tokens).encode()
        if kind is None:
            files |= dictionary_folder.segmenters(folder, side, short)
        else:
            used = "src" if content.settings.get("share_vocab") else short
            model = PureWindowsPath(str(content.settings.get(f"{used}_subword_model"))).name
            if not (folder / model).is_file():
                raise UserError(
                    f"{folder} has no {model}, the {used}_subword_model of {checkpoint}: copy it "
                    "there"
                )
            name = _SEGMENTERS[kind].format(side=side)
            files[name] = read_bytes(folder / model, MAX_MODEL_BYTES)
    tokenizers = dictionary_folder.tokenizers_of(files, folder)
    ids = {name: tokenizers.fields[name] for name in ("pad_id", "bos_id", "eos_id")}
    if tokenizers.source.pad_id != ids["pad_id"]:
        raise UserError(
            f"{labels['source']} has <blank> as token {tokenizers.source.pad_id}, "
            f"{labels['target']} as token {ids['pad_id']}: only equal ones are supported"
        )
    config, params = interop.load("opennmt", checkpoint, **ids | dict(overrides or {}))
    return dictionary_folder.bundle(folder, config, params, tokenizers, labels)


def _segmenter(options: Mapping[str, Any]) -> str | None:
    """Returns the transform that segments texts; None = none."""
    check_supported(options, _SUPPORTED)
    names: set[str] = set()
    for key in ("transforms", "_all_transform"):
        given = options.get(key) or ()
        if not isinstance(given, list | tuple | set):
            raise UserError(f"{key}={given!r} is not a list")
        names.update(map(str, given))
    kinds = names & {*_SEGMENTERS}
    others = sorted(names - kinds - _OF_TRAINING) or sorted(kinds)[1:]
    if others:
        raise UserError(
            f"texts are not prepared by the transform {others[0]}, only by sentencepiece or bpe: "
            "to use the weights without vocabularies, convert the file, not the folder, to "
            ".safetensors"
        )
    return next(iter(kinds), None)


def _is_token(token: Any) -> bool:
    return isinstance(token, str) and not re.search("[\n\ud800-\udfff]", token)


def _read_vocabulary(content: str, label: str, options: Mapping[str, Any], short: str) -> list[str]:
    """Returns the tokens of a file with a token a line, most with its count, as training uses it.

    Training adds special tokens, leaves out rare tokens, and fills up to a multiple of a size.
    """
    lines = content.removesuffix("\n").split("\n")
    fields = [line.split(None, 1) for line in lines]
    if len(fields[0]) == 2 and fields[0][1].isdigit():
        least = options.get(f"{short}_words_min_frequency") or 0
        for number, field in enumerate(fields, 1):
            if len(field) != 2 or not field[1].strip().isdecimal():
                raise UserError(f"{label}, line {number}: not a token and its count")
        lines = [token for token, count in fields if int(count) >= least]
    special = options.get("default_specials") or _SPECIAL
    tokens = [*(token for token in special if token not in lines), *lines]
    tokens = tokens[: options.get(f"{short}_vocab_size") or None]
    multiple = options.get("vocab_size_multiple") or 1
    missing = math.ceil(len(tokens) / multiple) * multiple - len(tokens)
    return tokens + [f"averyunlikelytoken{number}" for number in range(missing)]
