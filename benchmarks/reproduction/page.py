"""docs/results.md, from the scores of finished runs."""

import json
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from reproduction.recipes import RECIPES, Recipe

INTRODUCTION = """# Results

Every line can be repeated: `python benchmarks/results.py --run NAME` (`--help` says what text it
needs). The scores of each run with their signatures, and its metrics step by step, are in
[results/](results). BLEU of text that is tokenised already equals that of Moses' `multi-bleu.perl`;
BLEU of cased text is sacreBLEU's default. Intervals are those of 1,000 bootstrap samples, 95%; of
several seeds, the mean is given.

This file is written by `python benchmarks/results.py --page`.
"""


def write_page(results: Path) -> None:
    """Writes the page beside the folder of results.

    Args:
      results: has a JSON file of each run, as `runs.run` returns it.
    """
    runs: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for path in sorted(results.glob("*.json")):
        values = json.loads(path.read_text())
        runs[values["name"]].append(values)
    sections = [_section(name, RECIPES[name], runs[name]) for name in RECIPES if name in runs]
    results.with_suffix(".md").write_text("\n".join([INTRODUCTION, *sections]))


def _section(name: str, recipe: Recipe, runs: Sequence[dict[str, Any]]) -> str:
    lines = [f"## {recipe.title}", "", f"    python benchmarks/results.py --run {name}", ""]
    lines += ["| test set | BLEU | published | interval | chrF |", "|---|---|---|---|---|"]
    for test in runs[0]["scores"]:
        scores = [run["scores"][test] for run in runs]
        bleu = statistics.mean(score["bleu"] for score in scores)
        published = recipe.published.get(test)
        interval = "" if "interval" not in scores[0] else f"± {scores[0]['interval']:.2f}"
        chrf = "" if "chrf" not in scores[0] else f"{scores[0]['chrf']:.2f}"
        shown = "" if published is None else f"{published:.2f}"
        lines.append(f"| {test} | {bleu:.2f} | {shown} | {interval} | {chrf} |")
    seeds = ", ".join(str(run["seed"]) for run in runs)
    hours = ", ".join(f"{run['hours']:.2f}" for run in runs)
    steps = ", ".join(f"{run['steps']:,}" for run in runs)
    lines += [
        "",
        f"Seeds {seeds}; {steps} steps; {hours} hours on {runs[0]['device']}; commit "
        f"{runs[0]['commit']}; {runs[0]['parameters']:,} parameters; "
        f"{runs[0]['scores'][next(iter(runs[0]['scores']))]['signature']}.",
    ]
    if recipe.source:
        lines.append(f"Published scores: {recipe.source}.")
    return "\n".join([*lines, ""])
