"""What an experiment consists of."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal, NamedTuple

from flaxformer_mt import experiment
from flaxformer_mt.config import ExperimentConfig
from flaxformer_mt.run_reader import Run


class Text(NamedTuple):
    """The text of an experiment."""

    name: str
    """Of the folder that it is written to; experiments on the same text share it."""
    write: Callable[[Path, Path], None]
    """Called with the folder of raw corpora (--data) and the folder to write."""
    is_tokenized: bool = False
    """Lower-cased, normalised and tokenized text, scored as it is; otherwise cased and raw."""
    joined: Callable[[str], str] = str
    """Joins the subwords of a line, before it is scored; the text may be segmented already."""

    def prepare(self, raw: Path, out: Path) -> Path:
        """Writes the text below `out`, and returns its folder."""
        folder = out / "text" / self.name
        folder.mkdir(parents=True, exist_ok=True)
        self.write(raw, folder)
        return folder


Group = Literal["configs", "multi30k", "families", "published-tasks", "tatoeba"]


def run_name(name: str, seed: int) -> str:
    """Returns the name of the run folder, and of the files, of an experiment with a seed."""
    return f"{name}-seed{seed}"


@dataclasses.dataclass(frozen=True)
class Recipe:
    """One experiment."""

    title: str
    group: Group
    """The section of docs/results.md."""
    config: Callable[[], ExperimentConfig]
    """Without `data.path` and `train.seed`, which the runner sets."""
    text: Text | None = None
    """None if it is generated, as the configuration says."""
    train: Callable[[ExperimentConfig, Path], Run] = experiment.train
    """Trains in a run folder, and returns it."""
    averaged: int = 1
    """The number of last checkpoints whose mean is scored; 1 = the best checkpoint."""
    members: tuple["Member", ...] = ()
    """The experiments whose models translate together as an ensemble; () = only its own."""
    teachers: tuple["Member", ...] = ()
    """The experiments whose models translate the training text together. Each pair is then in the
    training text twice, with its reference and with that translation; the vocabulary is that of the
    first teacher."""
    tests: tuple[str, ...] = ("test",)
    """Test sets; () for a language model, which has the metrics of its validation."""
    published: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """BLEU by test set, with the scoring of the text."""
    source: str = ""
    """Where the published values are."""
    by_epoch: tuple[str, ...] = ()
    """Validation metrics to tabulate by epoch."""
    note: str = ""
    """What a reader has to know beside the scores, as Markdown."""


class Member(NamedTuple):
    """A model that is trained by a recipe."""

    name: str
    """Of the recipe."""
    recipe: Recipe
    seed: int


def members(name: str, recipe: Recipe, seed: int) -> tuple[Member, ...]:
    """Returns the models that an experiment trains: those of an ensemble have their own seeds."""
    return recipe.members or (Member(name, recipe, seed),)
