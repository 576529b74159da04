"""Text in, text out."""

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np
from jax import Array
from rich.console import Console
from rich.progress import track

from flaxformer_mt.config import (
    DecodeConfig,
    ExperimentConfig,
    TransformerConfig,
    with_vocabulary_sizes,
)
from flaxformer_mt.data.tokenizer import Tokenizers
from flaxformer_mt.decoding.buckets import Bucket, fill_rows, longest_sentence, plan_buckets
from flaxformer_mt.decoding.run import Checkpoint, load_run
from flaxformer_mt.decoding.search import SearchResult, beam_search, greedy_search
from flaxformer_mt.errors import UserError
from flaxformer_mt.model.transformer import ZERO_VECTOR, Transformer, reorder_cache


@dataclasses.dataclass(frozen=True)
class Hypothesis:
    """One translation of a sentence."""

    text: str
    """Detokenised, on one line."""
    score: float
    """Log-probability / length penalty."""
    tokens: tuple[int, ...]
    """Target tokens; the end token is the last, if the model came to an end."""


class Translator:
    """Translates with a trained model.

    What is compiled is shared by all translators of one model configuration: a new one, for new
    parameters, costs nothing.
    """

    def __init__(self, config: ExperimentConfig, params: Any, tokenizers: Tokenizers) -> None:
        """Makes a translator.

        Args:
          config: of the run; `model` and `decode` are used.
          params: the model's parameters, nested dicts of arrays.
          tokenizers: of the run.

        Raises:
          UserError: the model has no encoder.
        """
        if not config.model.has_inputs:
            raise UserError("model.has_inputs=False: a language model cannot translate")
        self.model = with_vocabulary_sizes(
            config.model, tokenizers.source.vocab_size, tokenizers.target.vocab_size
        )
        self.decode = config.decode
        self.params = jax.device_put(params)
        self.tokenizers = tokenizers

    @classmethod
    def from_run(cls, folder: str | Path, checkpoint: Checkpoint = "best") -> Self:
        """The translator of a run folder.

        Raises:
          UserError: the folder, or a part of it, is missing or damaged.
        """
        run = load_run(folder, checkpoint)
        return cls(run.config, run.params, run.tokenizers)

    def translate(
        self,
        sentences: Sequence[str],
        beam_size: int | None = None,
        length_penalty: float | None = None,
        *,
        show_progress: bool = False,
    ) -> list[str]:
        """The best translation of each sentence; arguments as in `translate_n_best`."""
        n_best_lists = self.translate_n_best(
            sentences, 1, beam_size, length_penalty, show_progress=show_progress
        )
        return [hypotheses[0].text for hypotheses in n_best_lists]

    def translate_n_best(
        self,
        sentences: Sequence[str],
        n_best: int | None = None,
        beam_size: int | None = None,
        length_penalty: float | None = None,
        *,
        show_progress: bool = False,
    ) -> list[list[Hypothesis]]:
        """The best translations of each sentence.

        Args:
          sentences: source sentences, in any order and of any length. An empty one has one
            translation, the empty one.
          n_best: translations per sentence; by default as configured.
          beam_size: hypotheses that the search follows, 1 = greedy; by default as configured.
          length_penalty: alpha, see `search.length_penalty`; by default as configured.
          show_progress: draw a progress bar on standard error.

        Returns:
          For each sentence, in the order given, its translations from best to worst.

        Raises:
          UserError: an option is out of range, a sentence is longer than a learned position
            table, or the parameters are not finite.
        """
        options = {"n_best": n_best, "beam_size": beam_size, "length_penalty": length_penalty}
        given: dict[str, Any] = {name: v for name, v in options.items() if v is not None}
        decode = dataclasses.replace(self.decode, **given)
        sources = self.tokenizers.source.encode([sentence.strip() for sentence in sentences])
        sources = [[*tokens, self.model.eos_id] if tokens else [] for tokens in sources]
        translations = [[Hypothesis("", 0.0, ())] for _ in sources]
        lengths = [len(source) for source in sources]
        for bucket in track(
            plan_buckets(lengths, decode.batch_tokens, self.model),
            "Translating",
            console=Console(stderr=True),
            transient=True,
            disable=not show_progress,
        ):
            found = self._translate_bucket(sources, bucket, decode)
            for index, hypotheses in zip(bucket.indices, found, strict=True):
                translations[index] = hypotheses
        return translations

    def _translate_bucket(
        self, sources: Sequence[Sequence[int]], bucket: Bucket, decode: DecodeConfig
    ) -> list[list[Hypothesis]]:
        max_lengths = np.zeros(bucket.num_rows, np.int32)
        for row, index in enumerate(bucket.indices):
            max_lengths[row] = longest_target(len(sources[index]), decode, self.model)
        result = search_targets(
            self.params,
            fill_rows(sources, bucket, self.model.pad_id),
            max_lengths,
            float(decode.length_penalty),
            model=self.model,
            max_length=longest_target(bucket.length, decode, self.model),
            beam_size=decode.beam_size,
            n_best=decode.n_best,
        )
        return self._detokenise(result, len(bucket.indices))

    def _detokenise(self, result: SearchResult, num_rows: int) -> list[list[Hypothesis]]:
        tokens, lengths, scores, _ = (array.tolist() for array in jax.device_get(result))
        hypotheses = []
        for row in range(num_rows):
            kept = [t[:n] for t, n in zip(tokens[row], lengths[row], strict=True) if n]
            if not kept:
                raise UserError("the model's parameters are not finite: training has diverged")
            texts = self.tokenizers.target.decode(kept)
            hypotheses.append(
                [
                    Hypothesis(_on_one_line(text), score, tuple(sequence))
                    for text, score, sequence in zip(texts, scores[row], kept, strict=False)
                ]
            )
        return hypotheses


