"""Experiments: the parts of a training run put together, for programs, scripts and notebooks.

    run = experiment.train("configs/quickstart.py", "runs/quickstart")

does everything: it tokenises, trains, evaluates, and continues an existing run. To use the parts
separately:

    config = load_config("configs/quickstart.py")  # of flaxformer_mt.config.files
    with experiment.open_folder(workdir) as folder:
        parts = experiment.prepare(config, workdir)
        experiment.fit(parts, folder)
        step, translations, metrics = experiment.evaluate_test(parts, folder)
"""

import contextlib
import dataclasses
import functools
import itertools
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO, cast

import jax
import numpy as np
from rich.console import Console

from flaxformer_mt import distributed
from flaxformer_mt.config import (
    GENERATED,
    DataConfig,
    DecodeConfig,
    ExperimentConfig,
    TransformerConfig,
    with_vocabulary_sizes,
)
from flaxformer_mt.config.files import load_config
from flaxformer_mt.data.corpora.corpus import has_splits
from flaxformer_mt.data.dataset import (
    Dataset,
    EvaluationSet,
    held_out_roles,
    open_all,
    open_dataset,
    resolve_config,
    tokenize,
)
from flaxformer_mt.data.sanity_checks import check_not_blank, check_sides, warn_of_shared_pairs
from flaxformer_mt.data.stream.batches import (
    Batch,
    DataPosition,
    evaluation_batches,
    packed_shape,
    pair_lengths,
)
from flaxformer_mt.data.stream.prefetch import Prefetched
from flaxformer_mt.data.tokenizers.sentencepiece_tokenizer import SentencePieceTokenizer
from flaxformer_mt.data.tokenizers.tokenizer import Tokenizers
from flaxformer_mt.decoding.scoring.teacher_forcing import predict_tokens
from flaxformer_mt.decoding.shortlists.shortlist import require_shortlist
from flaxformer_mt.decoding.text_arguments import require_path
from flaxformer_mt.decoding.translator import Sentence, Translator, check_search, into_languages
from flaxformer_mt.errors import UserError
from flaxformer_mt.evaluation import evaluate
from flaxformer_mt.evaluation.metrics import tokenizer_of_run
from flaxformer_mt.evaluation.teacher_forced import seq2seq_acc, teacher_forced_bleu
from flaxformer_mt.interop.exports import exports, summary
from flaxformer_mt.interruption import Interrupted, Interruption, handle_signals
from flaxformer_mt.memory_limits import explained_exhaustion
from flaxformer_mt.model.attention import attention_class
from flaxformer_mt.model.transformer import Transformer
from flaxformer_mt.run_reader import Run
from flaxformer_mt.runs import atomic, step_folders
from flaxformer_mt.runs.checkpoint import Checkpointer, restore_params
from flaxformer_mt.runs.folder import (
    check_unchanged,
    check_vocabulary,
    holds_run,
    read_tokenizers,
    update_config,
    with_stored_start,
    write_run,
)
from flaxformer_mt.runs.layout import CACHE, CONFIG, METRICS, TENSORBOARD
from flaxformer_mt.runs.lock import locked
from flaxformer_mt.standard_output import BestEffortOutput
from flaxformer_mt.training import loop
from flaxformer_mt.training.memory import require_training_memory, step_cost
from flaxformer_mt.training.optimizer import make_optimizer, make_schedule
from flaxformer_mt.training.parallel import Strategy, make_strategy
from flaxformer_mt.training.parameters import Params, describe
from flaxformer_mt.training.reporting.callbacks import Callback, Callbacks
from flaxformer_mt.training.reporting.console import ConsoleWriter, Sample, print_labelled, some_of
from flaxformer_mt.training.reporting.metrics import (
    JsonLinesWriter,
    TensorBoardWriter,
    Writer,
    validate,
)
from flaxformer_mt.training.state import TrainState, create_state
from flaxformer_mt.training.step import eval_step, train_step
from flaxformer_mt.training.warm_start import (
    load_parameters,
    require_parameters,
    require_vocabulary,
    start_from,
    tokenizer_path,
)


