"""Checks of a run's data before training: unknown tokens, swapped sides, leaked test pairs.

Pieces of text vote on the language of a side.
"""

import collections
import itertools
import logging
import re
from collections.abc import Iterable, Sequence
from typing import TypeAlias

from flaxformer_mt.config import DataConfig
from flaxformer_mt.data.corpora.corpus import Chunk, Corpus
from flaxformer_mt.data.corpora.filters import PairFilter
from flaxformer_mt.data.corpora.languages import Identifier, are_similar
from flaxformer_mt.data.corpora.rows import location_of
from flaxformer_mt.data.corpora.shared_text import (
    PAIR,
    SOURCE,
    TARGET,
    HeldOutText,
    Shared,
    shown,
)
from flaxformer_mt.data.stream.encoded_corpus import EncodedCorpus
from flaxformer_mt.errors import UserError
from flaxformer_mt.writing_systems import has_visible

_SECTIONS, _ROWS = 20, 25
"""Sections of a corpus from which its languages are identified, evenly spaced, and their rows."""

_WINDOWS = 4, 10
"""Numbers of parts of the corpus that are looked at by themselves."""

_PIECE_BYTES = 200
"""Letters of a piece of text whose language is identified, in bytes of UTF-8."""

_FEWEST_PIECES = 3
"""Number of pieces below which the language of a side is uncertain."""

_MAJORITY = 0.8
"""Minimum mean probability of a side's language."""

_PASS = "pass this check by data.check_languages=False"

_WORD = re.compile(r"[^\W\d_]+")

_log = logging.getLogger(__name__)


def check_unknown_rate(corpus: EncodedCorpus, config: DataConfig) -> None:
    """Rejects a corpus with more than `config.max_unknown_rate` unknown tokens on a side."""
    sides = {"source": corpus.report.sources, "target": corpus.report.targets}
    change = "set data.byte_fallback, raise data.character_coverage, or "
    if config.tokenizer_path:
        change = ""
    elif config.tokenizer == "word":
        change = (
            "segment the words into subwords (docs/data.md), set data.tokenizer=bpe, raise "
            f"data.vocab_size={config.vocab_size}, or "
        )
    for side, report in sides.items():
        if report is not None and report.unknown_rate > config.max_unknown_rate:
            raise UserError(
                f"{corpus.name}: {report.unknown_rate:.1%} of the {side} tokens are unknown "
                f"(data.max_unknown_rate={config.max_unknown_rate:g}), such as "
                f"{report.unknown_example!r}: {change}use a vocabulary made for this text"
            )


def check_not_blank(corpora: Sequence[Corpus], has_inputs: bool = True) -> None:
    """Rejects the corpora of a role if one of them has no pair with text on both sides.

    If they are held out of others, one with text is enough. A language model (without `has_inputs`)
    only needs the target side.
    """
    blank = [corpus for corpus in corpora if not _has_text(corpus, has_inputs)]
    for corpus in blank:
        if corpus.may_be_empty and len(blank) < len(corpora):
            continue
        sides = "on both sides" if has_inputs else "on the target side"
        advice = "raise data.hold_out" if corpus.may_be_empty else "give another split or file"
        if corpus.division and not corpus.may_be_empty:
            advice += (
                ", or lower data.hold_out: it leaves out what shares a side with a held-out pair"
            )
        raise UserError(f"{corpus.name}: no pair has text {sides}: {advice}")


def _has_text(corpus: Corpus, has_inputs: bool) -> bool:
    return any(
        has_visible(target) and (not has_inputs or has_visible(source.removeprefix(corpus.tag)))
        for source, target in corpus.pairs()
    )


def check_languages(training: Sequence[Corpus], held_out: Sequence[Corpus]) -> None:
    """Rejects corpora with swapped sides, or with a side that is in another language.

    Pieces of text vote. A corpus whose languages are unknown to the identifier is only compared
    with others of the same languages: one may have the sides of the other swapped. Languages that
    are similar, and corpora with too little text, pass.
    """
    corpora = [*training, *held_out]
    texts = [_sections(corpus) for corpus in corpora]
    if not any(any(pieces) for sections in texts for _, pieces in sections):
        return  # Numbers, such as generated ones.
    try:
        found = [_languages(*each) for each in zip(corpora, texts, strict=True)]
    except ImportError:
        _log.warning(
            "the languages of the corpora are not checked, for lack of a package: "
            "pip install 'flaxformer_mt[demo]'"
        )
        return
    for corpus, (_, looks) in zip(training, found, strict=False):
        for other, (_, theirs) in zip(held_out, found[len(training) :], strict=True):
            if corpus.languages == other.languages and _are_swapped(looks, theirs):
                raise UserError(
                    f"{other.name} and {corpus.name} have opposite directions: the sources of one "
                    "look like the targets of the other; swap the files or columns of one, or its "
                    f"source_language and target_language; or {_PASS}"
                )


_Pieces: TypeAlias = tuple[list[str], list[str]]
"""Text of the sources and of the targets, in pieces of enough letters."""


def _sections(corpus: Corpus) -> list[tuple[str, _Pieces]]:
    """Returns where sections of a corpus are, evenly spaced, and the pieces of their words."""
    distance = 1
    chunks: dict[int, Chunk] = {}

    def is_wanted(number: int) -> bool:
        return number % distance == 0

    for number, chunk in enumerate(corpus.chunks(_ROWS, is_wanted)):
        if chunk is not None and is_wanted(number):
            chunks[number] = chunk
        if len(chunks) > _SECTIONS:
            distance *= 2
            chunks = {n: kept for n, kept in chunks.items() if is_wanted(n)}
    sections = []
    for chunk in chunks.values():
        pairs = list(corpus.untagged(chunk.pairs))
        if pairs:
            where = location_of(pairs[0], chunk.numbers[0])
            sources, targets = zip(*pairs, strict=True)
            sections.append((where, (_of_length(sources), _of_length(targets))))
    return sections


