"""Machine translation with encoder-decoder Transformers in JAX.

    import flaxformer_mt as fmt

    run = fmt.train("configs/quickstart.py", "runs/quickstart")  # Or fmt.Run of a folder.
    run.plot().save("curves.png")
    run.translator().translate("three small dogs")
    fmt.load("opus-mt-en-de").translate("A dog runs.")

The public names are imported on first use, so that importing the package is cheap.
"""

import ast
import importlib
from pathlib import Path
from typing import Any

_STUB = Path(__file__).with_suffix(".pyi")  # For type checkers, it imports all public names.
_MODULES = {
    alias.name: str(node.module)
    for node in ast.parse(_STUB.read_text("utf-8")).body
    if isinstance(node, ast.ImportFrom)
    for alias in node.names
}
"""The module of each public name."""

__all__ = ["__version__", *_MODULES]


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
