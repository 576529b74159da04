"""Data sets that libraries have written, damaged: Arrow (`datasets`), Parquet, TFDS."""

import random
import shutil
from pathlib import Path

from fuzz.core import Case, Outcome
from fuzz.mutations import damage_file
from fuzz.world import SIZES, World


def make(rng: random.Random, world: World, folder: Path) -> Case:
    """Returns a case, whose files are in `folder`."""
    kind = rng.choice(sorted(world.data_sets))
    data = Path(shutil.copytree(world.data_sets[kind], folder / "data"))
    victim, other = rng.choices(sorted(file for file in data.rglob("*") if file.is_file()), k=2)
    done = damage_file(rng, victim, folder / "outside", other)
    options = [f"--data.corpus={kind}", "--dry-run"]
    if kind == "tfds":
        options.append("--data.valid-split=validation")
    arguments = ("train", *world.training(folder / "output", data), *options)
    names = (str(data), "data.", "train", "valid", "test")
    return Case(f"{done} of {kind}", arguments, check=has_all_pairs, names=names)


def has_all_pairs(outcome: Outcome) -> str:
    """Says whether pairs were lost; their text may be another where there are no checksums."""
    return (
        ""
        if f"{SIZES['train']} pairs" in outcome.out
        else f"other pairs without a word: {outcome.out[:500]!r}"
    )
