"""Tatoeba, English and French, by the number of training pairs, with the template's recipe.

`configs/forkme.py` is made for an accelerator. `SIZE` and a smaller batch replace its values, so
that two CPU cores train it in minutes; warm-up and rate fit the number of steps.
"""

import functools
from collections.abc import Mapping
from pathlib import Path

from flaxformer_mt.config import ExperimentConfig
from flaxformer_mt.config.experiment import with_changes
from flaxformer_mt.config.files import load_config
from flaxformer_mt.plotting import drawing
from reproduction.recipe import Recipe
from reproduction.repository import CONFIGS
from reproduction.texts import tatoeba

PAIRS = (1000, 10_000, 100_000)
DIRECTIONS = (("en", "fr"), ("fr", "en"))
NUM_STEPS = 2500
BATCH_TOKENS = 2048
SIZE = {
    "d_model": 128,
    "d_ff": 512,
    "num_encoder_layers": 3,
    "num_decoder_layers": 3,
    "dtype": "float32",
}


def experiment(source: str, target: str) -> ExperimentConfig:
    """Returns configs/forkme.py for a pair of languages, at `SIZE` and ended by early stopping."""
    changes = {
        "model": SIZE,
        "data": {"source_language": source, "target_language": target, "vocab_size": 4000},
        "optimizer": {"learning_rate": 3e-3, "warmup_steps": 500},
        "train": {
            "num_steps": NUM_STEPS,
            "batch_tokens": BATCH_TOKENS,
            "log_every": 100,
            "eval_every": 100,
            "checkpoint_every": 100,
            "early_stopping_metric": "bleu",
            "early_stopping_patience": 8,
        },
    }
    return with_changes(load_config(CONFIGS / "forkme.py"), changes)


def name(source: str, target: str, pairs: int) -> str:
    """Returns the name of the experiment with that many training pairs."""
    return f"tatoeba-{source}-{target}-{pairs // 1000}k"


def plot(bleu: Mapping[str, float], path: Path) -> None:
    """Draws BLEU by the number of training pairs, a line for each direction.

    Args:
      bleu: of the test set, by the name of the experiment; those that are missing are left out.
      path: the picture.
    """
    figure = drawing.new_figure(5, 3.2)
    axes = figure.subplots()
    for (source, target), color in zip(DIRECTIONS, ("#1d4ed8", "#f59e0b"), strict=True):
        known = [pairs for pairs in PAIRS if name(source, target, pairs) in bleu]
        scores = [bleu[name(source, target, pairs)] for pairs in known]
        axes.plot(known, scores, "o-", color=color, label=f"{source}-{target}")
    axes.set_xscale("log")
    axes.set_xlabel("training pairs")
    axes.set_ylabel("BLEU")
    axes.legend()
    path.write_bytes(drawing.to_file(figure, "png"))


RECIPES = {
    name(source, target, size): Recipe(
        f"{source}-{target}, {size:,} pairs",
        "tatoeba",
        functools.partial(experiment, source, target),
        text=tatoeba(size),
    )
    for source, target in DIRECTIONS
    for size in PAIRS
}