def train(
    config: ExperimentConfig | str | Path,
    workdir: str | Path,
    *,
    callbacks: Sequence[Callback] = (),
    console: Console | None = None,
    interruption: Interruption | None = None,
) -> Run:
    """Trains an experiment, or continues it, and evaluates the best checkpoint on the test corpus.

    A callback sees the metrics as they are written, and may stop the run:

        def watch(step, split, metrics):
            return split == "valid" and metrics["bleu"] > 30

        train("configs/quickstart.py", "runs/quickstart", callbacks=[watch])

    The run is saved then, evaluated, and returned; the same call continues it. If a callback
    raises an exception, the run is saved as well, and ends with that exception.

    Args:
      config: the configuration, or the path of a configuration file.
      workdir: the run folder; created if missing.
      callbacks: functions, called as `callback(step, split, metrics)` in their order: with the
        metrics of split "train" every `train.log_every` steps, and of "valid" after each
        validation. They return True to stop, None or False to go on. Of several processes, the
        first one calls them.
      console: prints the progress; by default to standard output.
      interruption: stops training in an orderly way, and saves; by default Ctrl-C and SIGTERM do,
        if this is the main thread.

    Returns:
      The run.

    Raises:
      TypeError: an argument is of another type.
      UserError: the configuration or the data cannot be used, or the folder holds another run.
      Interrupted: a signal arrived, and everything is saved.
    """
    if not isinstance(config, ExperimentConfig):
        config = load_config(require_path(config, "config", "an ExperimentConfig or a path"))
    workdir = require_path(workdir, "workdir")
    console = console or make_console(
        BestEffortOutput(f"training goes on without it, and {workdir / METRICS} has all metrics")
    )
    if isinstance(callbacks, Iterator):
        callbacks = list(callbacks)
    Callbacks(callbacks)  # Raises now what `fit` would raise.
    _check_before_start(config, workdir)
    require_training_memory(config, make_strategy(config))
    with open_folder(workdir, console.print) as folder:
        experiment = prepare(config, folder)
        print_labelled(experiment.report(), console)
        given = contextlib.nullcontext(interruption)
        with given if interruption else handle_signals() as handled:
            fit(experiment, folder, console, handled, callbacks=callbacks)
        if experiment.dataset.test is not None:
            print_test(experiment, folder, experiment.dataset.test, console)
        if config.model.has_inputs:  # A language model does not translate.
            console.print(f"translate with: flaxformer-mt translate --run {folder} < source.txt")
    return Run(workdir)


def dry_run(config: ExperimentConfig, workdir: str | Path, console: Console | None = None) -> None:
    """Checks an experiment and prints what would be trained, without writing anything.

    Errors as in `train`, except that too little memory is only printed: the run may be meant for
    another machine.
    """
    workdir, console = Path(workdir), console or make_console()
    if jax.process_count() > 1:
        raise UserError("--dry-run is for one process: start it without the others")
    _check_before_start(config, workdir)
    atomic.require_writable(workdir)
    with tempfile.TemporaryDirectory() as cache:
        experiment = prepare(config, workdir, cache_folder=Path(cache), write=False)
        print_labelled(experiment.report(), console)
        print_labelled(experiment.export_obstacles(), console)
        try:
            require_training_memory(experiment.config, experiment.strategy)
        except UserError as error:
            console.print(f"memory   {error}: training would be refused here")
        print_labelled(experiment.costs(), console)


def make_console(file: BestEffortOutput | None = None) -> Console:
    """Returns a console for the progress of a run; quiet in all processes but the first.

    Args:
      file: to print to; by default standard output.
    """
    return Console(
        file=cast(TextIO, file),
        highlight=False,
        markup=False,
        soft_wrap=True,
        quiet=not distributed.is_main(),
    )


