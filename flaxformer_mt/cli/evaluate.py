"""The command `evaluate`: translation quality on a test set."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import tyro

from flaxformer_mt.cli import output
from flaxformer_mt.cli.options import (
    DEFAULT_SEARCH,
    CheckpointChoice,
    DecodeOptions,
    RunFolders,
    load_runs,
    require_runs,
)
from flaxformer_mt.data.corpora.text_files import read_parallel
from flaxformer_mt.errors import UserError

OptionalTextFile = Annotated[Path | None, tyro.conf.arg(metavar="F")]
"""A text file, plain or compressed."""
_DIGITS = 4  # Of the metrics, after the point.


def evaluate(
    run: RunFolders = (),
    source: OptionalTextFile = None,
    reference: OptionalTextFile = None,
    split: Literal["test", "valid"] | None = None,
    checkpoint: CheckpointChoice = "best",
    decode: DecodeOptions = DEFAULT_SEARCH,
) -> None:
    r"""Translates a test set and prints BLEU, chrF and TER as JSON.

    The metrics are computed by sacreBLEU; their signatures are part of the output. Without --source
    and --reference, the text is that of the run's own test split.

    Examples:
      flaxformer-mt evaluate --run RUN
      flaxformer-mt evaluate --run RUN --source test.en --reference test.de
      flaxformer-mt evaluate --run RUN_1 --run RUN_2 --beam-size 8 \
          --source test.en --reference test.de

    Args:
      run: Run folder of the trained model. Repeat the option to decode with an ensemble of models
        that share a vocabulary.
      source: Text file of source sentences, one per line (.gz, .zst: decompressed).
      reference: Text file of their reference translations.
      split: Instead of --source and --reference: the split of the (first) run to translate, which
        is read from where the run's configuration says. Default: test, or valid if the run has no
        test split.
      checkpoint: "best" by validation, "last", or the step of a checkpoint.
      decode: Search options. Their defaults are those of the run.
    """
    if source is not None and reference is not None and split is None:
        sources, references = read_parallel(source, reference)
    elif source is None and reference is None:
        sources, references = _texts_of_run(run, split)
    else:
        raise UserError("give --source together with --reference, or neither; --split without them")
    from flaxformer_mt import evaluation
    from flaxformer_mt.decoding.translator import Translator

    runs = load_runs(run, checkpoint)
    hypotheses = Translator.from_runs(runs, decode).translate(
        sources, show_progress=sys.stderr.isatty()
    )
    metrics = evaluation.evaluate(hypotheses, references)
    steps = [model.step for model in runs]
    step = steps[0] if len(steps) == 1 else steps
    rounded = {
        name: round(value, _DIGITS) if isinstance(value, float) else value
        for name, value in metrics.items()
    }
    output.print_json({"step": step, "sentences": len(sources), **rounded})


def _texts_of_run(
    runs: Sequence[Path], split: Literal["test", "valid"] | None
) -> tuple[list[str], list[str]]:
    """Reads a split of a run; of the first of several, whose text the others have not seen either.

    Raises:
      UserError: no run is given; or its text is not there, or not the text that it was started
        with.
    """
    require_runs(runs)
    from flaxformer_mt.data.corpora.corpus import read_corpus
    from flaxformer_mt.data.dataset import open_held_out
    from flaxformer_mt.runs.folder import check_corpora, read_config

    config = read_config(runs[0])
    has_test = bool(config.data.test_split or config.data.test_corpora)
    split = split or ("test" if has_test else "valid")
    corpora = open_held_out(config, split)
    if not corpora:
        raise UserError(f"--split {split}: {runs[0]} has no {split} split")
    check_corpora(runs[0], {split: corpora})
    output.print_note(f"the {split} split of {runs[0]}: {corpora[0].name}")
    texts = read_corpus(corpora)
    return texts.sources, texts.targets
