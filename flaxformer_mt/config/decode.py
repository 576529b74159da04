"""Search, sampling and the constraints on translations."""

import dataclasses
from typing import Literal, TypedDict

from flaxformer_mt.config import relations
from flaxformer_mt.config.fields import MAX_LAYERS, MAX_SEED, MAX_WIDTH, Checked, FieldRole, option

MAX_FACTOR = 1000
"""Limit of penalties and factors."""


@dataclasses.dataclass(frozen=True, repr=False)
class DecodeConfig(Checked):
    """How translations are searched for, and which are allowed."""

    beam_size: int = option(4, FieldRole.SEARCH, lowest=1, limit=10**6)
    """W: number of hypotheses per sentence; 1 = greedy search."""
    n_best: int = option(1, FieldRole.SEARCH, lowest=1, limit=10**6)
    """Number of translations returned per sentence; at most beam_size for beam search."""
    length_penalty: float = option(0.6, FieldRole.SEARCH, lowest=-100, limit=100)
    """alpha of the length normalization, by which log-probabilities are divided; higher values
    favor longer translations, negative ones shorter ones, 0 = no normalization."""
    length_penalty_kind: Literal["gnmt", "average"] = option("gnmt", FieldRole.SEARCH)
    """gnmt: ((5 + length) / 6)**alpha (Wu et al. 2016); average: length**alpha (Hugging Face,
    CTranslate2, fairseq). The length includes the end token."""
    coverage_penalty: float = option(0.0, FieldRole.SEARCH, lowest=0, limit=MAX_FACTOR)
    """beta of the coverage penalty (Wu et al. 2016, equation 14), which favors attending to every
    source token: beta * sum over source tokens of log(min(attention received, 1)); 0 = none."""
    early_stopping: Literal["never", "heuristic", "first"] = option("never", FieldRole.SEARCH)
    """When beam search ends, given beam_size finished hypotheses. never: when no unfinished one can
    become better; heuristic: when no unfinished one would be better if it ended now; first:
    immediately. (Hugging Face's early_stopping="never", False and True.)"""
    min_length: int = option(0, FieldRole.SEARCH, lowest=0, limit=MAX_WIDTH)
    """Minimum length of a translation in tokens, without the end token."""
    min_length_factor: float = option(0.0, FieldRole.SEARCH, lowest=0, limit=MAX_FACTOR)
    """Minimum length of a translation in tokens per source token."""
    max_length: int = option(0, FieldRole.SEARCH, lowest=0, limit=MAX_WIDTH)
    """Maximum length of a translation in tokens, end token included; 0 = max_length_factor * source
    length + max_length_extra."""
    max_length_factor: float = option(1.5, FieldRole.SEARCH, lowest=0, limit=MAX_FACTOR)
    """Tokens per source token in the maximum length."""
    max_length_extra: int = option(20, FieldRole.SEARCH, lowest=1, limit=MAX_WIDTH)
    """Tokens added to the maximum length."""
    force_end: bool = option(False, FieldRole.SEARCH)
    """Make the last token within the maximum length the end token; otherwise a translation of that
    length has none."""
    first_token: str = option("", FieldRole.SEARCH)
    """Token that every translation begins with, even an improbable one: the target language of
    multilingual models, such as "fra_Latn" (NLLB), "__fr__" (M2M-100) or "fr_XX" (mBART-50). A
    sentence's own prefix may name another language."""
    no_repeat_ngram_size: int = option(0, FieldRole.SEARCH, lowest=0, limit=MAX_WIDTH)
    """No n-gram of this size occurs twice in a translation; 0 = no constraint."""
    repetition_penalty: float = option(1.0, FieldRole.SEARCH, lowest=0.001, limit=MAX_FACTOR)
    """Divides the scores of tokens that the translation already contains, and of the start token
    (Keskar et al. 2019); 1 = no penalty."""
    bad_words: tuple[str, ...] = option((), FieldRole.SEARCH)
    """Words and phrases that must not occur, each as written inside a sentence."""
    bad_word_ids: tuple[str, ...] = option((), FieldRole.SEARCH)
    """The same as comma-separated token ids, one string per phrase: "17,4"."""
    allow_padding: bool = option(False, FieldRole.SEARCH)
    """Let the search choose the padding token, as Hugging Face's generate may if its bad_words_ids
    do not exclude it."""
    renormalize: bool = option(False, FieldRole.SEARCH)
    """Renormalize the probabilities after tokens are excluded."""
    beam_groups: int = option(1, FieldRole.SEARCH, lowest=1, limit=10**6)
    """Number of groups of diverse beam search (Vijayakumar et al. 2018); groups share beam_size
    equally and avoid each other's tokens."""
    diversity_penalty: float = option(0.0, FieldRole.SEARCH, lowest=0, limit=MAX_FACTOR)
    """Subtracted from a token's log-probability for each hypothesis of an earlier group that chose
    it at the same position."""
    sampling: bool = option(False, FieldRole.SEARCH)
    """Sample n_best translations instead of searching for the best."""
    temperature: float = option(1.0, FieldRole.SEARCH, lowest=0.001, limit=MAX_FACTOR)
    """Divides the logits before sampling: lower values favour probable tokens, higher values
    variety."""
    top_k: int = option(0, FieldRole.SEARCH, lowest=0)
    """Sample from this many most probable tokens; 0 = from all."""
    top_p: float = option(1.0, FieldRole.SEARCH, above=0, highest=1)
    """Sample from the most probable tokens that together have this probability (nucleus sampling,
    Holtzman et al. 2020)."""
    min_p: float = option(0.0, FieldRole.SEARCH, lowest=0, below=1)
    """Sample from tokens with at least this fraction of the highest probability."""
    epsilon_cutoff: float = option(0.0, FieldRole.SEARCH, lowest=0, below=1)
    """Sample from tokens with at least this probability (Hewitt et al. 2022)."""
    seed: int = option(0, FieldRole.SEARCH, lowest=0, limit=MAX_SEED)
    """Random seed of sampling. The samples of a sentence depend on the seed and the sentence
    only."""
    mbr_samples: int = option(0, FieldRole.SEARCH, lowest=0, limit=10**6)
    """Number of samples for minimum Bayes risk decoding (Eikema and Aziz 2020), which returns those
    most similar to all others by chrF; 0 = search instead."""
    ensemble: Literal["log", "probability"] = option("log", FieldRole.SEARCH)
    """How several models are combined. log: the mean of their log-probabilities, normalized again;
    probability: the logarithm of the mean of their probabilities."""
    shortlist: str = option("", FieldRole.SEARCH)
    """File of a lexical table, either with lines "target source probability" or binary as Marian
    writes it: only translations of the source's tokens and frequent tokens are allowed."""
    shortlist_first: int = option(100, FieldRole.SEARCH, lowest=0)
    """Number of first tokens of the vocabulary that are always in the shortlist; a binary table has
    its own."""
    shortlist_best: int = option(100, FieldRole.SEARCH, lowest=1)
    """Number of translations per source token in the shortlist; a binary table has its own."""
    copy_unknown: bool = option(False, FieldRole.SEARCH)
    """Replace each unknown token by the source word that it attends to most."""
    alignment_layer: int = option(-1, FieldRole.SEARCH, lowest=-MAX_LAYERS, limit=MAX_LAYERS)
    """Decoder layer whose attention aligns source and target, from 0; negative counts from the
    last."""
    alignment_head: int = option(-1, FieldRole.SEARCH, lowest=-1, limit=MAX_WIDTH)
    """Head whose attention aligns, from 0; -1 = the mean of all heads."""
    max_source_length: int = option(0, FieldRole.SEARCH, lowest=2, limit=MAX_WIDTH, also=0)
    """Input longer than this many tokens is split at sentence boundaries, and its translations are
    joined; 0 = 512. At most model.max_length if the model has learned positions."""
    batch_tokens: int = option(0, FieldRole.RUNNING, lowest=0)
    """Source tokens decoded together with a beam of 4, padding included (more with a smaller beam);
    0 = 1024 on CPUs, 16384 on GPUs and TPUs."""
    num_devices: int = option(0, FieldRole.RUNNING, lowest=0)
    """Number of devices of this process that translate; 0 = all GPUs or TPUs, but one CPU, whose
    cores work together anyway."""
    devices_per_model: int = option(0, FieldRole.RUNNING, lowest=0)
    """Number of devices that hold a copy of the parameters together, each a part of every matrix,
    for a model that one device cannot hold; decoding waits for the others in every layer. 0 = one,
    if the parameters leave half of its memory; otherwise the devices over which they are sharded
    already, or all."""

    _prefix = "decode."
    _relations = relations.DECODE

    @property
    def longest_source(self) -> int:
        """Number of tokens of the longest input that is not split, for any model."""
        return self.max_source_length or 512

    @property
    def samples(self) -> bool:
        """Whether translations are sampled rather than searched for."""
        return self.sampling or self.mbr_samples > 0


