"""Translation quality: BLEU, chrF, chrF++ and TER by sacreBLEU, and user-defined metrics.

Source: Post 2018, "A Call for Clarity in Reporting BLEU Scores".
"""

import dataclasses
import logging
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

from flaxformer_mt.config.fields import suggestion
from flaxformer_mt.decoding.text_arguments import require_iterable, require_texts
from flaxformer_mt.errors import UserError
from flaxformer_mt.evaluation.metrics import (
    DEFAULT_TOKENIZER,
    STANDARD,
    FunctionMetric,
    MetricOptions,
    Separation,
    sacrebleu_metric,
    separation_of,
    wrong_for_zh,
)
from flaxformer_mt.evaluation.metrics import MetricFunction as MetricFunction
from flaxformer_mt.evaluation.significance import MetricScore, check_resampling, score_systems
from flaxformer_mt.writing_systems import has_visible

_log = logging.getLogger(__name__)


def evaluate(
    hypotheses: Sequence[str],
    references: Sequence[str] | Sequence[Sequence[str]],
    **options: Any,
) -> dict[str, Any]:
    """Computes metrics of detokenized translations.

    Text is compared in Unicode's NFC, and that of invisible characters alone is empty. By default
    the metrics are those of sacreBLEU with its default settings: cased, except for TER. If the
    references are in a script without spaces, as Japanese is, BLEU and TER have tokenizers that
    separate its words or characters, see `metrics.Separation`.

    Args:
      hypotheses: N translations.
      references: N references; or several lists of N references, one list for each set of them.
      **options: fields of `MetricOptions`.

    Returns:
      For each metric, by its name: the score (of sacreBLEU's metrics, in percent);
      `<name>_signature`; and with `confidence` `<name>_mean`, the mean of the resamples, and
      `<name>_interval`, half the width of the interval around it.

    Raises:
      TypeError: texts are not lists of strings, or a function does not return numbers.
      UserError: the numbers of sentences differ, or there are none; a metric or tokenizer is
        unknown or cannot be used.
    """
    return flattened(compare({"hypotheses": hypotheses}, references, **options)["hypotheses"])


def compare(
    systems: Mapping[str, Sequence[str]],
    references: Sequence[str] | Sequence[Sequence[str]],
    **options: Any,
) -> dict[str, dict[str, MetricScore]]:
    """Computes metrics of several systems, and whether they differ from the first.

    `systems` are N translations by the name of the system; the first is the baseline of a test. The
    other arguments are those of `evaluate`.

    Returns:
      {system: {metric: score}}. sacreBLEU's own programs compute the same numbers, except that
      the p-value of a text equal to the baseline is 1 here.

    Raises:
      TypeError, UserError: as of `evaluate`; or there is no system, or an option of the test or the
        environment variable SACREBLEU_SEED is invalid.
    """
    if not isinstance(systems, Mapping):
        raise TypeError(f"systems must be texts by name, not {type(systems).__name__}")
    texts = {name: _normalized(require_texts(given, name)) for name, given in systems.items()}
    all_references = [*map(_normalized, reference_lists(references))]
    given = _metric_options(options)
    _check_counts(texts, all_references, given.sources)
    _check_options(len(all_references[0]), given)
    by_sentence = [*zip(*all_references, strict=True)]
    if empty := [number for number, each in enumerate(by_sentence, start=1) if not any(each)]:
        _log.warning(
            "%d of %d references are empty (the first is number %d), which lowers the scores: "
            "leave these sentences out",
            *(len(empty), len(by_sentence), empty[0]),
        )
    separation = separation_of(all_references[0])
    if given.tokenize and "bleu" in given.standard and separation.is_unsuitable(given.tokenize):
        _log.warning(
            "BLEU is no measure of quality here: its tokenizer %s does not separate the words of "
            "the references, which are in a script without spaces; %s, the default for them, does",
            *(given.tokenize, separation.bleu),
        )
    if separation.is_mixed:
        _log.warning(
            "%.0f%% of the references are in a script without spaces, the others are not: no "
            "tokenizer suits both; evaluate each language by itself",
            100 * separation.spaceless,
        )
    if given.tokenize:
        separation = dataclasses.replace(separation, bleu=given.tokenize)
    if "bleu" in given.standard and separation.bleu == "zh":
        wrong = wrong_for_zh(all_references[0])
        if wrong:
            _log.warning(
                "BLEU: %d of %d references have '\u2026', which sacreBLEU's tokenizer zh takes for "
                "a Chinese character, or rare ones, which it does not separate (its issue 298); "
                "the tokenizer char separates all",
                *(wrong, len(by_sentence)),
            )
    metrics: dict[str, Any] = {
        name: sacrebleu_metric(name, all_references, separation, given.lowercase)
        for name in given.standard
    }
    for name, function in (given.metrics or {}).items():
        metrics[name] = FunctionMetric(name, function, given.sources, all_references)
    by_metric = {name: score_systems(metric, texts, given) for name, metric in metrics.items()}
    return {
        system: {name: scores[system] for name, scores in by_metric.items()} for system in texts
    }


