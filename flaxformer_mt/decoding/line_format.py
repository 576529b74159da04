"""Lines in, lines out: what `flaxformer-mt translate` reads and writes.

Each input line gives one output line, or, of n-best lists as text, one for each translation.
"""

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

from flaxformer_mt.decoding.scoring.alignment import pharaoh
from flaxformer_mt.decoding.scoring.scorer import Unit
from flaxformer_mt.decoding.translator import Hypothesis, Sentence, Translator
from flaxformer_mt.errors import UserError

Format = Literal["text", "jsonl"]
"""Text, or a JSON object, in each line."""


@dataclasses.dataclass(frozen=True)
class LineFormat:
    """How lines are read and written."""

    input: Format = "text"
    output: Format = "text"
    unit: Unit | None = None
    """What is aligned."""
    tokens: bool = False
    """Also write token ids, and the pieces that they stand for."""
    attention: bool = False
    """Also write the attention."""

    def __post_init__(self) -> None:
        for name in ("tokens", "attention"):
            if getattr(self, name) and self.output == "text":
                raise UserError(f"--{name} needs --format jsonl: it has no place in plain text")


def translate_lines(
    translator: Translator,
    groups: Iterable[Sequence[str]],
    form: LineFormat,
    name: str,
    advance: Callable[[], object] = lambda: None,
) -> Iterator[str]:
    """What to write for each input line, as soon as it and all lines before it are translated.

    Args:
      translator: of a model.
      groups: input lines, as many together as are there; a group is answered before the next is
        read.
      form: of the lines.
      name: where the lines come from, for messages.
      advance: called when a line is translated, which may be before its turn.

    Raises:
      UserError: a line is not what `form` says, or see `Translator.translate_n_best`.
    """
    first = 0
    scores = form.output == "jsonl" or translator.decode.n_best > 1
    for group in groups:
        found = translator.stream(
            [
                read_sentence(line, form.input, f"{name}, line {number}")
                for number, line in enumerate(group, first + 1)
            ],
            unit=form.unit,
            attention=form.attention or form.tokens,
            scores=scores,
            advance=advance,
        )
        for index, hypotheses in enumerate(found, first):
            if form.output == "jsonl":
                yield write_json(hypotheses, form)
            elif translator.decode.n_best == 1:
                yield write_text(hypotheses[0], form)
            else:
                for hypothesis in hypotheses:
                    yield f"{index} ||| {write_text(hypothesis, form, with_score=True)}"
        first += len(group)


def read_sentence(line: str, form: Format, place: str) -> Sentence:
    """The sentence of an input line.

    Args:
      line: without line end.
      form: text; or jsonl: {"text": "...", "prefix": "...", "phrases": ["...", ...]}, of which only
        the text is needed.
      place: where the line is, for messages.

    Raises:
      UserError: it is no such JSON object.
    """
    if form == "text":
        return Sentence(line)
    try:
        values = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{place}: not JSON: {error}") from error
    if not isinstance(values, dict) or "text" not in values:
        raise UserError(f'{place}: not a JSON object with a "text"')
    for field, value in values.items():
        if field not in Sentence._fields:
            known = ", ".join(Sentence._fields)
            raise UserError(f'{place}: unknown field "{field}"; known: {known}')
        if field != "phrases" and not isinstance(value, str):
            raise UserError(f'{place}: "{field}" must be a text')
    phrases = values.get("phrases", [])
    if not isinstance(phrases, list) or not all(isinstance(phrase, str) for phrase in phrases):
        raise UserError(f'{place}: "phrases" must be a list of texts')
    return Sentence(values["text"], values.get("prefix", ""), tuple(phrases))


def write_text(hypothesis: Hypothesis, form: LineFormat, with_score: bool = False) -> str:
    """A translation as text: `text`, or `text ||| score`, and ` ||| 0-0 1-2` if it is aligned."""
    columns = [hypothesis.text]
    if with_score:
        columns.append(f"{hypothesis.score:.6f}")
    if form.unit:
        columns.append(pharaoh(hypothesis.alignment))
    return " ||| ".join(columns)


def write_json(hypotheses: Sequence[Hypothesis], form: LineFormat) -> str:
    """The translations of a sentence as a JSON object, best first."""
    return json.dumps(
        {"translations": [dict(_fields(hypothesis, form)) for hypothesis in hypotheses]},
        ensure_ascii=False,
    )


def _fields(hypothesis: Hypothesis, form: LineFormat) -> Iterator[tuple[str, Any]]:
    yield "text", hypothesis.text
    yield "score", round(hypothesis.score, 6)
    yield "log_probability", round(hypothesis.log_probability, 6)
    if form.tokens:
        yield "tokens", hypothesis.tokens
        yield "pieces", hypothesis.pieces
        yield "source_pieces", hypothesis.source_pieces
    if form.unit:
        yield "alignment", pharaoh(hypothesis.alignment)
    if form.attention:
        attention = hypothesis.attention
        yield "attention", None if attention is None else attention.round(4).tolist()
