"""The command `parity`: numerical comparison with published models in PyTorch."""

import shutil
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from flaxformer_mt import atomic
from flaxformer_mt.cli import output
from flaxformer_mt.cli.options import model_fields, reject_options, require_writable
from flaxformer_mt.config.fields import MAX_INTEGER, Bounds
from flaxformer_mt.errors import UserError
from flaxformer_mt.presets import canonical_family

ALL = "all"


def parity(
    family: Annotated[str | None, tyro.conf.arg(metavar="FAMILY")] = None,
    verify: Annotated[Path | None, tyro.conf.arg(metavar="EXPORT")] = None,
    checkpoint: Path | None = None,
    inputs: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None,
    logits: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None,
    script: bool = False,
    settings: Annotated[tuple[str, ...], tyro.conf.arg(name="set", metavar="NAME=VALUE ...")] = (),
    dtype: Literal["float64", "float32"] | None = None,
    size: Literal["toy", "base"] | None = None,
    tables: Literal["exact", "published"] | None = None,
    tolerance: Annotated[tuple[str, ...], tyro.conf.arg(metavar="SITE=VALUE ...")] = (),
    baseline: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None,
    steps: Annotated[int | None, Bounds(0, 10**6)] = None,
    seed: Annotated[int, Bounds(0, MAX_INTEGER)] = 0,
    json_file: Annotated[Path | None, tyro.conf.arg(name="json", metavar="FILE")] = None,
    html: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None,
    junit: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None,
    verbose: bool = False,
) -> int:
    r"""Compares this implementation with a published one in PyTorch.

    Both sides run with the same weights on the same sentences. The comparison covers the output of
    every sub-layer, the loss, every gradient and, on request, optimizer steps. The report marks the
    first difference and names its likely cause. The exit code is 0 if everything agrees, 1 if
    anything differs by more than rounding, and 2 if the comparison is impossible.

    Examples:
      flaxformer-mt parity --family annotated
      flaxformer-mt parity --family torch --checkpoint model.pt \
          --set num_heads=8 --html report.html
      flaxformer-mt parity --family torch --script > save_values.py
      flaxformer-mt parity --family torch --checkpoint model.pt \
          --set num_heads=8 --inputs batch.npz --logits saved.npz
      flaxformer-mt parity --family tunz --steps 1000
      flaxformer-mt parity --family all --json all.json
      flaxformer-mt parity --verify exported

    Args:
      family: The published model: jadore801120, double_projection, annotated_wide_heads, annotated,
        tunz, torch, marian, fairseq, opennmt, mbart, m2m100, pegasus, fsmt, t5, umt5, t5gemma, or
        one that you registered; or all, for a summary of the built-in ones.
      verify: A folder or file that `convert` wrote, instead of a family. Its files are compared
        with their hashes in its certificate, `parity.json`, and what it computes with what the
        model computed that it was written from.
      checkpoint: Checkpoint of that model (.pt or .safetensors), or the folder of a whole model.
        Default: random weights.
      inputs: Tokens for which another program computed the values of --logits (.npz).
      logits: Logits, or values by site, that another program computed with the checkpoint (.npz).
        Our model is compared with them, which tests the settings as well. Without them, the
        reference has the settings that are given here.
      script: Print a Python script that writes the files of --inputs and --logits with any PyTorch
        program, and exit.
      settings: Configuration fields that differ from the published ones, or that cannot be inferred
        from the checkpoint, such as `num_heads=8 norm_position=pre`.
      dtype: Floating-point type of both sides. Default: float64, in which rounding is too small to
        hide a defect; "all" compares in both types.
      size: Size of a model with random weights. toy (default) takes seconds; base is the base model
        of the paper (D=512, F=2048, H=8, six layers per stack).
      tables: Tables of positions on both sides: exact ones, computed in the dtype, or the
        published ones, rounded to float32. Default: published with --logits, else exact.
      tolerance: Relative tolerance of a site of the report, such as "encoder/*=1e-6"; * stands for
        any characters.
      baseline: File of accepted differences (TOML): tables [[accepted]] with `site`, `largest` (a
        relative difference) and `reason`. They do not count for the exit code.
      steps: Number of optimizer steps to compare. Default: 0, and 100 for "all".
      seed: Seed of random weights and sentences.
      json_file: Also write the report to this file as JSON.
      html: Also write the report to this file as a web page, with a plot of the optimizer steps.
      junit: Also write the report to this file as JUnit XML, with one test case per value.
      verbose: Print every compared value, also in layers without differences.
    """
    if verify is not None:
        reject_options("a comparison, not for --verify", family=family, checkpoint=checkpoint)
        return _verified(verify)
    if family is None:
        raise UserError("give --family, the published model, or --verify, an export")
    fields = model_fields(settings)
    for name in ("dtype", "param_dtype"):
        if name in fields:
            raise UserError(f"--set {name}: both sides compute in the same dtype, give --dtype")
    tolerances = dict(map(_tolerance, tolerance))
    require_writable(json_file, html, junit)
    try:
        from flaxformer_mt.parity.families import check as families
        from flaxformer_mt.parity.families import saved_values
        from flaxformer_mt.parity.reports import baseline as baselines
        from flaxformer_mt.parity.reports import family_summary
    except ImportError as error:
        raise UserError(str(error)) from error

    if family == ALL:
        reject_options(
            "a single family", checkpoint=checkpoint, inputs=inputs, logits=logits, dtype=dtype,
            html=html, junit=junit, script=script or None, tables=tables, baseline=baseline,
            tolerance=tolerance or None,
        )  # fmt: skip
        with output.status_line() as announce:
            table = family_summary.check_all(
                size=size or "toy",
                num_steps=100 if steps is None else steps,
                seed=seed,
                announce=announce,
                **fields,
            )
        return _report(table, json_file, verbose)

    if script:
        output.print_lines([families.saving_script(family, checkpoint, **fields)])
        return 0
    if checkpoint:
        reject_options("random weights", size=size)
    else:
        reject_options("a --checkpoint", inputs=inputs, logits=logits, tables=tables)
    saved = None
    if logits or inputs:
        if not (logits and inputs):
            raise UserError("--inputs and --logits belong together: give both")
        reject_options("a comparison without --logits", steps=steps, dtype=dtype)
        saved = saved_values.read(inputs, logits)
    accepted = baselines.read_baseline(baseline) if baseline else ()
    with output.status_line() as announce:
        announce(f"{canonical_family(family)} in {dtype or 'float64'}")
        report = families.check_family(
            family,
            dtype=dtype or "float64",
            size=size or "toy",
            num_steps=steps or 0,
            seed=seed,
            checkpoint=checkpoint,
            saved=saved,
            tables=tables,
            **fields,
        )
    report = baselines.judged(report, tolerances, accepted)
    if junit:
        atomic.write_text(junit, report.to_junit())
    if html:
        atomic.write_text(html, report.to_html())
    return _report(report, json_file, verbose)


def _verified(export: Path) -> int:
    from flaxformer_mt.interop.certificate import verify

    result = verify(export)
    output.print_lines([result.headline, *result.problems])
    return int(bool(result.problems))


def _tolerance(option: str) -> tuple[str, float]:
    site, _, text = option.rpartition("=")
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not site or not 0 <= value < float("inf"):
        raise UserError(f"--tolerance {option}: give SITE=VALUE, such as logits=1e-6")
    return site, value


def _report(result: Any, json_file: Path | None, verbose: bool) -> int:
    if json_file:
        atomic.write_text(json_file, result.to_json())
    is_terminal = sys.stdout.isatty()
    width = shutil.get_terminal_size().columns if is_terminal else 100
    output.print_lines([result.to_text(verbose=verbose, width=width, color=is_terminal)])
    return int(not result.passed)
