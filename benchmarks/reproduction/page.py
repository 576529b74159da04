"""docs/results.md, from the scores of finished runs."""

import functools
import itertools
import json
import operator
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from flaxformer_mt import atomic
from flaxformer_mt.errors import UserError
from flaxformer_mt.runs.metrics_file import read_metrics
from reproduction import families, first_steps, tatoeba
from reproduction.recipe import Group, Recipe, run_name
from reproduction.recipes import RECIPES

INTRODUCTION = """# Results

`python benchmarks/results.py --run NAME` trains and scores one line of this page (`--help` says
what text it needs, `--list` has all names). Where a recipe has changed since, the line says so, and
its commit has the recipe that was trained. The scores of each run with their signatures, its
metrics step by step and its curves are in [results/](results).

Text that is tokenized already is scored without further tokenization, as by Moses'
`multi-bleu.perl`, other text with sacreBLEU's defaults. chrF is computed on the same text as BLEU:
compare it only between lines with equal text. Intervals are 95% bootstrap intervals (1,000
samples). With several seeds, scores and intervals are means over the seeds, so that the intervals
do not include the variance between seeds. The loss is the training objective, which differs between
presets; the perplexity is that of the cross-entropy without label smoothing. Hours are those
of the training steps, tokens per second the median over intervals of the training log. "1 x x86_64
CPU" is one JAX device: one or two cores, shared with other programs, for which some runs were
paused; hours include the pauses.

This file is written by `python benchmarks/results.py --page`.
"""

SECTIONS: dict[Group, str] = {
    "configs": "Files of `configs/`",
    "multi30k": "Multi30k, the Transformer-Tiny of Wu et al. 2021",
    "families": "Every preset, tiny, on Multi30k",
    "published-tasks": "What the published implementations were trained on",
    "tatoeba": "Tatoeba, by the number of training pairs",
}

TATOEBA_PICTURE = "tatoeba.png"

_INTRODUCTIONS: dict[Group, str] = {
    "multi30k": (
        'In the lines "as published" and "as the published command", the text, its subwords, the '
        "model, loss, schedule, stopping, averaging, search and scoring equal the publication's "
        "(the text except in 1 of 4,600 lines). Three things differ: update t has the rate that "
        "fairseq uses at t + 1; a batch mixes sentences of all lengths, with as many target tokens "
        'as fairseq\'s on average; random numbers. "As published" also has one batch per update, '
        'instead of the two of the published command. Lines "with SentencePiece" have other '
        "subwords and more tokens per update. `multi30k-en-de-command`, which stopped after 5,890 "
        "updates, is 0.45, 0.18 and 0.49 below the publication, and `multi30k-en-de` 0.36, 0.54 "
        "and 1.07: all are within the intervals."
    ),
    "families": (
        "2 + 2 layers of width 128, 4,000 pieces, and "
        f"{families.NUM_STEPS:,} batches of {families.BATCH_TOKENS:,} target tokens for "
        "all, which are six passes over the text. Architecture, initial values and loss are those "
        "of the preset, schedules those of the published training code or a related one (mBART and "
        "M2M-100: fairseq), with "
        f"{families.WARMUP_STEPS:,} steps of warm-up; `annotated_wide_heads` has one cycle, "
        "`torch`, `double_projection` and T5 a constant rate. The optimizer is Adam, for T5 it "
        "is Adafactor. Peak rates are 2.8e-3 to 5.6e-3, constant ones 1e-3, T5's is 1e-2. Lines "
        "below 25 BLEU have a note."
    ),
    "published-tasks": (
        "Translation with `tunz` and with the layers of the notebook (`double_projection`) is in "
        "the table above: `family-tunz`, `family-double_projection`. `jadore801120-de-en`, the "
        "command of its README (400 epochs of a base model), is for an accelerator: 45,200 updates "
        "of 4,096 tokens take at least 2.4 minutes on an H100, at the 12.8 ms for 16,384 positions "
        "of docs/accelerators.md. That README shows accuracy and perplexity as pictures only, of a "
        "run of 200 epochs with a warm-up of 4,000 updates and a quarter of the learning rate; "
        "`jadore801120-de-en-small` repeats its schedule with a small model."
    ),
    "tatoeba": (
        "`configs/forkme.py` at 3 + 3 layers of width 128, in float32, with 4,000 pieces, for at "
        f"most {tatoeba.NUM_STEPS:,} batches of {tatoeba.BATCH_TOKENS:,} target tokens. The rate "
        "is 3e-3 after 500 steps of warm-up (`forkme.py`: 1e-3 after 4,000). BLEU of 500 "
        "development sentences selects the checkpoint, and ends a run after eight validations, "
        "100 steps apart, without a better one. Only `tatoeba-en-fr-1k` was trained so. The others "
        "are from when the loss did that (`tatoeba-en-fr-1k` had a BLEU of 2.35 then). With 10,000 "
        "pairs, BLEU on the development set still rose when the loss no longer fell (32.7 instead "
        "of 24.2 for `tatoeba-en-fr-10k`); with 100,000 pairs, the checkpoint is that of the last "
        "step."
    ),
}

