"""Trains a recipe, averages checkpoints, translates its test sets and scores them."""

import itertools
import json
import math
import shutil
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from sacrebleu.metrics import BLEU, CHRF

from flaxformer_mt import atomic
from flaxformer_mt.config import ExperimentConfig
from flaxformer_mt.config.experiment import with_changes
from flaxformer_mt.data.corpora.text_files import read_lines
from flaxformer_mt.decoding.translator import Translator
from flaxformer_mt.errors import UserError
from flaxformer_mt.plotting.history import read_history
from flaxformer_mt.run_layout import CONFIG
from flaxformer_mt.run_reader import MetricRows, Run
from flaxformer_mt.runs import data_file
from flaxformer_mt.runs.averaging import average_run
from flaxformer_mt.runs.folder import read_fingerprints
from flaxformer_mt.trained_model import TrainedModel, load_run
from reproduction import provenance
from reproduction.recipe import Member, Recipe, members, run_name
from reproduction.texts import write_lines

NUM_BOOTSTRAP_SAMPLES = 1000


def run(
    name: str,
    recipe: Recipe,
    data: Path,
    out: Path,
    seed: int,
    changes: Mapping[str, Mapping[str, Any]] | None = None,
) -> dict[str, Any]:
    """Trains a recipe, or continues it, and scores it.

    Args:
      name: of the recipe.
      recipe: what to train.
      data: the folder of the raw corpora.
      out: run folders, prepared text and translations go there.
      seed: of initial values, dropout and the order of the data; the members of an ensemble have
        their own.
      changes: values that replace those of the recipe, to try it out: `{"train": {...}}`.

    Returns:
      JSON values: scores by test set, the number of steps, the hours that these took, without
      validation, and what they rest on. Of an ensemble, steps, tokens and hours are sums, other
      values of training those of the first model.
    """
    folder = None if recipe.text is None else recipe.text.prepare(data, out)
    models = [_member(member, folder, out, changes or {}) for member in members(name, recipe, seed)]
    first = models[0]
    best = min(first.rows("valid"), key=lambda row: row["loss"])
    return {
        "name": name,
        "seed": seed,
        "command": f"python benchmarks/results.py --run {name} --seed {seed}",
        "commit": ", ".join(dict.fromkeys(itertools.chain(*(each.commits for each in models)))),
        "data": first.data,
        "device": provenance.device(),
        "steps": sum(model.steps for model in models),
        "target_tokens": sum(model.target_tokens for model in models),
        "tokens_per_second": first.tokens_per_second,
        "hours": sum(model.hours for model in models),
        "validation": {key: best[key] for key in ("loss", "perplexity", "accuracy")},
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(first.model.params)),
        "scores": _scores(recipe, models, folder, out / "translations" / run_name(name, seed)),
    }


def _member(
    member: Member, text: Path | None, out: Path, changes: Mapping[str, Mapping[str, Any]]
) -> "_Trained":
    """Trains one model, or continues it; arguments as in `run`, with the folder of the text."""
    data = {} if text is None else {"path": str(text)}
    if text is not None and member.recipe.teachers:
        teachers = [_member(each, text, out, changes) for each in member.recipe.teachers]
        names = "-".join(run_name(each.name, each.seed) for each in member.recipe.teachers)
        models = [each.model for each in teachers]
        data = {
            "path": str(_translated(text, models, text.with_name(f"{text.name}-{names}"))),
            "tokenizer_path": str(models[0].folder),
        }
    found = {"data": data, "train": {"seed": member.seed}}
    config = with_changes(with_changes(member.recipe.config(), found), changes)
    return _train(member.recipe, config, out / run_name(member.name, member.seed))


def _translated(text: Path, teachers: Sequence[TrainedModel], folder: Path) -> Path:
    """Returns `folder`, with the text, to which the teachers' translations are added."""
    if folder.exists():
        return folder
    data = teachers[0].config.data
    source, target = (
        f"train.{language}" for language in (data.source_language, data.target_language)
    )
    sources, references = (read_lines(text / name) for name in (source, target))
    translator = Translator.from_runs(teachers)
    translations = translator.translate(sources, show_progress=sys.stderr.isatty())
    with atomic.new_folder(folder) as partial:
        shutil.copytree(text, partial, dirs_exist_ok=True)
        write_lines(partial / source, sources * 2)
        write_lines(partial / target, [*references, *translations])
    return folder


class _Trained(NamedTuple):
    """A finished run."""

    model: TrainedModel
    """The model to translate with."""
    commits: Sequence[str]
    """Those that it was started and continued with."""
    data: dict[str, list[str]]
    """SHA-256 of the corpora, by role."""
    steps: int
    target_tokens: int
    tokens_per_second: float
    hours: float
    rows: MetricRows