class DecodeOptions(TypedDict, total=False):
    """Fields of `DecodeConfig` as arguments; those omitted, or None, are as configured.

    Functions that take them have `beam_size` as an argument of its own.
    """

    length_penalty: float | None
    length_penalty_kind: Literal["gnmt", "average"] | None
    coverage_penalty: float | None
    early_stopping: Literal["never", "heuristic", "first"] | None
    min_length: int | None
    min_length_factor: float | None
    max_length: int | None
    max_length_factor: float | None
    max_length_extra: int | None
    force_end: bool | None
    first_token: str | None
    no_repeat_ngram_size: int | None
    repetition_penalty: float | None
    bad_words: tuple[str, ...] | None
    bad_word_ids: tuple[str, ...] | None
    allow_padding: bool | None
    renormalize: bool | None
    beam_groups: int | None
    diversity_penalty: float | None
    sampling: bool | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    epsilon_cutoff: float | None
    seed: int | None
    mbr_samples: int | None
    ensemble: Literal["log", "probability"] | None
    shortlist: str | None
    shortlist_first: int | None
    shortlist_best: int | None
    copy_unknown: bool | None
    alignment_layer: int | None
    alignment_head: int | None
    max_source_length: int | None
    batch_tokens: int | None
    num_devices: int | None
    devices_per_model: int | None
