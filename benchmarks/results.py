"""Repeats the experiments of docs/results.md.

    python benchmarks/results.py --list
    python benchmarks/results.py --run multi30k-en-de --data DATA --out runs/results

DATA has the folders `multi30k-en-de` and `multi30k-en-fr`, with train, valid, test,
test_2017_flickr and test_2017_mscoco, .en.gz and so on: the raw text of Multi30k, task 1,
github.com/multi30k/dataset. Tokenised text needs sacremoses. The same command continues a run that
was stopped. Each run writes NAME-seedN.json and a copy of its metrics into --results; `--page`
writes the tables of docs/results.md from all of them.
"""

import argparse
import shutil
import sys
from pathlib import Path

from reproduction.page import write_page
from reproduction.recipes import RECIPES
from reproduction.runs import run, write_json

from flaxformer_mt import runtime
from flaxformer_mt.errors import UserError

RESULTS = Path(__file__).parents[1] / "docs" / "results"


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--list", action="store_true", help="print the names of all experiments")
    what.add_argument("--run", nargs="+", metavar="NAME", choices=RECIPES, help="train and score")
    what.add_argument("--page", action="store_true", help="write docs/results.md")
    parser.add_argument("--data", type=Path, default=Path("data"), help="folder of the raw corpora")
    parser.add_argument("--out", type=Path, default=Path("runs/results"), help="of run folders")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the scores")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--num-steps", type=int, help="instead of the recipe's, to try it out")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if options.list:
        for name, recipe in RECIPES.items():
            print(f"{name:24} {recipe.title}")
        return 0
    if options.page:
        write_page(options.results)
        return 0
    runtime.configure()
    changes = {} if options.num_steps is None else {"num_steps": options.num_steps}
    options.results.mkdir(parents=True, exist_ok=True)
    for name in options.run:
        try:
            result = run(name, RECIPES[name], options.data, options.out, options.seed, changes)
        except UserError as error:
            print(f"results.py: error: {name}: {error}", file=sys.stderr)
            return 1
        stem = f"{name}-seed{options.seed}"
        write_json(options.results / f"{stem}.json", result)
        metrics = options.out / stem / "metrics.jsonl"
        shutil.copyfile(metrics, options.results / f"{stem}.metrics.jsonl")
        for test, scores in result["scores"].items():
            print(f"{name} {test}: BLEU {scores['bleu']:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
