"""docs/results.md, from the scores of finished runs."""

import json
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from flaxformer_mt.runs import atomic
from flaxformer_mt.runs.metrics_file import read_metrics
from reproduction import families, tatoeba
from reproduction.first_steps import NUM_STEPS
from reproduction.recipe import Group, Recipe
from reproduction.recipes import RECIPES

INTRODUCTION = """# Results

Every line can be repeated: `python benchmarks/results.py --run NAME` (`--help` says what text it
needs, `--list` has all names). The scores of each run with their signatures, its metrics step by
step and its curves are in [results/](results). BLEU of text that is tokenised already equals that
of Moses' `multi-bleu.perl`; BLEU of cased text is sacreBLEU's default. Intervals are those of 1,000
bootstrap samples, 95%; of several seeds, means are given.

This file is written by `python benchmarks/results.py --page`.
"""

SECTIONS: dict[Group, str] = {
    "quickstart": "Configurations without a corpus",
    "multi30k": "Multi30k, the Transformer-Tiny of Wu et al. 2021",
    "families": "Every preset, tiny, on Multi30k",
    "seeds": "The published implementations' own tasks",
    "tatoeba": "Tatoeba, by the number of training pairs",
}

TATOEBA_PICTURE = "tatoeba.png"

_INTRODUCTIONS: dict[Group, str] = {
    "families": (
        "2 + 2 layers of width 128, 4,000 pieces, and "
        f"{families.NUM_STEPS:,} batches of {families.BATCH_TOKENS:,} target tokens for "
        "all, which are six passes over the text. The arrangement, initial values, loss and "
        "schedule of each are its own. Warm-up has "
        f"{families.WARMUP_STEPS:,} steps; learning rates that do not depend "
        "on the width are those of wide models, and are replaced by a peak of 3e-3 (constant: "
        "1e-3). Lines below 25 BLEU have a note."
    ),
    "seeds": (
        "Translation with `tunz` and with the layers of the notebook (`double_projection`) is in "
        "the table above: `family-tunz`, `family-double_projection`."
    ),
    "tatoeba": (
        "`configs/forkme.py` at 3 + 3 layers of width 128, in float32, with 4,000 pieces, for at "
        f"most {tatoeba.NUM_STEPS:,} batches of {tatoeba.BATCH_TOKENS:,} target tokens: early "
        "stopping ends the runs on few pairs before."
    ),
}

Runs = Sequence[dict[str, Any]]
"""The results of one experiment, one for each seed."""


def write_page(results: Path) -> None:
    """Writes the page beside the folder of results.

    Args:
      results: has a JSON file of each run, as `runs.run` returns it; a "note" that is added to it
        says what is true of this run and not of its recipe.
    """
    runs: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for path in sorted(results.glob("*.json")):
        values = json.loads(path.read_text())
        runs[values["name"]].append(values)
    parts = [INTRODUCTION]
    for group, title in SECTIONS.items():
        members = {name: runs[name] for name, recipe in RECIPES.items() if recipe.group == group}
        finished = {name: found for name, found in members.items() if found}
        missing = [f"`{name}`" for name, found in members.items() if not found]
        parts.append(f"## {title}\n")
        if group in _INTRODUCTIONS:
            parts.append(f"{_INTRODUCTIONS[group]}\n")
        if finished and group in _TABLES:
            parts.append("\n".join([*_TABLES[group](finished), ""]))
        elif finished:
            parts += [_section(RECIPES[name], found, results) for name, found in finished.items()]
        if group == "tatoeba" and finished:
            bleu = {name: found[0]["scores"]["test"]["bleu"] for name, found in finished.items()}
            tatoeba.plot(bleu, results / TATOEBA_PICTURE)
        if group == "families" and runs["first-steps"]:
            parts.append("\n".join([*_first_steps(runs["first-steps"][0]["families"]), ""]))
        if missing:
            parts.append(f"Not yet run: {', '.join(missing)}.\n")
    atomic.write_text(results.with_suffix(".md"), "\n".join(parts))


def _section(recipe: Recipe, runs: Runs, results: Path) -> str:
    """One experiment: a table of its test sets, what it rests on, and its curves."""
    name = runs[0]["name"]
    lines = [f"### {recipe.title}", "", f"`python benchmarks/results.py --run {name}`", ""]
    if runs[0]["scores"]:
        lines += _scores(runs, recipe)
    else:
        best = runs[0]["validation"]
        lines.append(
            f"Validation: loss {best['loss']:.4f}, perplexity {best['perplexity']:.2f}, accuracy "
            f"{best['accuracy']:.1%}."
        )
    lines += ["", _foundation(runs)]
    if recipe.source:
        lines.append(f"Published: {recipe.source}.")
    lines += _notes(recipe, runs)
    if recipe.by_epoch:
        lines += ["", *_by_epoch(recipe.by_epoch, results / f"{_stem(runs[0])}.metrics.jsonl")]
    lines += ["", *(f"![curves]({results.name}/{_stem(run)}.png)" for run in runs)]
    return "\n".join([*lines, ""])


def _stem(run: dict[str, Any]) -> str:
    return f"{run['name']}-seed{run['seed']}"


_COLUMNS: dict[str, str] = {
    "bleu": "{:.2f}",
    "published": "{:.2f}",
    "interval": "± {:.2f}",
    "chrf": "{:.2f}",
    "exact": "{:.1%}",
}
_HEADS = {"bleu": "BLEU", "published": "published BLEU", "chrf": "chrF", "exact": "exact matches"}


