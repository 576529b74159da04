"""What makes a folder a run: its configuration, its vocabulary, and fingerprints of its text.

`config.json` marks a run folder; it is written last. `data.json` records all of them: with others,
the folder would hold a different run. It is continued whole or not at all.

The `history` in `config.json` tells how options were changed in the course of the run. Each entry
has the `step` of the checkpoint after which a change took effect, the values of the changed
`options` before and after it, and new fingerprints of the `corpora` whose text changed. The steps
after an entry were made with the values of all entries up to it.
"""

import contextlib
import dataclasses
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeAlias, TypedDict

import jax

from flaxformer_mt import atomic, input_files, run_layout
from flaxformer_mt import config as configuration
from flaxformer_mt.config import ExperimentConfig
from flaxformer_mt.config.experiment import groups, with_changes
from flaxformer_mt.config.fields import FieldRole, names_with
from flaxformer_mt.config.serialization import HISTORY
from flaxformer_mt.errors import UserError, prefixed
from flaxformer_mt.runs import data_file, manifest, metrics_file, step_folders
from flaxformer_mt.urls import require_local

Texts: TypeAlias = Mapping[str, Sequence[tuple[str, str]]]
"""Name and fingerprint of each corpus of "train", "valid" and "test"."""


class _Change(TypedDict):
    step: input_files.Count
    options: dict[str, tuple[Any, Any]]
    corpora: dict[str, list[str]]


class _Config(TypedDict, total=False):
    history: list[_Change]


@contextlib.contextmanager
def locked(run_folder: str | Path, announce: Callable[[str], None] = print) -> Iterator[None]:
    """Locks a run folder, created if missing, against other processes that train.

    `UserError` if one does. On a file system without locks, `announce` is called with a warning.
    """
    run_folder = Path(run_folder)
    atomic.require_utf8(run_folder)

    def refuse(owner: str) -> NoReturn:
        raise UserError(
            f"{owner} is training in {run_folder} already: wait for it, stop it, or "
            "give another workdir"
        )

    with contextlib.ExitStack() as stack:
        try:
            atomic.make_folder(run_folder)
        except FileExistsError as error:
            raise UserError(f"{run_folder} is not a folder: give another workdir") from error
        except OSError as error:
            raise UserError(
                f"{run_folder} cannot be written to: {error.strerror}; give another workdir"
            ) from error
        with atomic.explained(run_folder / run_layout.LOCK):
            is_supported = stack.enter_context(atomic.locked(run_folder / run_layout.LOCK, refuse))
        if not is_supported:
            announce(
                f"{run_folder} is on a file system without locks: make sure that only one process "
                "trains in it"
            )
        yield


def require_run(folder: str | Path) -> None:
    """Raises `UserError` unless a folder exists and has a `config.json`."""
    if not Path(folder).is_dir():
        require_local(folder)
        raise UserError(f"there is no run folder {folder}")
    if not Path(folder, run_layout.CONFIG).is_file():
        raise UserError(f"{folder} is not a run folder: it has no {run_layout.CONFIG}")


def has_trained(workdir: Path) -> bool:
    """Returns whether a folder has a checkpoint, or metrics."""
    metrics = workdir / run_layout.METRICS
    return step_folders.has_any(workdir) or (metrics.exists() and metrics.stat().st_size > 0)


def require_only_written(folder: Path) -> None:
    """Raises `UserError` if a path has anything but what `write_model` writes.

    Its files are those that the run and the manifest of its only checkpoint list.
    """
    if not os.path.lexists(folder):
        return
    if folder.is_symlink():
        raise UserError(f"{folder} is a link, not a run folder: remove it")
    read_config(folder)
    data_file.check_files(folder)
    known = {run_layout.CONFIG, run_layout.DATA, *data_file.read(folder).get(data_file.FILES, {})}
    steps = step_folders.steps_in(step_folders.folder_of(folder))
    for step in steps[:1]:
        checkpoint = f"{run_layout.CHECKPOINTS}/{step}"
        listed = [run_layout.MANIFEST, *manifest.listed(folder / checkpoint)]
        known |= {f"{checkpoint}/{name}" for name in listed}
    known |= {str(parent) for name in known for parent in Path(name).parents}
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() or path.relative_to(folder).as_posix() not in known:
            raise UserError(
                f"{path} is not of a run that was only saved: move it, or give another folder"
            )


def is_content_of_run(path: Path) -> bool:
    """Returns whether a file, which need not exist, would be one of those of a trained model."""
    path = path.resolve()
    # A config.json alone may be that of a published model.
    return any(
        path.relative_to(folder).parts[0] in run_layout.CONTENT
        and (folder / run_layout.CONFIG).is_file()
        and (folder / run_layout.CHECKPOINTS).is_dir()
        for folder in path.parents
    )


