"""Experiment trackers: TensorBoard, Weights & Biases, MLflow and trackio, without a network, too.

Each is a `Tracker`, which imports its library when a run begins. One of your own is a subclass,
given as `fmt.train(config, workdir, writers=[TextFile()])`:

    class TextFile(Tracker):
        def begin(self, folder, config):
            self.file = open(folder / "numbers.txt", "a")

        def log(self, step, numbers):
            print(step, dict(numbers), file=self.file)

        def close(self):
            self.file.close()
"""

import json
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flax.traverse_util import flatten_dict

from flaxformer_mt import atomic
from flaxformer_mt.config.train import TrackerName, TrainConfig
from flaxformer_mt.errors import first_line
from flaxformer_mt.run_layout import METRICS, TENSORBOARD, TRACKERS
from flaxformer_mt.training.reporting.console import Sample
from flaxformer_mt.training.reporting.metrics import JsonLinesWriter, MetricValues, Writer

_PROJECT = "flaxformer_mt"


class Tracker:
    """What a tracker may do with a run; whatever it raises ends the tracking, not the run.

    Of several processes, the first one has the trackers.
    """

    def begin(self, folder: Path, config: Mapping[str, Any]) -> None:
        """Called first, with the run folder and the configuration as nested dicts.

        The member "system" of `config` is `RunDevices.facts`.
        """

    def rewind(self, step: int) -> None:
        """Called next, and when a run returns to a checkpoint: later steps are made again."""

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Called with the metrics after a step, by "split/metric"."""

    def translated(self, step: int, samples: Sequence[Sample]) -> None:
        """Called with translations of a validation after a step."""

    def close(self) -> None:
        """Called last."""


class Trackers(Writer):
    """A writer that passes everything on to trackers, to each until it raises an exception.

    `others` are the writers among those given that are no trackers.
    """

    def __init__(
        self, writers: Sequence[Writer | Tracker], announce: Callable[[str], None]
    ) -> None:
        self._trackers = [each for each in writers if isinstance(each, Tracker)]
        self._announce = announce
        self.others = [each for each in writers if not isinstance(each, Tracker)]

    def tell(self, method: str, *arguments: Any) -> None:
        """Calls a method of all trackers, and announces which of them fail in one line each."""
        for tracker in [*self._trackers]:
            try:
                getattr(tracker, method)(*arguments)
            except (Exception, SystemExit) as error:
                self._trackers.remove(tracker)
                name, reason = type(tracker).__name__, first_line(error)
                self._announce(f"warning: {name} failed, the run goes on without it: {reason}")

    def rewind(self, step: int) -> None:
        self.tell("rewind", step)

    def write(self, step: int, split: str, values: MetricValues, is_best: bool = False) -> None:
        numbers = {name: value for name, value in values.items() if not isinstance(value, str)}
        if numbers:
            self.tell("log", step, {f"{split}/{name}": value for name, value in numbers.items()})

    def close(self) -> None:
        self.tell("close")


class TensorBoard(Tracker):
    """Writes event files for TensorBoard, with one chart per "split/metric"."""

    _events: Any = None
    _first_step = 0

    def begin(self, folder: Path, config: Mapping[str, Any]) -> None:
        self._folder = folder / TENSORBOARD
        self._config = config

    def rewind(self, step: int) -> None:
        self._first_step = step
        if self._events is not None:
            self.close()
            self._open()

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        from tensorboardX.summary import scalar

        self._write(step, *(scalar(name, value) for name, value in numbers.items()))

    def translated(self, step: int, samples: Sequence[Sample]) -> None:
        from tensorboardX.summary import text

        self._write(step, text("translations", as_markdown(samples)))

    def close(self) -> None:
        events, self._events = self._events, None
        if events is not None:
            with atomic.explained(self._folder):
                events.close()

    def _write(self, step: int, *summaries: Any) -> None:
        from tensorboardX.proto.event_pb2 import Event

        if self._events is None:
            self._open()
        with atomic.explained(self._folder):
            for summary in summaries:
                self._events.write_event(Event(wall_time=time.time(), step=step, summary=summary))
            self._events.flush()

    def _open(self) -> None:
        """Opens a new file, which makes TensorBoard discard later steps of earlier files."""
        # Not SummaryWriter: it writes in a thread, and waits for it forever if the disk is full.
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        from tensorboardX.summary import text

        with atomic.explained(self._folder):
            atomic.make_folder(self._folder)
            self._events = EventsWriter(str(self._folder / "events"), f".{time.time_ns()}")
            start = SessionLog(status=SessionLog.START)
            self._events.write_event(Event(step=self._first_step + 1, session_log=start))
        config = json.dumps(self._config, indent=2)
        self._write(self._first_step, text("config", f"```json\n{config}\n```"))


class WandB(Tracker):
    """Weights & Biases; offline, in the run folder, unless there is a login or WANDB_MODE."""

    def begin(self, folder: Path, config: Mapping[str, Any]) -> None:
        import wandb

        own, name = _own_folder(folder)
        mode = None if "WANDB_MODE" in os.environ or wandb.login(prompt=False) else "offline"
        project = os.environ.get("WANDB_PROJECT", _PROJECT)
        options = {"dir": own, "id": name, "name": folder.name, "mode": mode}
        self._run = wandb.init(project=project, config=config, resume="allow", **options)
        self._shown = lambda samples: wandb.Table([*Sample._fields], [[*each] for each in samples])

    def log(self, step: int, numbers: Mapping[str, Any]) -> None:
        # It ignores steps that a continued run makes again.
        self._run.log(numbers, step=step)

    def translated(self, step: int, samples: Sequence[Sample]) -> None:
        self.log(step, {"translations": self._shown(samples)})

    def close(self) -> None:
        self._run.finish()


class Trackio(WandB):
    """trackio, with the methods of wandb; in TRACKIO_DIR, by default in the user's cache."""

    def begin(self, folder: Path, config: Mapping[str, Any]) -> None:
        import trackio

        name = f"{folder.name}-{_own_folder(folder)[1]}"
        self._run = trackio.init(_PROJECT, name, config=config, resume="allow", embed=False)
        self._shown = lambda samples: trackio.Markdown(as_markdown(samples))


