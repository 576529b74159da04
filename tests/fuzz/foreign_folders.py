"""Folders of other programs, Hugging Face's and Marian's, damaged or contradicting themselves."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

from fuzz.core import Case, Outcome, run_command
from fuzz.mutations import damage_bytes, damage_file, json_text, mutate_json, replace_file
from fuzz.world import World

SIZES = (
    "vocab_size", "d_model", "encoder_layers", "decoder_layers", "encoder_ffn_dim",
    "decoder_ffn_dim",
)  # fmt: skip
"""Settings that the tensors contradict if they are changed."""
IDS = ("pad_token_id", "eos_token_id", "decoder_start_token_id")
BAD_IDS = (-1, 150, 2**31, 10**20, True, 1.5, "2", "x", [], {}, [0, "x"], [[2]], "@nan@", "@long@")
"""Ids that no vocabulary of 150 pieces has."""
BAD_SIZES = (0, -1, 10**9, 10**20, 2.5, True, "8", "x", [], {}, "@nan@", "@inf@", "@long@")


def make(rng: random.Random, world: World, folder: Path) -> Case:
    """Returns a case, whose files are in `folder`."""
    source = Path(shutil.copytree(world.marian, folder / "model"))
    path, other = rng.choice(sorted(source.iterdir())), rng.choice(sorted(world.marian.iterdir()))
    expected = "any"
    if rng.random() < 0.25:
        path, expected = source / "config.json", "refused"
        values = json.loads(path.read_text())
        names, new = rng.choice(((SIZES, BAD_SIZES), (IDS, BAD_IDS)))
        key = rng.choice(names)
        values[key] = rng.choice(new)
        replace_file(path, json_text(values).encode())
        done = f"{key} = {values[key]!r}"
    else:
        done = damage_file(rng, path, folder / "outside", other)
    return convert("marian", source, folder, done, usable(world, folder, expected))


def convert(
    family: str,
    source: Path,
    folder: Path,
    done: str,
    check: Callable[[Outcome], str],
) -> Case:
    output = folder / "output"
    arguments = ("convert", "--from", family, str(source), str(output))
    return Case(done, arguments, check=check, names=(str(source), "--set"))


def vocabulary(rng: random.Random, world: World, folder: Path) -> Case:
    """A folder of the Hugging Face Hub whose `tokenizer.json` is another."""
    source = Path(shutil.copytree(world.hub, folder / "model"))
    path = source / "tokenizer.json"
    if rng.random() < 0.7:
        values = json.loads(path.read_text())
        part = rng.choice(sorted(values))
        changed, done = mutate_json(rng, {part: values.pop(part)})
        text = ", ".join((json.dumps(values)[1:-1], changed.strip()[1:-1])).rstrip(", \n")
        content = f"{{{text}}}".encode(errors="surrogatepass")
    else:
        content, done = damage_bytes(rng, path.read_bytes(), b"{}")
    replace_file(path, content)
    return convert("t5", source, folder, f"{done} in {path.name}", usable(world, folder))


def usable(world: World, folder: Path, expected: str = "any") -> Callable[[Outcome], str]:
    """Returns a check of the run that a folder is converted to: other commands can use it.

    Args:
      world: has the text to translate.
      folder: of the case; the run is its `output`.
      expected: "refused" if the folder makes no sense, "any" if its numbers may be any.
    """

    def check(outcome: Outcome) -> str:
        if expected == "refused":
            return "accepted"
        run = str(folder / "output")
        command = ("translate", "--run", run, "--input", str(world.lines), "--max-length", "3")
        translated = Case("translate the result", (*command, "--beam-size", "1"))
        outcome = run_command(translated.arguments, folder=folder)
        problem = translated.problem(outcome)
        if problem or outcome.code == 0:
            lines = outcome.out.count("\n")
            problem = problem or ("" if lines == 2 else f"{lines} lines for 2 sentences")
            return problem and f"{translated}: {problem}"
        if expected == "any" and "no translation fulfils" in outcome.err:
            return ""  # The numbers of files without checksums may be any.
        return f"the result is not usable: {outcome.err}"

    return check
