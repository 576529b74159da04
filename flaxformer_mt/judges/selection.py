"""Translations chosen among candidates by a learned metric: reranking and minimum Bayes risk."""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import numpy as np

from flaxformer_mt.decoding.sentence_decoder import Hypothesis, Sentence
from flaxformer_mt.decoding.translator import Translator
from flaxformer_mt.errors import UserError
from flaxformer_mt.judges.judge import Judge

Criterion = Literal["quality", "risk"]
"""quality: the metric's score without a reference; risk: the mean of its scores with each sample as
the reference (minimum Bayes risk; Kumar and Byrne 2004)."""

_WINDOW = 64
"""Sentences whose candidates are scored together."""


class JudgedTranslator:
    """A translator whose n-best lists are chosen by a metric, for `translate_lines`.

    The candidates of a sentence are its `decode.mbr_samples` samples, or the hypotheses of the
    beam. The `score` of a translation is that of the metric, negated if the metric counts errors.
    """

    def __init__(self, translator: Translator, judge: Judge, criterion: Criterion) -> None:
        """Creates the translator.

        Raises:
          UserError: the metric needs references (quality) or has no use for them (risk), or there
            is one candidate only.
        """
        self.decode = translator.decode
        self._translator, self._judge, self._criterion = translator, judge, criterion
        if (criterion == "risk") not in judge.forms:
            problem = "has no use for references" if criterion == "risk" else "needs references"
            other = "reranks" if criterion == "risk" else "computes risks"
            raise UserError(f"the metric {judge.name} {problem}: it only {other}")
        samples = self.decode.mbr_samples or (self.decode.n_best if self.decode.sampling else 0)
        self._candidates = samples or self.decode.beam_size
        if self._candidates == 1:
            raise UserError(
                "one candidate leaves nothing to choose: set --beam-size or --mbr-samples"
            )
        self._search: dict[str, Any] = {"n_best": self._candidates}
        if samples:
            self._search |= {"sampling": True, "mbr_samples": 0}

    def stream(
        self, sentences: Iterable[Sentence], *, scores: bool = True, **options: Any
    ) -> Iterator[list[Hypothesis]]:
        """Yields the best translations of each sentence; arguments as of `Translator.stream`."""
        remembered, given = itertools.tee(sentences)
        found = self._translator.stream(given, scores=scores, **self._search, **options)
        pairs = zip(remembered, found, strict=True)
        while window := list(itertools.islice(pairs, _WINDOW)):
            yield from self._chosen([each.text for each, _ in window], [few for _, few in window])

    def _chosen(
        self, sources: Sequence[str], lists: Sequence[Sequence[Hypothesis]]
    ) -> Iterator[list[Hypothesis]]:
        counts = [Counter(each.text for each in few) for few in lists]
        first = [{each.text: each for each in reversed(few)} for few in lists]
        rows = [
            (source, text, reference)
            for source, count in zip(sources, counts, strict=True)
            for text in count
            for reference in (count if self._criterion == "risk" else [""])
        ]
        given, texts, references = zip(*rows, strict=True)
        values = iter(
            self._judge.scores(given, texts, references if self._criterion == "risk" else None)
            * (-1 if self._judge.lower_is_better else 1)
        )
        for count, hypotheses in zip(counts, first, strict=True):
            weights = [*count.values()] if self._criterion == "risk" else [1]
            size = len(count) * len(weights)
            table = np.fromiter(itertools.islice(values, size), float, size)
            means = table.reshape(len(count), -1) @ np.array(weights) / sum(weights)
            order = np.argsort(-means.round(9), kind="stable")[: self.decode.n_best]
            distinct = [*count]
            yield [
                dataclasses.replace(hypotheses[distinct[index]], score=float(means[index]))
                for index in order
            ]
