"""Data sets that libraries have written, damaged: Arrow (`datasets`), Parquet, TFDS."""

import json
import random
import shutil
from pathlib import Path

from fuzz.core import Case, Outcome
from fuzz.mutations import damage_bytes, damage_entry, mutate_json, replace_file
from fuzz.world import SIZES, World

CLASSES = (
    "subprocess.Popen", "tensorflow_datasets.testing.x", "os", "", "x.y.Z",
    "tensorflow_datasets.core.features.text_feature.Text",
)  # fmt: skip
"""What `features.json` may call a feature."""
LENGTHS = ("0", "1", "3", "-1", "300", "x", "", str(10**20))
"""Numbers of examples in a file that are wrong."""


def make(rng: random.Random, world: World, folder: Path) -> Case:
    """Returns a case, whose files are in `folder`."""
    kind = rng.choice(sorted(world.data_sets))
    data = Path(shutil.copytree(world.data_sets[kind], folder / "data"))
    if kind == "tfds" and rng.random() < 0.3:
        done = described_wrongly(rng, data)
    else:
        done = damage(rng, data, folder / "outside")
    return case(f"{done} of {kind}", kind, data, world, folder)


def case(done: str, kind: str, data: Path, world: World, folder: Path) -> Case:
    options = [f"--data.corpus={kind}", "--dry-run"]
    if kind == "tfds":
        options.append("--data.valid-split=validation")
    arguments = ("train", *world.training(folder / "output", data), *options)
    names = (str(data), "data.", "train", "valid", "test")
    return Case(done, arguments, check=has_all_pairs, names=names)


def damage(rng: random.Random, data: Path, outside: Path) -> str:
    """Damages one file of a data set, and returns what was done."""
    path = rng.choice(sorted(file for file in data.rglob("*") if file.is_file()))
    if path.suffix == ".json" and rng.random() < 0.7:
        text, done, *_ = mutate_json(rng, json.loads(path.read_text()))
        replace_file(path, text.encode(errors="surrogatepass"))
    elif rng.random() < 0.1:
        done = damage_entry(rng, path, outside)
    else:
        damaged, done = damage_bytes(rng, path.read_bytes(), bytes(range(256)))
        replace_file(path, damaged)
    return f"{done} in {path.name}"


def described_wrongly(rng: random.Random, data: Path) -> str:
    """Lets the metadata of TFDS name another class, or claim another number of examples."""
    if rng.random() < 0.5:
        path, key, new = data / "features.json", "pythonClassName", rng.choice(CLASSES)
        values = json.loads(path.read_text())
        values[key] = new
    else:
        path, key, new = data / "dataset_info.json", "shardLengths", rng.choice(LENGTHS)
        values = json.loads(path.read_text())
        rng.choice(values["splits"])[key] = [new]
    replace_file(path, json.dumps(values).encode())
    return f"{key} = {new!r}"


def has_all_pairs(outcome: Outcome) -> str:
    """Says whether pairs were lost; their text may be another where there are no checksums."""
    return (
        ""
        if f"{SIZES['train']} pairs" in outcome.out
        else f"other pairs without a word: {outcome.out[:500]!r}"
    )
