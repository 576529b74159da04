"""The options of a search that apply to all rows."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, Self

import jax
from jax import Array

from flaxformer_mt.config import DecodeConfig, TransformerConfig


@dataclasses.dataclass(frozen=True)
class SearchOptions:
    """Options for all rows of a search; `DecodeConfig` explains the fields of the same names.

    A pytree whose leaves are the numbers that a compiled program takes as arguments. An option that
    is None adds nothing to the program.
    """

    bos_id: int
    """Start token, the input of the first step."""
    eos_id: int
    """End token, after which a hypothesis is complete."""
    pad_id: int
    """Padding of the result after a hypothesis."""
    beam_size: int = 1
    """W: number of hypotheses, or samples, per row."""
    n_best: int = 1
    """N: number of hypotheses returned per row."""
    length_penalty: float | Array = 0.0
    length_penalty_kind: Literal["gnmt", "average"] = "gnmt"
    coverage_penalty: float | Array | None = None
    early_stopping: Literal["never", "heuristic", "first"] = "never"
    min_length: bool = False
    """Whether any row has a minimum length."""
    force_end: bool = False
    no_repeat_ngram_size: int = 0
    repetition_penalty: float | Array | None = None
    forbidden_ids: tuple[int, ...] = ()
    """Tokens that are never chosen."""
    bad_phrases: tuple[tuple[int, ...], ...] = ()
    """Sequences of two or more tokens that must not appear."""
    renormalize: bool = False
    beam_groups: int = 1
    diversity_penalty: float | Array = 0.0
    sampling: bool = False
    temperature: float | Array | None = None
    top_k: int = 0
    top_p: float | Array | None = None
    min_p: float | Array | None = None
    epsilon_cutoff: float | Array | None = None
    scores: bool = True
    """Whether log-probabilities and scores are needed. If not, greedy search skips their
    computation and returns meaningless values."""

    @classmethod
    def from_config(
        cls,
        decode: DecodeConfig,
        model: TransformerConfig,
        bad_phrases: Sequence[Sequence[int]] = (),
        scores: bool = True,
    ) -> Self:
        """Returns the options that correspond to a configuration.

        The model gives the special tokens, see `forbidden_token_ids`. Of the
        texts, `decode.bad_words` and `bad_word_ids`, only `bad_phrases` count, their tokens; the
        end token alone is none.
        """
        own = dataclasses.fields(cls)
        defaults = {field.name: field.default for field in dataclasses.fields(decode)}
        num_samples = decode.mbr_samples or decode.n_best
        values: dict[str, Any] = {
            field.name: getattr(decode, field.name) for field in own if field.name in defaults
        }
        for field in own:
            if field.default is None and values[field.name] == defaults[field.name]:
                values[field.name] = None  # The default is neutral.
        bad_words = {phrase[0] for phrase in bad_phrases if len(phrase) == 1} - {model.eos_id}
        return cls(
            **values
            | {
                "beam_size": num_samples if decode.samples else decode.beam_size,
                "n_best": num_samples,
                "min_length": decode.min_length > 0 or decode.min_length_factor > 0,
                "sampling": decode.samples,
            },
            bos_id=model.bos_id,
            eos_id=model.eos_id,
            pad_id=model.pad_id,
            forbidden_ids=tuple(sorted(bad_words.union(forbidden_token_ids(model, decode)))),
            bad_phrases=tuple(tuple(phrase) for phrase in bad_phrases if len(phrase) > 1),
            scores=scores,
        )

    @property
    def independent(self) -> bool:
        """Whether a row's hypotheses do not compete: greedy search and sampling."""
        return self.sampling or self.beam_size == 1


_NUMBERS = [field.name for field in dataclasses.fields(SearchOptions) if "Array" in str(field.type)]
jax.tree_util.register_dataclass(
    SearchOptions,
    data_fields=_NUMBERS,
    meta_fields=[f.name for f in dataclasses.fields(SearchOptions) if f.name not in _NUMBERS],
)


def forbidden_token_ids(model: TransformerConfig, decode: DecodeConfig) -> tuple[int, ...]:
    """Returns the tokens that a search may not choose: padding and the start token.

    Either is left out if it is also the end token, or allowed padding; a start id of -1 is the zero
    vector.
    """
    allowed = {model.eos_id, -1, *([model.pad_id] if decode.allow_padding else [])}
    return tuple(sorted({model.pad_id, model.bos_id} - allowed))
