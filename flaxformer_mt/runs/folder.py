"""The configuration and the data fingerprints of a run folder.

`config.json` marks a run folder; it is written last. `data.json` holds fingerprints of the text and
the vocabulary: with others, the folder would hold a different run.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from flaxformer_mt import config as configuration
from flaxformer_mt.config import ExperimentConfig
from flaxformer_mt.data.corpora.corpus import Corpus
from flaxformer_mt.data.tokenizers.tokenizer import Tokenizers
from flaxformer_mt.errors import UserError
from flaxformer_mt.runs import atomic
from flaxformer_mt.runs.layout import CONFIG, DATA, TOKENIZER

Corpora: TypeAlias = Mapping[str, Sequence[Corpus]]
"""The corpora of "train", "valid" and "test"."""


def require_run(folder: str | Path) -> None:
    """Checks that a folder is a run folder.

    Raises:
      UserError: it does not exist, or has no `config.json`.
    """
    if not Path(folder).is_dir():
        raise UserError(f"there is no run folder {folder}")
    if not Path(folder, CONFIG).is_file():
        raise UserError(f"{folder} is not a run folder: it has no {CONFIG}")


def read_config(folder: str | Path) -> ExperimentConfig:
    """Reads the configuration of a run.

    Raises:
      UserError: the folder is not a run folder, or its configuration is damaged.
    """
    require_run(folder)
    path = Path(folder, CONFIG)
    try:
        return configuration.from_json(path.read_text(encoding="utf-8"))
    except (UserError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: {error}") from error


def read_fingerprints(folder: str | Path) -> dict[str, Any] | None:
    """Reads the data fingerprints of a run; None if it has none, as a converted model.

    Raises:
      UserError: they are damaged.
    """
    path = Path(folder, DATA)
    if not path.is_file():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}): give another --workdir") from error


def holds_run(workdir: Path, experiment: ExperimentConfig) -> bool:
    """Returns whether the folder holds a run of this experiment, to be continued.

    Raises:
      UserError: it holds a run of another experiment, or its configuration is damaged.
    """
    if not (workdir / CONFIG).exists():
        return False
    changed = configuration.differences(read_config(workdir), experiment)
    if changed:
        raise UserError(
            f"{workdir} holds a run of another configuration ({'; '.join(changed)}): "
            "give these values, or another --workdir"
        )
    return True


def check_unchanged(workdir: Path, corpora: Corpora, tokenizers: Tokenizers) -> None:
    """Checks that a run is continued with the text and the vocabulary that it was started with.

    Raises:
      UserError: a corpus or the vocabulary has changed; names it.
    """
    stored = read_fingerprints(workdir) or {}
    for split, parts in corpora.items():
        fingerprints = stored.get(split, [])
        for number, corpus in enumerate(parts):
            if fingerprints[number : number + 1] != [corpus.fingerprint]:
                raise UserError(
                    f"the {split} corpus ({corpus.name}) is not the text that the run in "
                    f"{workdir} was started with: restore it, or give another --workdir"
                )
    if stored.get("tokenizer") != _fingerprints(tokenizers):
        raise UserError(
            f"{workdir / TOKENIZER} is not the vocabulary that the run was started with: restore "
            "it, or give another --workdir"
        )


def write_run(
    workdir: Path, experiment: ExperimentConfig, corpora: Corpora, tokenizers: Tokenizers
) -> None:
    """Writes a run folder without checkpoints; `config.json`, which marks it, last.

    Raises:
      UserError: it cannot be written.
    """
    workdir.mkdir(parents=True, exist_ok=True)
    tokenizers.save(workdir / TOKENIZER)
    data: dict[str, object] = {
        split: [corpus.fingerprint for corpus in parts] for split, parts in corpora.items()
    }
    data["tokenizer"] = _fingerprints(tokenizers)
    atomic.write_text(workdir / DATA, json.dumps(data, indent=2) + "\n")
    atomic.write_text(workdir / CONFIG, configuration.to_json(experiment))


def _fingerprints(tokenizers: Tokenizers) -> dict[str, str]:
    return {
        "source": tokenizers.source.fingerprint,
        "target": tokenizers.target.fingerprint,
    }
