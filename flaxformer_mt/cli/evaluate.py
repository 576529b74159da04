"""The command `evaluate`: translation quality on a test set."""

import sys

from flaxformer_mt.cli import output
from flaxformer_mt.cli.options import (
    DEFAULT_SEARCH,
    CheckpointChoice,
    DecodeOptions,
    RunFolders,
    TextFile,
    load_runs,
)
from flaxformer_mt.data.corpora.text_files import read_parallel


def evaluate(
    source: TextFile,
    reference: TextFile,
    run: RunFolders = (),
    checkpoint: CheckpointChoice = "best",
    decode: DecodeOptions = DEFAULT_SEARCH,
) -> None:
    r"""Translates a test set and prints BLEU, chrF and TER as JSON.

    The metrics are computed by sacreBLEU; their signatures are part of the output.

    Examples:
      flaxformer-mt evaluate --run RUN --source test.en --reference test.de
      flaxformer-mt evaluate --run RUN_1 --run RUN_2 --beam-size 8 \
          --source test.en --reference test.de

    Args:
      source: Text file of source sentences, one per line (.gz: decompressed).
      reference: Text file of their reference translations.
      run: Run folder of the trained model. Repeat the option to decode with an ensemble of models
        that share a vocabulary.
      checkpoint: "best" by validation, "last", or the step of a checkpoint.
      decode: Search options. Their defaults are those of the run.
    """
    sources, references = read_parallel(source, reference)
    from flaxformer_mt import evaluation
    from flaxformer_mt.decoding.translator import Translator

    runs = load_runs(run, checkpoint)
    hypotheses = Translator.from_runs(runs, decode).translate(
        sources, show_progress=sys.stderr.isatty()
    )
    metrics = evaluation.evaluate(hypotheses, references)
    steps = [model.step for model in runs]
    step = steps[0] if len(steps) == 1 else steps
    output.print_json({"step": step, "sentences": len(sources), **metrics})
