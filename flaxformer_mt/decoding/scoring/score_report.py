"""Reports of scores: lines of text or JSON, and the metrics of a corpus."""

import math
from collections.abc import Callable, Iterable, Sequence
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


def corpus_metrics(
    sentences: Iterable[ScoredSentence], value: ScoreFunction
) -> dict[str, float | None]:
    """Returns sums over a corpus, its perplexity, and its accuracy if there is a choice.

    Those over tokens count the first translation of each sentence. The perplexity is
    exp(-mean log-probability per token), end tokens included, None if it is too large for a float;
    the accuracy is the fraction of sentences with several translations whose first is preferred.
    """
    count = tokens = 0
    log_probability = 0.0
    is_correct = []
    for scored in sentences:
        count += 1
        tokens += len(scored.scores[0].tokens)
        log_probability += scored.scores[0].log_probability
        if len(scored.scores) > 1:
            is_correct.append(preferred([value(score) for score in scored.scores]) == 0)
    with np.errstate(over="ignore"):
        perplexity = float(np.exp(-log_probability / tokens))
    metrics: dict[str, float | None] = {
        "sentences": count,
        "tokens": tokens,
        "log_probability": log_probability,
        "perplexity": perplexity if math.isfinite(perplexity) else None,
    }
    if is_correct:
        metrics |= {"preferred": sum(is_correct), "accuracy": sum(is_correct) / len(is_correct)}
    return metrics