def _of_length(texts: Iterable[str]) -> list[str]:
    pieces, words, size = [], [], 0
    for text in dict.fromkeys(texts):
        for word in _WORD.findall(text):
            words.append(word)
            size += len(word.encode())
        if size >= _PIECE_BYTES:
            pieces.append(" ".join(words))
            words, size = [], 0
    return pieces


def _languages(
    corpus: Corpus, sections: Sequence[tuple[str, _Pieces]]
) -> tuple[Sequence[str], Sequence[str]]:
    """Returns the codes of the languages that both sides should have, and of those they are in.

    They are "" if the identifier does not know the language, or what a side is in is uncertain.

    Raises:
      UserError: a side is in another language, or the sides are swapped, also in a part of the
        corpus alone.
    """
    identifier = Identifier(*corpus.languages)
    expected = identifier.codes
    for language, code in zip(corpus.languages, expected, strict=True):
        if not code:
            _log.info("%s: the language %r is not checked: it is unknown", corpus.name, language)
    votes = [[[*map(identifier.identify, side)] for side in pieces] for _, pieces in sections]

    def looks_of(first: int, last: int) -> list[str]:
        return [
            _majority([*itertools.chain(*(v[side] for v in votes[first:last]))]) for side in (0, 1)
        ]

    looks = looks_of(0, len(votes))
    _check_declared(corpus, expected, looks)
    for count in _WINDOWS:
        starts = [len(votes) * window // count for window in range(count + 1)]
        windows = [looks_of(*ends) for ends in itertools.pairwise(starts)]
        for start, found in zip(starts, windows, strict=False):
            if _are_swapped(expected, found) or _are_swapped(windows[0], found):
                raise UserError(
                    f"{corpus.name}: the sides are swapped in a part of it, about from "
                    f"{sections[start][0]} on: swap the columns there; or {_PASS}"
                )
    return expected, looks


def _majority(votes: Sequence[tuple[str, float]]) -> str:
    """Returns the language of nearly all votes, or "" if there is none."""
    if len(votes) < _FEWEST_PIECES:
        return ""
    sums: collections.Counter[str] = collections.Counter()
    for code, probability in votes:
        sums[code] += probability  # type: ignore[assignment]
    ((code, total),) = sums.most_common(1)
    return code if total >= _MAJORITY * len(votes) else ""


def _check_declared(corpus: Corpus, expected: Sequence[str], looks: Sequence[str]) -> None:
    options = ("data.source_language", "data.target_language")
    if _are_swapped(expected, looks):
        source, target = corpus.languages
        raise UserError(
            f"{corpus.name}: the sides are swapped: the sources look like {target} and the "
            f"targets like {source}; swap the files or columns, or {' and '.join(options)}; "
            f"or {_PASS}"
        )
    for side, language, code, seems, option in zip(
        ("sources", "targets"), corpus.languages, expected, looks, options, strict=True
    ):
        if code and seems and not are_similar(code, seems):
            raise UserError(
                f"{corpus.name}: the {side} look like {seems}, not like {language}: set "
                f"{option}={seems}, or give other files or columns; or {_PASS}"
            )


def _are_swapped(first: Sequence[str], second: Sequence[str]) -> bool:
    """Returns whether all four languages are known, and the pairs are opposite."""
    if not all((*first, *second)) or are_similar(*first):
        return False
    return are_similar(first[0], second[1]) and are_similar(first[1], second[0])


_SHARED = {
    PAIR: "{} of the {} pairs of {} are also in the training corpus {}",
    SOURCE: "{} of the {} pairs of {} have a source that the training corpus {} translates "
    "otherwise",
    TARGET: "{} of the {} pairs of {} have a target that the training corpus {} has with another "
    "source",
}


def warn_of_shared_text(
    training: Sequence[Corpus],
    held_out: HeldOutText,
    config: DataConfig,
    has_inputs: bool = True,
    stores: Sequence[EncodedCorpus] = (),
) -> None:
    """Logs a warning for everything that a held-out corpus shares with a training corpus.

    Training pairs that the filters drop do not count. A corpus is read unless its store has what it
    shares.
    """
    if not held_out.corpora:
        return
    for corpus, store in itertools.zip_longest(training, stores):
        known = store.shared.get(held_out.fingerprint) if store else None
        shared = _shared(corpus, held_out, config, has_inputs) if known is None else known
        first = 0
        for other, own in zip(held_out.corpora, held_out.texts, strict=True):
            for kind, message in _SHARED.items():
                of_kind = [n for n in range(len(own)) if shared.get(first + n, (None,))[0] == kind]
                if not of_kind:
                    continue
                pair = own[of_kind[0]]
                _log.warning(
                    "%s: its scores will be too good; the first is %s (%s), in training %s",
                    message.format(len(of_kind), len(own), other.name, corpus.name),
                    shown(*pair),
                    location_of(pair, of_kind[0] + 1),
                    shared[first + of_kind[0]][1],
                )
            first += len(own)


def _shared(corpus: Corpus, held_out: HeldOutText, config: DataConfig, has_inputs: bool) -> Shared:
    is_kept = PairFilter(config, corpus, has_inputs).keep
    return held_out.find(corpus.untagged(), itertools.count(1), is_kept)