def _check_before_start(config: ExperimentConfig, workdir: Path) -> None:
    """Raises errors that can be found before anything is read or written."""
    for name in ("dtype", "param_dtype"):
        if (
            getattr(config.model, name) == "float64"
            and jax.dtypes.canonicalize_dtype("float64") != "float64"
        ):
            raise UserError(
                f"model.{name}=float64: JAX computes in float32 unless the environment has "
                "JAX_ENABLE_X64=1"
            )
    attention_class(config.model)
    make_strategy(config)
    schedule = make_schedule(config.optimizer, config.model.d_model, config.train.num_steps)
    packed_shape(config)
    holds_run(workdir, config)
    if config.train.freeze:
        # Raises what is wrong with it. The sizes of the vocabularies are not known yet.
        model = Transformer(with_vocabulary_sizes(config.model, 1, 1))
        optimizer = make_optimizer(config.optimizer, schedule)
        jax.eval_shape(functools.partial(create_state, model, optimizer, config.train))


def _require_effects(config: ExperimentConfig) -> None:
    """Checks a new run for options that others make ineffective.

    Raises:
      UserError: there is one.
    """
    data, model = config.data, config.model
    is_generated = data.corpus in GENERATED and not data.train_corpora
    if is_generated and data.path and not data.path.startswith("tfds:"):
        raise UserError(
            f"data.path={data.path} has no effect, since data.corpus={data.corpus} is generated: "
            "set data.corpus=text for a file or a folder of your own"
        )
    if data.hold_out and not held_out_roles(data):
        raise UserError(
            f"data.hold_out={data.hold_out} has no effect: data.valid_corpora are the development "
            "set, and data.test_corpora or data.test_split='' the test set"
        )
    if data.train_split != DataConfig.train_split and not (data.train_corpora or has_splits(data)):
        raise UserError(
            f"data.train_split={data.train_split} has no effect: data.path={data.path} has no "
            "splits"
        )
    if data.subword_sampling and not model.has_inputs:
        raise UserError(
            f"data.subword_sampling={data.subword_sampling} has no effect: a language model has no "
            "sources to segment"
        )
    if not model.has_inputs:
        for name, is_given in (
            ("data.max_length_ratio", data.max_length_ratio),
            ("data.drop_identical", data.drop_identical),
            ("train.watch", config.train.watch),
        ):
            if is_given:
                raise UserError(f"{name} has no effect: a language model has no sources")
    optimizer = config.optimizer
    if optimizer.total_steps and optimizer.schedule != "one_cycle":
        raise UserError(
            f"optimizer.total_steps={optimizer.total_steps} has no effect with "
            f"optimizer.schedule={optimizer.schedule}: it is the length of one_cycle"
        )
    rates = (
        model.dropout_rate, model.embedding_dropout, model.attention_dropout_rate,
        model.activation_dropout_rate,
    )  # fmt: skip
    if config.train.r_drop and not any(rates):
        raise UserError(
            f"train.r_drop={config.train.r_drop} has no effect without dropout: set "
            "model.dropout_rate, or train.r_drop=0"
        )


def _require_shared_vocabulary(model: TransformerConfig, tokenizers: Tokenizers) -> None:
    """Checks that an embedding table of both sides is for a vocabulary of both sides.

    Raises:
      UserError: each side has learned a vocabulary of its own.
    """
    source, target = tokenizers.source, tokenizers.target
    # In published vocabularies, the same ids may be read by two tokenizers.
    is_own = isinstance(source, SentencePieceTokenizer)
    if is_own and source.fingerprint != target.fingerprint and model.shares_source_and_target:
        raise UserError(
            f"model.tie_embeddings={model.tie_embeddings} gives both sides one table, but each has "
            "a vocabulary of its own: set model.tie_embeddings=target_output or none, or "
            "data.joint_vocabulary=True"
        )


