"""Checks of a run's data before training: unknown tokens, swapped sides, leaked test pairs.

Letter n-gram models tell which of two languages a text is in.
"""

import collections
import dataclasses
import functools
import itertools
import logging
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from flaxformer_mt.config import DataConfig
from flaxformer_mt.data.corpora.comparison import comparable, in_chunks
from flaxformer_mt.data.corpora.corpus import Corpus, SentencePair
from flaxformer_mt.data.corpora.filters import PairFilter, shortened
from flaxformer_mt.data.corpora.rows import place_of, with_place
from flaxformer_mt.data.stream.encoded_corpus import EncodedCorpus
from flaxformer_mt.errors import UserError

_PAIRS = 500
"""Number of leading pairs from which the languages of a corpus are identified."""

_FEWEST_LETTERS = 500
"""Minimum number of letters per side; the language of shorter text cannot be identified."""

_MARGIN = 0.3
"""Minimum gain in log-likelihood, in nats per letter, from exchanging the sides. Multi30k, Tatoeba
and WMT news gain 0.7 or more if their sides are swapped, and lose as much if they are not."""

_NGRAM = 5
"""Characters in an n-gram of near-duplicates."""

_ORDER = 3
"""Order of the letter n-grams: separates Danish from Norwegian, and needs only a few pages."""

_UNSEEN = 1e-4
"""Prior probability of a letter."""

_FEWEST_PROFILE_LETTERS = 5000
"""Minimum number of letters of a CLDR profile; languages with less text have none."""

_WORD = re.compile(r"[^\W\d_]+")

_log = logging.getLogger(__name__)


class Profile:
    """A letter trigram model of a language.

    It is a hierarchical Dirichlet model (MacKay and Peto 1995): the distribution after a shorter
    context is the prior, with the weight of one letter, of that after a longer one.
    """

    def __init__(self, texts: Iterable[str]):
        letters = letters_of(texts)
        self._counts = collections.Counter(
            letters[end - length : end]
            for length in range(_ORDER + 1)
            for end in range(length, len(letters) + 1)
        )
        self._log_probability = functools.cache(
            lambda letters: math.log(self._probability(letters))
        )

    def _probability(self, letters: str) -> float:
        if not letters:
            return _UNSEEN
        prior = self._probability(letters[1:])
        return (self._counts[letters] + prior) / (self._counts[letters[:-1]] + 1)

    def log_likelihood(self, letters: str) -> float:
        """Returns the mean natural log-probability per letter of a text from `letters_of`."""
        ends = range(_ORDER, len(letters) + 1)
        total = sum(self._log_probability(letters[end - _ORDER : end]) for end in ends)
        return total / max(len(ends), 1)


def letters_of(texts: Iterable[str]) -> str:
    """Returns the lower-case words of the texts, space-separated, without duplicate texts."""
    words = _WORD.findall(" ".join(dict.fromkeys(texts)).lower())
    return f" {' '.join(words)} "


@functools.cache
def cldr_profile(language: str) -> Profile | None:
    """Returns the profile of a language ("de", "zh_Hant", "pt-BR"), built from the Unicode CLDR.

    It consists of the names of languages, countries, currencies, months, days and units. None if
    they are too few, or Babel (the extra `demo`) is not installed.
    """
    try:
        import babel
    except ImportError:
        return None
    try:
        locale = babel.Locale.parse(language.replace("-", "_"))
    except (ValueError, babel.UnknownLocaleError):
        return None
    texts = list(_cldr_texts(locale))
    return Profile(texts) if len(letters_of(texts)) >= _FEWEST_PROFILE_LETTERS else None


def _cldr_texts(locale: Any) -> Iterator[str]:
    names = (locale.territories, locale.languages, locale.scripts, locale.currencies)
    for group in names:
        yield from group.values()
    for calendar in (locale.months, locale.days):
        for widths in calendar.values():
            yield from widths["wide"].values()
    for widths in locale.unit_display_names.values():
        yield from widths.values()


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
        target.strip() and (not has_inputs or source.removeprefix(corpus.tag).strip())
        for source, target in corpus.pairs()
    )


