"""Translates greedily with a model that was exported by `flaxformer-mt convert --to jax`.

    python server.py < source.txt > translation.txt

A line that cannot be translated becomes an empty line, with a message and exit code 1 at the end.
The server must be in the folder of the model, and needs jax, flatbuffers and sentencepiece. It is a
minimal example: a real server would keep running, and could use beam search with the function
`reorder`.
"""

import json
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

BATCH = 16
"""The number of sentences per batch."""

SHORTEST = 16
"""Lengths are padded to this times a power of two, to limit the number of compilations."""


class NotSupportedError(Exception):
    """The exported functions are too old or too new for this JAX, or damaged; says what to do."""


class Model:
    """Translates token ids to token ids.

    Args:
      folder: the folder of the model.

    Raises:
      NotSupportedError: this version of JAX cannot run the exported functions.
    """

    def __init__(self, folder: Path) -> None:
        self.facts: dict[str, Any] = json.loads((folder / "metadata.json").read_bytes())
        with np.load(folder / "parameters.npz") as parameters:
            self.parameters = jax.device_put(dict(parameters))
        files = {name: (folder / f"{name}.jax").read_bytes() for name in ("encode", "step")}
        try:
            functions = {name: export.deserialize(bytearray(files[name])) for name in files}
            self.encode = jax.jit(functions["encode"].call)
            # The previous cache is not needed after a step, so its buffers are donated.
            self.step = jax.jit(functions["step"].call, donate_argnums=2)
            self._trace()
        except ImportError:
            raise
        except Exception as error:  # A version that is not supported can raise anything.
            raise NotSupportedError(
                f"{folder} {_unsupported(self.facts['jax_version'])} renew it with this version of "
                f"JAX: flaxformer-mt convert --from jax --to jax {shlex.quote(str(folder))} NEW"
            ) from error

    def _trace(self) -> None:
        """Traces both functions without compiling them: only then JAX reads all that they hold."""
        tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
        room = jax.ShapeDtypeStruct((1, 1), jnp.bool_)
        positions = jax.ShapeDtypeStruct((1,), jnp.int32)
        self.encode.lower(self.parameters, tokens, room)
        cache = jax.eval_shape(self.encode, self.parameters, tokens, room)
        self.step.lower(self.parameters, tokens, cache, positions)

    def translate(self, sources: Sequence[Sequence[int]]) -> list[list[int]]:
        """Translates by greedy search.

        Args:
          sources: token ids, without end tokens.

        Returns:
          The translations, without end tokens, in the same order.

        Raises:
          ValueError: a sentence is longer than the model's maximum length.
        """
        for source in sources:
            self.check(source)
        found: dict[int, list[int]] = {}
        order = sorted(range(len(sources)), key=lambda index: len(sources[index]))
        for start in range(0, len(order), BATCH):
            indices = order[start : start + BATCH]
            found |= zip(indices, self._batch([sources[i] for i in indices]), strict=True)
        return [found[index] for index in range(len(sources))]

    def check(self, source: Sequence[int]) -> None:
        """Raises ValueError if a sentence is longer than the model's maximum length."""
        length, longest = len(source) + 1, self.facts["longest"]
        if length > longest:
            raise ValueError(f"{length} tokens, but the model takes {longest}")

    def _batch(self, sources: Sequence[Sequence[int]]) -> list[list[int]]:
        facts = self.facts
        source = np.full((BATCH, self._padded(max(map(len, sources)) + 1)), facts["pad_id"])
        limits = np.zeros(BATCH, np.int32)
        for row, tokens in enumerate(sources):
            source[row, : len(tokens) + 1] = [*tokens, facts["eos_id"]]
            limits[row] = self._longest(len(tokens))
        room = np.zeros((1, self._padded(int(limits.max()))), np.bool_)
        cache = self.encode(self.parameters, source.astype(np.int32), room)
        last = np.full((BATCH, 1), facts["bos_id"], np.int32)
        translations: list[list[int]] = [[] for _ in sources]
        for position in range(limits.max()):
            positions = np.full(BATCH, position, np.int32)
            logits, cache = self.step(self.parameters, last, cache, positions)
            logits = logits.at[..., np.array(facts["never_chosen"], int)].set(-jnp.inf)
            last = np.asarray(logits.argmax(axis=-1), np.int32)
            has_ended = last[:, 0] == facts["eos_id"]
            limits = np.where(has_ended, np.minimum(limits, position), limits)
            for translation, token, limit in zip(translations, last[:, 0], limits, strict=False):
                if position < limit:
                    translation.append(int(token))
            if limits.max() <= position + 1:
                break
        return translations

    def _longest(self, num_tokens: int) -> int:
        """Returns the maximum length of a translation, including the end token."""
        facts = self.facts
        by_source = int(facts["max_length_factor"] * num_tokens) + facts["max_length_extra"]
        return min(facts["max_length"] or by_source, facts["longest"])

    def _padded(self, length: int) -> int:
        power_of_two = 1 << (length - 1).bit_length()
        return min(max(SHORTEST, power_of_two), self.facts["longest"])