def _normalized(texts: Sequence[str]) -> list[str]:
    # Composed and decomposed text look the same, but n-grams would differ.
    return [unicodedata.normalize("NFC", text) if has_visible(text) else "" for text in texts]


def check_options(sentences: int, **options: Any) -> None:
    """Raises the errors of options of `compare` that are unknown or cannot be used.

    For programs that compute something expensive before they evaluate a number of sentences.
    """
    _check_options(sentences, _metric_options(options))


def _check_options(sentences: int, options: MetricOptions) -> None:
    separation = Separation(options.tokenize or DEFAULT_TOKENIZER)
    for name in options.standard:
        sacrebleu_metric(name, [], separation, lowercase=False)
    for name in options.metrics or {}:
        if name in STANDARD:
            raise UserError(f"the metric {name} is sacreBLEU's: give the function another name")
    if options.confidence or options.significance is not None or options.resamples:
        check_resampling(options, sentences)


def _metric_options(given: Mapping[str, Any]) -> MetricOptions:
    names = [field.name for field in dataclasses.fields(MetricOptions)]
    for name in given:
        if name not in names:
            raise TypeError(f"there is no option {name}{suggestion(name, names)}")
    options = MetricOptions(**given)
    if options.sources is not None:
        options = dataclasses.replace(options, sources=require_texts(options.sources, "sources"))
    # An iterator can be read once.
    return dataclasses.replace(options, standard=require_texts(options.standard, "standard"))


def flattened(scores: Mapping[str, MetricScore]) -> dict[str, Any]:
    """Returns the numbers and signatures of a system as one dict, without those that are None."""
    result: dict[str, Any] = {}
    for name, metric in scores.items():
        values = {
            name: metric.score,
            f"{name}_mean": metric.mean,
            f"{name}_interval": metric.interval,
            f"{name}_p_value": metric.p_value,
            f"{name}_signature": metric.signature,
        }
        result |= {key: value for key, value in values.items() if value is not None}
    return result


def reference_lists(references: Any) -> list[list[str]]:
    """Returns one reference per sentence, or several lists of them, as a list of lists."""
    listed = list(require_iterable(references, "references", "strings"))
    if all(isinstance(each, str) for each in listed):
        return [require_texts(listed, "references")]
    return [require_texts(each, f"references[{index}]") for index, each in enumerate(listed)]


def _check_counts(
    systems: Mapping[str, Sequence[str]],
    references: Sequence[Sequence[str]],
    sources: Sequence[str] | None,
) -> None:
    if not systems:
        raise UserError("there are no translations to evaluate")
    (name, first), *others = systems.items()
    counts = [(len(each), f"translations of {other}") for other, each in others]
    counts += [(len(each), "references") for each in references]
    counts += [(len(sources), "sources")] if sources is not None else []
    for count, what in counts:
        if count != len(first):
            raise UserError(f"{name}: {len(first)} translations, but {count} {what}")
    if not first:
        raise UserError("there are no sentences to evaluate")