Runs = Sequence[dict[str, Any]]
"""The results of one experiment, one for each seed."""


def write_page(results: Path) -> None:
    """Writes the page beside the folder of results.

    Args:
      results: has a JSON file of each run, as `runs.run` returns it; a "note" that is added to it
        says what is true of this run and not of its recipe.

    Raises:
      UserError: there is no such file.
    """
    runs: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for path in sorted(results.glob("*.json")):
        values = json.loads(path.read_text())
        runs[values["name"]].append(values)
    if not runs:
        raise UserError(f"{results} has no JSON file of a run")
    for found in runs.values():
        found.sort(key=lambda run: run.get("seed", 0))
    parts = [INTRODUCTION]
    for group, title in SECTIONS.items():
        members = {name: runs[name] for name, recipe in RECIPES.items() if recipe.group == group}
        finished = {name: found for name, found in members.items() if found}
        missing = [f"`{name}`" for name, found in members.items() if not found]
        parts.append(f"## {title}\n")
        if group in _INTRODUCTIONS:
            parts.append(f"{_INTRODUCTIONS[group]}\n")
        if finished and group in _TABLES:
            parts.append("\n".join([*_TABLES[group](finished, results.name), ""]))
        elif finished:
            parts += [_section(RECIPES[name], found, results) for name, found in finished.items()]
        if group == "tatoeba" and finished:
            bleu = {
                name: _mean(found, "scores", "test", "bleu") for name, found in finished.items()
            }
            tatoeba.plot(bleu, results / TATOEBA_PICTURE)
        if group == "families":
            if runs[first_steps.NAME]:
                (compared,) = runs[first_steps.NAME]
                parts.append("\n".join([*_first_steps(compared, results.name), ""]))
            else:
                missing.append(f"`{first_steps.NAME}`")
        if missing:
            parts.append(f"Not yet run: {', '.join(missing)}.\n")
    atomic.write_text(results.parent / f"{results.name}.md", "\n".join(parts))


def _section(recipe: Recipe, runs: Runs, results: Path) -> str:
    """One experiment: a table of its test sets, what it rests on, and its curves."""
    commands = (f"`{run['command']}`" for run in runs)
    lines = [f"### {recipe.title}", "", *"  \n".join(commands).splitlines(), ""]
    if runs[0]["scores"]:
        lines += _scores(runs, recipe)
    else:
        loss, perplexity, accuracy = (
            _mean(runs, "validation", name) for name in ("loss", "perplexity", "accuracy")
        )
        lines.append(
            f"Validation: loss {loss:.4f}, perplexity {perplexity:.2f}, accuracy {accuracy:.1%}."
        )
    lines += ["", _foundation(recipe, runs)]
    if recipe.source:
        lines.append(f"Published: {recipe.source}.")
    lines += _notes(recipe, runs)
    if recipe.by_epoch:
        lines += ["", *_by_epoch(recipe.by_epoch, results / f"{_stem(runs[0])}.metrics.jsonl")]
    lines += ["", *(f"![curves]({results.name}/{_stem(run)}.png)" for run in runs)]
    return "\n".join([*lines, ""])