class Text:
    """Converts text to token ids and back.

    Args:
      folder: the folder of the model.
      facts: its metadata.
    """

    def __init__(self, folder: Path, facts: dict[str, Any]) -> None:
        import sentencepiece

        self.source, self.decoder = (
            sentencepiece.SentencePieceProcessor(model_file=str(folder / name))
            for name in ("source.spm", facts["decoding"]["model"])
        )
        self.ids = {piece: token for token, piece in enumerate(facts["pieces"]["source"])}
        self.pieces = facts["pieces"]["target"]
        self.has_codes = facts["has_codes"]
        self.unknown = facts["unk_id"]
        self.decoding = facts["decoding"]

    def encode(self, text: str) -> list[int]:
        """Returns the token ids of a text, which may begin with a language code (">>fra<<")."""
        code = re.match(">>.*?<<", text) if self.has_codes else None
        pieces = [code[0]] if code else []
        pieces += self.source.encode(text[code.end() if code else 0 :], out_type=str)
        ids = []
        for piece in pieces:
            # SentencePiece makes one piece of consecutive unknown words.
            number = 1 if piece in self.ids else max(1, piece.count("\u2581"))
            ids += [self.ids.get(piece, self.unknown["source"])] * number
        return ids

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the text of token ids, on one line."""
        facts = self.decoding
        pieces = [self.pieces[token] for token in tokens if token not in facts["omitted"]]
        text = self.decoder.decode_pieces(pieces)
        if facts["space"]:
            text = text.replace(facts["space"], " ").strip()
        for before, after in facts["cleaned"]:
            text = text.replace(before, after)
        return " ".join(text.splitlines())


def _unsupported(exported: str) -> str:
    """Returns what prevents the use of a folder of this version of JAX, as the start of advice."""
    installed = jax.__version__
    if exported == installed:
        return "is damaged:"
    written, running = (
        [int(number) for number in re.findall("[0-9]+", version)]
        for version in (exported, installed)
    )
    versions = f"it is of JAX {exported}, and this is JAX {installed}"
    if written < running:
        return f"has expired: {versions};"
    return f"is too new: {versions}; update JAX, or"


def main() -> None:
    """Translates standard input to standard output, line by line."""
    folder = Path(__file__).parent
    try:
        model = Model(folder)
    except NotSupportedError as error:
        sys.exit(f"server.py: error: {error}")
    text = Text(folder, model.facts)
    lines = [line.removesuffix(b"\n") for line in sys.stdin.buffer]
    sources: dict[int, list[int]] = {}
    code = 0
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            source = text.encode(line.decode())
            model.check(source)
        except ValueError as error:
            print(f"server.py: error: line {number}: {error}", file=sys.stderr)
            code = 1
        else:
            sources[number] = source
    translations = dict(zip(sources, model.translate(list(sources.values())), strict=True))
    for number in range(1, len(lines) + 1):
        translation = text.decode(translations[number]) if number in translations else ""
        sys.stdout.buffer.write(f"{translation}\n".encode())
    sys.exit(code)


if __name__ == "__main__":
    main()
