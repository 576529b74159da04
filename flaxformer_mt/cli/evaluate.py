"""The command `evaluate`: translation quality on a test set."""

import functools
import importlib
import os
import sys
import traceback
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import tyro

from flaxformer_mt.cli import output
from flaxformer_mt.cli.options import (
    DEFAULT_SEARCH,
    CheckpointChoice,
    DecodeOptions,
    OptionalTextFile,
    RunFolders,
    load_runs,
    reject_options,
    require_writable,
)
from flaxformer_mt.config.fields import Bounds
from flaxformer_mt.data.corpora.text_files import read_lines
from flaxformer_mt.errors import UserError

if TYPE_CHECKING:
    from flaxformer_mt.decoding.doubtful_output import Doubts
    from flaxformer_mt.evaluation import MetricFunction, MetricScore

TextFiles = tyro.conf.UseAppendAction[Annotated[tuple[Path, ...], tyro.conf.arg(metavar="F")]]
"""Text files: an option that may be repeated."""
MetricNames = tyro.conf.UseAppendAction[Annotated[tuple[str, ...], tyro.conf.arg(metavar="METRIC")]]
"""Metrics: an option that may be repeated."""
Resamples = Annotated[int | None, Bounds(2, 10**6), tyro.conf.arg(metavar="N")]
_DIGITS = 4  # Of the metrics, after the point.
_TITLES = {"bleu": "BLEU", "chrf": "chrF", "chrf++": "chrF++", "ter": "TER"}
_SIGNIFICANT = 0.05


class _TestSet(NamedTuple):
    name: str
    sources: list[str] | None
    references: list[list[str]]


