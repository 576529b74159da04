"""Checks of a run's data before training: unknown tokens, swapped sides, leaked test pairs.

Letter n-gram models tell which of two languages a text is in.
"""

import collections
import functools
import itertools
import logging
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from flaxformer_mt.config import DataConfig
from flaxformer_mt.data.corpora.corpus import Corpus
from flaxformer_mt.data.stream.encoded_corpus import EncodedCorpus
from flaxformer_mt.data.stream.packing import Sentences
from flaxformer_mt.errors import UserError

_PAIRS = 500
"""Number of leading pairs from which the languages of a corpus are identified."""

_FEWEST_LETTERS = 500
"""Minimum number of letters per side; the language of shorter text cannot be identified."""

_MARGIN = 0.3
"""Minimum gain in log-likelihood, in nats per letter, from exchanging the sides. Multi30k, Tatoeba
and WMT news gain 0.7 or more if their sides are swapped, and lose as much if they are not."""

_HASH_CHUNK = 50_000  # Sentences hashed at once.

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
    change = "set data.byte_fallback, raise data.character_coverage"
    if config.tokenizer == "word":
        change = "raise data.vocab_size"
    for side, report in sides.items():
        if report is not None and report.unknown_rate > config.max_unknown_rate:
            raise UserError(
                f"{corpus.name}: {report.unknown_rate:.1%} of the {side} tokens are unknown "
                f"(data.max_unknown_rate={config.max_unknown_rate:g}), such as "
                f"{report.unknown_example!r}: {change}, or use a vocabulary made for this text"
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


def warn_of_shared_pairs(
    training: Sequence[EncodedCorpus], held_out: Sequence[EncodedCorpus]
) -> None:
    """Logs a warning for each held-out corpus that shares pairs with a training corpus.

    Of several corpora that are evaluated together, each is named by itself.
    """
    for corpus in training:
        for other, is_shared in zip(held_out, shared_pairs(corpus, held_out), strict=True):
            first = 0
            for name, size in other.parts or ((other.name, len(other.targets)),):
                shared = int(is_shared[first : first + size].sum())
                first += size
                if shared:
                    _log.warning(
                        "%d of the %d pairs of %s are also in the training corpus %s: its scores "
                        "will be too good",
                        shared,
                        size,
                        name,
                        corpus.name,
                    )


def shared_pairs(
    training: EncodedCorpus, held_out: Sequence[EncodedCorpus]
) -> Iterator[np.ndarray]:
    """Yields, per held-out corpus, which pairs have the tokens of a training pair: bool [pairs].

    Pairs are compared by 64-bit hashes: with 10 million training pairs and 1,000 held-out pairs,
    the probability of a false match is below 1e-9.
    """
    hashes = _pair_hashes(training)
    return (np.isin(_pair_hashes(other), hashes) for other in held_out)


def _pair_hashes(corpus: EncodedCorpus) -> np.ndarray:
    hashes = _hashes(corpus.targets)
    if corpus.sources is not None:
        # The factor makes the hash depend on which side a sentence is on.
        hashes = hashes * np.uint64(0x9E3779B97F4A7C15) + _hashes(corpus.sources)
    return hashes


def _hashes(sentences: Sentences) -> np.ndarray:
    """Sums random numbers of tokens times odd position factors, uint64 [sentences]."""
    vocab_size = int(sentences.tokens.max(initial=0)) + 1
    # The numbers do not depend on the vocabulary size: a larger vocabulary extends the sequence.
    numbers = np.random.default_rng(0).integers(1 << 64, size=vocab_size, dtype=np.uint64)
    hashes = [np.empty(0, np.uint64)]
    for first in range(0, len(sentences), _HASH_CHUNK):
        offsets = sentences.offsets[first : first + _HASH_CHUNK + 1]
        starts, lengths = offsets[:-1] - offsets[0], np.diff(offsets)
        tokens = sentences.tokens[offsets[0] : offsets[-1]]
        positions = np.arange(len(tokens)) - np.repeat(starts, lengths)
        terms = numbers[tokens] * (2 * positions + 1).astype(np.uint64)
        hashes.append(np.add.reduceat(terms, starts))
    return np.concatenate(hashes)
