"""Commands that draw pictures: `plot` and `attention`."""

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

import tyro

from flaxformer_mt.cli import options, output
from flaxformer_mt.config.fields import Bounds
from flaxformer_mt.errors import UserError


def plot(
    output_file: Annotated[Path, tyro.conf.arg(name="output", metavar="FILE")],
    run: tyro.conf.UseAppendAction[
        Annotated[tuple[tuple[Path, ...], ...], tyro.conf.arg(metavar="RUN ...")]
    ] = (),
    metrics: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME ...")] = (),
    x: Literal["steps", "tokens", "hours"] = "steps",
    smoothing: Annotated[float, Bounds(0, 1, excludes_highest=True)] = 0.0,
) -> None:
    r"""Draws the training curves of one run, or of several.

    Loss, accuracy, BLEU, chrF, learning rate, gradient norm and speed, as far as there are such
    metrics, with training and validation told apart and the best checkpoint marked.

    Examples:
      flaxformer-mt plot --run RUN --output curves.png
      flaxformer-mt plot --run RUN_1 RUN_2 --output curves.html
      flaxformer-mt plot --run RUN --output loss.pdf --metrics loss perplexity \
          --x hours --smoothing 0.8

    Args:
      output_file: Picture to write: .png, .svg or .pdf, or .html for a self-contained web page.
      run: Run folders, also of runs that are being trained.
      metrics: Metrics to draw, by their names in metrics.jsonl. Default: those above.
      x: What to draw them over: steps, target tokens, or hours of training steps.
      smoothing: Weight of the previous average in the moving average of the training metrics, from
        0 to below 1; the metrics themselves are drawn faintly behind it.
    """
    from flaxformer_mt.plotting.curves import plot_curves
    from flaxformer_mt.plotting.drawing import format_of

    folders = [folder for group in run for folder in group]
    options.require_runs(folders)
    format_of(output_file)
    options.require_writable(output_file)
    plot_curves(folders, metrics, x, smoothing).save(output_file)
    output.print_lines([str(output_file)])


def attention(
    run: options.RunFolder,
    source: Annotated[str, tyro.conf.arg(metavar="TEXT")],
    output_file: Annotated[Path, tyro.conf.arg(name="output", metavar="FILE")],
    target: Annotated[str | None, tyro.conf.arg(metavar="TEXT")] = None,
    checkpoint: options.CheckpointChoice = "best",
    decode: options.DecodeOptions = options.DEFAULT_SEARCH,
) -> None:
    r"""Shows what each token of a sentence attends to.

    Writes an interactive page, one file that needs no network, or an image: self-attention of the
    encoder and of the decoder, and cross-attention, of every layer and head, with entropies and
    alignments. The model is that of a run folder, trained or converted from a published model.

    Examples:
      flaxformer-mt attention --run RUN --source "A dog is running." \
          --output attention.html
      flaxformer-mt attention --run RUN --source "A dog is running." \
          --target "Ein Hund rennt." --output attention.png

    Args:
      run: Run folder of the model.
      source: A sentence.
      output_file: Picture to write: .html for the page; .png, .svg or .pdf for an image of all
        heads.
      target: Its translation. Default: that of the model.
      checkpoint: "best" by validation, "last", or the step of a checkpoint.
      decode: Options of the search for the translation, if there is no --target; --first-token
        also precedes a given --target. Their defaults are those of the run.
    """
    from flaxformer_mt.plotting.attention_page import AttentionPicture
    from flaxformer_mt.plotting.drawing import format_of

    format_of(output_file)
    options.require_writable(output_file)
    from flaxformer_mt.decoding.attention_weights import sentence_attention
    from flaxformer_mt.decoding.translator import Translator
    from flaxformer_mt.trained_model import load_run

    model = load_run(run, checkpoint)
    own = dataclasses.replace(model.config.decode, first_token=decode.first_token)
    if target is not None and decode != own:
        raise UserError(
            "search options other than --first-token have no effect on a given --target: leave "
            "them out"
        )
    found = sentence_attention(Translator.from_runs([model], decode), source, target)
    AttentionPicture(found, f"Attention of {run}, step {model.step}").save(output_file)
    output.print_lines([f"{output_file}: {found.source} -> {found.target}"])