def evaluate(
    run: RunFolders = (),
    hypothesis: TextFiles = (),
    baseline: OptionalTextFile = None,
    source: OptionalTextFile = None,
    reference: TextFiles = (),
    split: Literal["test", "valid"] | None = None,
    output_file: Annotated[Path | None, tyro.conf.arg(name="output", metavar="F")] = None,
    metric: MetricNames = (),
    tokenize: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None,
    lowercase: bool = False,
    confidence: bool = False,
    significance: Literal["bootstrap", "randomization"] | None = None,
    resamples: Resamples = None,
    output_format: Annotated[Literal["auto", "table", "json"], tyro.conf.arg(name="format")] = (
        "auto"
    ),
    checkpoint: CheckpointChoice = "best",
    decode: DecodeOptions = DEFAULT_SEARCH,
) -> None:
    r"""Computes BLEU, chrF, chrF++ and TER of a run or of translations.

    Translates a test set with a run, or reads translations from files, or both. The metrics are
    sacreBLEU's, with their signatures, and user-defined functions. "doubtful" has the number of
    translations that look wrong, such as empty ones. Without --source and --reference, the text is
    that of the run's own test split. See docs/evaluation.md.

    Examples:
      flaxformer-mt evaluate --run RUN
      flaxformer-mt evaluate --run RUN --source test.en --reference test.de \
          --output hypothesis.de
      flaxformer-mt evaluate --hypothesis hypothesis.de --reference test.de \
          --confidence
      flaxformer-mt evaluate --baseline old.de --hypothesis new.de \
          --hypothesis other.de --reference test.1.de --reference test.2.de
      flaxformer-mt evaluate --run RUN --metric bleu --metric comet=wmt22-comet-da
      flaxformer-mt evaluate --run RUN --metric bleu --metric my_metrics:my_function
      flaxformer-mt evaluate --run RUN_1 --run RUN_2 --beam-size 8

    Args:
      run: Run folder of the trained model. Repeat the option to decode with an ensemble of models
        that share a vocabulary.
      hypothesis: Text file of translations, one per line (compressed ones are decompressed). Repeat
        the option for several systems.
      baseline: Text file of the translations with which those of all other systems are compared,
        by --significance.
      source: Text file of source sentences, one per line. For translations in files it is only
        needed by user-defined functions.
      reference: Text file of the reference translations. Repeat the option if each sentence has
        several.
      split: Instead of --source and --reference: the split of the (first) run, which is read from
        where the run's configuration says. Default: test, or valid if the run has no test split.
      output_file: Write the translations of the run to this file.
      metric: bleu, chrf, chrf++ or ter: compute only those that are named (default: all four).
        NAME=FOLDER: also compute the learned metric of a folder, MetricX or COMET, under this name.
        MODULE:FUNCTION: also compute a user-defined function, whose module is installed or in the
        current folder. It is called with the sources, the translations and a list of lists of
        references, and returns a number, or a number for each sentence. Repeat the option for
        several.
      tokenize: Tokenizer of BLEU: 13a, intl, char, zh, ja-mecab, ko-mecab, flores200, none.
        Default: 13a, or zh or char if the references are in a script without spaces.
      lowercase: Ignore case in BLEU, chrF and chrF++, too. TER always does.
      confidence: Estimate 95% confidence intervals by bootstrap resampling.
      significance: Paired test against --baseline: bootstrap resampling (the default), which also
        gives confidence intervals, or approximate randomization.
      resamples: Number of bootstrap resamples (default: 1,000), or of trials of the randomization
        (default: 10,000). The environment variable SACREBLEU_SEED sets their seed, as in sacreBLEU
        (default: 12345).
      output_format: auto: a table on a terminal, JSON elsewhere.
      checkpoint: "best" by validation, "last", or the step of a checkpoint.
      decode: Search options. Their defaults are those of the run.
    """
    if not (run or hypothesis or baseline):
        raise UserError("--run or --hypothesis is missing: say what to evaluate")
    require_writable(output_file)
    from flaxformer_mt import evaluation
    from flaxformer_mt.evaluation import metrics
    from flaxformer_mt.runs.folder import read_config

    if run:
        if decode.n_best != read_config(run[0]).decode.n_best:
            raise UserError("evaluate scores one translation per sentence: remove --n-best")
    else:
        chosen = None if checkpoint == "best" else checkpoint
        reject_options("--run", split=split, output=output_file, checkpoint=chosen)
        if decode != DEFAULT_SEARCH:
            raise UserError("search options are for --run only: --hypothesis is not translated")
    if baseline is None:
        reject_options("--baseline", significance=significance)
        if not confidence:
            reject_options("--confidence and --baseline", resamples=resamples)
    elif not (hypothesis or run):
        raise UserError("--baseline needs --hypothesis or --run, to be compared with it")
    _require_different(baseline, hypothesis)
    standard, functions = _metrics(metric, evaluation.STANDARD)
    if "bleu" not in standard:
        reject_options("--metric bleu", tokenize=tokenize)
    significance = significance or ("bootstrap" if baseline else None)
    test = _test_set(run, source, reference, split)
    options: dict[str, Any] = {
        "significance": significance,
        "standard": standard,
        "metrics": functions,
        "tokenize": tokenize,
        "lowercase": lowercase,
        "confidence": confidence,
        "resamples": resamples or 0,
    }
    evaluation.check_options(len(test.references[0]), **options)
    own_tokenizer = metrics.separation_of(test.references[0]).bleu
    if tokenize is None and "bleu" in standard and own_tokenizer != metrics.DEFAULT_TOKENIZER:
        output.print_note(
            f"the references are in a script without spaces: BLEU's tokenizer is {own_tokenizer}"
        )
    name = " + ".join(map(str, run))
    systems = {} if baseline is None else {str(baseline): _parallel_lines(baseline, test)}
    if run:
        systems[name] = []  # Its place: everything else is read before it is translated.
    systems |= {str(file): _parallel_lines(file, test) for file in hypothesis}
    common: dict[str, Any] = {}
    if run:
        common["step"], systems[name], test = _translated(
            run, checkpoint, decode, test, output_file
        )
    common["sentences"] = len(test.references[0])
    options["sources"] = test.sources
    scores = evaluation.compare(systems, test.references, **options)
    doubts = {system: _doubts(texts, test) for system, texts in systems.items()}
    if output_format == "table" or (output_format == "auto" and sys.stdout.isatty()):
        _print_table(scores, significance, doubts)
        return
    rows: list[dict[str, Any]] = [
        {"system": system, **_rounded(found)} for system, found in scores.items()
    ]
    for row in rows:
        if counts := doubts[row["system"]].counts:
            row["doubtful"] = counts
    if len(rows) == 1:
        del rows[0]["system"]
        output.print_json(common | rows[0])
    else:
        output.print_json({**common, "systems": rows})


def _doubts(translations: Sequence[str], test: _TestSet) -> "Doubts":
    from flaxformer_mt.decoding.doubtful_output import Doubts

    found = Doubts()
    sources: Sequence[str | None] = test.sources or [None] * len(translations)
    for texts in zip(translations, sources, test.references[0], strict=True):
        found.add(*texts)
    return found


def _rounded(scores: Mapping[str, "MetricScore"]) -> dict[str, Any]:
    from flaxformer_mt.evaluation import flattened

    return {
        name: round(value, _DIGITS) if isinstance(value, float) else value
        for name, value in flattened(scores).items()
    }


def _require_different(baseline: Path | None, hypotheses: Sequence[Path]) -> None:
    options: dict[Path, str] = {}
    if baseline is not None:
        options[baseline.resolve()] = "--baseline and --hypothesis"
    for file in hypotheses:
        if file.resolve() in options:
            given = options[file.resolve()]
            raise UserError(f"{file} is given twice, by {given}: leave one out")
        options[file.resolve()] = "--hypothesis"


