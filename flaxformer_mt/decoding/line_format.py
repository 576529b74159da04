"""The line formats that `flaxformer-mt translate` reads and writes.

Each input line results in one output line, or, for n-best lists as text, in one per translation.
"""

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

import msgspec

from flaxformer_mt.decoding.doubtful_output import Doubts
from flaxformer_mt.decoding.scoring.alignment import AlignmentUnit, pharaoh
from flaxformer_mt.decoding.translator import Hypothesis, Sentence, Translator
from flaxformer_mt.errors import UserError, prefixed
from flaxformer_mt.input_files import parse_json
from flaxformer_mt.writing_systems import has_visible

LineEncoding = Literal["text", "jsonl"]
"""Plain text, or one JSON object per line."""


@dataclasses.dataclass(frozen=True)
class LineFormat:
    """The format of input and output lines, and what the latter have besides translations."""

    input: LineEncoding = "text"
    output: LineEncoding = "text"
    unit: AlignmentUnit | None = None
    """Of the alignment; None = none."""
    tokens: bool = False
    """Token ids and their pieces."""
    attention: bool = False

    def __post_init__(self) -> None:
        for name in ("tokens", "attention"):
            if getattr(self, name) and self.output == "text":
                raise UserError(f"--{name} requires --format jsonl: plain text cannot represent it")


def translate_lines(
    translator: Translator,
    groups: Iterable[Sequence[str]],
    line_format: LineFormat,
    name: str,
    advance: Callable[[], object] = lambda: None,
    first: int = 0,
    doubts: Doubts | None = None,
) -> Iterator[str]:
    """Yields the output lines, each as soon as all preceding input lines are translated.

    If fewer than `n_best` different translations of a line are found, the last one is repeated. A
    group of lines that are available together is translated completely before the next is read.
    `name` is the source of the lines, for error messages, and `first` the number of the first, from
    0; `advance` is that of `Translator.stream`. `doubts` counts the best translations.

    Raises:
      UserError: a line does not have the input format or cannot be translated.
    """
    scores = line_format.output == "jsonl" or translator.decode.n_best > 1
    for group in groups:
        sentences = [
            read_sentence(line, line_format.input, f"{name}, line {number}")
            for number, line in enumerate(group, first + 1)
        ]
        found = translator.stream(
            sentences,
            unit=line_format.unit,
            attention=line_format.attention or line_format.tokens,
            scores=scores,
            advance=advance,
        )
        with prefixed(f"{name}: "):
            for index, different in enumerate(found, first):
                if doubts is not None:
                    doubts.add(different[0].text, sentences[index - first].text)
                # Programs that read n-best lists count lines.
                repeated = [different[-1]] * (translator.decode.n_best - len(different))
                yield from _lines([*different, *repeated], line_format, index)
        first += len(group)


def _lines(hypotheses: Sequence[Hypothesis], line_format: LineFormat, index: int) -> Iterator[str]:
    """Yields the output lines of a sentence, of this number from 0."""
    if line_format.output == "jsonl":
        yield format_json(hypotheses, line_format)
    elif len(hypotheses) == 1:
        yield format_text(hypotheses[0], line_format)
    else:
        for hypothesis in hypotheses:
            yield f"{index} ||| {format_text(hypothesis, line_format, with_score=True)}"


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    text: str
    prefix: str = ""
    phrases: tuple[str, ...] = ()


def read_sentence(line: str, encoding: LineEncoding, location: str) -> Sentence:
    """Parses an input line.

    Its encoding is text; or jsonl: {"text": "...", "prefix": "...", "phrases": ["...", ...]}, of
    which only "text" is required. A blank line is an empty sentence. `location` is for the
    UserError of a line that is not such a JSON object.
    """
    if encoding == "text" or not has_visible(line):
        return Sentence(line)
    given: _Line = parse_json(line, location, _Line)
    return Sentence(given.text, given.prefix, given.phrases)


def format_text(hypothesis: Hypothesis, line_format: LineFormat, with_score: bool = False) -> str:
    """Formats a translation as `text`, or `text ||| score`, and ` ||| 0-0 1-2` with alignment."""
    columns = [hypothesis.text]
    if with_score:
        columns.append(f"{hypothesis.score:.6f}")
    if line_format.unit:
        columns.append(pharaoh(hypothesis.alignment))
    return " ||| ".join(columns)


def format_json(hypotheses: Sequence[Hypothesis], line_format: LineFormat) -> str:
    """Formats the translations of a sentence, best first, as a JSON object."""
    return json.dumps(
        {"translations": [dict(_fields(hypothesis, line_format)) for hypothesis in hypotheses]},
        ensure_ascii=False,
    )


def _fields(hypothesis: Hypothesis, line_format: LineFormat) -> Iterator[tuple[str, Any]]:
    yield "text", hypothesis.text
    yield "score", round(hypothesis.score, 6)
    yield "log_probability", round(hypothesis.log_probability, 6)
    if line_format.tokens:
        yield "tokens", hypothesis.tokens
        yield "pieces", hypothesis.pieces
        yield "source_pieces", hypothesis.source_pieces
    if line_format.unit:
        yield "alignment", pharaoh(hypothesis.alignment)
    if line_format.attention:
        attention = hypothesis.attention
        yield "attention", None if attention is None else attention.round(4).tolist()