@contextlib.contextmanager
def open_folder(workdir: Path, announce: Callable[[str], None] = print) -> Iterator[Path]:
    """Creates and locks a run folder; one that was created for nothing is removed again.

    This is so if no run was written to it, or if the run was refused before it trained: the
    corrected command then starts anew.

    Args:
      workdir: the run folder.
      announce: see `locked`.

    Raises:
      UserError: another process trains there, or the folder cannot be written to.
    """
    if not distributed.is_main():
        yield workdir
        return
    before = set(workdir.iterdir()) if workdir.is_dir() else None
    with locked(workdir, announce):
        is_refused = False
        try:
            yield workdir
        except UserError:
            is_refused = True
            raise
        finally:
            is_needed = _has_trained(workdir) if is_refused else (workdir / CONFIG).exists()
            if not is_needed and (is_refused or before is None):
                _remove_new(workdir, before)


def _remove_new(workdir: Path, before: Collection[Path] | None) -> None:
    """Removes what is in a folder but not in `before`; the folder, too, if that is None."""
    if before is None:
        # NFS keeps files that are still open, such as the lock.
        shutil.rmtree(workdir, ignore_errors=True)
    elif workdir / CONFIG not in before:
        for path in {*workdir.iterdir()}.difference(before):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def _has_trained(workdir: Path) -> bool:
    metrics = workdir / METRICS
    return step_folders.has_any(workdir) or (metrics.exists() and metrics.stat().st_size > 0)


def prepare(
    given: ExperimentConfig,
    workdir: Path,
    *,
    cache_folder: Path | None = None,
    write: bool = True,
    check_languages: bool = True,
) -> "Experiment":
    """Builds the experiment of a new run, or of the run in a folder.

    Of several processes the first one tokenises and writes the run folder.

    Args:
      given: the configuration as given by the user.
      workdir: the run folder.
      cache_folder: where tokens are stored; by default in the run folder.
      write: whether to write a new run's configuration, vocabulary and fingerprints.
      check_languages: whether to check that the sides of a new run's corpora are not swapped, for
        which Babel is imported.

    Returns:
      The experiment: its configuration, vocabulary, tokens, batches, model, optimizer and devices.

    Raises:
      UserError: the folder holds another run, or the configuration or the data cannot be used.
    """
    if not distributed.is_main():
        distributed.barrier("data")
        if write:
            _require_shared(workdir)
    continued = holds_run(workdir, given)
    if continued:
        given = with_stored_start(workdir, given)
    else:
        _require_effects(given)
        require_parameters(given.train.init_from, given.model)
    if given.decode.shortlist:
        require_shortlist(given.decode.shortlist)
    corpora = open_all(given)
    for of_role in corpora.values():
        check_not_blank(of_role, given.model.has_inputs)
    if continued:
        tokenizers = read_tokenizers(workdir)
        check_unchanged(workdir, corpora, tokenizers)
    else:
        if given.model.has_inputs and check_languages:
            check_sides(corpora["train"], [*corpora["valid"], *corpora["test"]])
        path = tokenizer_path(given)
        if path:
            check_vocabulary(Path(path))
        data = dataclasses.replace(given.data, tokenizer_path=path)
        tokenizers = Tokenizers.for_run(corpora["train"], data, given.model.has_inputs)
        _require_shared_vocabulary(given.model, tokenizers)
        if given.train.init_from and path != given.train.init_from:
            require_vocabulary(given.train.init_from, tokenizers)
        if data.subword_sampling:
            tokenizers.source.sample([], 0, data.subword_sampling)  # Some vocabularies cannot.
    if given.model.has_inputs:
        check_search(given.model, tokenizers, given.decode)
    tokens = tokenize(
        given,
        corpora,
        tokenizers,
        cache_folder or workdir / CACHE,
        verify=distributed.is_main(),
    )
    config = resolve_config(given, tokens, tokenizers)
    experiment = Experiment(config, open_dataset(config, tokens, tokenizers))
    if not continued:
        experiment.load_given_parameters()  # Errors are raised before anything is written.
    if distributed.is_main():
        if not continued:
            warn_of_shared_pairs(tokens.training, tokens.held_out)
        if write and continued:
            update_config(workdir, given)
        elif write:
            write_run(workdir, given, corpora, tokenizers)
        distributed.barrier("data")
    # Collectives wait for a late process for a limited time, on CPUs for 30 s.
    distributed.barrier("experiment is prepared")
    return experiment


