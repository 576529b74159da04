"""Options that several commands share: their types, their defaults and how they are read."""

import argparse
import typing
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from flaxformer_mt import atomic
from flaxformer_mt.config import DecodeConfig, TransformerConfig
from flaxformer_mt.errors import UserError
from flaxformer_mt.presets import check_fields
from flaxformer_mt.remote.reading import local

if typing.TYPE_CHECKING:
    from flaxformer_mt.trained_model import TrainedModel

CheckpointChoice = Annotated[Literal["best", "last"] | int, tyro.conf.arg(metavar="CHECKPOINT")]
"""The best checkpoint by validation, the newest, or that of a step."""
RunFolder = Annotated[Path, tyro.conf.arg(metavar="RUN")]
"""A run folder."""
RunFolders = tyro.conf.UseAppendAction[Annotated[tuple[Path, ...], tyro.conf.arg(metavar="RUN")]]
"""The run folders of an ensemble: an option that may be repeated."""
TextFile = Annotated[Path, tyro.conf.arg(metavar="F")]
"""A text file, plain or compressed."""
OptionalTextFile = Annotated[Path | None, tyro.conf.arg(metavar="F")]
DecodeOptions = tyro.conf.OmitArgPrefixes[DecodeConfig]
"""All fields of `DecodeConfig` as options without a prefix."""
DEFAULT_SEARCH = DecodeConfig()


def configured_search(arguments: Sequence[str]) -> DecodeConfig:
    """Returns the search configuration of the first run that the command line names.

    Its values are the defaults of the search options, also in `--help`.
    """
    finder = argparse.ArgumentParser("flaxformer-mt", add_help=False, allow_abbrev=False)
    finder.add_argument("--run", action="append", type=Path)
    runs = finder.parse_known_args(arguments)[0].run
    if not runs:
        return DEFAULT_SEARCH
    from flaxformer_mt.runs.folder import read_config

    # Some versions of argparse leave an empty list of the value in `--run=--`.
    return read_config(local(runs[0] or "--")).decode


def load_runs(folders: Sequence[Path], checkpoint: CheckpointChoice) -> list["TrainedModel"]:
    """Loads one model per folder, of which there must be one."""
    from flaxformer_mt.trained_model import load_run

    require_runs(folders)
    return [load_run(folder, checkpoint) for folder in folders]


def require_runs(folders: Sequence[Path]) -> None:
    """Raises UserError if no folder is given."""
    if not folders:
        raise UserError("--run is missing: give the folder of a trained model")


def model_fields(settings: Iterable[str]) -> dict[str, Any]:
    """Parses the `NAME=VALUE` settings of `--set` as fields of `TransformerConfig`."""
    return dict(map(_model_field, settings))


def _model_field(setting: str) -> tuple[str, Any]:
    name, _, text = setting.partition("=")
    check_fields([name])
    kind: Any = typing.get_type_hints(TransformerConfig)[name]
    values = typing.get_args(kind) or ((True, False) if kind is bool else ())
    choices = {str(value).lower() if isinstance(value, bool) else value: value for value in values}
    if choices and text not in choices:
        raise UserError(f"--set {setting}: {name} is one of {', '.join(choices)}")
    try:
        return name, choices[text] if choices else kind(text)
    except ValueError as error:
        raise UserError(f"--set {setting}: {name} is a number, {kind.__name__}") from error


def reject_options(valid_for: str, **options: object) -> None:
    """Raises UserError if one of the options is given; `valid_for` names where they are valid."""
    for name, value in options.items():
        if value is not None:
            raise UserError(f"--{name} is for {valid_for} only: leave it out")


def require_writable(*files: Path | None) -> None:
    """Checks where output files go, before any work is done."""
    from flaxformer_mt.runs.folder import is_content_of_run

    for file in filter(None, files):
        if file.is_dir():
            raise UserError(f"{file} cannot be written: it is a folder")
        if not file.parent.is_dir():
            atomic.require_writable(file.parent)
        if is_content_of_run(file):
            raise UserError(f"{file} cannot be written: it belongs to a trained model")
