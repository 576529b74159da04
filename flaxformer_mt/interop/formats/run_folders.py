"""Reads a whole model from a run folder, and writes one.

A run folder converted from a published model has a single checkpoint, of step 0, and can be used
like any other.
"""

import dataclasses
from pathlib import Path

from flaxformer_mt.config import to_json
from flaxformer_mt.interop.formats.bundle import ModelBundle
from flaxformer_mt.interop.weight_maps.mapping import model_params
from flaxformer_mt.runs import atomic
from flaxformer_mt.runs.layout import CONFIG, ORIGIN, TOKENIZER
from flaxformer_mt.runs.trained_model import load_run


def read(folder: Path) -> ModelBundle:
    """Reads a run folder with its best checkpoint.

    Raises:
      UserError: see `load_run`.
    """
    run = load_run(folder, "best")
    kept = folder / ORIGIN
    return ModelBundle(
        dataclasses.replace(run.config, model=run.model),
        run.params,
        run.tokenizers,
        {path.name: path.read_bytes() for path in kept.iterdir()} if kept.is_dir() else {},
    )


def write(bundle: ModelBundle, folder: Path) -> None:
    """Writes a run folder atomically.

    Raises:
      UserError: it exists, or cannot be written.
    """
    from flaxformer_mt.runs.checkpoint import write_params

    with atomic.new_folder(folder) as partial:
        bundle.tokenizers.save(partial / TOKENIZER)
        write_params(partial, 0, model_params(bundle.params))
        if bundle.origin:
            (partial / ORIGIN).mkdir()
        for name, content in bundle.origin.items():
            (partial / ORIGIN / name).write_bytes(content)
        text = to_json(bundle.config)
        (partial / CONFIG).write_text(text, encoding="utf-8")
