"""Evaluates the best checkpoint of a run on its test set."""

import itertools
from pathlib import Path
from typing import Any

from rich.console import Console

from flaxformer_mt import distributed
from flaxformer_mt.data.dataset import EvaluationSet
from flaxformer_mt.decoding.translator import into_languages
from flaxformer_mt.errors import UserError
from flaxformer_mt.experiment.preparation import Experiment
from flaxformer_mt.runs.checkpoint import restore_params
from flaxformer_mt.runs.layout import METRICS
from flaxformer_mt.training.reporting.console import Sample, print_labelled
from flaxformer_mt.training.reporting.metrics import JsonLinesWriter


def evaluate_test(
    experiment: Experiment, workdir: Path, show_progress: bool = False
) -> tuple[int, list[str], dict[str, Any]]:
    """Evaluates the best checkpoint on the test corpus, and writes the metrics.

    Returns:
      The checkpoint's step, the translations, of which a language model has none, and the metrics.

    Raises:
      UserError: the experiment has no test corpus.
    """
    test = experiment.dataset.test
    if test is None:
        raise UserError("data.test_split is empty: there is nothing to test on")
    validation = experiment.validation
    step, params = restore_params(workdir, "best")
    hypotheses: list[str] = []
    metrics = validation.measure("test", experiment.devices.place(params))
    if experiment.config.model.has_inputs:
        sentences, (references,) = into_languages(
            test.texts.sources, [test.texts.targets], experiment.dataset.tokenizers.target
        )
        hypotheses = validation.translate(params, sentences, show_progress)
        metrics |= validation.quality(hypotheses, references)
    if distributed.is_main():
        JsonLinesWriter(workdir / METRICS).write(step, "test", metrics)
    return step, hypotheses, metrics


def print_test(
    experiment: Experiment, workdir: Path, test: EvaluationSet, console: Console
) -> None:
    """Evaluates the best checkpoint on the test corpus, and prints metrics and translations."""
    step, hypotheses, metrics = evaluate_test(experiment, workdir, console.is_terminal)
    head = f"test ({test.texts.name}), best checkpoint (step {step:,}): loss {metrics['loss']:.4f}"
    if not experiment.config.model.has_inputs:
        console.print(f"\n{head}, perplexity {metrics['perplexity']:.2f}")
        return
    texts = zip(test.texts.sources, hypotheses, test.texts.targets, strict=True)
    for each in itertools.islice(texts, experiment.config.train.show_translations):
        console.print()
        print_labelled(Sample(*each).rows(), console, width=12)
    console.print(
        f"\n{head}, BLEU {metrics['bleu']:.2f}, chrF {metrics['chrf']:.2f}  "
        f"[{metrics['bleu_signature']}]",
        soft_wrap=not console.is_terminal,  # Terminals would break lines within words.
    )
