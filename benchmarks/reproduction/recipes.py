"""All experiments."""

from collections.abc import Callable

from flaxformer_mt.config import ExperimentConfig
from flaxformer_mt.config.files import load_config
from reproduction import families, multi30k, published_tasks, tatoeba, texts
from reproduction.recipe import Recipe
from reproduction.repository import CONFIGS


def _from_file(name: str) -> Callable[[], ExperimentConfig]:
    return lambda: load_config(CONFIGS / f"{name}.py")


RECIPES: dict[str, Recipe] = {
    "reverse": Recipe("Digits reversed", "configs", _from_file("reverse")),
    "quickstart": Recipe(
        "Generated phrases, English to French", "configs", _from_file("quickstart")
    ),
    "first-hour": Recipe(
        "100,000 pairs of Tatoeba, English to French",
        "configs",
        _from_file("first_hour"),
        text=texts.tatoeba(100_000),
        note="`configs/first_hour.py`.",
    ),
    "multi30k-en-de-marian": Recipe(
        "Multi30k, English to German, with the architecture of OPUS-MT",
        "configs",
        _from_file("multi30k_marian_en_de"),
        text=texts.multi30k("de", tokenized=False),
        tests=texts.MULTI30K_TESTS,
        note="`configs/multi30k_marian_en_de.py`.",
    ),
    **multi30k.RECIPES,
    **families.RECIPES,
    **published_tasks.RECIPES,
    **tatoeba.RECIPES,
}
"""By the name that `benchmarks/results.py --run` takes."""