def _metrics(
    names: Sequence[str], standard: Sequence[str]
) -> tuple[list[str], dict[str, "MetricFunction"]]:
    chosen = [name for name in names if ":" not in name and "=" not in name]
    functions: dict[str, MetricFunction] = {}
    for text in names:
        if text in chosen:
            continue
        name, is_learned, folder = text.partition("=")
        name = name if is_learned else text.rpartition(":")[2]
        if name in (*functions, *standard):
            raise UserError(f"--metric {text}: there is another metric {name}; rename one")
        if is_learned:
            from flaxformer_mt.judges.reading import metric

            functions[name] = metric(folder).mean_scores
        else:
            functions[name] = _function(text)
    return chosen or list(standard), functions


def _function(text: str) -> "MetricFunction":
    """Imports MODULE:FUNCTION, also from the current folder, where it may import others later."""
    module, _, name = text.rpartition(":")
    folder = os.getcwd()
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        function: Any = getattr(importlib.import_module(module), name)
    except Exception as error:  # The module can raise anything.
        raise UserError(f"--metric {text}: {_reason(error)}") from error
    if not callable(function):
        raise UserError(f"--metric {text}: {name} is not a function")

    @functools.wraps(function)
    def reporting(*texts: Any) -> Any:
        try:
            return function(*texts)
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            raise UserError(
                f"--metric {text}: {_reason(error)} ({last.filename}, line {last.lineno})"
            ) from error

    return reporting


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _test_set(
    run: Sequence[Path],
    source: Path | None,
    references: Sequence[Path],
    split: Literal["test", "valid"] | None,
) -> _TestSet:
    if not references and not source and run:
        from flaxformer_mt.run_reader import Run

        # Of several runs, the others have not seen the text of the first one either.
        first = Run(run[0])
        texts = first.texts(split)
        name = f"the {split or first.held_out_split} split of {run[0]}"
        output.print_note(f"{name}: {texts.name}")
        return _TestSet(name, list(texts.sources), [list(texts.targets)])
    if run and (split or not source or not references):
        raise UserError("give --source together with --reference, or neither; --split without them")
    if not references:
        raise UserError("--reference is missing: give the reference translations")
    test = _TestSet(str(references[0]), None, [read_lines(references[0])])
    test.references.extend(_parallel_lines(path, test) for path in references[1:])
    return test if source is None else test._replace(sources=_parallel_lines(source, test))


def _parallel_lines(path: Path, test: _TestSet) -> list[str]:
    lines, expected = read_lines(path), len(test.references[0])
    if len(lines) != expected:
        raise UserError(
            f"{path} has {len(lines)} lines but {test.name} has {expected}: line i of one must "
            "translate line i of the other"
        )
    return lines


def _translated(
    run: Sequence[Path],
    checkpoint: CheckpointChoice,
    decode: DecodeOptions,
    test: _TestSet,
    output_file: Path | None,
) -> tuple[int | list[int], list[str], _TestSet]:
    """Translates a test set, and writes the translations.

    Returns the step of the run, or those of several, the translations, and the test set with
    references that do not begin with their language.
    """
    from flaxformer_mt.decoding.translator import Translator, into_languages

    models = load_runs(run, checkpoint)
    steps = [model.step for model in models]
    translator = Translator.from_runs(models, decode)
    del models  # The translator has parameters of its own.
    sources, target = test.sources or [], translator.tokenizers.target
    sentences, references = into_languages(sources, test.references, target)
    translations = translator.translate(sentences, show_progress=sys.stderr.isatty())
    if output_file is not None:
        with output.line_writer(output_file) as write:
            write(translations)
    test = test._replace(references=references)
    return steps[0] if len(steps) == 1 else steps, translations, test


def _print_table(
    scores: Mapping[str, Mapping[str, "MetricScore"]],
    significance: str | None,
    doubts: Mapping[str, "Doubts"],
) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    baseline = next(iter(scores))
    metrics = scores[baseline]
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("system", overflow="fold")
    for name in metrics:
        table.add_column(_TITLES.get(name, name), justify="right", no_wrap=True)
    for system, found in scores.items():
        cells = (Text("\n".join(_cell(name, score))) for name, score in found.items())
        table.add_row(Text(system), *cells)
    console.print(table)
    console.print()
    notes = [f"{_TITLES.get(name, name)}: {score.signature}" for name, score in metrics.items()]
    if any(score.interval is not None for score in metrics.values()):
        notes.append("mean ± half the 95% confidence interval, of bootstrap resamples")
    if significance:
        notes.append(f"p: paired {significance} against {baseline}; * below {_SIGNIFICANT}")
    notes += [f"{system}: {found}" for system, found in doubts.items() if found.counts]
    for note in notes:
        console.print(note, markup=False, highlight=False, soft_wrap=True)


def _cell(metric: str, score: "MetricScore") -> Iterable[str]:
    digits = 2 if metric in _TITLES else _DIGITS  # sacreBLEU's are percentages.
    yield f"{score.score:.{digits}f}"
    if score.mean is not None:
        yield f"{score.mean:.{digits}f} ± {score.interval:.{digits}f}"
    if score.p_value is not None:
        mark = " *" if score.p_value < _SIGNIFICANT else ""
        yield f"p = {score.p_value:.4f}{mark}"