@functools.partial(jax.jit, static_argnames=("model", "max_length", "beam_size", "n_best"))
def search_targets(
    params: Any,
    source_tokens: Array,
    max_lengths: Array,
    length_penalty: float,
    *,
    model: TransformerConfig,
    max_length: int,
    beam_size: int,
    n_best: int,
) -> SearchResult:
    """The best target token sequences of a batch of source token sequences.

    Args:
      params: of `model`.
      source_tokens: int32 [B, S], with end token, padded.
      max_lengths: int32 [B], the most target tokens of each row; 0 = an empty row.
      length_penalty: alpha, see `search.length_penalty`.
      model: which Transformer.
      max_length: P, the largest value that `max_lengths` may have.
      beam_size: W; 1 searches greedily.
      n_best: N, at most W.
    """
    transformer = Transformer(model)
    variables = {"params": params}
    encoded = transformer.apply(variables, source_tokens, method="encode")
    cache = transformer.apply(
        variables, encoded, source_tokens, beam_size, max_length, method="init_cache"
    )

    def step(tokens, cache, position):
        return transformer.apply(variables, tokens, cache, position, method="decode_step")

    options: dict[str, Any] = {
        "max_lengths": max_lengths,
        "max_length": max_length,
        "bos_id": model.bos_id,
        "eos_id": model.eos_id,
        "pad_id": model.pad_id,
        "forbidden_ids": sorted({model.pad_id, model.bos_id} - {model.eos_id, ZERO_VECTOR}),
        "alpha": length_penalty,
    }
    if beam_size == 1:
        return greedy_search(step, cache, **options)
    return beam_search(
        step, cache, beam_size=beam_size, n_best=n_best, reorder=reorder_cache, **options
    )


def longest_target(source_length: int, decode: DecodeConfig, model: TransformerConfig) -> int:
    """The most tokens that a translation of so many source tokens (end included) may have."""
    length = int(decode.max_length_factor * (source_length - 1)) + decode.max_length_extra
    limit = longest_sentence(model)
    return length if limit is None else min(length, limit)


def _on_one_line(text: str) -> str:
    # Pieces for single bytes can spell a line break, which would shift all lines after it.
    return text.replace("\n", " ").replace("\r", " ")
