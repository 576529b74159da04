"""The version of the installed package; of a source tree that is not installed, "0+unknown"."""

import importlib.metadata

try:
    __version__ = importlib.metadata.version("flaxformer_mt")
except importlib.metadata.PackageNotFoundError:
    __version__ = "0+unknown"