def read_config(folder: str | Path) -> ExperimentConfig:
    """Reads the configuration of a run; `UserError` if it is none, is damaged or was changed.

    Options with which a run may be continued may have been edited by hand.
    """
    require_run(folder)
    path = Path(folder, run_layout.CONFIG)
    text = input_files.read_text(path)
    with prefixed(f"{path}: "):
        config = configuration.from_json(text)
    # Without it, no checkpoint of the run can be read.
    recorded = data_file.read(folder).get(data_file.CONFIG)
    if recorded is not None:
        history = read_history(folder)
        with prefixed(f"{path} is damaged: history: "):
            original = config_before(config, history)
        changed = configuration.differences(configuration.from_dict(recorded), original).values()
        if changed:
            raise UserError(
                f"{path} is damaged or was changed ({'; '.join(changed)}): restore these values, "
                f"or the run's own {run_layout.DATA}"
            )
    return config


def read_history(folder: str | Path) -> list[dict[str, Any]]:
    """Reads the history of a run, oldest first."""
    values: dict[str, Any] = input_files.read_json(Path(folder, run_layout.CONFIG), _Config)
    return values.get(HISTORY, [])


def config_before(
    config: ExperimentConfig, history: Sequence[Mapping[str, Any]]
) -> ExperimentConfig:
    """Returns the configuration of a run before the last entries of its history."""
    values = configuration.to_dict(config)
    for entry in reversed(history):
        for name, (old, _) in entry["options"].items():
            group, _, field = name.partition(".")
            values.setdefault(group, {})[field] = old
    return configuration.from_dict(values)


def described_change(entry: Mapping[str, Any]) -> str:
    """Returns an entry in words: "optimizer.learning_rate: 0.001 -> 0.0005; train text"."""
    options = (
        f"{name}: {json.dumps(old)} -> {json.dumps(new)}"
        for name, (old, new) in entry["options"].items()
    )
    return "; ".join([*options, *(f"text of {split}" for split in entry["corpora"])])


def missing_lines(
    folder: Path, history: Sequence[Mapping[str, Any]], last: int
) -> list[tuple[int, dict[str, str]]]:
    """Returns the steps and values of the lines about changes that `metrics.jsonl` lacks.

    `last` is the step that the run continues from; lines of later ones are removed.
    """
    lines = [
        line.values
        for line in metrics_file.read_lines(folder / run_layout.METRICS)
        if line.values is not None
    ]
    written = [
        line for line in lines if line["split"] == metrics_file.CHANGE and line["step"] <= last
    ]
    return [
        (entry["step"], {"changed": described_change(entry)}) for entry in history[len(written) :]
    ]


def read_origin(folder: str | Path) -> dict[str, bytes]:
    """Reads the files of the published model that a run was converted from, by name."""
    data_file.check_files(folder)
    paths = (Path(folder, name) for name in data_file.read(folder).get(data_file.FILES, {}))
    return {
        path.name: input_files.read_bytes(path, input_files.MAX_MODEL_BYTES)
        for path in paths
        if path.parent.name == run_layout.ORIGIN
    }


def read_fingerprints(folder: str | Path) -> dict[str, Any] | None:
    """Reads the data fingerprints of a run; None if it has none, as a converted model."""
    values = _with_corpora(folder, data_file.read(folder))
    if not values.keys() & set(data_file.CORPORA):
        return None
    return {
        name: values[name] for name in (*data_file.CORPORA, data_file.TOKENIZER) if name in values
    }