def _stem(run: dict[str, Any]) -> str:
    return run_name(run["name"], run["seed"])


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
            column: _mean(runs, "scores", test, column) for column in _COLUMNS.keys() & score.keys()
        }
        published = {"published": recipe.published[test]} if test in recipe.published else {}
        lines[test] = means | published
    columns = [name for name in _COLUMNS if any(name in line for line in lines.values())]
    yield f"| test set | {' | '.join(_HEADS.get(name, name) for name in columns)} |"
    yield "|---|" + "---|" * len(columns)
    for test, line in lines.items():
        cells = [_COLUMNS[name].format(line[name]) if name in line else "" for name in columns]
        yield f"| {test} | {' | '.join(cells)} |"


def _mean(runs: Runs, *path: str) -> float:
    """Returns the mean of a value over seeds."""
    return statistics.mean(functools.reduce(operator.getitem, path, run) for run in runs)


def _foundation(recipe: Recipe, runs: Runs) -> str:
    """What the scores of an experiment rest on."""
    hours = ", ".join(f"{run['hours']:.2f}" for run in runs)
    steps = ", ".join(f"{run['steps']:,}" for run in runs)
    parameters = f"{runs[0]['parameters']:,} parameters"
    metric = recipe.config().train.best_metric
    scored = (
        f"best checkpoint by validation {metric.upper() if metric == 'bleu' else metric}"
        if recipe.averaged == 1
        else f"mean of the last {recipe.averaged} checkpoints"
    )
    ensemble = ""
    if recipe.members:
        names = (f"`{member.name}` of seed {member.seed}" for member in recipe.members)
        ensemble = f"Ensemble of {', '.join(names)}"
        parameters += " per model"
        scored += " of each"
    return (
        f"{_common(runs, ensemble)}; {steps} steps; {scored}; {hours} hours; "
        f"commit {_commits(runs)}; {parameters}."
    )


def _common(runs: Runs, models: str = "") -> str:
    """The models of runs, by default their seeds, and their devices and signatures."""
    seeds = ", ".join(map(str, sorted({run["seed"] for run in runs})))
    devices = ", ".join(sorted({run["device"] for run in runs}))
    signatures = {score["signature"] for run in runs for score in run["scores"].values()}
    return "; ".join([models or f"Seed {seeds}", devices, *sorted(signatures)])


def _commits(runs: Runs) -> str:
    return ", ".join(dict.fromkeys(run["commit"] for run in runs))


def _notes(recipe: Recipe, runs: Runs) -> list[str]:
    """The note of an experiment and those of its runs."""
    of_runs = [f"Seed {run['seed']}: {run['note']}" for run in runs if "note" in run]
    return ([recipe.note] if recipe.note else []) + of_runs


