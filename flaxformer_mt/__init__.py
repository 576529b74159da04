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
    from flaxformer_mt.decoding.translator import Translator as Translator
    from flaxformer_mt.experiment import train as train
    from flaxformer_mt.loading import Model as Model
    from flaxformer_mt.loading import load as load
    from flaxformer_mt.model.attention import MultiHeadAttention as MultiHeadAttention
    from flaxformer_mt.model.attention import register_attention as register_attention
    from flaxformer_mt.model.transformer import Transformer as Transformer
    from flaxformer_mt.run_reader import Run as Run

    __version__: str

_MODULES = {
    "ExperimentConfig": "flaxformer_mt.config",
    "Model": "flaxformer_mt.loading",
    "MultiHeadAttention": "flaxformer_mt.model.attention",
    "Run": "flaxformer_mt.run_reader",
    "Transformer": "flaxformer_mt.model.transformer",
    "TransformerConfig": "flaxformer_mt.config",
    "Translator": "flaxformer_mt.decoding.translator",
    "load": "flaxformer_mt.loading",
    "register_attention": "flaxformer_mt.model.attention",
    "train": "flaxformer_mt.experiment",
}

__all__ = [
    "ExperimentConfig",
    "Model",
    "MultiHeadAttention",
    "Run",
    "Transformer",
    "TransformerConfig",
    "Translator",
    "__version__",
    "load",
    "register_attention",
    "train",
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
