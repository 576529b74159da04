"""Reads folders of OpenNMT-py 3: a checkpoint with its vocabularies, and what segments the text.

The options in the checkpoint name the transforms of training and the models of these, which are
looked for in the folder; the other files are those of `fairseq_folder`.

Source: OpenNMT-py 3.5.1, onmt/inputters/inputter.py (`vocabs_to_dict`) and onmt/transforms/
"""

import re
from collections.abc import Mapping
from pathlib import Path, PureWindowsPath
from typing import Any

from flaxformer_mt.data.tokenizers import dictionary_tokenizer
from flaxformer_mt.errors import UserError, prefixed
from flaxformer_mt.interop import checkpoint_files
from flaxformer_mt.interop.formats import fairseq_folder
from flaxformer_mt.interop.formats.bundle import ModelBundle
from flaxformer_mt.interop.weight_maps.family import check_supported

_SEGMENTERS = {
    "sentencepiece": dictionary_tokenizer.PIECES_FILE,
    "bpe": dictionary_tokenizer.CODES_FILE,
}
_OF_TRAINING = {"bart", "clean", "filtertoolong", "switchout", "tokendrop", "tokenmask"}
"""Transforms that leave out pairs or add noise, and so do not change what is translated."""
_SUPPORTED = {"src_vocab_threshold": (0, None), "tgt_vocab_threshold": (0, None)}


def read(
    folder: Path, overrides: Mapping[str, Any] | None = None
) -> tuple[ModelBundle, tuple[str, ...]]:
    """Reads a model with its vocabularies.

    Returns:
      The model, and a line about what its texts have to be.

    Raises:
      UserError: a file is missing, damaged or not supported, or files contradict each other.
    """
    checkpoint = fairseq_folder.find_checkpoint(folder)
    with prefixed(f"{checkpoint}: "):
        content = checkpoint_files.read(checkpoint)
        segmenter = _segmenter(content.settings)
    vocab = content.vocabularies if isinstance(content.vocabularies, Mapping) else {}
    start = vocab.get("decoder_start_token", "<s>")
    files: dict[str, bytes] = {}
    labels = {}
    for side, short in {"source": "src", "target": "tgt"}.items():
        labels[side] = f"{checkpoint}: vocab[{short}]"
        tokens = vocab.get(short)
        if not isinstance(tokens, list) or not all(map(_is_token, [start, *tokens])):
            raise UserError(f"{labels[side]} is not a list of tokens, as OpenNMT-py 3 writes it")
        files[dictionary_tokenizer.TOKENS_FILE.format(side=side)] = "\n".join(tokens).encode()
        if segmenter is None:
            files |= fairseq_folder.segmenters(folder, side, short)
            continue
        option = f"{'src' if content.settings.get('share_vocab') else short}_subword_model"
        # The path is that on the computer of training.
        name = PureWindowsPath(str(content.settings.get(option))).name
        patterns = {_SEGMENTERS[segmenter]: [name]}
        found = fairseq_folder.segmenters(folder, side, short, patterns)
        if not found:
            raise UserError(f"{folder} has no {name}, the {option} of {checkpoint}: copy it there")
        files |= found
    files[dictionary_tokenizer.OPENNMT_FILE] = start.encode()
    return fairseq_folder.bundle("opennmt", checkpoint, files, labels, overrides)


def _segmenter(options: Mapping[str, Any]) -> str | None:
    """Returns the transform that segments texts; None = none."""
    check_supported(options, _SUPPORTED)
    given = options.get("_all_transform", options.get("transforms")) or ()
    if not isinstance(given, list | tuple | set):
        raise UserError(f"its transforms are not a list: {given!r}")
    names = {*map(str, given)} - _OF_TRAINING
    known = sorted(names & {*_SEGMENTERS})
    if others := sorted(names - {*known}) or known[1:]:
        raise UserError(
            f"texts are not prepared by the transform {others[0]}, only by sentencepiece or bpe: "
            "to use the weights without vocabularies, convert the file, not the folder, to "
            ".safetensors"
        )
    return known[0] if known else None


def _is_token(token: Any) -> bool:
    return isinstance(token, str) and not re.search("[\n\ud800-\udfff]", token)
