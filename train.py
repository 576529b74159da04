"""Trains one experiment in one folder, from the start or from where it stopped.

    python train.py --config=configs/quickstart.py --workdir=runs/quickstart

Any field of the configuration can be set: --optimizer.learning-rate=1e-3 --train.num-steps=500.
"""

import argparse
import dataclasses
import functools
import json
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import tyro
from rich.console import Console
from rich.table import Table

from flaxformer_mt import config as configuration
from flaxformer_mt.config import ExperimentConfig
from flaxformer_mt.data.batches import BatchLayout, TrainingBatches, evaluation_batches
from flaxformer_mt.data.corpus import ParallelCorpus, load_corpus
from flaxformer_mt.data.encoding import encode_corpus
from flaxformer_mt.data.tokenizer import Tokenizers
from flaxformer_mt.decoding.translator import Translator
from flaxformer_mt.errors import UserError
from flaxformer_mt.evaluation import evaluate
from flaxformer_mt.model.transformer import Transformer
from flaxformer_mt.training import loop
from flaxformer_mt.training.checkpoint import Checkpointer, restore_params
from flaxformer_mt.training.metrics import (
    ConsoleWriter,
    JsonLinesWriter,
    TensorBoardWriter,
    Writer,
    validate,
)
from flaxformer_mt.training.optimizer import make_optimizer, make_schedule
from flaxformer_mt.training.parallel import make_strategy, on_one_device
from flaxformer_mt.training.state import create_state
from flaxformer_mt.training.step import eval_step, train_step

console = Console(highlight=False, markup=False, soft_wrap=True)


@dataclasses.dataclass(frozen=True)
class Flags(ExperimentConfig):
    """Trains an experiment; every field of its configuration can be set here."""

    config: Path = dataclasses.field(kw_only=True)
    """Python file with get_config() -> ExperimentConfig; the defaults below are its values."""
    workdir: Path = dataclasses.field(kw_only=True)
    """Run folder, made if missing. A run that is there already is continued."""
    dry_run: bool = dataclasses.field(default=False, kw_only=True)
    """Check everything and say what would be trained, but write nothing and do not train."""


def parse_flags(arguments: Sequence[str]) -> Flags:
    """Reads the command line on top of the configuration file that it names.

    Raises:
      UserError: the file is missing or makes no configuration, or values do not go together.
      SystemExit: an option is unknown, mistyped or missing, or help was asked for.
    """
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--config", type=Path)
    path = finder.parse_known_args(arguments)[0].config
    experiment = ExperimentConfig() if path is None else load_config(path)
    defaults = {
        field.name: getattr(experiment, field.name)
        for field in dataclasses.fields(ExperimentConfig)
    }
    return tyro.cli(
        Flags,
        prog="train.py",
        description=__doc__,
        args=list(arguments),
        default=Flags(
            **defaults,
            config=tyro.MISSING if path is None else path,
            workdir=tyro.MISSING,
        ),
    )


def load_config(path: Path) -> ExperimentConfig:
    """Runs `get_config()` of a configuration file.

    Raises:
      UserError: there is no such file, or it does not give an `ExperimentConfig`.
    """
    if not path.is_file():
        raise UserError(f"--config: there is no file {path}")
    get_config = runpy.run_path(str(path)).get("get_config")
    if not callable(get_config):
        raise UserError(f"--config: {path} defines no get_config()")
    experiment = get_config()
    if not isinstance(experiment, ExperimentConfig):
        raise UserError(f"--config: get_config() of {path} gives no ExperimentConfig")
    return experiment


def open_run(workdir: Path, experiment: ExperimentConfig) -> bool:
    """Whether the folder holds a run of this experiment (True) or none (False).

    Raises:
      UserError: it holds a run of another experiment.
    """
    path = workdir / "config.json"
    if not path.exists():
        return False
    stored = configuration.from_json(path.read_text(encoding="utf-8"))
    changed = configuration.differences(stored, experiment)
    if changed:
        raise UserError(
            f"{workdir} holds a run of another configuration ({'; '.join(changed)}): "
            "give these values, or another --workdir"
        )
    return True


def check_fingerprints(workdir: Path, corpora: dict[str, ParallelCorpus]) -> None:
    """Refuses to continue a run on other text than it began with.

    Raises:
      UserError: a corpus has changed.
    """
    stored = json.loads((workdir / "data.json").read_text(encoding="utf-8"))
    for split, corpus in corpora.items():
        if stored.get(split) != corpus.fingerprint:
            raise UserError(
                f"the {split} corpus ({corpus.name}) is not the text that the run in {workdir} "
                "began with: restore it, or give another --workdir"
            )


def write_run(
    workdir: Path,
    experiment: ExperimentConfig,
    tokenizers: Tokenizers,
    corpora: dict[str, ParallelCorpus],
) -> None:
    """Writes what a run folder has besides checkpoints; `config.json`, which marks a run, last."""
    workdir.mkdir(parents=True, exist_ok=True)
    tokenizers.save(workdir / "tokenizer")
    fingerprints = {split: corpus.fingerprint for split, corpus in corpora.items()}
    (workdir / "data.json").write_text(json.dumps(fingerprints, indent=2) + "\n", encoding="utf-8")
    unfinished = workdir / "config.json.new"
    unfinished.write_text(configuration.to_json(experiment), encoding="utf-8")
    unfinished.replace(workdir / "config.json")


