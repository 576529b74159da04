"""What makes a folder a run: its configuration, its vocabulary, and fingerprints of its text.

`config.json` marks a run folder; it is written last. `data.json` records all of them: with others,
the folder would hold a different run. It is continued whole or not at all.
"""

import collections
import contextlib
import dataclasses
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

from flaxformer_mt import config as configuration
from flaxformer_mt import input_files
from flaxformer_mt.config import ExperimentConfig
from flaxformer_mt.config.experiment import groups, with_changes
from flaxformer_mt.config.fields import FieldRole, names_with
from flaxformer_mt.data.corpora.corpus import Corpus
from flaxformer_mt.data.tokenizers.tokenizer import Tokenizers
from flaxformer_mt.errors import UserError, prefixed
from flaxformer_mt.runs import atomic, changes, data_file, layout, manifest, step_folders
from flaxformer_mt.urls import require_local

Corpora: TypeAlias = Mapping[str, Sequence[Corpus]]
"""The corpora of "train", "valid" and "test"."""


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
            "give another --workdir"
        )

    with contextlib.ExitStack() as stack:
        try:
            atomic.make_folder(run_folder)
        except FileExistsError as error:
            raise UserError(f"{run_folder} is not a folder: give another --workdir") from error
        except OSError as error:
            raise UserError(
                f"{run_folder} cannot be written to: {error.strerror}; give another --workdir"
            ) from error
        with atomic.explained(run_folder / layout.LOCK):
            is_supported = stack.enter_context(atomic.locked(run_folder / layout.LOCK, refuse))
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
    if not Path(folder, layout.CONFIG).is_file():
        raise UserError(f"{folder} is not a run folder: it has no {layout.CONFIG}")


def is_content_of_run(path: Path) -> bool:
    """Returns whether a file, which need not exist, would be one of those of a trained model."""
    path = path.resolve()
    # A config.json alone may be that of a published model.
    return any(
        path.relative_to(folder).parts[0] in layout.CONTENT
        and (folder / layout.CONFIG).is_file()
        and (folder / layout.CHECKPOINTS).is_dir()
        for folder in path.parents
    )


def read_config(folder: str | Path) -> ExperimentConfig:
    """Reads the configuration of a run; `UserError` if it is none, is damaged or was changed.

    Options with which a run may be continued may have been edited by hand.
    """
    require_run(folder)
    path = Path(folder, layout.CONFIG)
    text = input_files.read_text(path)
    with prefixed(f"{path}: "):
        config = configuration.from_json(text)
    # Without it, no checkpoint of the run can be read.
    recorded = data_file.read(folder).get(data_file.CONFIG)
    if recorded is not None:
        history = changes.read(folder)
        with prefixed(f"{path} is damaged: history: "):
            original = changes.before(config, history)
        changed = configuration.differences(configuration.from_dict(recorded), original).values()
        if changed:
            raise UserError(
                f"{path} is damaged or was changed ({'; '.join(changed)}): restore these values, "
                f"or the run's own {layout.DATA}"
            )
    return config


def read_tokenizers(folder: str | Path) -> Tokenizers:
    """Reads the vocabularies of a run; `UserError` if a file is missing or not that of the run."""
    data_file.check_files(folder)
    path = Path(folder, layout.TOKENIZER)
    tokenizers = Tokenizers.load(path)
    recorded = data_file.read(folder).get(data_file.TOKENIZER)
    if recorded is not None and recorded != fingerprints(tokenizers):
        raise UserError(f"{path} is not the vocabulary that the run was started with: restore it")
    return tokenizers


def check_vocabulary(paths: str) -> None:
    """Checks the files of vocabularies of runs: folders, or files in `tokenizer`, after commas."""
    for path in map(Path, paths.split(",")):
        for folder in (path, path.parent, path.parent.parent):
            if (folder / layout.TOKENIZER).is_dir() and (folder / layout.CONFIG).is_file():
                data_file.check_files(folder)


