"""All experiments."""

from collections.abc import Callable

from flaxformer_mt.config import ExperimentConfig
from flaxformer_mt.config.files import load_config
from reproduction import families, multi30k, published_tasks, tatoeba
from reproduction.recipe import Recipe
from reproduction.repository import CONFIGS


def _from_file(name: str) -> Callable[[], ExperimentConfig]:
    return lambda: load_config(CONFIGS / f"{name}.py")


RECIPES: dict[str, Recipe] = {
    "reverse": Recipe("Digits reversed", "quickstart", _from_file("reverse")),
    "quickstart": Recipe(
        "Generated phrases, English to French", "quickstart", _from_file("quickstart")
    ),
    **multi30k.RECIPES,
    **families.RECIPES,
    **published_tasks.RECIPES,
    **tatoeba.RECIPES,
}
"""By the name that `benchmarks/results.py --run` takes."""
