"""Commands that draw pictures: `plot`."""

from pathlib import Path
from typing import Annotated, Literal

import tyro

from flaxformer_mt.cli import output
from flaxformer_mt.cli.options import require_folders, require_runs
from flaxformer_mt.config.fields import Bounds


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
      smoothing: Weight of the past in a moving average of the training metrics, from 0 to below 1;
        the metrics themselves stay behind it.
    """
    from flaxformer_mt.plotting.curves import plot_curves
    from flaxformer_mt.plotting.drawing import format_of

    folders = [folder for group in run for folder in group]
    require_runs(folders)
    format_of(output_file)
    require_folders(output_file)
    plot_curves(folders, metrics, x, smoothing).save(output_file)
    output.print_lines([str(output_file)])
