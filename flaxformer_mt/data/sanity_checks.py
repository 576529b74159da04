"""What is probably wrong with the data of a run, noticed before it costs a training."""

import itertools
import logging
from collections.abc import Sequence

import numpy as np

from flaxformer_mt.config import DataConfig
from flaxformer_mt.data.corpora.corpus import Corpus
from flaxformer_mt.data.corpora.language_profiles import Profile, cldr_profile, letters_of
from flaxformer_mt.data.stream.encoded_corpus import EncodedCorpus
from flaxformer_mt.data.stream.packing import Sentences
from flaxformer_mt.errors import UserError

_PAIRS = 500
"""First pairs of a corpus by which the languages of its sides are told."""

_FEWEST_LETTERS = 500
"""Letters that both sides must have; less text tells no language."""

_MARGIN = 0.3
"""Nats a letter by which text must be likelier with its sides exchanged. Multi30k, Tatoeba and
WMT news are so by 0.7 and more if they were exchanged, and less likely by as much if not."""

_HASHED = 50_000  # Sentences at a time.

_log = logging.getLogger(__name__)


def check_unknown_rate(corpus: EncodedCorpus, config: DataConfig) -> None:
    """Refuses text that the vocabulary cannot spell.

    Raises:
      UserError: more than `config.max_unknown_rate` of the tokens of a side are unknown.
    """
    sides = {"source": corpus.report.sources, "target": corpus.report.targets}
    for side, report in sides.items():
        if report is not None and report.unknown_rate > config.max_unknown_rate:
            raise UserError(
                f"{corpus.name}: {report.unknown_rate:.1%} of the {side} tokens are unknown "
                f"(data.max_unknown_rate={config.max_unknown_rate:g}), such as "
                f"{report.unknown_example!r}: set data.byte_fallback, raise "
                "data.character_coverage, or use a vocabulary made for this text"
            )


def check_sides(training: Sequence[Corpus], held_out: Sequence[Corpus]) -> None:
    """Refuses corpora whose sources are in the language of the targets, and the reverse.

    Each corpus is compared with what Babel knows of its two languages, and each training corpus
    with each held-out corpus of the same languages. Where the languages are not known, or too much
    alike, nothing is refused.

    Args:
      training: the training corpora of a translation model.
      held_out: its development and test corpora.

    Raises:
      UserError: the sides of a corpus are swapped.
    """
    texts = {id(corpus): _letters(corpus) for corpus in (*training, *held_out)}
    for corpus in (*training, *held_out):
        source, target = corpus.languages
        profiles = cldr_profile(source), cldr_profile(target)
        if _are_swapped(texts[id(corpus)], *profiles):
            raise UserError(
                f"{corpus.name}: the sides are swapped, its sources read like {target} and its "
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
                    f"{other.name} and {corpus.name} have their sides the other way round: the "
                    "sources of one read like the targets of the other; swap the files or columns "
                    "of one, or its source_language and target_language"
                )


def _letters(corpus: Corpus) -> tuple[str, str]:
    """The letters of the first sources, without tags, and of the first targets."""
    pairs = list(itertools.islice(corpus.pairs(), _PAIRS))
    sources = (source.removeprefix(corpus.tag) for source, _ in pairs)
    return letters_of(sources), letters_of(target for _, target in pairs)


def _are_swapped(
    sides: tuple[str, str], source_profile: Profile | None, target_profile: Profile | None
) -> bool:
    """Whether the letters of the two sides are clearly likelier under each other's profile.

    Both sides are asked, each about both languages: so a profile that fits no text, or a side that
    is in neither language, decides nothing.
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
    """Logs how many pairs of each held-out corpus are training pairs, too."""
    for corpus in training:
        for other, shared in zip(held_out, count_shared_pairs(corpus, held_out), strict=True):
            if shared:
                _log.warning(
                    "%d of the %d pairs of %s are in the training corpus %s, too: its figures will "
                    "be too good",
                    shared,
                    len(other.targets),
                    other.name,
                    corpus.name,
                )


def count_shared_pairs(training: EncodedCorpus, held_out: Sequence[EncodedCorpus]) -> list[int]:
    """How many pairs of each held-out corpus are also training pairs, token by token.

    Pairs are compared by 64-bit hashes: with 10 million training and 1,000 other pairs, one is
    counted by mistake with a probability below 1e-9.
    """
    hashes = _pair_hashes(training)
    return [int(np.isin(_pair_hashes(other), hashes).sum()) for other in held_out]


def _pair_hashes(corpus: EncodedCorpus) -> np.ndarray:
    """uint64 [pairs]."""
    hashes = _hashes(corpus.targets)
    if corpus.sources is not None:
        # The factor tells the two sides apart.
        hashes = hashes * np.uint64(0x9E3779B97F4A7C15) + _hashes(corpus.sources)
    return hashes


def _hashes(sentences: Sentences) -> np.ndarray:
    """A sum over tokens of their random numbers times odd numbers for their places.

    Returns:
      uint64 [sentences], modulo 2**64.
    """
    vocab_size = int(sentences.tokens.max(initial=0)) + 1
    # The numbers of a vocabulary are the first ones of a larger vocabulary.
    numbers = np.random.default_rng(0).integers(1 << 64, size=vocab_size, dtype=np.uint64)
    hashes = [np.empty(0, np.uint64)]
    for first in range(0, len(sentences), _HASHED):
        offsets = sentences.offsets[first : first + _HASHED + 1]
        starts, lengths = offsets[:-1] - offsets[0], np.diff(offsets)
        tokens = sentences.tokens[offsets[0] : offsets[-1]]
        places = np.arange(len(tokens)) - np.repeat(starts, lengths)
        terms = numbers[tokens] * (2 * places + 1).astype(np.uint64)
        hashes.append(np.add.reduceat(terms, starts))
    return np.concatenate(hashes)