_SHARED_SECONDS = 60
"""How long a file system may take to show other hosts what one of them has written: that of NFS."""


def _require_shared(workdir: Path) -> None:
    """Checks that a process other than the first sees the run folder that the first has written.

    Raises:
      UserError: it does not.
    """
    end = time.monotonic() + _SHARED_SECONDS
    while not (workdir / CONFIG).exists():
        if time.monotonic() > end:
            raise UserError(
                f"--workdir={workdir}: process {jax.process_index()} does not see what process 0 "
                "has written there: give a folder on a file system that all processes share"
            )
        time.sleep(0.5)


class Experiment:
    """The parts of an experiment: model, optimizer, strategy, steps and data.

    Args:
      config: the resolved configuration, from `resolve_config`.
      dataset: its data.

    Raises:
      UserError: the devices, rows or schedule do not fit the configuration.
    """

    def __init__(self, config: ExperimentConfig, dataset: Dataset) -> None:
        self.config = config
        self.dataset = dataset
        self.strategy: Strategy = make_strategy(config)
        self.model = Transformer(config.model)
        self.schedule = make_schedule(
            config.optimizer, config.model.d_model, config.train.num_steps
        )
        self.optimizer = make_optimizer(config.optimizer, self.schedule)
        self.make_state: Callable[[], TrainState] = functools.partial(
            create_state, self.model, self.optimizer, config.train
        )
        self.train_step = functools.partial(
            train_step, model=self.model, optimizer=self.optimizer, config=config.train
        )
        self._batches = {
            split: evaluation_batches(
                evaluated.tokens, config, self.strategy.row_shards, self.strategy.shard
            )
            for split, evaluated in dataset.evaluation_sets.items()
        }
        shapes = {_shapes(batch) for batches in self._batches.values() for batch in batches}
        self.run_eval_step = self.strategy.compile_eval_step(
            functools.partial(eval_step, model=self.model, config=config.train), len(shapes)
        )

    def report(self) -> Iterator[tuple[str, str]]:
        """Yields the lines at the start of a run, each with its label."""
        config = self.config
        yield from self.dataset.report()
        params = jax.eval_shape(self.make_state).params
        yield (
            "model",
            f"{describe(params, config.train.freeze, config.model)}, {config.model.dtype}",
        )
        epochs = config.train.num_steps / self.dataset.training.batches_per_epoch
        yield "steps", f"{config.train.num_steps:,}, which are {epochs:,.1f} epochs"
        if config.train.label_smoothing:
            smoothing = f"with label smoothing of {config.train.label_smoothing:g}"
            yield "loss", f"{smoothing}; the perplexity is exp(loss) without it"
        axes = " x ".join(f"{size} {axis}" for axis, size in self.strategy.mesh.shape.items())
        devices = self.strategy.devices
        yield "devices", f"{len(devices)} {devices[0].platform} ({axes})"
        for line in self.strategy.sharding(params).not_divisible:
            yield "sharding", line
        yield "exports", summary(config.model, self.dataset.tokenizers.has_sentencepiece)

    def export_obstacles(self) -> Iterator[tuple[str, str]]:
        """Yields what prevents an export to each other format."""
        has_sentencepiece = self.dataset.tokenizers.has_sentencepiece
        for name, obstacle in exports(self.config.model, has_sentencepiece).items():
            if obstacle:
                yield "exports", f"not {name}: {obstacle}"

    def costs(self) -> Iterator[tuple[str, str]]:
        """Compiles the training step for each shape, and yields what it needs per device."""
        for shape in self.dataset.training.shapes:
            cost = step_cost(
                self.strategy, self.make_state, self.train_step, shape, self.config.model.has_inputs
            )
            rows = f"{shape.rows} x {shape.source_length} and {shape.target_length} tokens"
            yield "step", f"one compilation for {rows}: {cost}"

    @functools.cache  # noqa: B019  (an experiment lives as long as the program)
    def load_given_parameters(self) -> Params | None:
        """Loads the parameters that `train.init_from` names, if any, onto the host.

        Raises:
          UserError: they cannot be read, or belong to another model.
        """
        if not self.config.train.init_from:
            return None
        template = jax.eval_shape(self.make_state).params
        return load_parameters(self.config.train.init_from, self.config.model, template)

    def initial_state(self) -> TrainState:
        """Creates the state before the first step, on the devices."""
        state = self.strategy.create_state(self.make_state)
        params = self.load_given_parameters()
        return state if params is None else start_from(state, params, self.strategy.place_state)

    def abstract_state(self) -> TrainState:
        """Returns the shapes, dtypes and shardings of the state, to restore a checkpoint into."""
        return self.strategy.abstract_state(self.make_state)

    def stream(self, position: DataPosition) -> Prefetched[Batch]:
        """Returns an iterator of batches on the devices, from a position in the data."""
        training, strategy = self.dataset.training, self.strategy

        def read(position: DataPosition) -> tuple[Batch, DataPosition]:
            batch, after = training.read(position, strategy.shard)
            return strategy.place_batch(batch), after

        return Prefetched(read, position)

    def quality(self, hypotheses: Sequence[str], references: Sequence[str]) -> dict[str, Any]:
        """Computes BLEU, with the tokenizer for the target language, and chrF."""
        return evaluate(
            hypotheses,
            references,
            standard=("bleu", "chrf"),
            tokenize=tokenizer_of_run(self.config.data),
        )

    def measure(self, split: str, params: Any) -> dict[str, Any]:
        """Computes loss, accuracy and perplexity of the development or test corpus."""
        batches = map(self.strategy.place_batch, self._batches[split])
        corpus = self.dataset.evaluation_sets[split].tokens
        lengths = np.maximum(*pair_lengths(corpus))
        longest = int(lengths.argmax())
        if lengths[longest] <= self.config.data.target_row_length:
            return validate(self.run_eval_step, params, batches)
        with explained_exhaustion(
            f"the loss of {corpus.name}",
            f"shorten or remove its longest pair, number {longest + 1:,}, which has "
            f"{lengths[longest]:,} tokens",
        ):
            return validate(self.run_eval_step, params, batches)

    def validate(self, params: Any) -> tuple[dict[str, Any], list[Sample]]:
        """Computes the metrics of a validation, with those of its translations.

        Args:
          params: parameters, placed by the strategy.

        Returns:
          The metrics, and translations to show: of some of the sentences, and of `train.watch`.
        """
        metrics = self.measure("valid", params)
        if not self.config.model.has_inputs:
            return metrics, []
        texts, watched = self.dataset.valid.texts, self.config.train.watch
        chosen = texts.first_of_parts(self.config.train.eval_sentences or len(texts))
        sources, references = (
            [side[index] for index in chosen] for side in (texts.sources, texts.targets)
        )
        sentences, (references,) = into_languages(
            sources, [references], self.dataset.tokenizers.target
        )
        hypotheses = self.translate(self.strategy.gather(params), [*sentences, *watched])
        own = hypotheses[: len(sources)]
        quality = self.quality(own, references)
        samples = [
            *some_of([Sample(*each) for each in zip(sources, own, references, strict=True)]),
            *(Sample(*each) for each in zip(watched, hypotheses[len(sources) :], strict=True)),
        ]
        return {**metrics, **quality, **self._teacher_forced_metrics(params)}, samples

    def _teacher_forced_metrics(self, params: Any) -> dict[str, float]:
        """Computes `train.teacher_forced_metrics` of the development set."""
        wanted = self.config.train.teacher_forced_metrics
        corpus = self.dataset.valid.tokens
        if not wanted or corpus.sources is None:
            return {}
        sources, targets = (
            [side[index].tolist() for index in range(len(side))]
            for side in (corpus.sources, corpus.targets)
        )
        own = distributed.share_out(range(len(targets)))
        predicted = predict_tokens(
            self.strategy.gather(params),
            self.config.model,
            self.config.decode,
            [sources[index] for index in own],
            [targets[index] for index in own],
        )
        lines = distributed.gather_texts([json.dumps(tokens) for tokens in predicted])
        predictions = [json.loads(line) for line in lines]
        functions: dict[str, Callable[[], float]] = {
            "seq2seq_acc": lambda: seq2seq_acc(predictions, targets, list(map(len, sources))),
            "teacher_forced_bleu": lambda: teacher_forced_bleu(predictions, targets),
        }
        return {name: functions[name]() for name in wanted}

    def translate(
        self, params: Any, sources: Sequence[str | Sentence], show_progress: bool = False
    ) -> list[str]:
        """Translates sentences; of several processes, each translates a part.

        Args:
          params: parameters on one device of each process.
          sources: the sentences, with constraints on their translations if they have any.
          show_progress: whether to draw a progress bar.
        """
        decode = self.config.decode
        if self.config.parallel.num_devices:
            decode = decoding_on(self.strategy.devices, decode)
        translator = Translator(self.config.model, params, self.dataset.tokenizers, decode)
        own = translator.translate(distributed.share_out(sources), show_progress=show_progress)
        return distributed.gather_texts(own)


