"""Trains a recipe, averages checkpoints, translates its test sets and scores them."""

import json
import platform
import shutil
import statistics
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from sacrebleu.metrics import BLEU, CHRF

from flaxformer_mt import experiment
from flaxformer_mt.config import ExperimentConfig
from flaxformer_mt.config.experiment import with_changes
from flaxformer_mt.data.corpora.text_files import read_lines
from flaxformer_mt.decoding.translator import Translator
from flaxformer_mt.plotting.history import read_history
from flaxformer_mt.run_reader import MetricRows
from flaxformer_mt.runs import atomic
from flaxformer_mt.runs.averaging import average_run
from reproduction.recipe import Recipe
from reproduction.repository import ROOT
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
      seed: of initial values, dropout and the order of the data.
      changes: values that replace those of the recipe, to try it out: `{"train": {...}}`.

    Returns:
      JSON values: scores by test set, the number of steps, the hours that these took, without
      validation, and what they rest on.
    """
    folder = None if recipe.text is None else recipe.text.prepare(data, out)
    found = {"data": {} if folder is None else {"path": str(folder)}, "train": {"seed": seed}}
    config = with_changes(with_changes(recipe.config(), found), changes or {})

    workdir = out / f"{name}-seed{seed}"
    commit = out / f"{workdir.name}.commit"
    if not (workdir.exists() and commit.exists()):
        out.mkdir(parents=True, exist_ok=True)
        write_lines(commit, [_commit()])
    trained = experiment.train(config, workdir)
    scored = workdir
    if recipe.averaged > 1:
        scored = out / f"{workdir.name}-mean"
        shutil.rmtree(scored, ignore_errors=True)  # Of fewer steps.
        average_run(workdir, scored, recipe.averaged, "last")
    rows = trained.metrics()
    training, best = rows("train"), _best(rows)
    speeds = [row["target_tokens_per_second"] for row in training]
    (hours,) = read_history(workdir).positions(np.array([training[-1]["step"]]), "hours")
    return {
        "name": name,
        "seed": seed,
        "command": f"python benchmarks/results.py --run {name} --seed {seed}",
        "commit": read_lines(commit)[0],
        "device": _device(),
        "steps": training[-1]["step"],
        "target_tokens": sum(row["target_tokens"] for row in training),
        "tokens_per_second": statistics.median(speeds),
        "hours": float(hours),
        "validation": {key: best[key] for key in ("loss", "perplexity", "accuracy")},
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(trained.model("last").params)),
        "scores": _scores(recipe, config, scored, folder, rows),
    }


def _best(rows: MetricRows) -> dict[str, Any]:
    """Returns the validation with the lowest loss."""
    return min(rows("valid"), key=lambda row: row["loss"])


def _scores(
    recipe: Recipe,
    config: ExperimentConfig,
    run: Path,
    text: Path | None,
    rows: MetricRows,
) -> dict[str, Any]:
    """Translates the test sets and returns their scores."""
    if text is None or recipe.text is None:
        (test,) = rows("test")
        return {"test": {"bleu": test["bleu"], "signature": test["bleu_signature"]}}
    if not recipe.tests:
        return {}
    translator = Translator.from_run(run, "last" if recipe.averaged > 1 else "best")
    languages = config.data.source_language, config.data.target_language
    scores = {}
    for test in recipe.tests:
        sources, references = (read_lines(text / f"{test}.{language}") for language in languages)
        start = time.perf_counter()
        hypotheses = translator.translate(sources)
        seconds = time.perf_counter() - start
        write_lines(run / f"{test}.hypotheses", hypotheses)
        scores[test] = score(hypotheses, references, recipe.text.is_tokenized) | {
            "seconds": seconds
        }
    return scores


def score(hypotheses: Sequence[str], references: Sequence[str], tokenized: bool) -> dict[str, Any]:
    """Computes BLEU with a bootstrap interval of 95%, chrF, and the share of exact matches.

    Args:
      hypotheses: translations.
      references: one for each.
      tokenized: the text is tokenised already; BLEU is then that of Moses' multi-bleu.perl.
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


def _commit() -> str:
    """Returns the commit that is checked out, or "unknown" outside a repository."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=10", "--exclude=*"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return result.stdout.strip() or "unknown"


def _device() -> str:
    devices = jax.devices()
    kind = devices[0].device_kind
    if devices[0].platform == "cpu":
        kind = f"{platform.machine()} CPU"
    return f"{len(devices)} x {kind}"


def write_json(path: Path, values: Any) -> None:
    """Writes JSON values to a file."""
    atomic.write_text(path, json.dumps(values, indent=1) + "\n")
