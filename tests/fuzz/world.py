"""The intact files that cases start from: text, run folders, an exported model, data sets."""

import dataclasses
import functools
import shutil
from pathlib import Path
from typing import Any

import datasets
import hub_models
import tfds_folder

from flaxformer_mt.config import DataConfig
from flaxformer_mt.data.corpora.corpus import load_corpus
from fuzz.core import run_command

REPOSITORY = Path(__file__).parents[2]
CONFIG = REPOSITORY / "configs" / "multi30k_marian_en_de.py"
SIZES = {"train": 120, "valid": 2, "test": 1}
STEPS = 4
OPTIONS = (
    f"--config={CONFIG}",
    "--data.corpus=text",
    "--data.vocab-size=150",
    "--data.no-byte-fallback",
    "--data.target-row-length=32",
    "--model.d-model=8",
    "--model.num-heads=2",
    "--model.d-ff=16",
    "--model.num-encoder-layers=1",
    "--model.num-decoder-layers=1",
    "--model.activation=relu",
    "--optimizer.schedule=inverse_square_root",
    "--train.batch-tokens=64",
    "--train.eval-every=2",
    "--train.checkpoint-every=2",
    "--train.log-every=2",
    "--train.eval-sentences=1",
    "--train.show-translations=1",
    "--train.best-metric=loss",
    "--decode.max-length-factor=0",
    "--decode.max-length-extra=4",
    "--decode.max-source-length=16",
    "--decode.beam-size=1",
    "--parallel.num-devices=1",
    f"--train.num-steps={STEPS}",
)
"""A model that every format can hold, and that trains in a second."""


@dataclasses.dataclass(frozen=True)
class World:
    """A folder of intact files; each is made when it is first asked for."""

    folder: Path
    results: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Results of commands on intact files, by what describes the command."""

    @functools.cached_property
    def text(self) -> Path:
        """Parallel text: train, valid and test, .en and .de."""
        folder = self.folder / "text"
        folder.mkdir()
        for split, size in SIZES.items():
            corpus = load_corpus(DataConfig(corpus="phrases", generated_pairs=300), split)
            for language, lines in (("en", corpus.sources), ("de", corpus.targets)):
                write_lines(folder / f"{split}.{language}", lines[:size])
        return folder

    @functools.cached_property
    def lines(self) -> Path:
        """Two source sentences, short enough for one compiled program."""
        return write_lines(self.folder / "lines.txt", ["two", "ten"])

    @functools.cached_property
    def run(self) -> Path:
        """A finished run with two checkpoints."""
        self.succeed("train", *self.training(self.folder / "run"))
        return self.folder / "run"

    @functools.cached_property
    def other(self) -> Path:
        """A run of another seed, vocabulary and text, with its languages exchanged."""
        folder = self.folder / "other"
        options = ("--data.source-language=de", "--data.target-language=en", "--train.seed=1")
        self.succeed("train", *self.training(folder), *options)
        return folder

    @functools.cached_property
    def marian(self) -> Path:
        """The run as a model of Hugging Face's Marian."""
        output = self.folder / "marian"
        given = ("--from", "flaxformer_mt", "--to", "marian")
        self.succeed("convert", *given, str(self.run), str(output))
        return output

    @functools.cached_property
    def hub(self) -> Path:
        """A toy T5 of the Hugging Face Hub, with `tokenizer.json`."""
        texts = [
            line
            for each in ("en", "de")
            for line in (self.text / f"train.{each}").read_text().splitlines()
        ]
        hub_models.save("t5", texts, self.folder / "hub")
        return self.folder / "hub"

    @functools.cached_property
    def data_sets(self) -> dict[str, Path]:
        """The text as other libraries keep it, by the name of `data.corpus`."""
        rows = {}
        for split in SIZES:
            lines = [
                (self.text / f"{split}.{each}").read_text().splitlines() for each in ("en", "de")
            ]
            pairs = [{"en": en, "de": de} for en, de in zip(*lines, strict=True)]
            rows[split] = datasets.Dataset.from_dict({"translation": pairs})
        folders = {name: self.folder / name for name in ("datasets", "parquet", "tfds")}
        datasets.disable_progress_bars()
        datasets.DatasetDict(rows).save_to_disk(folders["datasets"])
        folders["parquet"].mkdir()
        for split, each in rows.items():
            each.flatten().rename_columns(
                {"translation.en": "en", "translation.de": "de"}
            ).to_parquet(folders["parquet"] / f"{split}.parquet")
        pairs = {
            {"valid": "validation"}.get(split, split): [
                (pair["en"], pair["de"]) for pair in each["translation"]
            ]
            for split, each in rows.items()
        }
        tfds_folder.write(folders["tfds"], **pairs)
        return folders

    def training(self, workdir: Path, text: Path | None = None) -> tuple[str, ...]:
        """Returns the options that train in a folder."""
        return (*OPTIONS, f"--data.path={text or self.text}", f"--workdir={workdir}")

    def command(self, name: str, output: Path, run: Path | None = None) -> tuple[str, ...]:
        """Returns a command line that succeeds.

        Args:
          name: of the command.
          output: path of what it writes, if it does not print.
          run: a copy of the run that it reads instead of the run.
        """
        run = run or self.run
        given, written = f"--run={run}", f"--output={output}"
        text, lines = self.text, self.lines
        source = f"--source={lines}"
        arguments = {
            "translate": (given, f"--input={lines}"),
            "score": (given, source, f"--target={lines}"),
            "evaluate": (given, source, f"--reference={lines}"),
            "plot": (given, f"{written}.svg"),
            "attention": (given, "--source=two", f"{written}.svg"),
            "inspect": (given, "--json"),
            "average": (given, "--last=2", written),
            "lexicon": (given, f"--source={text}/train.en", f"--target={text}/train.de", written),
            "convert": ("--from=flaxformer_mt", "--to=marian", str(run), f"{output}.safetensors"),
            "parity": ("--family=torch",),
            "train": self.training(output),
        }  # fmt: skip
        return name, *arguments[name]

    def succeed(self, *arguments: str) -> str:
        """Runs a command that must succeed, and returns its standard output."""
        outcome = run_command(arguments, seconds=600)
        assert outcome.code == 0, (arguments, outcome)
        return outcome.out

    def copy_run(self, folder: Path, name: str = "run") -> Path:
        """Copies the run into the folder of a case."""
        return Path(shutil.copytree(self.run, folder / name, symlinks=True))


def write_lines(path: Path, lines: list[str]) -> Path:
    path.write_bytes("".join(f"{line}\n" for line in lines).encode())
    return path
