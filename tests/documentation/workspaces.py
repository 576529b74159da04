"""What the commands of the documentation expect to be there: text, runs and published models."""

import contextlib
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hub_models
import numpy as np
import torch
from documentation import shell, tiny
from documentation.pages import Block

from flaxformer_mt.cli import main
from flaxformer_mt.parity import references

NOUNS = {"dog": ("Hund", "chien"), "girl": ("Mädchen", "fille"), "boy": ("Junge", "garçon")}
VERBS = {"runs": ("rennt", "court"), "sleeps": ("schläft", "dort"), "sits": ("sitzt", "attend")}
PLACES = {
    "on green grass": ("auf grünem Gras", "sur l'herbe verte"),
    "in front of a fence": ("vor einem Zaun", "devant une clôture"),
    "at home": ("zu Hause", "à la maison"),
}


def triples(count: int, seed: int = 0) -> list[tuple[str, str, str]]:
    """Returns different sentences in English, German and French."""
    rng = random.Random(seed)
    found = {}
    while len(found) < count:
        noun, verb, place = (rng.choice(list(each)) for each in (NOUNS, VERBS, PLACES))
        number = rng.randint(2, 9999)
        words = zip((noun, verb, place), (NOUNS[noun], VERBS[verb], PLACES[place]), strict=True)
        english, german, french = zip(*((each, *others) for each, others in words), strict=True)
        found[number] = tuple(f"{number} {' '.join(each)}." for each in (english, german, french))
    return list(found.values())


def write(path: Path, lines: list[str]) -> None:
    """Writes lines to a file, and makes its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def prepare(folder: Path, page: str, blocks: list[Block], trained_run: Path) -> None:
    """Fills the folder in which the commands of a page run."""
    shell.prepare(folder)
    tiny.write_configs(folder)
    for seed, (name, count) in enumerate({"train": 200, "valid": 20, "test": 20}.items()):
        for text in ("mytext", "other/text", "newstest", "FOLDER", "PATH"):
            for language, lines in zip(
                ("en", "de", "fr"), zip(*triples(count, seed), strict=True), strict=True
            ):
                write(folder / text / f"{name}.{language}", list(lines))
    english, german, french = (list(each) for each in zip(*triples(20, 9), strict=True))
    for name, lines in {
        "test.en": english, "test.de": german, "test.fr": french, "test.1.fr": french,
        "test.2.fr": french[1:] + french[:1], "a.fr": french[2:] + french[:2],
        "b.fr": french[3:] + french[:3], "greedy.fr": french[4:] + french[:4],
        "beam.fr": french[5:] + french[:5], "old.fr": french[6:] + french[:6],
        "new.fr": french[7:] + french[:7], "right.de": german, "wrong.de": german[1:] + german[:1],
        "one.en": english[:1], "source.txt": english, "F": english, "lines.en": english[:3],
        "two.en": english[:2],
    }.items():  # fmt: skip
        write(folder / name, lines)
    many = triples(4200)
    write(folder / "fra.txt", ["\t".join((e, f, "CC-BY")) for e, _, f in many])
    write(folder / "mine.tsv", ["\t".join((e, d)) for e, d, _ in many])
    made = {
        word.partition("=")[2]
        for block in blocks
        if block.reason is None
        for word in " ".join(block.lines).split()
        if word.startswith("--workdir=")
    }
    for run in ("runs/quickstart", "runs/multi30k", "runs/earlier", "runs/a", "RUN"):
        if run not in made:
            shutil.copytree(trained_run, folder / run, symlinks=True)
    for block in blocks:
        for command in block.commands() if is_run(block) else ():
            shown = re.fullmatch(r"(cat|head -2) (\S+)", command.text)
            if shown:
                path = folder / shown[2]
                following = path.read_text(encoding="utf-8") if shown[1] != "cat" else ""
                write(path, [*command.output, *following.splitlines()])
    for pages, add in FURTHER.items():
        if page in pages.split():
            add(folder)


def is_run(block: Block) -> bool:
    """Whether a block has commands that are run, with what they print."""
    return block.language == "console" and block.reason is None


def opus(folder: Path) -> None:
    """Adds the folder of an OPUS-MT model."""
    convert(folder, "--to", "marian", "runs/multi30k", "opus-mt-en-de")


def mine(folder: Path) -> None:
    """Trains the run of docs/first-hour.md."""
    options = ["--data.path=fra.txt", "--data.columns", "1", "2", "--data.hold-out", "100"]
    options += ["--data.source-language=en", "--data.target-language=fr"]
    train(folder, "first_hour", "mine", *options)


def several_checkpoints(folder: Path) -> None:
    """Trains the two runs of docs/training.md."""
    train(folder, "multi30k_en_de", "a", "--train.checkpoint-every=1", "--train.keep-last=5")
    shutil.copytree(folder / "runs" / "a", folder / "runs" / "b")


def quickstart(folder: Path) -> None:
    """Trains the run of README.md's first command."""
    train(folder, "quickstart", "quickstart")