def _shapes(batch: Batch) -> tuple[tuple[int, ...], ...]:
    """The shapes for which a step is compiled."""
    return tuple(leaf.shape for leaf in jax.tree.leaves(batch))


def decoding_on(devices: Sequence[jax.Device], decode: DecodeConfig) -> DecodeConfig:
    """Returns search options with which no more devices translate than train.

    Args:
      devices: those that train, of all processes.
      decode: the options; those of a user who chose `num_devices` do not change.
    """
    own = [each for each in devices if each.process_index == jax.process_index()]
    if decode.num_devices or not own or own[0].platform == "cpu":  # Zero means one CPU.
        return decode
    return dataclasses.replace(decode, num_devices=len(own))


def fit(
    experiment: Experiment,
    workdir: Path,
    console: Console | None = None,
    interruption: Interruption | None = None,
    writers: Sequence[Writer] | None = None,
    callbacks: Sequence[Callback] = (),
) -> None:
    """Trains from the newest checkpoint, or from the start, and writes checkpoints and metrics.

    Args:
      experiment: from `prepare`.
      workdir: its run folder.
      console: prints the progress.
      interruption: see `train`.
      writers: receive the metrics, in the first process; by default `metrics.jsonl`, TensorBoard
        and the console.
      callbacks: see `train`.

    Raises:
      TypeError: a callback is no function, or returned something else than a truth value.
      UserError: see `loop.train`.
      Interrupted: a signal arrived, and everything is saved.
    """
    config, console = experiment.config.train, console or make_console()
    display = ConsoleWriter(
        config.num_steps, console, experiment.dataset.training.batches_per_epoch
    )
    if writers is None:
        writers = [
            JsonLinesWriter(workdir / METRICS, console.print),
            TensorBoardWriter(workdir / TENSORBOARD),
            display,
        ]

    def validated(params: Params, step: int) -> dict[str, Any]:
        display.validating()
        metrics, samples = experiment.validate(params)
        display.translated(samples)
        return metrics

    several = jax.process_count() > 1
    watching = Callbacks(callbacks, distributed.agree, config.log_every if several else 1)
    with (
        explained_exhaustion("training", _LESS_MEMORY),
        Checkpointer(
            workdir, config.keep_last, config.keep_best, config.best_metric, console.print
        ) as checkpointer,
    ):
        is_new = checkpointer.latest_step() is None
        state = experiment.initial_state() if is_new else experiment.abstract_state()
        train_step = experiment.strategy.compile_train_step(
            experiment.train_step, len(experiment.dataset.training.shapes)
        )
        train_step.on_compile = display.compiling
        with (
            contextlib.nullcontext(lambda step: False)
            if interruption is None
            else interruption.deferred(distributed.agree if several else None, config.log_every)
        ) as is_interrupted:
            try:
                loop.train(
                    state,
                    train_step=train_step,
                    stream=experiment.stream,
                    evaluate=validated,
                    schedule=experiment.schedule,
                    checkpointer=checkpointer,
                    writers=[*writers, watching] if distributed.is_main() else (),
                    config=config,
                    devices=experiment.strategy.devices,
                    # Both are asked after every step, because processes have to agree on each.
                    should_stop=lambda step: any(
                        [is_interrupted(step), watching.should_stop(step)]
                    ),
                    announce=console.print,
                    on_step=display.advance,
                )
            except Interrupted as interrupted:
                if not watching.is_stopping:
                    raise
                console.print(f"by a callback, {interrupted}")
            # While signals are still deferred.
            checkpointer.wait()
            watching.finish()


