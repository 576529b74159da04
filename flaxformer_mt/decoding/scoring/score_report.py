"""Reports of scores: lines of text or JSON, and the metrics of a corpus."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from flaxformer_mt.decoding.scoring.alignment import pharaoh
from flaxformer_mt.decoding.scoring.scorer import PairScore, ScoredSentence

ScoreFunction = Callable[[PairScore], float]
"""Maps a pair to its reported score: its log-probability, optionally normalized."""


def preferred(values: Sequence[float]) -> int:
    """Returns the index of the highest value; in a tie, not the first.

    The first translation is the correct one, and a model that scores another one equally does not
    prefer it.
    """
    return max(range(len(values)), key=lambda index: (values[index], index > 0))


def to_text(scored: ScoredSentence, value: ScoreFunction, with_tokens: bool = False) -> str:
    """Formats a sentence as tab-separated columns.

    With one translation: its score; the log-probabilities of its tokens, if `with_tokens`; its
    alignment, if it has one. With several: the index of the preferred one, and the score of each.
    """
    values = [value(score) for score in scored.scores]
    columns = [f"{each:.6f}" for each in values]
    if len(values) > 1:
        return "\t".join([str(preferred(values)), *columns])
    (score,) = scored.scores
    if with_tokens:
        columns.append(" ".join(f"{each:.6f}" for each in score.token_log_probabilities))
    if score.alignment is not None:
        columns.append(pharaoh(score.alignment))
    return "\t".join(columns)


def to_json(scored: ScoredSentence, value: ScoreFunction) -> dict[str, Any]:
    """Formats a sentence as JSON values; several translations become a list, `candidates`."""
    details = [
        _details(target, score, value(score))
        for target, score in zip(scored.targets, scored.scores, strict=True)
    ]
    if len(details) == 1:
        return {"source": scored.source, **details[0]}
    return {
        "source": scored.source,
        "preferred": preferred([each["score"] for each in details]),
        "candidates": details,
    }


def _details(target: str, score: PairScore, value: float) -> dict[str, Any]:
    return {
        "target": target,
        "score": value,
        "log_probability": score.log_probability,
        "tokens": score.tokens,
        "pieces": score.pieces,
        "token_log_probabilities": score.token_log_probabilities,
        **({} if score.alignment is None else {"alignment": pharaoh(score.alignment)}),
    }


@dataclasses.dataclass
class CorpusTotals:
    """Sums over a corpus; those over tokens count the first translation of each sentence."""

    sentences: int = 0
    tokens: int = 0
    """Number of tokens, end tokens included."""
    log_probability: float = 0.0
    compared: int = 0
    """Number of sentences with several translations."""
    preferred: int = 0
    """Number of those whose first translation is preferred."""

    def add(self, scored: ScoredSentence, value: ScoreFunction) -> None:
        """Adds one sentence."""
        first = scored.scores[0]
        self.sentences += 1
        self.tokens += len(first.tokens)
        self.log_probability += first.log_probability
        if len(scored.scores) > 1:
            self.compared += 1
            self.preferred += preferred([value(score) for score in scored.scores]) == 0

    def metrics(self) -> dict[str, float | None]:
        """Returns the sums, the perplexity and the accuracy.

        The perplexity is exp(-mean log-probability per token), end tokens included, None if it is
        too large for a float; the accuracy is the fraction of sentences whose first translation is
        preferred.
        """
        with np.errstate(over="ignore"):
            perplexity = float(np.exp(-self.log_probability / self.tokens))
        metrics: dict[str, float | None] = {
            "sentences": self.sentences,
            "tokens": self.tokens,
            "log_probability": self.log_probability,
            "perplexity": perplexity if math.isfinite(perplexity) else None,
        }
        if self.compared:
            metrics |= {"preferred": self.preferred, "accuracy": self.preferred / self.compared}
        return metrics