class MLflow(Tracker):
    """MLflow; a database in the run folder unless there is MLFLOW_TRACKING_URI."""

    def begin(self, folder: Path, config: Mapping[str, Any]) -> None:
        from mlflow import MlflowClient, entities

        own, name = _own_folder(folder)
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        self._client = client = MlflowClient(uri or f"sqlite:///{own}/mlflow.db")
        self._metric = entities.Metric
        project = os.environ.get("MLFLOW_EXPERIMENT_NAME", _PROJECT)
        if client.get_experiment_by_name(project) is None:
            client.create_experiment(project, None if uri else (own / "mlflow").as_uri())
        experiment = client.get_experiment_by_name(project).experiment_id
        runs = client.search_runs([experiment], f"tags.{_PROJECT} = '{name}'") or [
            client.create_run(experiment, tags={_PROJECT: name}, run_name=folder.name)
        ]
        self._run = runs[0].info.run_id
        client.update_run(self._run, "RUNNING")
        if not runs[0].data.params:  # They cannot be changed later.
            for option, value in flatten_dict(config, sep=".").items():
                client.log_param(self._run, option, value)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        now = round(time.time() * 1000)
        metrics = [self._metric(name, value, now, step) for name, value in numbers.items()]
        self._client.log_batch(self._run, metrics=metrics)

    def translated(self, step: int, samples: Sequence[Sample]) -> None:
        self._client.log_text(self._run, as_markdown(samples), f"translations/{step:09}.md")

    def close(self) -> None:
        self._client.set_terminated(self._run)


BY_NAME: Mapping[TrackerName, type[Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WandB,
    "mlflow": MLflow,
    "trackio": Trackio,
}
"""The trackers of `train.trackers`."""


def default_writers(
    config: TrainConfig, workdir: Path, announce: Callable[[str], None]
) -> list[Writer | Tracker]:
    """Returns the writer of `metrics.jsonl`, and the trackers of a configuration."""
    chosen = [BY_NAME[name]() for name in dict.fromkeys(config.trackers)]
    return [JsonLinesWriter(workdir / METRICS, announce), *chosen]


def as_markdown(samples: Sequence[Sample]) -> str:
    """Returns translations as a table."""
    rows = [Sample._fields, ("---",) * len(Sample._fields), *samples]
    cells = ((" ".join((cell or "").split()).replace("|", r"\|") for cell in row) for row in rows)
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def _own_folder(folder: Path) -> tuple[Path, str]:
    """Returns the trackers' folder in a run folder, and the name of the run, the same each time."""
    own = folder.absolute() / TRACKERS
    if not (own / "name").exists():
        atomic.make_folder(own)
        atomic.write_text(own / "name", secrets.token_hex(4))
    return own, (own / "name").read_text()