def check_sides(training: Sequence[Corpus], held_out: Sequence[Corpus]) -> None:
    """Rejects sources in the target language with targets in the source language.

    Each corpus is compared with CLDR profiles of its two languages, and each training corpus with
    each held-out corpus of the same languages. Unknown or very similar languages always pass, and
    without Babel only the second comparison is made.
    """
    texts = {id(corpus): _letters(corpus) for corpus in (*training, *held_out)}
    for corpus in (*training, *held_out):
        source, target = corpus.languages
        profiles = cldr_profile(source), cldr_profile(target)
        if _are_swapped(texts[id(corpus)], *profiles):
            raise UserError(
                f"{corpus.name}: the sides are swapped: the sources look like {target} and the "
                f"targets like {source}; swap the files or columns, or data.source_language and "
                "data.target_language"
            )
    for corpus in training:
        source_profile, target_profile = (Profile([side]) for side in texts[id(corpus)])
        for other in held_out:
            if corpus.languages == other.languages and _are_swapped(
                texts[id(other)], source_profile, target_profile
            ):
                raise UserError(
                    f"{other.name} and {corpus.name} have opposite directions: the sources of one "
                    "look like the targets of the other; swap the files or columns of one, or its "
                    "source_language and target_language"
                )


def _letters(corpus: Corpus) -> tuple[str, str]:
    pairs = list(itertools.islice(corpus.pairs(), _PAIRS))
    sources = (source.removeprefix(corpus.tag) for source, _ in pairs)
    return letters_of(sources), letters_of(target for _, target in pairs)


def _are_swapped(
    sides: tuple[str, str], source_profile: Profile | None, target_profile: Profile | None
) -> bool:
    """Returns whether the two sides are clearly more likely under each other's profile.

    The likelihoods of both sides are added up for both assignments of languages, so that neither a
    poor profile nor a side in a third language decides the outcome.
    """
    source, target = sides
    if source_profile is None or target_profile is None:
        return False
    if min(len(source), len(target)) < _FEWEST_LETTERS:
        return False
    as_they_are = source_profile.log_likelihood(source) + target_profile.log_likelihood(target)
    exchanged = target_profile.log_likelihood(source) + source_profile.log_likelihood(target)
    return exchanged > as_they_are + _MARGIN


_SHARED = (
    "{} of the {} pairs of {} are also in the training corpus {}",
    "{} of the {} pairs of {} have a source that the training corpus {} translates otherwise",
    "{} of the {} pairs of {} have a target that the training corpus {} has with another source",
    "{} of the {} pairs of {} have a near-duplicate of a side in the training corpus {}",
)
"""What a held-out pair may share with the training text; the earliest that applies counts."""

_NEAR, _NOTHING = len(_SHARED) - 1, len(_SHARED)


def warn_of_shared_text(
    training: Sequence[Corpus],
    held_out: Sequence[Corpus],
    config: DataConfig,
    has_inputs: bool = True,
) -> None:
    """Logs a warning for everything that a held-out corpus shares with a training corpus.

    Texts are compared as `comparable` returns them, near-duplicates with `config.near_duplicates`
    only. Training pairs that the filters drop do not count.
    """
    if config.hold_out_rule == "sides" and not config.near_duplicates:
        # Those that are held out share nothing with what they were held out of.
        held_out = [corpus for corpus in held_out if not corpus.may_be_empty]
    if not held_out:
        return
    texts = [list(_untagged(corpus)) for corpus in held_out]
    for corpus in training:
        pairs = SharedPairs(corpus, list(itertools.chain(*texts)), config, has_inputs)
        first = 0
        for other, own in zip(held_out, texts, strict=True):
            for kind, example in pairs.examples(range(first, first + len(own))):
                count = int((pairs.kinds[first : first + len(own)] == kind).sum())
                _log.warning(
                    "%s: its scores will be too good; the first is %s",
                    _SHARED[kind].format(count, len(own), other.name, corpus.name),
                    example,
                )
            first += len(own)