def _with_corpora(folder: str | Path, values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the content of `data.json` with the corpora that a run was changed to."""
    result = dict(values)
    for entry in read_history(folder) if Path(folder, run_layout.CONFIG).exists() else ():
        result |= entry["corpora"]
    return result


def has_run(workdir: Path) -> bool:
    """Returns whether a folder holds a run, to be continued.

    Raises:
      UserError: parts of a run are missing.
    """
    if not (workdir / run_layout.CONFIG).exists():
        _require_no_remains(workdir)
        return False
    for name in (run_layout.DATA, run_layout.TOKENIZER):
        if not (workdir / name).exists():
            raise UserError(
                f"{workdir} holds a run whose {name} is missing: restore it, give another "
                f"workdir, or start from its parameters with train.init_from={workdir}"
            )
    if data_file.is_trained(workdir) and not step_folders.has_any(workdir):
        raise UserError(
            f"{workdir / run_layout.CHECKPOINTS} holds no checkpoint, but the run has written "
            "some: restore them, or give another workdir to begin anew"
        )
    return True


_OWN_FOLDERS = (run_layout.TOKENIZER, run_layout.ORIGIN)
"""Those whose files `data.json` lists."""


def _require_no_remains(workdir: Path) -> None:
    """Raises `UserError` if a folder without `config.json` holds part of a run that has begun.

    A start that was killed leaves `data.json`, or that and a vocabulary; a new one replaces them.
    """
    has_data = (workdir / run_layout.DATA).exists()
    remains = {
        run_layout.DATA: data_file.is_trained(workdir),
        **{name: (workdir / name).exists() and not has_data for name in _OWN_FOLDERS},
        run_layout.METRICS: (workdir / run_layout.METRICS).exists(),
        run_layout.CHECKPOINTS: step_folders.has_any(workdir),
    }
    if any(remains.values()):
        parts = " and ".join(name for name, is_there in remains.items() if is_there)
        raise UserError(
            f"{workdir} holds {parts} of a run whose {run_layout.CONFIG} is missing: restore it, "
            "or give another workdir to begin anew"
        )


ACCEPT = (
    "accept_changes=True (--accept-changes) to go on with the new ones after the newest checkpoint "
    "(no uninterrupted run equals that one), or another workdir"
)


def check_texts(workdir: Path, texts: Texts) -> None:
    """Raises `UserError` unless texts are those that a run is trained with."""
    stored = _with_corpora(workdir, data_file.read(workdir))
    for split, parts in texts.items():
        recorded = stored.get(split, [])
        for number, (name, fingerprint) in enumerate(parts):
            if recorded[number : number + 1] != [fingerprint]:
                raise UserError(
                    f"the {split} corpus ({name}) is not the text that the run in "
                    f"{workdir} was started with: restore it, {ACCEPT}"
                )


def write_run(
    workdir: Path,
    experiment: ExperimentConfig,
    vocabulary: Mapping[str, bytes],
    fingerprints: Mapping[str, Any],
    origin: Mapping[str, bytes] = {},
) -> None:
    """Writes a run folder without checkpoints; `config.json`, which marks it, last.

    Args:
      workdir: the folder.
      experiment: the configuration.
      vocabulary: the files of the vocabularies, by name.
      fingerprints: those of the vocabularies and of the corpora, see `data_file`; a converted model
        has none of corpora.
      origin: files of the published model that it was converted from, by name.
    """
    files = {f"{run_layout.TOKENIZER}/{name}": content for name, content in vocabulary.items()}
    files |= {f"{run_layout.ORIGIN}/{name}": content for name, content in origin.items()}
    atomic.make_folder(workdir)
    for name in _OWN_FOLDERS:
        if (workdir / name).is_symlink():
            raise UserError(f"{workdir / name} is a link: remove it, or give another folder")
    # A start that was killed may have left files of another vocabulary.
    for name in data_file.read(workdir).get(data_file.FILES, {}).keys() - files.keys():
        (workdir / name).unlink(missing_ok=True)
    data_file.write(
        workdir,
        {
            **fingerprints,
            data_file.CONFIG: configuration.to_dict(experiment),
            data_file.FILES: {
                name: dataclasses.asdict(manifest.entry_of(content))
                for name, content in files.items()
            },
        },
    )
    for name, content in files.items():
        atomic.make_folder((workdir / name).parent)
        atomic.write_bytes(workdir / name, content)
    atomic.write_text(workdir / run_layout.CONFIG, configuration.to_json(experiment))


def with_stored_start(workdir: Path, experiment: ExperimentConfig) -> ExperimentConfig:
    """Returns the configuration of a continued run, with what the run was started from."""
    stored = configuration.to_dict(read_config(workdir))
    values = configuration.to_dict(experiment)
    for group, kind in groups().items():
        values[group] |= {name: stored[group][name] for name in names_with(kind, FieldRole.START)}
    values["model"] |= {name: stored["model"][name] for name in ("pad_id", "bos_id", "eos_id")}
    return configuration.from_dict(values)


def with_first_schedule(workdir: Path, experiment: ExperimentConfig) -> ExperimentConfig:
    """Returns the configuration with the schedule that the run began with, if it has more steps.

    The warm-up of a run that is continued with another number of steps does not change. A schedule
    that has an end does: the number is then an accepted change.
    """
    optimizer = experiment.optimizer
    if not optimizer.warmup or optimizer.total_steps or optimizer.schedule_has_end:
        return experiment
    steps = configuration.from_dict(data_file.read(workdir)[data_file.CONFIG]).train.num_steps
    return with_changes(experiment, {"optimizer": {"total_steps": steps}})


def update_config(
    workdir: Path, experiment: ExperimentConfig, fingerprints: Mapping[str, Sequence[str]]
) -> None:
    """Writes the options that a continued run was given to `config.json`, for other commands.

    Those that its parameters depend on, and `fingerprints` of other text, by split, are added to
    its history.
    """
    stored, history = read_config(workdir), read_history(workdir)
    known = _with_corpora(workdir, data_file.read(workdir))
    entry = {
        "step": max(step_folders.steps_in(step_folders.folder_of(workdir)), default=0),
        "options": configuration.changes(stored, experiment),
        "corpora": {
            split: own for split, own in fingerprints.items() if own != known.get(split, [])
        },
    }
    added = [entry] if entry["options"] or entry["corpora"] else []
    if experiment != stored or added:
        text = configuration.to_json(experiment, [*history, *added])
        atomic.write_text(workdir / run_layout.CONFIG, text)


_SHARED_SECONDS = 60
"""How long a file system may take to show other hosts what one of them has written: that of NFS."""


def require_shared(workdir: Path) -> None:
    """Checks that a process other than the first sees the run folder that the first has written."""
    end = time.monotonic() + _SHARED_SECONDS
    while not (workdir / run_layout.CONFIG).exists():
        if time.monotonic() > end:
            raise UserError(
                f"workdir={workdir}: process {jax.process_index()} does not see what process 0 "
                "has written there: give a folder on a file system that all processes share"
            )
        time.sleep(0.5)