def _by_epoch(metrics: Sequence[str], path: Path) -> Iterator[str]:
    """A table with a line for each validation, or for ten of them where there are more."""
    rows = read_metrics(path)
    training = {row["step"]: row for row in rows if row["split"] == "train"}
    yield f"| epoch | train_loss | {' | '.join(f'valid {name}' for name in metrics)} | seconds |"
    yield "|---|---|" + "---|" * (len(metrics) + 1)
    validations = [row for row in rows if row["split"] == "valid"]
    interval = max(1, len(validations) // 10)
    for epoch, row in list(enumerate(validations))[interval - 1 :: interval]:
        train = training[row["step"]]
        seconds = train["target_tokens"] / train["target_tokens_per_second"]
        cells = " | ".join(f"{row[name]:.4f}" for name in metrics)
        yield f"| {epoch} | {train['loss']:.4f} | {cells} | {seconds:.0f} |"


def _families(found: dict[str, Runs], folder: str) -> Iterator[str]:
    yield (
        "| `--run`, with its curves | development loss | perplexity | BLEU | interval | tokens/s "
        "| hours | commit |"
    )
    yield "|---|---|---|---|---|---|---|---|"
    for runs in found.values():
        loss, perplexity = (_mean(runs, "validation", name) for name in ("loss", "perplexity"))
        bleu, interval = (_mean(runs, "scores", "test", name) for name in ("bleu", "interval"))
        yield (
            f"| {_curves(runs, folder)} | {loss:.4f} | {perplexity:.2f} | {bleu:.2f} "
            f"| ± {interval:.2f} | {_mean(runs, 'tokens_per_second'):,.0f} "
            f"| {_mean(runs, 'hours'):.2f} | {_commits(runs)} |"
        )
    yield f"\n{_common(list(itertools.chain(*found.values())))}."
    for name, runs in found.items():
        notes = _notes(RECIPES[name], runs)
        if notes:
            yield f"\n`{name}`: {' '.join(notes)}"


def _tatoeba(found: dict[str, Runs], folder: str) -> Iterator[str]:
    yield "| `--run`, with its curves | BLEU | interval | chrF | steps | hours | commit |"
    yield "|---|---|---|---|---|---|---|"
    for runs in found.values():
        bleu, interval, chrf = (
            _mean(runs, "scores", "test", name) for name in ("bleu", "interval", "chrf")
        )
        yield (
            f"| {_curves(runs, folder)} | {bleu:.2f} | ± {interval:.2f} | {chrf:.2f} "
            f"| {_mean(runs, 'steps'):,.0f} | {_mean(runs, 'hours'):.2f} | {_commits(runs)} |"
        )
    yield f"\n{_common(list(itertools.chain(*found.values())))}."
    yield ""
    yield f"![BLEU by the number of training pairs]({folder}/{TATOEBA_PICTURE})"


def _curves(runs: Runs, folder: str) -> str:
    """The name of an experiment, linked to the curves of its first run."""
    return f"[`{runs[0]['name']}`]({folder}/{_stem(runs[0])}.png)"


def _first_steps(compared: dict[str, Any], folder: str) -> Iterator[str]:
    yield f"### The first {first_steps.NUM_STEPS} steps beside PyTorch"
    yield ""
    yield f"`{compared['command']}`"
    yield ""
    yield (
        "The PyTorch reference of each preset and our model, trained from the same weights on the "
        "same batches of Multi30k, in float64, without dropout, at width "
        f"{first_steps.SIZES['d_model']} with {first_steps.VOCABULARY:,} pieces and a warm-up of "
        f"{first_steps.WARMUP_STEPS:,} steps: loss per token of both sides, and the largest "
        "relative difference of the loss in any step."
    )
    yield ""
    yield "| preset | first loss | last loss, ours | last loss, PyTorch | largest difference |"
    yield "|---|---|---|---|---|"
    for values in compared["families"]:
        yield (
            f"| `{values['name']}` | {values['ours'][0]:.4f} | {values['ours'][-1]:.4f} "
            f"| {values['pytorch'][-1]:.4f} | {values['largest_difference']:.1e} |"
        )
    yield ""
    yield f"{compared['device']}; {compared['hours']:.2f} hours; commit {compared['commit']}."
    yield ""
    yield f"![loss of both sides]({folder}/{first_steps.NAME}.png)"


_TABLES: dict[Group, Callable[[dict[str, Runs], str], Iterator[str]]] = {
    "families": _families,
    "tatoeba": _tatoeba,
}
"""Groups whose experiments are lines of one table."""
