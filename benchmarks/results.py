"""Repeats the experiments of docs/results.md.

    python benchmarks/results.py --list
    python benchmarks/results.py --run multi30k-en-de --data DATA --out runs/results

DATA has the folders
- `multi30k-en-de`, `multi30k-en-fr`: data/task1/raw of github.com/multi30k/dataset, with `val`
  renamed to `valid` and `test_2016_flickr` to `test`: train.en.gz, test_2017_mscoco.de.gz, ...
- `tatoeba-eng-fra`: fra-eng of manythings.org/anki, of 2017-09-29 for the published page, as train,
  valid and test, .en.gz and .fr.gz, with about 1% of the English sentences and all of their
  translations in each of the last two.

A result has the SHA-256 of the text that it was trained and tested on.

Tokenized text needs sacremoses and subword-nmt, pictures matplotlib, `first-steps` and the families
PyTorch.

The same command continues a run that was stopped; one whose last checkpoints are averaged must not
be stopped while these are written. Each run writes NAME-seedN.json, a copy of its
metrics and a picture of its curves into --results; `--page` writes docs/results.md from all of
them.
"""

import argparse
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from reproduction import first_steps, provenance
from reproduction.page import write_page
from reproduction.recipe import members, run_name
from reproduction.recipes import RECIPES
from reproduction.repository import RESULTS, ROOT
from reproduction.runs import run, write_json

from flaxformer_mt import runtime
from flaxformer_mt.errors import UserError
from flaxformer_mt.exit_codes import ExitCode
from flaxformer_mt.interruption import Interrupted
from flaxformer_mt.plotting.curves import plot_curves

TITLES = {name: recipe.title for name, recipe in RECIPES.items()} | {
    first_steps.NAME: f"The first {first_steps.NUM_STEPS} steps of every family, beside PyTorch"
}


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--list", action="store_true", help="print the names of all experiments")
    what.add_argument("--run", nargs="+", metavar="NAME", choices=TITLES, help="train and score")
    what.add_argument("--page", action="store_true", help="write docs/results.md")
    parser.add_argument("--data", type=Path, default=Path("data"), help="folder of the raw corpora")
    parser.add_argument("--out", type=Path, default=Path("runs/results"), help="of run folders")
    parser.add_argument(
        "--results", type=Path, help=f"folder of the scores (default: {RESULTS.relative_to(ROOT)})"
    )
    parser.add_argument(
        "--seed", type=int, default=1, help=f"not used by {first_steps.NAME} and by ensembles"
    )
    parser.add_argument(
        "--num-steps",
        type=int,
        help="train only the first steps of the recipe, to try it out; needs --results",
    )
    options = parser.parse_args(arguments)
    if options.num_steps is not None and options.results is None:
        parser.error("--num-steps needs --results: its scores are not those of the recipe")
    options.results = options.results or RESULTS
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if options.list:
        width = max(map(len, TITLES))
        for name, title in TITLES.items():
            print(f"{name:{width}}  {title}")
        return 0
    try:
        if options.page:
            write_page(options.results)
            return 0
        runtime.configure()
        options.results.mkdir(parents=True, exist_ok=True)
        for name in options.run:
            if name == first_steps.NAME:
                compare_first_steps(options)
            else:
                train_and_score(name, options)
    except Interrupted as stopped:
        print(f"results.py: {stopped}", file=sys.stderr)
        return ExitCode.INTERRUPTED
    except UserError as error:
        print(f"results.py: error: {error}", file=sys.stderr)
        return ExitCode.FAILURE
    return ExitCode.SUCCESS


def train_and_score(name: str, options: argparse.Namespace) -> None:
    recipe, out = RECIPES[name], options.out
    seed = 1 if recipe.members else options.seed
    changes: dict[str, Any] = {}
    if options.num_steps is not None:
        changes = {"train": {"num_steps": options.num_steps}}
        config = recipe.config()
        if config.optimizer.schedule_has_end or config.optimizer.warmup:
            changes["optimizer"] = {"total_steps": config.train.num_steps}
        out = out / f"{options.num_steps}-steps"
    result = run(name, recipe, options.data, out, seed, changes)
    stem = run_name(name, seed)
    write_json(options.results / f"{stem}.json", result)
    trained = members(name, recipe, seed)
    stems = [run_name(member.name, member.seed) for member in trained]
    for each in stems:
        # The models of an ensemble may have lines of their own.
        kept = each if each == stem else f"{stem}.{each}"
        metrics = options.results / f"{kept}.metrics.jsonl"
        shutil.copyfile(out / each / "metrics.jsonl", metrics)
    plot_curves([out / each for each in stems]).save(options.results / f"{stem}.png")
    for test, scores in result["scores"].items():
        print(f"{name} {test}: BLEU {scores['bleu']:.2f}")


def compare_first_steps(options: argparse.Namespace) -> None:
    commit, started, found = provenance.commit(), time.monotonic(), []
    for family in first_steps.NAMES:
        values = first_steps.compare(family, options.data, options.out)
        print(f"{family:24} largest difference {values['largest_difference']:.1e}", flush=True)
        found.append(values)
    result = {
        "name": first_steps.NAME,
        "command": f"python benchmarks/results.py --run {first_steps.NAME}",
        "commit": commit,
        "data": {"train": [first_steps.fingerprint(options.data, options.out)]},
        "device": provenance.device(),
        "hours": (time.monotonic() - started) / 3600,
        "families": found,
    }
    write_json(options.results / f"{first_steps.NAME}.json", result)
    first_steps.plot(found, options.results / f"{first_steps.NAME}.png")


if __name__ == "__main__":
    sys.exit(main())
