"""Reads folders of fairseq: a checkpoint, its dictionaries, and what segments the text.

The dictionaries are `dict.en.txt` and `dict.de.txt`, or one dictionary of both sides; the other
files are those of `dictionary_folder`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flaxformer_mt import interop
from flaxformer_mt.data.tokenizers import dictionary_tokenizer
from flaxformer_mt.errors import UserError, prefixed
from flaxformer_mt.input_files import MAX_MODEL_BYTES, read_text
from flaxformer_mt.interop import checkpoint_files
from flaxformer_mt.interop.formats import dictionary_folder
from flaxformer_mt.interop.formats.bundle import ModelBundle


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
    config, params = interop.load("fairseq", checkpoint, **overrides or {})
    with prefixed(f"{checkpoint}: "):
        settings = checkpoint_files.read(checkpoint).settings
    task = {**settings, **settings.get("task", {})}
    sides = {"source": task.get("source_lang"), "target": task.get("target_lang")}
    files: dict[str, bytes] = {}
    labels = {}
    for side, language in sides.items():
        path = dictionary_folder.of_side(folder, ("dict.*txt",), side, language)
        if path is None:
            raise UserError(f"{folder} has no dictionary: dict.txt, or dict.{language or 'en'}.txt")
        labels[side] = str(path)
        tokens = dictionary_tokenizer.read_fairseq(read_text(path, MAX_MODEL_BYTES), str(path))
        files[dictionary_tokenizer.TOKENS_FILE.format(side=side)] = "\n".join(tokens).encode()
        files |= dictionary_folder.segmenters(folder, side, language)
    tokenizers = dictionary_folder.tokenizers_of(files, folder)
    languages = {f"{side}_language": name for side, name in sides.items() if name}
    return dictionary_folder.bundle(folder, config, params, tokenizers, labels, languages)
