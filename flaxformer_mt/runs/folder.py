"""What a run folder says of its run: the configuration, and the text and vocabulary behind it.

`config.json` marks a run; it is written last. `data.json` holds fingerprints: the same run on
other text, or with another vocabulary, would be another run.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from flaxformer_mt import config as configuration
from flaxformer_mt.config import ExperimentConfig
from flaxformer_mt.data.corpora.corpus import Corpus
from flaxformer_mt.data.tokenizers.tokenizer import Tokenizers
from flaxformer_mt.errors import UserError
from flaxformer_mt.runs import atomic

Corpora: TypeAlias = Mapping[str, Sequence[Corpus]]
"""The corpora of "train", "valid" and "test"."""


def holds_run(workdir: Path, experiment: ExperimentConfig) -> bool:
    """Whether the folder holds a run of this experiment (True) or none (False).

    Raises:
      UserError: it holds a run of another experiment, or its configuration is damaged.
    """
    path = workdir / "config.json"
    if not path.exists():
        return False
    try:
        stored = configuration.from_json(path.read_text(encoding="utf-8"))
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    changed = configuration.differences(stored, experiment)
    if changed:
        raise UserError(
            f"{workdir} holds a run of another configuration ({'; '.join(changed)}): "
            "give these values, or another --workdir"
        )
    return True


def check_unchanged(workdir: Path, corpora: Corpora, tokenizers: Tokenizers) -> None:
    """Refuses to continue a run on other text, or with another vocabulary, than it began with.

    Raises:
      UserError: a corpus or the tokenizer has changed; names it.
    """
    path = workdir / "data.json"
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise UserError(f"{path} cannot be read ({error}): give another --workdir") from error
    for split, parts in corpora.items():
        fingerprints = stored.get(split, [])
        for number, corpus in enumerate(parts):
            if fingerprints[number : number + 1] != [corpus.fingerprint]:
                raise UserError(
                    f"the {split} corpus ({corpus.name}) is not the text that the run in "
                    f"{workdir} began with: restore it, or give another --workdir"
                )
    if stored.get("tokenizer") != _fingerprints(tokenizers):
        raise UserError(
            f"{workdir / 'tokenizer'} is not the vocabulary that the run began with: restore it, "
            "or give another --workdir"
        )


def write_run(
    workdir: Path, experiment: ExperimentConfig, corpora: Corpora, tokenizers: Tokenizers
) -> None:
    """Writes what a run folder has besides checkpoints; `config.json`, which marks a run, last."""
    workdir.mkdir(parents=True, exist_ok=True)
    tokenizers.save(workdir / "tokenizer")
    data: dict[str, object] = {
        split: [corpus.fingerprint for corpus in parts] for split, parts in corpora.items()
    }
    data["tokenizer"] = _fingerprints(tokenizers)
    atomic.write_text(workdir / "data.json", json.dumps(data, indent=2) + "\n")
    atomic.write_text(workdir / "config.json", configuration.to_json(experiment))


def _fingerprints(tokenizers: Tokenizers) -> dict[str, str]:
    return {
        "source": tokenizers.source.fingerprint,
        "target": tokenizers.target.fingerprint,
    }