class SharedPairs:
    """What held-out pairs share with a training corpus.

    Attributes:
      kinds: int8 [held-out pairs], an index of `_SHARED`, or its length for nothing.
    """

    def __init__(
        self,
        training: Corpus,
        held_out: Sequence[SentencePair],
        config: DataConfig,
        has_inputs: bool = True,
    ):
        self.kinds = np.full(len(held_out), _NOTHING, np.int8)
        self._held_out = held_out
        self._examples: dict[int, str] = {}
        # Duplicates are trained on once.
        filters = dataclasses.replace(config, drop_duplicates=False)
        self._is_kept = PairFilter(filters, training, has_inputs).keep
        self._compared = [
            pair
            for pairs in in_chunks(held_out)
            for pair in zip(*map(comparable, zip(*pairs, strict=True)), strict=True)
        ]
        self._equal = [_numbers_by_text(pair[side] for pair in self._compared) for side in (0, 1)]
        share = config.near_duplicates
        self._near = [_NearDuplicates(texts, share) for texts in self._equal] if share else []
        sources_to_find, targets_to_find = self._equal
        number = 0
        for pairs in in_chunks(_untagged(training)):
            compared = zip(*map(comparable, zip(*pairs, strict=True)), strict=True)
            for pair, (source, target) in zip(pairs, compared, strict=True):
                number += 1
                if share or source in sources_to_find or target in targets_to_find:
                    self._compare(number, pair, (source, target))

    def _compare(self, number: int, pair: SentencePair, compared: tuple[str, str]) -> None:
        found = [texts.get(text, ()) for texts, text in zip(self._equal, compared, strict=True)]
        for near, text in zip(self._near, compared, strict=False):
            found.append(near.find(text))
        if not any(found) or not self._is_kept(place_of(pair, number), *pair):
            return
        for kind, numbers in zip((1, 2, _NEAR, _NEAR), found, strict=False):
            for held in numbers:
                strongest = 0 if self._compared[held] == compared else kind
                if strongest < self.kinds[held]:
                    self.kinds[held] = strongest
                    self._examples[held] = f"{_shown(*pair)} ({place_of(pair, number)})"

    def examples(self, among: range) -> Iterator[tuple[int, str]]:
        """Yields each kind that some of the held-out pairs have, with the first of these."""
        for kind in range(_NOTHING):
            found = np.flatnonzero(self.kinds[among.start : among.stop] == kind)
            if len(found):
                held = among.start + int(found[0])
                pair = self._held_out[held]
                shown = f"{_shown(*pair)} ({place_of(pair, int(found[0]) + 1)})"
                yield kind, f"{shown}, in training {self._examples[held]}"


def _numbers_by_text(texts: Iterable[str]) -> dict[str, list[int]]:
    """Returns the numbers, from 0, of each text that is not empty."""
    numbers: dict[str, list[int]] = {}
    for number, text in enumerate(texts):
        if text:
            numbers.setdefault(text, []).append(number)
    return numbers


class _NearDuplicates:
    """Finds texts by the share of their n-grams of characters, of all that either text has."""

    def __init__(self, numbers_by_text: Mapping[str, Sequence[int]], share: float):
        self._share = share
        self._numbers = [*numbers_by_text.values()]
        self._texts_with: dict[str, list[int]] = {}
        self._sizes = []
        for place, text in enumerate(numbers_by_text):
            ngrams = _ngrams(text)
            self._sizes.append(len(ngrams))
            for ngram in ngrams:
                self._texts_with.setdefault(ngram, []).append(place)

    def find(self, text: str) -> list[int]:
        """Returns the numbers of the texts that are near to another."""
        ngrams = _ngrams(text)
        common = collections.Counter(
            itertools.chain.from_iterable(self._texts_with.get(ngram, ()) for ngram in ngrams)
        )
        return [
            number
            for place, count in common.items()
            if count >= self._share * (len(ngrams) + self._sizes[place] - count)
            for number in self._numbers[place]
        ]


def _ngrams(text: str) -> set[str]:
    return {text[end - _NGRAM : end] for end in range(_NGRAM, len(text) + 1)}


def _untagged(corpus: Corpus) -> Iterator[SentencePair]:
    tag = f"{corpus.tag} " if corpus.tag else ""
    return (with_place((pair[0].removeprefix(tag), pair[1]), pair) for pair in corpus.pairs())


def _shown(source: str, target: str) -> str:
    return f"{shortened(source)} | {shortened(target)}" if source else shortened(target)
