"""Recognizes folders: the family that reads one, or the program that wrote it and what to do."""

from pathlib import Path
from typing import Any

from flaxformer_mt.errors import UserError
from flaxformer_mt.input_files import read_json
from flaxformer_mt.interop.formats import adapters
from flaxformer_mt.interop.formats.hub_families import HUB_FAMILIES
from flaxformer_mt.interop.formats.own_format import OWN
from flaxformer_mt.run_layout import CONFIG

INDEX = ".index.json"
WEIGHTS = ("model.safetensors", "pytorch_model.bin")
"""The weights of a folder of Hugging Face, which may be in the shards that `INDEX` lists."""


_ORIGINAL = "convert the model that it was made from"
_BY_TRANSFORMERS = (
    "pip install 'transformers<5' torch {needs} && python -c \"from transformers import "
    "AutoModelForSeq2SeqLM as M; M.from_pretrained('{{folder}}', {option}=True)"
    ".save_pretrained('{{folder}}')\""
)
_ONNX = "a graph of ONNX", f"no program makes weights of it again: {_ORIGINAL} (hf download NAME)"
_KERAS = "a model of Keras", "copy its weights into a model of transformers, and save that"
_FOREIGN = {
    ("metadata.json", "model/model.bin"): (
        "a package of Argos Translate",
        f"its weights are CTranslate2's, which may be rounded: {_ORIGINAL}",
    ),
    ("model.bin", "*vocabulary.*"): (
        "a model of CTranslate2",
        f"its weights are fused, and may be rounded: {_ORIGINAL}",
    ),
    ("model.0*.safetensors",): ("a model of eole", f"{_ORIGINAL} by `eole convert`"),
    ("checkpoint", "target.*"): (
        "a checkpoint of T5X",
        "pip install 'transformers<5' t5x && python -m transformers.models.t5."
        "convert_t5x_checkpoint_to_pytorch --t5x_checkpoint_path {folder} --config_file CONFIG "
        "--pytorch_dump_path NEW",
    ),
    ("*.index", "*.data-00000-of-*"): (
        "a checkpoint of TensorFlow",
        "programs that write it, such as tensor2tensor, have no family here",
    ),
    ("flax_model*.msgpack",): (
        "weights of Flax",
        _BY_TRANSFORMERS.format(needs="flax", option="from_flax"),
    ),
    ("tf_model*.h5",): (
        "weights of TensorFlow",
        _BY_TRANSFORMERS.format(needs="tensorflow tf-keras", option="from_tf"),
    ),
    ("saved_model.pb",): ("a SavedModel of TensorFlow", _ORIGINAL),
    ("*.keras",): _KERAS,
    ("*.weights.h5",): _KERAS,
    ("*.onnx",): _ONNX,
    ("onnx/*.onnx",): _ONNX,
    ("*.gguf",): ("a model of llama.cpp", f"its weights may be rounded: {_ORIGINAL}"),
}
"""For folders that cannot be read, by patterns that all match: the program, and what to do."""


def has_weights(folder: Path) -> bool:
    """Returns whether a folder has weights as Hugging Face stores them."""
    names = (name + end for name in WEIGHTS for end in ("", INDEX))
    return any((folder / name).exists() for name in names)


def require_readable(folder: Path) -> None:
    """Raises `UserError` if a folder is of a program whose models cannot be read.

    It says which program that is, and how to convert the model.
    """
    if has_weights(folder):
        return
    for patterns, (what, advice) in _FOREIGN.items():
        if all(any(folder.glob(pattern)) for pattern in patterns):
            advice = advice.format(folder=folder)
            raise UserError(f"{folder} holds {what}, which cannot be read: {advice}")


def family_of(folder: Path, base: Path | None = None) -> str:
    """Returns the family as which a folder is read, a key of `bundle.READERS` or `OWN`.

    Args:
      folder: a folder of a model, or of an adapter of one.
      base: the model that an adapter changes, if it is not beside it.

    Raises:
      UserError: it holds no model, or one that cannot be read.
    """
    if adapters.is_adapter(folder):
        folder, _ = adapters.chain(folder, base, has_weights)
    require_readable(folder)
    if not (folder / CONFIG).is_file():
        if has_weights(folder):
            raise UserError(f"{folder} has weights, but no {CONFIG}, which says of which model")
        for pattern, family in (
            ("*.jax", "jax"),
            ("dict.*txt", "fairseq"),
            ("*.npz", "marian-native"),
            ("*.bin", "marian-native"),
            ("*.pt", "opennmt"),
        ):
            if any(folder.glob(pattern)):
                return family
        raise UserError(f"{folder} holds no model: it has no {CONFIG}, dict.txt or file of Marian")
    kind = read_json(folder / CONFIG, dict[str, Any]).get("model_type")
    if kind is None:
        return OWN
    families = {
        architecture: name
        for name, hub in HUB_FAMILIES.items()
        for architecture in hub.architectures
    }
    if kind not in families:
        raise UserError(
            f"{folder / CONFIG} is of model_type={kind}, which cannot be read; there are "
            f"{', '.join(sorted(families))}"
        )
    return families[kind]