_LESS_MEMORY = (
    "set model.remat=full, or parallel.fsdp with several devices; a new run can also have more "
    "train.accumulation_steps or a lower train.batch_tokens"
)


def evaluate_test(
    experiment: Experiment, workdir: Path, show_progress: bool = False
) -> tuple[int, list[str], dict[str, Any]]:
    """Evaluates the best checkpoint on the test corpus, and writes the metrics.

    Returns:
      The checkpoint's step, the translations, of which a language model has none, and the metrics.

    Raises:
      UserError: the experiment has no test corpus.
    """
    test = experiment.dataset.test
    if test is None:
        raise UserError("data.test_split is empty: there is nothing to test on")
    step, params = restore_params(workdir, "best")
    hypotheses: list[str] = []
    metrics = experiment.measure("test", experiment.strategy.place_state(params))
    if experiment.config.model.has_inputs:
        sentences, (references,) = into_languages(
            test.texts.sources, [test.texts.targets], experiment.dataset.tokenizers.target
        )
        hypotheses = experiment.translate(params, sentences, show_progress)
        metrics |= experiment.quality(hypotheses, references)
    if distributed.is_main():
        JsonLinesWriter(workdir / METRICS).write(step, "test", metrics)
    return step, hypotheses, metrics


def print_test(
    experiment: Experiment, workdir: Path, test: EvaluationSet, console: Console
) -> None:
    """Evaluates the best checkpoint on the test corpus, and prints metrics and translations."""
    step, hypotheses, metrics = evaluate_test(experiment, workdir, console.is_terminal)
    head = f"test ({test.texts.name}), best checkpoint (step {step:,}): loss {metrics['loss']:.4f}"
    if not experiment.config.model.has_inputs:
        console.print(f"\n{head}, perplexity {metrics['perplexity']:.2f}")
        return
    texts = zip(test.texts.sources, hypotheses, test.texts.targets, strict=True)
    for each in itertools.islice(texts, experiment.config.train.show_translations):
        console.print()
        print_labelled(Sample(*each).rows(), console, width=12)
    console.print(
        f"\n{head}, BLEU {metrics['bleu']:.2f}, chrF {metrics['chrf']:.2f}  "
        f"[{metrics['bleu_signature']}]",
        soft_wrap=not console.is_terminal,  # Terminals would break lines within words.
    )