def _scores(runs: Runs, recipe: Recipe) -> Iterator[str]:
    """A table with a line for each test set, and the columns that any of them has."""
    lines = {}
    for test, score in runs[0]["scores"].items():
        means = {
            column: statistics.mean(run["scores"][test][column] for run in runs)
            for column in _COLUMNS.keys() & score.keys()
        }
        published = {"published": recipe.published[test]} if test in recipe.published else {}
        lines[test] = means | published
    columns = [name for name in _COLUMNS if any(name in line for line in lines.values())]
    yield f"| test set | {' | '.join(_HEADS.get(name, name) for name in columns)} |"
    yield "|---|" + "---|" * len(columns)
    for test, line in lines.items():
        cells = [_COLUMNS[name].format(line[name]) if name in line else "" for name in columns]
        yield f"| {test} | {' | '.join(cells)} |"


def _foundation(runs: Runs) -> str:
    """What the scores of an experiment rest on."""
    hours = ", ".join(f"{run['hours']:.2f}" for run in runs)
    steps = ", ".join(f"{run['steps']:,}" for run in runs)
    commits = ", ".join(dict.fromkeys(run["commit"] for run in runs))
    parameters = f"{runs[0]['parameters']:,} parameters"
    return f"{_common(runs)}; {steps} steps; {hours} hours; commit {commits}; {parameters}."


def _common(runs: Runs) -> str:
    """The seeds, devices and signatures of runs."""
    seeds = ", ".join(sorted({str(run["seed"]) for run in runs}))
    devices = ", ".join(sorted({run["device"] for run in runs}))
    signatures = {score["signature"] for run in runs for score in run["scores"].values()}
    return "; ".join([f"Seed {seeds}", devices, *sorted(signatures)])


def _notes(recipe: Recipe, runs: Runs) -> list[str]:
    """The note of an experiment and those of its runs."""
    of_runs = [f"Seed {run['seed']}: {run['note']}" for run in runs if "note" in run]
    return ([recipe.note] if recipe.note else []) + of_runs


def _by_epoch(metrics: Sequence[str], path: Path) -> Iterator[str]:
    """A table with a line for each validation."""
    rows = read_metrics(path)
    training = {row["step"]: row for row in rows if row["split"] == "train"}
    yield f"| epoch | train_loss | {' | '.join(f'valid {name}' for name in metrics)} | seconds |"
    yield "|---|---|" + "---|" * (len(metrics) + 1)
    validations = [row for row in rows if row["split"] == "valid"]
    for epoch, row in enumerate(validations):
        train = training[row["step"]]
        seconds = train["target_tokens"] / train["target_tokens_per_second"]
        cells = " | ".join(f"{row[name]:.4f}" for name in metrics)
        yield f"| {epoch} | {train['loss']:.4f} | {cells} | {seconds:.0f} |"


def _families(found: dict[str, Runs]) -> Iterator[str]:
    yield (
        "| `--run`, with its curves | development loss | perplexity | BLEU | interval | tokens/s "
        "| hours | commit |"
    )
    yield "|---|---|---|---|---|---|---|---|"
    for runs in found.values():
        run = runs[0]
        validation, score = run["validation"], run["scores"]["test"]
        yield (
            f"| {_curves(run)} | {validation['loss']:.4f} | {validation['perplexity']:.2f} "
            f"| {score['bleu']:.2f} | ± {score['interval']:.2f} | {run['tokens_per_second']:,.0f} "
            f"| {run['hours']:.2f} | {run['commit']} |"
        )
    yield f"\n{_common([runs[0] for runs in found.values()])}."
    for name, runs in found.items():
        notes = _notes(RECIPES[name], runs[:1])
        if notes:
            yield f"\n`{name}`: {' '.join(notes)}"


def _tatoeba(found: dict[str, Runs]) -> Iterator[str]:
    yield "| `--run`, with its curves | BLEU | interval | chrF | steps | hours | commit |"
    yield "|---|---|---|---|---|---|---|"
    for runs in found.values():
        run = runs[0]
        score = run["scores"]["test"]
        yield (
            f"| {_curves(run)} | {score['bleu']:.2f} | ± {score['interval']:.2f} "
            f"| {score['chrf']:.2f} | {run['steps']:,} | {run['hours']:.2f} | {run['commit']} |"
        )
    yield f"\n{_common([runs[0] for runs in found.values()])}."
    yield ""
    yield f"![BLEU by the number of training pairs](results/{TATOEBA_PICTURE})"


def _curves(run: dict[str, Any]) -> str:
    """The name of an experiment, linked to its curves."""
    return f"[`{run['name']}`](results/{_stem(run)}.png)"


def _first_steps(compared: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield f"### The first {NUM_STEPS} steps beside PyTorch"
    yield ""
    yield "`python benchmarks/results.py --run first-steps`"
    yield ""
    yield (
        "The PyTorch reference of each preset and our model, trained from the same weights on the "
        "same batches of Multi30k, in float64, without dropout: loss per token of both sides, and "
        "the largest relative difference of the loss in any step."
    )
    yield ""
    yield "| preset | first loss | last loss, ours | last loss, PyTorch | largest difference |"
    yield "|---|---|---|---|---|"
    for values in compared:
        yield (
            f"| `{values['name']}` | {values['ours'][0]:.4f} | {values['ours'][-1]:.4f} "
            f"| {values['pytorch'][-1]:.4f} | {values['largest_difference']:.1e} |"
        )
    yield ""
    yield "![loss of both sides](results/first-steps.png)"


_TABLES: dict[Group, Callable[[dict[str, Runs]], Iterator[str]]] = {
    "families": _families,
    "tatoeba": _tatoeba,
}
"""Groups whose experiments are lines of one table."""
