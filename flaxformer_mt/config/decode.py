"""Search, sampling and the constraints on translations."""

import dataclasses
from typing import Literal

from flaxformer_mt.config.fields import require


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
    """How translations are searched for, and which may be found."""

    beam_size: int = 4
    """W: hypotheses followed per sentence; 1 = greedy."""
    n_best: int = 1
    """Translations returned per sentence; of a beam search at most beam_size."""
    length_penalty: float = 0.6
    """alpha of what divides a hypothesis' log-probability; more favours longer translations, 0 =
    nothing divides it."""
    length_penalty_kind: Literal["gnmt", "average"] = "gnmt"
    """gnmt: ((5 + length) / 6)**alpha (Wu et al. 2016); average: length**alpha (Hugging Face,
    CTranslate2, fairseq). The length includes the end token."""
    coverage_penalty: float = 0.0
    """beta of the reward for attending to every source token (Wu et al. 2016, equation 14): beta *
    sum over source tokens of log(min(attention received, 1)); 0 = none."""
    early_stopping: Literal["never", "heuristic", "first"] = "never"
    """When a beam search ends, given beam_size complete hypotheses. never: when no unfinished one
    can become better; heuristic: when none would be better if it ended now; first: at once.
    (Hugging Face's early_stopping="never", False and True.)"""
    min_length: int = 0
    """A translation has at least this many tokens, the end token not counted ..."""
    min_length_factor: float = 0.0
    """... and at least this many per source token."""
    max_length: int = 0
    """A translation has at most this many tokens, end token included; 0 = as the next two say."""
    max_length_factor: float = 1.5
    """A translation may have this many tokens per source token ..."""
    max_length_extra: int = 20
    """... plus this many."""
    force_end: bool = False
    """Make the last token that the length allows the end token, instead of leaving the translation
    without one."""
    no_repeat_ngram_size: int = 0
    """No sequence of this many tokens appears twice; 0 = any may."""
    repetition_penalty: float = 1.0
    """Divides the scores of tokens that the translation already has (Keskar et al. 2019); 1 =
    none."""
    bad_words: tuple[str, ...] = ()
    """Words and phrases that must not appear, each written as inside a sentence."""
    bad_word_ids: tuple[str, ...] = ()
    """The same as token ids, those of one phrase parted by commas: "17,4"."""
    renormalize: bool = False
    """After tokens were ruled out, divide the probabilities of the others by their sum."""
    beam_groups: int = 1
    """Diverse beam search (Vijayakumar et al. 2018): beam_size hypotheses in so many groups, which
    avoid each other's tokens."""
    diversity_penalty: float = 0.0
    """Taken from a token's log-probability for each hypothesis of an earlier group that chose it at
    the same position."""
    sampling: bool = False
    """Draw n_best translations at random instead of searching for the best."""
    temperature: float = 1.0
    """Divides the logits before sampling: below 1 more probable tokens, above 1 more varied."""
    top_k: int = 0
    """Sample among this many most probable tokens; 0 = all."""
    top_p: float = 1.0
    """Sample among the most probable tokens that together have this probability (Holtzman et al.
    2020)."""
    min_p: float = 0.0
    """Sample among tokens of at least this share of the highest probability."""
    epsilon_cutoff: float = 0.0
    """Sample among tokens of at least this probability (Hewitt et al. 2022)."""
    seed: int = 0
    """Of sampling. What is drawn for a sentence follows from the seed and the sentence alone."""
    mbr_samples: int = 0
    """Minimum Bayes risk (Eikema and Aziz 2020): draw this many translations and return those that
    are most like all others by chrF; 0 = search instead."""
    ensemble: Literal["log", "probability"] = "log"
    """What several models agree on: the mean of their log-probabilities, or the logarithm of the
    mean of their probabilities."""
    shortlist: str = ""
    """File of a lexical table, "target source probability" a line, or Marian's binary one: only
    translations of the source's tokens, and frequent tokens, can be chosen."""
    shortlist_first: int = 100
    """Tokens of the vocabulary, from the first on, that are always in the shortlist; a binary table
    says itself how many."""
    shortlist_best: int = 100
    """Translations of each source token that are in the shortlist; a binary table has so many as
    were written."""
    copy_unknown: bool = False
    """Write in the place of an unknown token the source word that it attends to most."""
    alignment_layer: int = -1
    """Decoder layer whose attention aligns source and target, from 0; negative from the last."""
    alignment_head: int = -1
    """Head whose attention aligns, from 0; -1 = the mean of all."""
    max_source_length: int = 0
    """Longer input, in tokens, is split at sentence borders, and its translations are joined; 0 =
    512, or what the model has positions for."""
    batch_tokens: int = 1024
    """Source tokens decoded at a time with a beam of 4, padding included (with a smaller beam, more
    sentences); an accelerator is faster with more."""

    def __post_init__(self) -> None:
        for name in ("beam_size", "n_best", "batch_tokens", "beam_groups", "shortlist_best"):
            require(getattr(self, name) > 0, f"decode.{name} must be positive")
        for name in (
            "length_penalty", "coverage_penalty", "min_length", "min_length_factor", "max_length",
            "max_length_factor", "no_repeat_ngram_size", "diversity_penalty", "top_k", "min_p",
            "epsilon_cutoff", "seed", "mbr_samples", "shortlist_first", "max_source_length",
        ):  # fmt: skip
            require(getattr(self, name) >= 0, f"decode.{name} must not be negative")
        require(self.max_length_extra >= 1, "decode.max_length_extra must be positive")
        require(self.repetition_penalty > 0, "decode.repetition_penalty must be positive")
        require(self.temperature > 0, "decode.temperature must be positive")
        require(0 < self.top_p <= 1, "decode.top_p must be in (0, 1]")
        for name in ("min_p", "epsilon_cutoff"):
            require(getattr(self, name) < 1, f"decode.{name} must be below 1")
        require(
            self.samples or self.n_best <= self.beam_size,
            f"decode.n_best={self.n_best} is more than decode.beam_size={self.beam_size}",
        )
        require(
            not self.mbr_samples or self.n_best <= self.mbr_samples,
            f"decode.n_best={self.n_best} is more than decode.mbr_samples={self.mbr_samples}",
        )
        require(
            self.beam_size % self.beam_groups == 0,
            f"decode.beam_size={self.beam_size} is not a multiple of decode.beam_groups="
            f"{self.beam_groups}",
        )
        require(
            self.diversity_penalty == 0 or self.beam_groups > 1,
            "decode.diversity_penalty needs decode.beam_groups of 2 or more",
        )
        require(self.max_source_length != 1, "decode.max_source_length must be at least 2, or 0")
        for phrase in self.bad_word_ids:
            require(
                all(token.strip().isdecimal() for token in phrase.split(",")),
                f'decode.bad_word_ids: "{phrase}" is no list of token ids, such as "17,4"',
            )

    @property
    def samples(self) -> bool:
        """Whether translations are drawn at random."""
        return self.sampling or self.mbr_samples > 0