def _train(recipe: Recipe, config: ExperimentConfig, workdir: Path) -> _Trained:
    """Trains one model, or continues it, and averages its last checkpoints."""
    recorded = workdir.with_name(f"{workdir.name}.commit")
    workdir.parent.mkdir(parents=True, exist_ok=True)
    is_continued = (workdir / CONFIG).exists() and recorded.exists()
    before = read_lines(recorded) if is_continued else []
    commits = list(dict.fromkeys([*before, provenance.commit()]))
    write_lines(recorded, commits)
    first_step = _latest_step(workdir)
    try:
        trained = recipe.train(config, workdir)
    finally:
        if _latest_step(workdir) == first_step:  # This commit has trained nothing.
            commits = before
            write_lines(recorded, commits)
    scored = workdir
    # A trial of few steps has fewer checkpoints.
    averaged = min(
        recipe.averaged, math.ceil(config.train.num_steps / config.train.checkpoint_every)
    )
    if averaged > 1:
        scored = workdir.with_name(f"{workdir.name}-mean")
        shutil.rmtree(scored, ignore_errors=True)  # Of fewer steps.
        _require_regular(average_run(workdir, scored, averaged, "last"), workdir, config)
    rows = trained.metrics()
    training = rows("train")
    (hours,) = read_history(workdir).positions(np.array([training[-1]["step"]]), "hours")
    fingerprints = read_fingerprints(workdir) or {}
    return _Trained(
        model=load_run(scored, "last" if averaged > 1 else "best"),
        commits=commits,
        data={name: values for name, values in fingerprints.items() if name in data_file.CORPORA},
        steps=training[-1]["step"],
        target_tokens=sum(row["target_tokens"] for row in training),
        tokens_per_second=statistics.median(row["target_tokens_per_second"] for row in training),
        hours=float(hours),
        rows=rows,
    )


def _latest_step(workdir: Path) -> int | None:
    return Run(workdir).latest_step if (workdir / CONFIG).exists() else None


def _require_regular(averaged: Sequence[int], workdir: Path, config: ExperimentConfig) -> None:
    """Checks that no step but the last is one of an interruption.

    Raises:
      UserError: one is. Its checkpoint replaced a regular one.
    """
    for step in averaged[:-1]:
        if step % config.train.checkpoint_every:
            raise UserError(
                f"{workdir} was interrupted after {step} steps, and the mean of its last "
                f"{len(averaged)} checkpoints is not that of the recipe: remove it and train again"
            )


def _scores(
    recipe: Recipe, models: Sequence[_Trained], text: Path | None, folder: Path
) -> dict[str, Any]:
    """Translates the test sets, into `folder`, and returns their scores."""
    first = models[0]
    if text is None or recipe.text is None:
        (test,) = first.rows("test")
        return {"test": {"bleu": test["bleu"], "signature": test["bleu_signature"]}}
    if not recipe.tests:
        return {}
    translator = Translator.from_runs([each.model for each in models])
    data = first.model.config.data
    languages = data.source_language, data.target_language
    folder.mkdir(parents=True, exist_ok=True)
    scores = {}
    for test in recipe.tests:
        sources, references = (read_lines(text / f"{test}.{language}") for language in languages)
        start = time.perf_counter()
        hypotheses = translator.translate(sources)
        seconds = time.perf_counter() - start
        hypotheses, references = (
            list(map(recipe.text.joined, lines)) for lines in (hypotheses, references)
        )
        write_lines(folder / f"{test}.hypotheses", hypotheses)
        scores[test] = score(hypotheses, references, recipe.text.is_tokenized) | {
            "seconds": seconds
        }
    return scores


def score(hypotheses: Sequence[str], references: Sequence[str], tokenized: bool) -> dict[str, Any]:
    """Computes BLEU with a bootstrap interval of 95%, chrF, and the share of exact matches.

    Args:
      hypotheses: translations.
      references: one for each.
      tokenized: the text is tokenized already; BLEU is then that of Moses' multi-bleu.perl.
    """
    bleu = BLEU(tokenize="none" if tokenized else None, force=tokenized)
    result: Any = bleu.corpus_score(hypotheses, [references], n_bootstrap=NUM_BOOTSTRAP_SAMPLES)
    return {
        "bleu": result.score,
        "interval": result._ci,
        "signature": str(bleu.get_signature()),
        "chrf": CHRF().corpus_score(hypotheses, [references]).score,
        "exact": sum(map(str.__eq__, hypotheses, references)) / len(references),
    }


def write_json(path: Path, values: Any) -> None:
    """Writes JSON values to a file."""
    atomic.write_text(path, json.dumps(values, indent=1) + "\n")
