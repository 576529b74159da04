"""A flipped bit in any file of a run folder is named by whoever reads it, or has no effect."""

import hashlib
import json
import random
import shutil

import jax
import numpy as np
import pytest
from small_runs import flags

from flaxformer_mt import config as configuration
from flaxformer_mt import experiment
from flaxformer_mt.cli import training
from flaxformer_mt.errors import UserError
from flaxformer_mt.interop.convert import convert
from flaxformer_mt.runs import parameter_file
from flaxformer_mt.runs.averaging import average_run
from flaxformer_mt.runs.checkpoint import Checkpoints, restore_params
from flaxformer_mt.runs.manifest import damage
from flaxformer_mt.trained_model import load_run
from flaxformer_mt.training.reporting.metrics import JsonLinesWriter


def digest(tree):
    content = hashlib.sha256()
    for leaf in jax.tree.leaves(jax.device_get(tree)):
        content.update(np.asarray(leaf).tobytes() if not isinstance(leaf, str) else leaf.encode())
    return content.hexdigest()


def fixed(config):
    """A configuration without the options that may be edited by hand."""
    values = configuration.to_dict(config)
    return [
        (f"{group}.{name}", value)
        for group, fields in values.items()
        for name, value in fields.items()
        if f"{group}.{name}" not in configuration.RESUMABLE_FIELDS
    ]


def translate(run, output, announce):
    """Also what `score`, `evaluate` and `inspect` read."""
    model = load_run(run, "best")
    files = {name: content.hex() for name, content in model.tokenizers.files.items()}
    return model.step, digest(model.params), digest(files), fixed(model.config)


def average(run, output, announce):
    steps = average_run(run, output, 2, "last", announce)
    return steps, digest(restore_params(output)[1]), fixed(load_run(output).config)


def convert_to_file(run, output, announce):
    path = output.with_suffix(".safetensors")
    convert("flaxformer_mt", "flaxformer_mt", run, path)
    content = parameter_file.read(path)  # The order of the metadata in the file is not fixed.
    return digest(content.tensors), content.metadata


class Continuing:
    """All that a continued run starts from."""

    def __init__(self, arguments, caplog):
        self._config = training.parse_flags(arguments).experiment()
        self._caplog = caplog
        self._prepared = None

    def __call__(self, run, output, announce):
        self._caplog.clear()
        parts = experiment.prepare(self._config, run)
        for message in self._caplog.messages:
            announce(message)
        tokens = [
            array
            for corpus in parts.dataset.training.corpora
            for side in (corpus.sources, corpus.targets)
            for array in (side.tokens, side.offsets)
        ]
        self._prepared = parts.abstract_state(), digest(tokens), [*parts.dataset.report()]
        return self.restore(run, output, announce)

    def restore(self, run, output, announce):
        """As a call, for a file that only the restoration reads."""
        template, tokens, report = self._prepared
        with Checkpoints(run, announce=announce) as checkpointer:
            state, progress = checkpointer.restore(template)
        JsonLinesWriter(run / "metrics.jsonl", announce).rewind(int(state.step))
        lines = (run / "metrics.jsonl").read_text()
        return digest(state), tokens, report, json.dumps(progress), lines


def names(text, path, run):
    """Whether a message names a file, or the checkpoint that it is a part of."""
    checkpoints = run / "checkpoints"
    if checkpoints in path.parents:
        return f"checkpoints/{path.relative_to(checkpoints).parts[0]}" in text
    return path.name in text


def flip(path, random_numbers):
    """Flips a random bit of a file, and returns its place."""
    content = bytearray(path.read_bytes())
    position, bit = random_numbers.randrange(len(content)), random_numbers.randrange(8)
    content[position] ^= 1 << bit
    path.write_bytes(content)
    return position, bit


SOME = ("config.json", "tokenizer/*", "metrics.jsonl", "checkpoints/6/progress.json")


PARTS = (
    "*.json",
    "metrics.jsonl",
    "tokenizer/*",
    "cache/**/*",
    "checkpoints/**/*",
    "tensorboard/*",
)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    ("patterns", "count"),
    [
        (SOME, 1),
        *(pytest.param((part,), 200, marks=pytest.mark.slow, id=part) for part in PARTS),
    ],
)
def test_each_is_named_or_has_no_effect(finished, text, tmp_path, caplog, patterns, count):
    start = Continuing(flags(text, finished, "--train.num-steps=6"), caplog)

    def outcomes(run, outputs, continuing):
        commands = {
            "translate": translate,
            "average": average,
            "convert": convert_to_file,
            "continue": continuing,
        }
        results = {}
        for name, command in commands.items():
            lines = []
            try:
                result = command(run, outputs / name, lines.append)
            except UserError as error:
                result = None
                lines.append(str(error))
            results[name] = (result, "\n".join(lines))
        return results

    wanted = outcomes(shutil.copytree(finished, tmp_path / "whole"), tmp_path, start)
    assert not any(lines for _, lines in wanted.values())
    random_numbers = random.Random(0)
    files = sorted(
        path.relative_to(finished)
        for pattern in patterns
        for path in finished.glob(pattern)
        if path.is_file() and path.stat().st_size
    )
    checked = shutil.copytree(finished, tmp_path / "checked")
    silent = []
    for file in files:
        in_checkpoint = file.parts[0] == "checkpoints"
        # All commands verify a checkpoint by the same function, before they read it.
        for _ in range(1 if in_checkpoint else count):
            case = tmp_path / "case"
            run = shutil.copytree(finished, case / "run")
            position, bit = flip(run / file, random_numbers)
            continuing = start.restore if in_checkpoint else start
            for name, (result, lines) in outcomes(run, case, continuing).items():
                if result != wanted[name][0] and not names(lines, run / file, run):
                    silent.append((str(file), position, bit, name, lines))
            shutil.rmtree(case)
        for _ in range(count - 1 if in_checkpoint else 0):
            position, bit = flip(checked / file, random_numbers)
            if not damage(checked.joinpath(*file.parts[:2])):
                silent.append((str(file), position, bit, "damage", ""))
            shutil.copyfile(finished / file, checked / file)
    assert not silent
