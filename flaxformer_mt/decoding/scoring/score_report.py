"""What there is to say about scores: a line of text, a line of JSON, or figures of a corpus."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from flaxformer_mt.decoding.scoring.alignment import pharaoh
from flaxformer_mt.decoding.scoring.scorer import PairScore, Scored

Value = Callable[[PairScore], float]
"""The score of a pair: its log-probability, normalised or not."""


def preferred(values: Sequence[float]) -> int:
    """Which of several translations has the highest value; in a tie, not the first.

    The first is the right one, and a model that cannot tell it from another does not prefer it.
    """
    return max(range(len(values)), key=lambda index: (values[index], index > 0))


def to_text(scored: Scored, value: Value, with_tokens: bool = False) -> str:
    """Columns parted by tabs.

    For one translation: its value; the log-probabilities of its tokens, if asked for; its
    alignment, if it has one. For several: which one is preferred, and the value of each.
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


def to_json(scored: Scored, value: Value) -> dict[str, Any]:
    """All that is known, as JSON values; several translations stand in a list, `candidates`."""
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
class Totals:
    """Sums over a corpus. Those of tokens are of the first translation of each sentence."""

    sentences: int = 0
    tokens: int = 0
    """End tokens included."""
    log_probability: float = 0.0
    compared: int = 0
    """Sentences with several translations."""
    preferred: int = 0
    """Those in which the first is preferred."""

    def add(self, scored: Scored, value: Value) -> None:
        """Counts one sentence more."""
        first = scored.scores[0]
        self.sentences += 1
        self.tokens += len(first.tokens)
        self.log_probability += first.log_probability
        if len(scored.scores) > 1:
            self.compared += 1
            self.preferred += preferred([value(score) for score in scored.scores]) == 0

    def figures(self) -> dict[str, float]:
        """The sums, and what follows from them.

        The perplexity is exp(-mean log-probability of a token), end tokens included; the accuracy
        is the share of sentences in which the first translation is preferred.
        """
        figures: dict[str, float] = {
            "sentences": self.sentences,
            "tokens": self.tokens,
            "log_probability": self.log_probability,
            "perplexity": math.exp(-self.log_probability / self.tokens),
        }
        if self.compared:
            figures |= {"preferred": self.preferred, "accuracy": self.preferred / self.compared}
        return figures
