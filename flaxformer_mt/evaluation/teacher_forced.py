"""Metrics of teacher forcing: of tokens predicted after the reference's preceding tokens.

They need no search, and say little about translations: a model that has lost its way is led back at
every token. They are here to compare runs with publications that report them.
"""

from collections.abc import Sequence

import numpy as np
from sacrebleu.metrics import BLEU

from flaxformer_mt.config.train import TeacherForcedMetric

BATCH_SIZE = 64
"""Sentences that are padded to one length for `seq2seq_acc`."""


def metrics(
    names: Sequence[TeacherForcedMetric],
    predictions: Sequence[Sequence[int]],
    targets: Sequence[Sequence[int]],
    source_lengths: Sequence[int],
) -> dict[str, float]:
    """Computes the metrics of `train.teacher_forced_metrics`, by name."""
    functions = {
        "seq2seq_acc": lambda: seq2seq_acc(predictions, targets, source_lengths),
        "teacher_forced_bleu": lambda: teacher_forced_bleu(predictions, targets),
    }
    return {name: functions[name]() for name in names}


def seq2seq_acc(
    predictions: Sequence[Sequence[int]],
    targets: Sequence[Sequence[int]],
    source_lengths: Sequence[int],
) -> float:
    """Computes the share of positions that agree, padding included, as a mean over batches.

    Sentences are sorted by the length of their sources, longest first, and divided into batches of
    64; both sides of a batch are padded to its longest target. Positions where both are padding
    agree. The metric is therefore higher than the accuracy per token. The weight of a batch is its
    number of sentences.

    A prediction has one token for each token of its target. Without sentences, the share is 0.

    Source: `seq2seq_acc` of fast.ai's course on natural language processing, with its batches, and
    the mean over them of `AverageMetric` in fast.ai version 1.
    """
    lengths = np.array([len(target) for target in targets], np.int64)
    num_wrong = np.array(
        [
            sum(predicted != token for predicted, token in zip(*pair, strict=True))
            for pair in zip(predictions, targets, strict=True)
        ],
        np.int64,
    )
    order = np.argsort(-np.asarray(source_lengths, np.int64), kind="stable")
    total = 0.0
    for first in range(0, len(order), BATCH_SIZE):
        batch = order[first : first + BATCH_SIZE]
        total += batch.size - num_wrong[batch].sum() / max(1, int(lengths[batch].max()))
    return float(total / len(order)) if len(order) else 0.0


def teacher_forced_bleu(
    predictions: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]
) -> float:
    """Computes corpus BLEU, from 0 to 100, over tokens as they are, without smoothing."""
    hypotheses, references = (
        [" ".join(map(str, tokens)) for tokens in side] for side in (predictions, targets)
    )
    bleu = BLEU(tokenize="none", smooth_method="none", force=True)
    return bleu.corpus_score(hypotheses, [references]).score
