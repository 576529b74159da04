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

_MODULES = {
    "Batch": "flaxformer_mt.data.stream.batches",
    "place": "flaxformer_mt.training.devices",
    "padded": "flaxformer_mt.data.library",
    "RDrop": "flaxformer_mt.objectives.r_drop",
    "Distillation": "flaxformer_mt.objectives.distillation",
    "Checkpoints": "flaxformer_mt.runs.checkpoint",
    "ExperimentConfig": "flaxformer_mt.config",
    "Model": "flaxformer_mt.loading",
    "MultiHeadAttention": "flaxformer_mt.model.attention",
    "Run": "flaxformer_mt.run_reader",
    "Sums": "flaxformer_mt.objectives.cross_entropy",
    "Transformer": "flaxformer_mt.model.transformer",
    "TransformerConfig": "flaxformer_mt.config",
    "Translator": "flaxformer_mt.decoding.translator",
    "apply": "flaxformer_mt.model.functional",
    "compile_step": "flaxformer_mt.training.devices",
    "create": "flaxformer_mt.training.devices",
    "cross_entropy": "flaxformer_mt.objectives.cross_entropy",
    "fused_attention": "flaxformer_mt.model.functional",
    "guided_alignment": "flaxformer_mt.objectives.guided_alignment",
    "init": "flaxformer_mt.model.functional",
    "load": "flaxformer_mt.loading",
    "make_mesh": "flaxformer_mt.training.devices",
    "packed": "flaxformer_mt.data.library",
    "read_pairs": "flaxformer_mt.data.library",
    "register_attention": "flaxformer_mt.model.attention",
    "residual_norm": "flaxformer_mt.model.functional",
    "sample": "flaxformer_mt.decoding.training_samples",
    "save_run": "flaxformer_mt.loading",
    "train": "flaxformer_mt.experiment",
    "train_tokenizers": "flaxformer_mt.data.library",
    "translate": "flaxformer_mt.decoding.translator",
}

__all__ = [
    "Batch",
    "Checkpoints",
    "Distillation",
    "ExperimentConfig",
    "Model",
    "MultiHeadAttention",
    "RDrop",
    "Run",
    "Sums",
    "Transformer",
    "TransformerConfig",
    "Translator",
    "__version__",
    "apply",
    "compile_step",
    "create",
    "cross_entropy",
    "fused_attention",
    "guided_alignment",
    "init",
    "load",
    "make_mesh",
    "packed",
    "padded",
    "place",
    "read_pairs",
    "register_attention",
    "residual_norm",
    "sample",
    "save_run",
    "train",
    "train_tokenizers",
    "translate",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        value: Any = _version()
    elif name in _MODULES:
        value = getattr(importlib.import_module(_MODULES[name]), name)
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
