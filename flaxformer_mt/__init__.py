"""Machine translation with encoder-decoder Transformers in JAX.

The public names are imported on first use, so that importing the package is cheap.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flaxformer_mt.config import TransformerConfig as TransformerConfig
    from flaxformer_mt.decoding.translator import Translator as Translator
    from flaxformer_mt.experiment import train as train
    from flaxformer_mt.model.transformer import Transformer as Transformer
    from flaxformer_mt.run_reader import Run as Run

    __version__: str

_MODULES = {
    "Run": "flaxformer_mt.run_reader",
    "Transformer": "flaxformer_mt.model.transformer",
    "TransformerConfig": "flaxformer_mt.config",
    "Translator": "flaxformer_mt.decoding.translator",
    "train": "flaxformer_mt.experiment",
}

__all__ = ["Run", "Transformer", "TransformerConfig", "Translator", "__version__", "train"]


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
