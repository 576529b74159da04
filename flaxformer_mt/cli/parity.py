"""The command `parity`: numerical comparison with published models in PyTorch."""

import shutil
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from flaxformer_mt.cli import output
from flaxformer_mt.cli.options import model_fields, reject_options, require_folders
from flaxformer_mt.config.fields import MAX_INTEGER, Bounds
from flaxformer_mt.errors import UserError
from flaxformer_mt.presets import FAMILIES, FAMILY_ALIASES, canonical_family
from flaxformer_mt.runs import atomic

ALL = "all"
FAMILY_CHOICES = (*FAMILIES, *FAMILY_ALIASES, ALL)
FamilyChoice = Annotated[
    str, tyro.conf.arg(constructor=tyro.extras.literal_type_from_choices(FAMILY_CHOICES))
]


def parity(
    family: FamilyChoice,
    checkpoint: Path | None = None,
    settings: Annotated[tuple[str, ...], tyro.conf.arg(name="set", metavar="NAME=VALUE ...")] = (),
    dtype: Literal["float64", "float32"] | None = None,
    size: Literal["toy", "base"] | None = None,
    steps: Annotated[int | None, Bounds(0, 10**6)] = None,
    seed: Annotated[int, Bounds(0, MAX_INTEGER)] = 0,
    json_file: Annotated[Path | None, tyro.conf.arg(name="json", metavar="FILE")] = None,
    html: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None,
    markdown: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None,
    verbose: bool = False,
) -> int:
    r"""Compares this implementation with a published one in PyTorch.

    Both sides run with the same weights on the same sentences. The comparison covers the output of
    every sub-layer, the loss, every gradient and, on request, optimizer steps. The report marks the
    first difference and names its likely cause. The exit code is 1 if anything differs by more than
    rounding.

    Examples:
      flaxformer-mt parity --family annotated
      flaxformer-mt parity --family torch --checkpoint model.pt \
          --set num_heads=8 --html report.html
      flaxformer-mt parity --family tunz --steps 1000
      flaxformer-mt parity --family all --markdown docs/parity.md

    Args:
      family: The published model, or "all" for a summary of all of them.
      checkpoint: Checkpoint of that model (.pt or .safetensors). Default: random weights.
      settings: Configuration fields that differ from the published ones, or that cannot be inferred
        from the checkpoint, such as `num_heads=8 norm_position=pre`.
      dtype: Floating-point type of both sides. Default: float64, in which rounding is too small to
        hide a defect; "all" compares in both types.
      size: Size of a model with random weights. toy (default) takes seconds; base is the base model
        of the paper (D=512, F=2048, H=8, six layers per stack).
      steps: Number of optimizer steps to compare. Default: 0, and 100 for "all".
      seed: Seed of random weights and sentences.
      json_file: Also write the report to this file as JSON.
      html: Also write the report to this file as a web page, with a plot of the optimizer steps.
      markdown: Write the summary of "all" to this Markdown file, between its markers; the file is
        created if it does not exist.
      verbose: Print every compared value, also in layers without differences.
    """
    fields = model_fields(settings)
    require_folders(json_file, html, markdown)
    try:
        from flaxformer_mt.parity import families
        from flaxformer_mt.parity.reports import family_summary
    except ImportError as error:
        raise UserError(str(error)) from error

    if family == ALL:
        reject_options("a single family", checkpoint=checkpoint, dtype=dtype, html=html)
        if markdown:
            family_summary.read_document(markdown)  # Fails before the comparisons, not after.
        with output.status_line() as announce:
            table = family_summary.check_all(
                size=size or "toy",
                num_steps=100 if steps is None else steps,
                seed=seed,
                announce=announce,
                **fields,
            )
        if markdown:
            document = family_summary.read_document(markdown)
            text = family_summary.with_table(document, table.to_markdown())
            atomic.write_text(markdown, text)
        return _report(table, json_file, verbose)

    reject_options("--family all", markdown=markdown)
    if checkpoint:
        reject_options("random weights", size=size)
    with output.status_line() as announce:
        announce(f"{canonical_family(family)} in {dtype or 'float64'}")
        report = families.check_family(
            family,
            dtype=dtype or "float64",
            size=size or "toy",
            num_steps=steps or 0,
            seed=seed,
            checkpoint=checkpoint,
            **fields,
        )
    if html:
        atomic.write_text(html, report.to_html())
    return _report(report, json_file, verbose)


def _report(result: Any, json_file: Path | None, verbose: bool) -> int:
    """Writes and prints the result of a comparison, and returns the exit code."""
    if json_file:
        atomic.write_text(json_file, result.to_json())
    is_terminal = sys.stdout.isatty()
    width = shutil.get_terminal_size().columns if is_terminal else 100
    output.print_lines([result.to_text(verbose=verbose, width=width, color=is_terminal)])
    return int(not result.passed)
