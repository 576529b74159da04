"""Whole models: parameters with vocabularies and search options, and who reads and writes them."""

import dataclasses
import importlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Self

from flaxformer_mt.config import (
    DataConfig,
    DecodeConfig,
    ExperimentConfig,
    OptimizerConfig,
    TrainConfig,
    TransformerConfig,
)
from flaxformer_mt.data.tokenizers.tokenizer import Tokenizers
from flaxformer_mt.errors import UserError
from flaxformer_mt.interop.families import FAMILIES
from flaxformer_mt.interop.formats import adapters, folders
from flaxformer_mt.interop.formats.hub_families import HUB_FAMILIES
from flaxformer_mt.interop.formats.own_format import OWN
from flaxformer_mt.interop.weight_maps.mapping import model_params
from flaxformer_mt.runs.folder import read_origin
from flaxformer_mt.trained_model import load_run, write_model

Notes = tuple[str, ...]
"""What was changed or lost, in one line each."""

# Modules of this package with a function `read`, ...
READERS = {
    **dict.fromkeys(HUB_FAMILIES, "huggingface"),
    **dict.fromkeys(("fairseq", "opennmt"), "dictionary_folders"),
    "marian-native": "marian_folder",
    "jax": "jax_export",
}
# ... and with a function `write`. They are imported at use, since some need optional packages.
WRITERS = {
    **dict.fromkeys(HUB_FAMILIES, "huggingface"),
    "marian-native": "marian_folder",
    "ctranslate2": "ctranslate2",
    "jax": "jax_export",
}


@dataclasses.dataclass(frozen=True)
class ModelBundle:
    """A model with everything that is needed to use it."""

    config: ExperimentConfig
    """Its model, its search options, and the defaults for fine-tuning it."""
    params: dict[str, Any]
    """The model's parameters, without carried tensors."""
    tokenizers: Tokenizers
    origin: Mapping[str, bytes] = dataclasses.field(default_factory=dict)
    """Files of a published folder that have no counterpart in ours, by name. They are kept to write
    the same folder again."""

    @classmethod
    def of_run(cls, folder: Path) -> Self:
        """Reads a run folder with its best checkpoint; errors as for `load_run`."""
        run = load_run(folder, "best")
        config = dataclasses.replace(run.config, model=run.model)
        return cls(config, run.params, run.tokenizers, read_origin(folder))

    def write_run(self, folder: Path, replace: bool = False) -> None:
        """Writes a run folder with a single checkpoint, of step 0; as `write_model`."""
        parts = self.config, self.tokenizers, model_params(self.params), self.origin
        write_model(folder, *parts, replace=replace)


WITHOUT_EFFECT = frozenset({
    "batch_tokens", "num_devices", "max_source_length", "alignment_layer", "alignment_head", "seed",
})  # fmt: skip
"""Search options that do not decide which translation is found for a sentence."""


def unsupported_options(
    decode: DecodeConfig, supported: Collection[str], program: str
) -> list[str]:
    """Returns a line about each search option that a program does not support.

    `supported` are the fields with a counterpart, besides those of `WITHOUT_EFFECT`.
    """
    known = {*supported, *WITHOUT_EFFECT}
    return [
        f"decode.{field.name}={getattr(decode, field.name)} is not supported by {program}"
        for field in dataclasses.fields(decode)
        if field.name not in known and getattr(decode, field.name) != field.default
    ]


def experiment(model: TransformerConfig, decode: DecodeConfig, **data: Any) -> ExperimentConfig:
    """Returns the configuration of a published model, with cautious defaults for fine-tuning.

    `data` are fields of `DataConfig`, of the published vocabulary.
    """
    return ExperimentConfig(
        model=model,
        data=DataConfig(byte_fallback=False, target_row_length=128, **data),
        optimizer=OptimizerConfig(learning_rate=5e-5, warmup_steps=200, clip_norm=1.0),
        train=TrainConfig(num_steps=2000, eval_every=500, checkpoint_every=500, best_metric="bleu"),
        decode=decode,
    )


def read_bundle(
    family: str, source: Path, overrides: Mapping[str, Any], base: Path | None = None
) -> tuple[ModelBundle, Notes]:
    """Reads a folder with a whole model, given configuration fields that override its own.

    `base` is the folder of the model that an adapter changes, if it is not beside the adapter.

    Raises:
      UserError: it is not a folder of that family, or is damaged.
    """
    options: dict[str, Any] = {}
    if source.is_dir():
        folders.require_readable(source)
    if adapters.is_adapter(source):
        if family not in HUB_FAMILIES:
            raise UserError(f"{source} has an adapter of PEFT, which {family} does not have")
        options["base"] = base
    elif base is not None:
        raise UserError(f"{source} has no {adapters.CONFIG}: a base is for adapters, remove it")
    if family in READERS and (source.is_dir() or family not in FAMILIES):
        found: tuple[ModelBundle, Notes]
        found = _call(READERS, "read", family, source, overrides, **options)
        return found
    if not source.is_dir():
        raise UserError(f"{source} is not a folder, so it has no vocabulary: a folder is needed")
    if family != OWN:
        raise UserError(f"{source} is a folder: {family} is read from a file")
    if overrides:
        raise UserError(f"{source} contains {next(iter(overrides))}: fields cannot be overridden")
    return ModelBundle.of_run(source), ()


def write_bundle(
    family: str, bundle: ModelBundle, folder: Path, accepted: Collection[str], **options: Any
) -> Notes:
    """Writes a folder of a key of `WRITERS`; `accepted` and errors are those of `convert`."""
    notes: Notes = _call(WRITERS, "write", family, bundle, folder, accepted, **options)
    return notes


def _call(
    modules: Mapping[str, str], function: str, family: str, *arguments: Any, **options: Any
) -> Any:
    module = importlib.import_module(f"{__package__}.{modules[family]}")
    # A module of several families takes the one that is meant.
    options |= {"family": family} if family in FAMILIES else {}
    return getattr(module, function)(*arguments, **options)
