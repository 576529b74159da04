"""Machine translation with encoder-decoder Transformers in JAX.

    import flaxformer_mt as fmt

    run = fmt.train("configs/quickstart.py", "runs/quickstart")  # Or fmt.Run of a folder.
    run.plot().save("curves.png")
    run.translator().translate("three small dogs")
    fmt.load("opus-mt-en-de").translate("A dog runs.")

The public names are imported on first use, so that importing the package is cheap.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flaxformer_mt.config import ExperimentConfig as ExperimentConfig
    from flaxformer_mt.config import TransformerConfig as TransformerConfig
    from flaxformer_mt.data.library import packed as packed
    from flaxformer_mt.data.library import padded as padded
    from flaxformer_mt.data.library import read_pairs as read_pairs
    from flaxformer_mt.data.library import train_tokenizers as train_tokenizers
    from flaxformer_mt.data.stream.batches import Batch as Batch
    from flaxformer_mt.decoding.training_samples import sample as sample
    from flaxformer_mt.decoding.translator import Translator as Translator
    from flaxformer_mt.decoding.translator import translate as translate
    from flaxformer_mt.experiment import train as train
    from flaxformer_mt.loading import Model as Model
    from flaxformer_mt.loading import load as load
    from flaxformer_mt.loading import save_run as save_run
    from flaxformer_mt.model.attention import MultiHeadAttention as MultiHeadAttention
    from flaxformer_mt.model.attention import register_attention as register_attention
    from flaxformer_mt.model.functional import apply as apply
    from flaxformer_mt.model.functional import fused_attention as fused_attention
    from flaxformer_mt.model.functional import init as init
    from flaxformer_mt.model.functional import residual_norm as residual_norm
    from flaxformer_mt.model.transformer import Transformer as Transformer
    from flaxformer_mt.objectives.cross_entropy import Sums as Sums
    from flaxformer_mt.objectives.cross_entropy import cross_entropy as cross_entropy
    from flaxformer_mt.objectives.distillation import Distillation as Distillation
    from flaxformer_mt.objectives.guided_alignment import guided_alignment as guided_alignment
    from flaxformer_mt.objectives.r_drop import RDrop as RDrop
    from flaxformer_mt.run_reader import Run as Run
    from flaxformer_mt.runs.checkpoint import Checkpoints as Checkpoints
    from flaxformer_mt.training.devices import compile_step as compile_step
    from flaxformer_mt.training.devices import create as create
    from flaxformer_mt.training.devices import make_mesh as make_mesh
    from flaxformer_mt.training.devices import place as place

    __version__: str

_PUBLIC = {
    "config": ("ExperimentConfig", "TransformerConfig"),
    "data.library": ("packed", "padded", "read_pairs", "train_tokenizers"),
    "data.stream.batches": ("Batch",),
    "decoding.training_samples": ("sample",),
    "decoding.translator": ("Translator", "translate"),
    "experiment": ("train",),
    "loading": ("Model", "load", "save_run"),
    "model.attention": ("MultiHeadAttention", "register_attention"),
    "model.functional": ("apply", "fused_attention", "init", "residual_norm"),
    "model.transformer": ("Transformer",),
    "objectives.cross_entropy": ("Sums", "cross_entropy"),
    "objectives.distillation": ("Distillation",),
    "objectives.guided_alignment": ("guided_alignment",),
    "objectives.r_drop": ("RDrop",),
    "run_reader": ("Run",),
    "runs.checkpoint": ("Checkpoints",),
    "training.devices": ("compile_step", "create", "make_mesh", "place"),
}
"""The public names of each module."""

_MODULES = {name: module for module, names in _PUBLIC.items() for name in names}

__all__ = ["__version__", *_MODULES]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        value: Any = _version()
    elif name in _MODULES:
        value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _version() -> str:
    """The version of the installed package; of a source tree that is not installed, "0+unknown"."""
    import importlib.metadata

    try:
        return importlib.metadata.version("flaxformer_mt")
    except importlib.metadata.PackageNotFoundError:
        return "0+unknown"