def read_origin(folder: str | Path) -> dict[str, bytes]:
    """Reads the files of the published model that a run was converted from, by name."""
    data_file.check_files(folder)
    paths = (Path(folder, name) for name in data_file.read(folder).get(data_file.FILES, {}))
    return {
        path.name: input_files.read_bytes(path, input_files.MAX_MODEL_BYTES)
        for path in paths
        if path.parent.name == layout.ORIGIN
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
    for entry in changes.read(folder) if Path(folder, layout.CONFIG).exists() else ():
        result |= entry["corpora"]
    return result


def holds_run(workdir: Path, experiment: ExperimentConfig, accept_changes: bool = False) -> bool:
    """Returns whether the folder holds a run of this experiment, to be continued.

    Args:
      workdir: the folder.
      experiment: the configuration that was given.
      accept_changes: whether the run may be continued with other values of some options.

    Raises:
      UserError: it holds a run of another experiment, or parts of it are missing or damaged.
    """
    if not (workdir / layout.CONFIG).exists():
        _require_no_remains(workdir)
        return False
    for name in (layout.DATA, layout.TOKENIZER):
        if not (workdir / name).exists():
            raise UserError(
                f"{workdir} holds a run whose {name} is missing: restore it, give another "
                f"--workdir, or start from its parameters with --train.init-from={workdir}"
            )
    if data_file.is_trained(workdir) and not step_folders.has_any(workdir):
        raise UserError(
            f"{workdir / layout.CHECKPOINTS} holds no checkpoint, but the run has written some: "
            "restore them, or give another --workdir to begin anew"
        )
    stored = read_config(workdir)
    if configuration.differences(stored, experiment):
        # The run took what was left open from its vocabulary.
        model = read_tokenizers(workdir).with_ids(experiment.model)
        experiment = dataclasses.replace(experiment, model=model)
    differences = configuration.differences(stored, experiment)
    starts = stored.train.init_from, experiment.train.init_from
    kinds = dict(configuration.CONTINUATIONS)
    if starts[0] != starts[1] and not step_folders.has_any(workdir):
        # Before its first checkpoint, a run is continued from its start.
        text = "train.init_from: {!r} in the run, {!r} now"
        differences["train.init_from"] = text.format(*starts)
        kinds["train.init_from"] = "never"
    never = [text for name, text in differences.items() if kinds[name] == "never"]
    refused = [text for name, text in differences.items() if kinds[name] != "noted"]
    if never or (refused and not accept_changes):
        named = "; ".join(never if accept_changes else refused)
        raise UserError(
            f"{workdir} holds a run of another configuration ({named}): "
            f"give these values, {_NEW_START.format(workdir) if never else _ACCEPT}"
        )
    return True


def _require_no_remains(workdir: Path) -> None:
    """Raises `UserError` if a folder without `config.json` holds part of a run that has begun.

    A start that was killed leaves `data.json`, or that and a vocabulary; a new one replaces them.
    """
    remains = {
        layout.DATA: data_file.is_trained(workdir),
        layout.TOKENIZER: (workdir / layout.TOKENIZER).exists()
        and not (workdir / layout.DATA).exists(),
        layout.METRICS: (workdir / layout.METRICS).exists(),
        layout.CHECKPOINTS: step_folders.has_any(workdir),
    }
    if any(remains.values()):
        parts = " and ".join(name for name, is_there in remains.items() if is_there)
        raise UserError(
            f"{workdir} holds {parts} of a run whose {layout.CONFIG} is missing: restore it, or "
            "give another --workdir to begin anew"
        )


_NEW_START = (
    "or another --workdir, for a new run: --train.init-from={} starts it from these parameters if "
    "they fit, --train.init-optimizer from the optimizer's moments, too, and steps and data begin "
    "anew"
)
_ACCEPT = (
    "--accept-changes to go on with the new ones after the newest checkpoint (no uninterrupted run "
    "equals that one), or another --workdir"
)


def check_corpora(workdir: Path, corpora: Corpora) -> None:
    """Raises `UserError` unless corpora are those that a run is trained with."""
    stored = _with_corpora(workdir, data_file.read(workdir))
    for split, parts in corpora.items():
        recorded = stored.get(split, [])
        for number, corpus in enumerate(parts):
            if recorded[number : number + 1] != [corpus.fingerprint]:
                raise UserError(
                    f"the {split} corpus ({corpus.name}) is not the text that the run in "
                    f"{workdir} was started with: restore it, {_ACCEPT}"
                )


def write_run(
    workdir: Path,
    experiment: ExperimentConfig,
    corpora: Corpora,
    tokenizers: Tokenizers,
    origin: Mapping[str, bytes] = {},
) -> None:
    """Writes a run folder without checkpoints; `config.json`, which marks it, last.

    It keeps fingerprints of the corpora; a converted model has none. `origin` are files of the
    published model that it was converted from, by name.
    """
    files = {f"{layout.TOKENIZER}/{name}": content for name, content in tokenizers.files.items()}
    files |= {f"{layout.ORIGIN}/{name}": content for name, content in origin.items()}
    held_out: collections.Counter[str] = collections.Counter()
    for corpus in corpora.get("train", ()):
        held_out.update(corpus.division() if corpus.division else {})
    atomic.make_folder(workdir)
    data_file.write(
        workdir,
        {
            **{split: [corpus.fingerprint for corpus in parts] for split, parts in corpora.items()},
            **({data_file.HOLD_OUT: dict(held_out)} if held_out else {}),
            data_file.TOKENIZER: fingerprints(tokenizers),
            data_file.CONFIG: configuration.to_dict(experiment),
            data_file.FILES: {
                name: dataclasses.asdict(manifest.entry_of(content))
                for name, content in files.items()
            },
        },
    )
    for path in (workdir / layout.TOKENIZER, workdir / layout.ORIGIN):
        # A start that was killed may have left files of another vocabulary.
        if path.is_symlink():
            path.unlink()
        elif path.exists():
            shutil.rmtree(path)
    for name, content in files.items():
        atomic.make_folder((workdir / name).parent)
        atomic.write_bytes(workdir / name, content)
    atomic.write_text(workdir / layout.CONFIG, configuration.to_json(experiment))


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


def update_config(workdir: Path, experiment: ExperimentConfig, corpora: Corpora) -> None:
    """Writes the options that a continued run was given to `config.json`, for other commands.

    Those that its parameters depend on, and other text, are added to its history.
    """
    stored, history = read_config(workdir), changes.read(workdir)
    known = _with_corpora(workdir, data_file.read(workdir))
    texts = {split: [corpus.fingerprint for corpus in parts] for split, parts in corpora.items()}
    entry = {
        "step": max(step_folders.steps_in(step_folders.folder_of(workdir)), default=0),
        "options": configuration.changes(stored, experiment),
        "corpora": {split: own for split, own in texts.items() if own != known.get(split, [])},
    }
    added = [entry] if entry["options"] or entry["corpora"] else []
    if experiment != stored or added:
        text = configuration.to_json(experiment, [*history, *added])
        atomic.write_text(workdir / layout.CONFIG, text)


def fingerprints(tokenizers: Tokenizers) -> dict[str, str]:
    """Returns the fingerprints of the vocabularies of both sides."""
    return {
        "source": tokenizers.source.fingerprint,
        "target": tokenizers.target.fingerprint,
    }
