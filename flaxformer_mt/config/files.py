"""Configuration files."""

import runpy
from pathlib import Path

from flaxformer_mt.config.experiment import ExperimentConfig
from flaxformer_mt.config.serialization import from_json
from flaxformer_mt.errors import UserError


def load_config(path: str | Path) -> ExperimentConfig:
    """Calls `get_config()` of a configuration file, or reads the `config.json` of a run.

    Raises:
      UserError: there is no such file, or it does not give an `ExperimentConfig`.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"there is no file {path}")
    if path.suffix == ".json":
        try:
            return from_json(path.read_text(encoding="utf-8"))
        except (UserError, UnicodeDecodeError) as error:
            raise UserError(f"{path}: {error}") from error
    get_config = runpy.run_path(str(path)).get("get_config")
    if not callable(get_config):
        raise UserError(f"{path} defines no get_config()")
    config = get_config()
    if not isinstance(config, ExperimentConfig):
        raise UserError(f"get_config() of {path} does not return an ExperimentConfig")
    return config
