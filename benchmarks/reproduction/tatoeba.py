"""Tatoeba, English and French, by the number of training pairs, with the template's defaults."""

import dataclasses
import functools

from flaxformer_mt.config import ExperimentConfig
from flaxformer_mt.config.files import load_config
from reproduction.recipe import Recipe
from reproduction.repository import CONFIGS
from reproduction.texts import tatoeba

SIZES = (1000, 10_000, 100_000)


def experiment(source: str, target: str) -> ExperimentConfig:
    """Returns configs/forkme.py for a pair of languages, ended by early stopping."""
    config = load_config(CONFIGS / "forkme.py")
    return dataclasses.replace(
        config,
        data=dataclasses.replace(config.data, source_language=source, target_language=target),
        train=dataclasses.replace(
            config.train,
            num_steps=10_000,
            eval_every=100,
            checkpoint_every=500,
            early_stopping_patience=10,
        ),
    )


RECIPES = {
    f"tatoeba-{source}-{target}-{size // 1000}k": Recipe(
        f"{source}-{target}, {size:,} pairs",
        "tatoeba",
        functools.partial(experiment, source, target),
        text=tatoeba(size),
    )
    for source, target in (("en", "fr"), ("fr", "en"))
    for size in SIZES
}
