"""Translation quality: BLEU, chrF and TER of detokenized text, computed by sacreBLEU."""

from collections.abc import Sequence
from typing import Any

from sacrebleu.metrics import BLEU, CHRF, TER

from flaxformer_mt.decoding.text_arguments import require_texts
from flaxformer_mt.errors import UserError


def evaluate(
    hypotheses: Sequence[str], references: Sequence[str], *, with_ter: bool = True
) -> dict[str, Any]:
    """Computes corpus BLEU and chrF (cased) and TER (uncased), with sacreBLEU's default settings.

    Args:
      hypotheses: detokenized translations.
      references: one reference per hypothesis.
      with_ter: also compute TER, which takes longer than the other metrics.

    Returns:
      `bleu`, `chrf` and `ter`, in percent, and their sacreBLEU signatures `bleu_signature`,
      `chrf_signature` and `ter_signature`.

    Raises:
      TypeError: an argument is not a list of strings.
      UserError: the numbers of sentences differ, or there are none.

    Source: Post 2018, "A Call for Clarity in Reporting BLEU Scores".
    """
    hypotheses = require_texts(hypotheses, "hypotheses")
    references = require_texts(references, "references")
    if len(hypotheses) != len(references):
        raise UserError(f"{len(hypotheses)} translations, but {len(references)} references")
    if not references:
        raise UserError("there are no sentences to evaluate")
    metrics = {"bleu": BLEU(), "chrf": CHRF()}
    if with_ter:
        metrics["ter"] = TER()
    result: dict[str, Any] = {}
    for name, metric in metrics.items():
        result[name] = metric.corpus_score(hypotheses, [references]).score
        result[f"{name}_signature"] = str(metric.get_signature())
    return result
