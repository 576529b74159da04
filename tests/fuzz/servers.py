"""Input of the server that is exported with a model: each line has its translation or a message."""

import io
import random
from typing import Any

import pytest

from flaxformer_mt.interop.formats import jax_server
from fuzz.core import HANG_SECONDS, Outcome, captured, peak_memory, watched
from fuzz.mutations import damage_bytes
from fuzz.world import World

ODD_LINES = (
    b"", b" ", b"\r", b"\0", b"\xff", b"\xed\xa0\x80", b"\xef\xbb\xbfone", "\u2028".encode(),
    b">>fra<< one", b">>" * 50, b"one\x0btwo", b"one\x1ctwo", b"\t\t", "ا👩‍👩‍👧".encode(),
    "\u0301".encode() * 300, b"one " * 1000, b"x" * 100_000, "\U0010ffff".encode() * 40,
)  # fmt: skip


def lines_of(rng: random.Random, world: World) -> list[bytes]:
    """Returns lines, of which some are sentences."""
    sentences = (world.text / "valid.en").read_bytes().splitlines()
    lines = []
    for _ in range(rng.randrange(6)):
        match rng.choice(("sentence", "odd", "noise", "damaged")):
            case "sentence":
                line = rng.choice(sentences)
            case "odd":
                line = rng.choice(ODD_LINES)
            case "noise":
                line = rng.randbytes(rng.choice((1, 5, 60)))
            case _:
                line, _ = damage_bytes(rng, rng.choice(sentences), b"PK\3\4")
        lines += line.split(b"\n")
    return lines


class Server:
    """The exported server, whose model is loaded once."""

    def __init__(self, world: World) -> None:
        self._folder = world.exported
        self._model = jax_server.Model(self._folder)
        self._alone: dict[bytes, str] = {}

    def run(self, stdin: bytes) -> Outcome:
        """Returns the outcome of a start of the server."""
        out, err = io.TextIOWrapper(io.BytesIO(), "utf-8"), io.StringIO()
        memory = peak_memory()
        code: Any = 0
        with pytest.MonkeyPatch.context() as patch, captured(stdin, out, err):
            patch.setattr(jax_server, "__file__", str(self._folder / "server.py"))
            patch.setattr(jax_server, "Model", lambda folder: self._model)
            try:
                with watched(None, HANG_SECONDS):
                    jax_server.main()
            except SystemExit as error:
                code = error.code
        out.flush()
        written = out.buffer.getvalue().decode()
        return Outcome(code, written, err.getvalue(), growth=peak_memory() - memory)

    def problem(self, rng: random.Random, world: World) -> tuple[bytes, Outcome, str]:
        """Gives random input; returns it, the outcome and what is wrong."""
        lines = lines_of(rng, world)
        stdin = b"\n".join(lines) + (b"\n" if rng.random() < 0.8 else b"")
        expected = stdin.removesuffix(b"\n").split(b"\n") if stdin else []
        outcome = self.run(stdin)
        written = outcome.out.split("\n")
        messages = outcome.err.splitlines()
        if written.pop() != "" or len(written) != len(expected):
            return stdin, outcome, f"{len(written)} lines for {len(expected)}"
        if any(not each.startswith("server.py: error: line ") for each in messages):
            return stdin, outcome, f"other messages: {outcome.err[:300]!r}"
        if outcome.code != bool(messages):
            return stdin, outcome, f"exit code {outcome.code} with {len(messages)} messages"
        for line, translation in zip(expected, written, strict=True):
            if translation and translation != self._translation(line):
                return stdin, outcome, f"{line[:100]!r} is translated otherwise alone"
        return stdin, outcome, ""

    def _translation(self, line: bytes) -> str:
        if line not in self._alone:
            self._alone[line] = self.run(line).out.removesuffix("\n")
        return self._alone[line]