def train(folder: Path, config: str, run: str, *options: str) -> None:
    """Trains a run in the folder."""
    shutil.rmtree(folder / "runs" / run, ignore_errors=True)
    arguments = [f"--config=configs/{config}.py", f"--workdir=runs/{run}", *options]
    with contextlib.chdir(folder):
        assert main(["train", *arguments]) == 0


def hub(folder: Path) -> None:
    """Adds the folders of other models of Hugging Face."""
    english = [each for each, _, _ in triples(200)]
    for kind, name in {
        "nllb": "nllb-200-distilled-600M", "mbart50": "mbart-large-50-many-to-many-mmt",
        "t5": "flan-t5-base",
    }.items():  # fmt: skip
        hub_models.save(kind, english, folder / name)


def convert(folder: Path, *arguments: str) -> None:
    """Converts a run in the folder."""
    *options, source, target = arguments
    paths = (str(folder / source), str(folder / target))
    assert main(["convert", "--from", "flaxformer_mt", *options, *paths]) == 0


def published(folder: Path) -> None:
    """Adds checkpoints of published models."""
    for family, name in {
        "opennmt": "opennmt.pt", "tunz": "tunz.pt", "annotated": "annotated.pt",
        "torch": "torch.pt",
    }.items():  # fmt: skip
        torch.save(reference(family).state_dict(), folder / name)


def reference(family: str) -> torch.nn.Module:
    """Returns a published model with 8 heads and random weights."""
    return references.build(
        family, source_vocab_size=50, target_vocab_size=50, d_model=32, num_heads=8, d_ff=64,
        num_encoder_layers=1, num_decoder_layers=1,
    )  # fmt: skip


def names(folder: Path, page: str) -> dict[str, Any]:
    """Returns the variables that the Python of a page expects."""
    if page not in PAGES_WITH_MODULE:
        return {}
    source = np.array([[5, 6, 7, 8, 2], [9, 4, 2, 0, 0]], np.int32)
    target_input = np.array([[1, 5, 6, 7], [1, 7, 0, 0]], np.int32)
    targets = np.array([[5, 6, 7, 2], [7, 2, 0, 0]], np.int32)
    return {
        "module": reference("annotated"), "source": source, "target_input": target_input,
        "targets": targets,
    }  # fmt: skip


PAGES_WITH_MODULE = {
    "README.md", "docs/converting.md", "docs/published-models.md", "docs/reference-tools.md",
}  # fmt: skip
"""Those whose Python compares a module with a batch."""
PAGES_WITH_CHECKPOINTS = {*PAGES_WITH_MODULE, "docs/parity-in-ci.md"}

FURTHER: dict[str, Callable[[Path], None]] = {
    "README.md docs/opus-mt.md docs/python.md docs/reference-runs.md": opus,
    " ".join(PAGES_WITH_CHECKPOINTS): published,
    "docs/hugging-face.md": hub,
    "docs/decoding.md docs/evaluation.md": mine,
    "docs/training.md": several_checkpoints,
    "README.md docs/python.md": quickstart,
}
"""What only some pages need."""