def count_parameters(params: Any) -> int:
    """Numbers in all arrays."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def run(flags: Flags) -> None:
    """Trains, and measures the best checkpoint on the test corpus.

    Raises:
      UserError: something that the user gave cannot be used.
    """
    experiment = ExperimentConfig(
        **{field.name: getattr(flags, field.name) for field in dataclasses.fields(ExperimentConfig)}
    )
    workdir = flags.workdir
    strategy = make_strategy(experiment)
    continued = open_run(workdir, experiment)

    data, train = experiment.data, experiment.train
    corpora = {
        split: load_corpus(data, name)
        for split, name in (
            ("train", data.train_split),
            ("valid", data.valid_split),
            ("test", data.test_split),
        )
    }
    if continued:
        check_fingerprints(workdir, corpora)
        tokenizers = Tokenizers.load(workdir / "tokenizer")
    else:
        tokenizers = Tokenizers.train(corpora["train"], data)
    given = experiment
    experiment = dataclasses.replace(
        experiment,
        model=configuration.with_vocabulary_sizes(
            experiment.model, tokenizers.source.vocab_size, tokenizers.target.vocab_size
        ),
    )
    encoded = {
        split: encode_corpus(corpus, tokenizers, experiment) for split, corpus in corpora.items()
    }
    layout = BatchLayout.from_config(experiment)
    training = TrainingBatches(encoded["train"], layout, train.seed)

    model = Transformer(experiment.model)
    schedule = make_schedule(experiment.optimizer, experiment.model.d_model, train.num_steps)
    optimizer = make_optimizer(experiment.optimizer, schedule)
    make_state = functools.partial(create_state, model, optimizer, train.seed)

    summary = Table(box=None, show_header=False, pad_edge=False)
    for split, corpus in encoded.items():
        summary.add_row(split, str(corpus.report))
    parameters = count_parameters(jax.eval_shape(make_state).params)
    summary.add_row("model", f"{parameters:,} parameters, {experiment.model.dtype}")
    summary.add_row(
        "batch",
        f"{layout.rows} rows of {layout.source_row_length} source and {layout.target_row_length} "
        f"target tokens, {training.fill:.1%} filled; "
        f"{training.rows_per_epoch / layout.rows:,.1f} batches an epoch",
    )
    devices = experiment.parallel.num_devices or jax.device_count()
    summary.add_row("devices", f"{devices} {jax.devices()[0].platform}")
    console.print(summary)
    if flags.dry_run:
        return
    if not continued:
        write_run(workdir, given, tokenizers, corpora)

    run_eval_step = strategy.compile_eval_step(
        functools.partial(eval_step, model=model, config=train)
    )

    def validate_on(split: str, params: Any) -> dict[str, Any]:
        batches = map(strategy.place_batch, evaluation_batches(encoded[split], layout))
        return validate(run_eval_step, params, batches)

    def evaluate_valid(params: Any, step: int) -> dict[str, Any]:
        figures = validate_on("valid", params)
        if not experiment.model.has_inputs:
            return figures
        _, quality = translation_quality(
            on_one_device(params), corpora["valid"], train.eval_sentences
        )
        return {**figures, **quality}

    def translation_quality(
        params: Any, corpus: ParallelCorpus, num_sentences: int
    ) -> tuple[list[str], dict[str, Any]]:
        sources = corpus.sources[: num_sentences or None]
        translator = Translator(experiment, params, tokenizers)
        hypotheses = translator.translate(sources, show_progress=console.is_terminal)
        return hypotheses, evaluate(hypotheses, corpus.targets[: len(sources)], with_ter=False)

    json_writer = JsonLinesWriter(workdir / "metrics.jsonl")
    writers: list[Writer] = [
        json_writer,
        TensorBoardWriter(workdir / "tensorboard"),
        ConsoleWriter(train.num_steps, console),
    ]
    with Checkpointer(workdir, train.keep_last, train.keep_best, train.best_metric) as checkpointer:
        loop.train(
            strategy.place_state(make_state()),
            train_step=strategy.compile_train_step(
                functools.partial(train_step, model=model, optimizer=optimizer, config=train)
            ),
            batches=lambda step: strategy.place_batch(training.batch(step)),
            evaluate=evaluate_valid,
            schedule=schedule,
            checkpointer=checkpointer,
            writers=writers,
            config=train,
        )

    if not experiment.model.has_inputs:
        return  # A language model has nothing to translate.
    step, params = restore_params(workdir, "best")
    test = corpora["test"]
    hypotheses, figures = translation_quality(params, test, 0)
    figures |= validate_on("test", strategy.place_state(params))
    json_writer.write(step, "test", figures)
    for number in range(min(train.show_translations, len(test))):
        console.print(f"\nsource       {test.sources[number]}")
        console.print(f"translation  {hypotheses[number]}")
        console.print(f"reference    {test.targets[number]}")
    console.print(
        f"\ntest ({test.name}), best checkpoint (step {step:,}): "
        f"loss {figures['loss']:.4f}, BLEU {figures['bleu']:.2f}, chrF {figures['chrf']:.2f}  "
        f"[{figures['bleu_signature']}]"
    )
    console.print(f"translate with: flaxformer-mt translate --run {workdir} < source.txt")


def main() -> None:
    """The entry point."""
    try:
        run(parse_flags(sys.argv[1:]))
    except UserError as error:
        print(f"train.py: error: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
