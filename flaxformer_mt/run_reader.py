"""The run folder of a trained model, as scripts and notebooks use it."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Unpack

from flaxformer_mt.config import GENERATED, ExperimentConfig
from flaxformer_mt.config.decode import DecodeOptions
from flaxformer_mt.config.experiment import with_changes
from flaxformer_mt.decoding.text_arguments import require_path, require_texts
from flaxformer_mt.errors import UserError, requiring, shown
from flaxformer_mt.remote.reading import local
from flaxformer_mt.runs.folder import check_texts, read_config, require_run
from flaxformer_mt.runs.layout import METRICS, CheckpointSelector
from flaxformer_mt.runs.metrics_file import read_metrics
from flaxformer_mt.runs.step_folders import best_step, metric_of

if TYPE_CHECKING:
    import pandas

    from flaxformer_mt.data.corpora.corpus import ParallelCorpus
    from flaxformer_mt.decoding.translator import Translator
    from flaxformer_mt.evaluation import MetricFunction
    from flaxformer_mt.plotting.attention_page import AttentionPicture
    from flaxformer_mt.plotting.curves import Curves
    from flaxformer_mt.plotting.history import Axis
    from flaxformer_mt.trained_model import TrainedModel


class MetricRows(list[dict[str, Any]]):
    """Lines of `metrics.jsonl`: "step", "split" and metrics; None is a value that was not finite.

    In a notebook they show as a table.
    """

    def __call__(self, split: Literal["train", "valid", "test"] | None = None) -> "MetricRows":
        """Returns the rows of a split, by default all."""
        if split not in (None, "train", "valid", "test"):
            raise UserError(f"split={split!r}: choose train, valid or test")
        return MetricRows(row for row in self if split in (None, row["split"]))

    def frame(self) -> "pandas.DataFrame":
        """Returns a data frame with a column per metric, NaN where a row has none; needs pandas."""
        with requiring("a data frame", "pandas", "pandas"):
            import pandas
        return pandas.DataFrame(list(self))

    def _repr_html_(self) -> str:
        from flaxformer_mt.plotting.curves import rows_table

        return rows_table(self)


class CheckpointScore(NamedTuple):
    """An intact checkpoint of a run; the best one is loaded by default."""

    step: int
    metric: str
    """The validation metric that ranks checkpoints (`train.best_metric`)."""
    value: float | None
    """Of the metric; None if this checkpoint was not validated."""
    is_best: bool


class CheckpointScores(list[CheckpointScore]):
    """The intact checkpoints of a run, by step. In a notebook they show as a table."""

    def _repr_html_(self) -> str:
        rows = ("<td>".join(map(str, row)) for row in [CheckpointScore._fields, *self])
        return f"<table><tr><td>{'<tr><td>'.join(rows)}</table>"


class Run:
    """A run folder.

        run = Run("runs/quickstart")
        run.config.model.d_model
        run.metrics("valid")[-1]["bleu"]
        run.plot().save("curves.png")
        run.translator().translate("three small dogs")
        run.attention("three small dogs").save("attention.html")

    Everything is read when it is asked for; a run that is being trained may be looked at. In a
    notebook it shows as a summary with its curves. A folder that is not a run is a UserError.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = local(require_path(folder, "folder"), as_it_is_now=True)
        require_run(self.folder)

    def __repr__(self) -> str:
        return f"Run({shown(str(self.folder))!r})"

    def _repr_html_(self) -> str:
        from flaxformer_mt.plotting.curves import run_summary

        return run_summary(self.folder)

    @property
    def config(self) -> ExperimentConfig:
        """The configuration, as it was given."""
        return read_config(self.folder)

    @property
    def metrics(self) -> MetricRows:
        """The rows of `metrics.jsonl`, in order; raises UserError if the file is damaged."""
        return MetricRows(read_metrics(self.folder / METRICS))

    @property
    def checkpoints(self) -> CheckpointScores:
        """The intact checkpoints, by step; a line is printed for each damaged one."""
        scores, metric = self._scores(), self.config.train.best_metric
        best = best_step(scores)
        return CheckpointScores(
            CheckpointScore(
                step,
                metric,
                metric_of(metric, score) if math.isfinite(score) else None,
                step == best,
            )
            for step, score in sorted(scores.items())
        )

    @property
    def latest_step(self) -> int | None:
        """The step of the newest intact checkpoint; None without one."""
        return max(self._scores(), default=None)

    @property
    def best_step(self) -> int | None:
        """The step of the best intact checkpoint, the newest if none was validated."""
        return best_step(self._scores())

    def model(self, checkpoint: CheckpointSelector = "best") -> "TrainedModel":
        """Loads the model of a checkpoint: "best" by validation, "last", or a step.

        Raises:
          UserError: it cannot be read.
        """
        from flaxformer_mt.trained_model import load_run

        if not isinstance(checkpoint, str | int) or isinstance(checkpoint, bool):
            raise TypeError(
                f'checkpoint must be "best", "last" or a step, not {type(checkpoint).__name__}'
            )
        if isinstance(checkpoint, str) and checkpoint not in ("best", "last"):
            raise UserError(f'checkpoint={checkpoint!r}: choose "best", "last" or a step')
        return load_run(self.folder, checkpoint)

    def translator(self, checkpoint: CheckpointSelector = "best") -> "Translator":
        """Loads a translator with the parameters of a checkpoint, chosen as for `model`."""
        from flaxformer_mt.decoding.translator import Translator

        return Translator.from_runs([self.model(checkpoint)])

    @property
    def held_out_split(self) -> Literal["valid", "test"]:
        """The split to evaluate on: "test", or "valid" of a run without a test split."""
        data = self.config.data
        return "test" if data.test_split or data.test_corpora else "valid"

    def texts(self, split: Literal["valid", "test"] | None = None) -> "ParallelCorpus":
        """Reads the run's own text of a split, by default `held_out_split`, from its source.

        Raises:
          UserError: there is no such text, or it is not the one that the run was started with.
        """
        from flaxformer_mt.data.corpora.corpus import read_corpus
        from flaxformer_mt.data.dataset import open_all

        if split not in (None, "valid", "test"):
            raise UserError(f"split={split!r}: choose valid or test")
        split = split or self.held_out_split
        corpora = open_all(self.config, [split])[split]
        if not corpora:
            raise UserError(f"{self.folder} has no {split} split")
        texts = [(corpus.name, corpus.fingerprint) for corpus in corpora]
        check_texts(self.folder, {split: texts})
        return read_corpus(corpora)

    def evaluate(
        self,
        sources: Sequence[str] | None = None,
        references: Sequence[str] | Sequence[Sequence[str]] | None = None,
        *,
        split: Literal["valid", "test"] | None = None,
        checkpoint: CheckpointSelector = "best",
        metrics: "Mapping[str, MetricFunction] | None" = None,
        confidence: bool = False,
        beam_size: int | None = None,
        **options: Unpack[DecodeOptions],
    ) -> dict[str, Any]:
        """Translates text and compares it with references.

        Args:
          sources: sentences; by default the run's own test split, see `texts`.
          references: one translation per sentence, or several lists of them, if `sources` are
            given.
          split: instead of both, the split of the run to translate.
          checkpoint: as of `model`.
          metrics: further metrics, functions by name.
          confidence: whether to estimate 95% confidence intervals.
          beam_size: of the search; None = as configured.
          **options: search options, fields of `DecodeConfig`.

        Returns:
          BLEU, chrF, chrF++ and TER with their signatures, see `evaluation.evaluate`.

        Raises:
          UserError: one of `sources` and `references` is missing, their numbers differ, or the
            run's own text cannot be read.
        """
        from flaxformer_mt import evaluation
        from flaxformer_mt.decoding.translator import into_languages

        if (sources is None) != (references is None) or (sources is not None and split is not None):
            raise UserError("give sources together with references, or neither; split without them")
        if sources is None or references is None:
            texts = self.texts(split)
            sources, references = texts.sources, texts.targets
        given = require_texts(sources, "sources")
        lists = evaluation.reference_lists(references)
        for each in lists:
            if len(each) != len(given):
                raise UserError(f"{len(given)} sources, but {len(each)} references")
        chosen: dict[str, Any] = {
            "sources": given,
            "metrics": metrics,
            "confidence": confidence,
        }
        evaluation.check_options(len(given), **chosen)
        translator = self.translator(checkpoint)
        sentences, lists = into_languages(given, lists, translator.tokenizers.target)
        translations = translator.translate(sentences, beam_size, **options)
        return evaluation.evaluate(translations, lists, **chosen)

    def plot(
        self,
        metrics: Sequence[str] = (),
        *,
        x: "Axis" = "steps",
        smoothing: float = 0.0,
        beside: "Sequence[Run | str | Path]" = (),
    ) -> "Curves":
        """Returns the training curves, which show as a picture and can be saved.

        Args:
          metrics: names of metrics in `metrics.jsonl`, one panel each; by default loss, accuracy,
            BLEU, chrF, learning rate, gradient norm and speed, as far as there are such metrics.
          x: what they are plotted over: "steps", "tokens" or "hours".
          smoothing: weight, from 0 to below 1, of the past in a moving average while training.
          beside: other runs, or their folders, to plot in the same panels.

        Raises:
          UserError: a folder has no metrics, a metric is unknown, or `x` or `smoothing` is invalid.
        """
        from flaxformer_mt.plotting.curves import plot_curves

        others = [beside] if isinstance(beside, Run | str | Path) else list(beside)
        folders = [
            other.folder if isinstance(other, Run) else require_path(other, "beside", "runs")
            for other in others
        ]
        names = [metrics] if isinstance(metrics, str) else require_texts(metrics, "metrics")
        return plot_curves([self.folder, *folders], names, x, smoothing)

    def attention(
        self,
        source: str,
        target: str | None = None,
        checkpoint: CheckpointSelector = "best",
    ) -> "AttentionPicture":
        """Returns the attention of every layer and head, which shows as a page and can be saved.

        The default of `target` is the model's own translation of `source`.

        Raises:
          UserError: the checkpoint cannot be read, the source is empty, or a sentence is too long.
        """
        from flaxformer_mt.decoding.attention_weights import sentence_attention
        from flaxformer_mt.plotting.attention_page import AttentionPicture

        found = sentence_attention(self.translator(checkpoint), source, target)
        return AttentionPicture(found, shown(str(self.folder)))

    def fine_tuning_config(self, **changes: Mapping[str, Any]) -> ExperimentConfig:
        """Returns the configuration of a new run that starts from the best checkpoint.

            config = run.fine_tuning_config(data={"path": "mine.tsv"}, train={"num_steps": 500})
            flaxformer_mt.train(config, "runs/tuned")

        The parameters and the vocabulary are those of this run; step, optimizer and learning rate
        start anew. Where `data` has a path, corpora that this run names one by one or generates are
        replaced. `changes` are fields by group that differ from this run; those of `model` as far
        as the parameters still fit.

        Raises:
          TypeError: there is no such group or field, or a value is of another type.
          UserError: a value is invalid.
        """
        data: dict[str, Any] = {"tokenizer_path": ""}
        if "path" in changes.get("data", {}):
            data |= {"train_corpora": (), "valid_corpora": (), "test_corpora": ()}
            if self.config.data.corpus in GENERATED:
                data["corpus"] = "text"
        start = {
            "train": {"init_from": shown(str(self.folder)), "init_optimizer": False},
            "data": data,
        }
        return with_changes(with_changes(self.config, start), changes)

    def _scores(self, announce: Callable[[str], None] = print) -> dict[int, float]:
        from flaxformer_mt.runs.checkpoint import whole_checkpoints

        return whole_checkpoints(self.folder, announce)
