"""Reads a whole model from a run folder, and writes one.

A run folder converted from a published model has a single checkpoint, of step 0, and can be used
like any other.
"""

import dataclasses
from pathlib import Path

from flaxformer_mt.interop.formats.bundle import ModelBundle
from flaxformer_mt.interop.weight_maps.mapping import model_params
from flaxformer_mt.runs.folder import read_origin
from flaxformer_mt.runs.trained_model import load_run, write_model


def read(folder: Path) -> ModelBundle:
    """Reads a run folder with its best checkpoint; errors as for `load_run`."""
    run = load_run(folder, "best")
    return ModelBundle(
        dataclasses.replace(run.config, model=run.model),
        run.params,
        run.tokenizers,
        read_origin(folder),
    )


def write(bundle: ModelBundle, folder: Path) -> None:
    """Writes a run folder atomically.

    Raises:
      UserError: it exists, or cannot be written.
    """
    write_model(
        folder, bundle.config, bundle.tokenizers, model_params(bundle.params), bundle.origin
    )
