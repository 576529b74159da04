"""The console script `flaxformer-mt`: one function a subcommand, its arguments are the options.

Whatever takes long to import is imported by the subcommand that needs it, so that `--help` and
mistyped options answer at once.
"""

import argparse
import contextlib
import dataclasses
import functools
import io
import json
import os
import re
import shutil
import sys
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from flaxformer_mt import runtime
from flaxformer_mt.config import CorpusConfig, DataConfig, DecodeConfig, TransformerConfig
from flaxformer_mt.data.corpora.text_files import (
    arriving_lines,
    count_lines,
    opened,
    read_parallel,
    stream_parallel,
)
from flaxformer_mt.errors import UserError
from flaxformer_mt.presets import FAMILIES, FAMILY_ALIASES, canonical_family, check_fields
from flaxformer_mt.runs import atomic

Checkpoint = Literal["best", "last"] | int
Runs = tyro.conf.UseAppendAction[
    Annotated[tuple[Path, ...], tyro.conf.arg(name="run", metavar="FOLDER")]
]
Search = tyro.conf.OmitArgPrefixes[DecodeConfig]
DEFAULT_SEARCH = DecodeConfig()

EXIT_INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it."""

ALL = "all"
FAMILY_CHOICES = (*FAMILIES, *FAMILY_ALIASES, ALL)
PublishedFamily = Annotated[
    str, tyro.conf.arg(constructor=tyro.extras.literal_type_from_choices(FAMILY_CHOICES))
]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the subcommand that `arguments` (by default the command line) name.

    Returns:
      The exit code: 0, or 1 if what the user gave cannot be used, or if `parity` finds a
      difference. (Options that cannot be parsed raise SystemExit with code 2.)
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    runtime.configure()
    try:
        search = configured_search(arguments)
        code = tyro.extras.subcommand_cli_from_dict(
            {
                "translate": functools.partial(translate, decode=search),
                "score": score,
                "evaluate": functools.partial(evaluate, decode=search),
                "inspect": inspect,
                "average": average,
                "lexicon": lexicon,
                "convert": convert,
                "parity": parity,
                "prepare": prepare,
            },
            prog="flaxformer-mt",
            description="Uses trained translation models, and compares them with published ones.",
            args=arguments,
            config=(tyro.conf.FlagCreatePairsOff,),
        )
    except UserError as error:
        print(f"flaxformer-mt: error: {_with_options(str(error))}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # Nobody reads any more. Python flushes standard output once again when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return code or 0


def configured_search(arguments: Sequence[str]) -> DecodeConfig:
    """The search as configured in the first run that the command line names.

    Its values are what `--help` shows, and what holds where no option says another.

    Raises:
      UserError: there is no such run.
    """
    if arguments[:1] not in (["translate"], ["evaluate"]):
        return DEFAULT_SEARCH
    finder = argparse.ArgumentParser("flaxformer-mt", add_help=False, allow_abbrev=False)
    finder.add_argument("--run", action="append", type=Path)
    runs = finder.parse_known_args(arguments)[0].run
    if not runs:
        return DEFAULT_SEARCH
    from flaxformer_mt.runs.trained_run import read_config

    return read_config(runs[0]).decode


def _with_options(message: str) -> str:
    """A message with the names that fields of `DecodeConfig` have on this command line."""
    return re.sub(r"\bdecode\.(\w+)", lambda field: "--" + field[1].replace("_", "-"), message)


def translate(
    run: Runs = (),
    input_file: Annotated[Path | None, tyro.conf.arg(name="input", metavar="FILE")] = None,
    output_file: Annotated[Path | None, tyro.conf.arg(name="output", metavar="FILE")] = None,
    input_format: Literal["text", "jsonl"] = "text",
    output_format: Annotated[Literal["text", "jsonl"], tyro.conf.arg(name="format")] = "text",
    alignment: Literal["words", "pieces"] | None = None,
    tokens: bool = False,
    attention: bool = False,
    checkpoint: Checkpoint = "best",
    decode: Search = DEFAULT_SEARCH,
) -> None:
    """Translates standard input, one sentence a line, to standard output.

    A line is answered as soon as it and all before it are translated, also when the input goes on.
    Empty lines stay empty, and long ones are translated sentence by sentence. Some commands:

      flaxformer-mt translate --run RUN < source.txt > translation.txt
      flaxformer-mt translate --run RUN --input source.txt.gz --output translation.txt
      flaxformer-mt translate --run RUN --n-best 4 --format jsonl --alignment words < source.txt
      flaxformer-mt translate --run RUN --sampling --temperature 0.8 --seed 1 < source.txt
      flaxformer-mt translate --run FIRST --run SECOND < source.txt

    docs/decoding.md shows what each option does.

    Args:
      run: Folder of the trained model. Several models, each with its own --run, choose each token
        together; they need the same vocabulary.
      input_file: Read this text file (also .gz) instead of standard input.
      output_file: Write this file, which appears when it is whole, instead of standard output.
      input_format: jsonl: each line is {"text": ..., "prefix": ..., "phrases": [...]}; the
        translation begins with the prefix and has all phrases. Only the text is needed.
      output_format: text: the translation; of --n-best, each as `index ||| text ||| score`, best
        first, where the index counts input lines from 0. jsonl: {"translations": [{"text": ...,
        "score": ..., "log_probability": ...}, ...]}.
      alignment: Add which source word, or piece, each target word or piece attends to most: `0-0
        1-2`, source-target, both counted from 0; as text after a further ` ||| `.
      tokens: Add to jsonl the tokens, and the pieces that the words of both sides are split into.
      attention: Add to jsonl the attention of each target piece (row) to each source piece.
      checkpoint: The best by validation, the last, or that of a step.
      decode: How translations are searched for. Defaults are those of the run.
    """
    from flaxformer_mt.decoding.line_format import LineFormat, translate_lines
    from flaxformer_mt.decoding.translator import WINDOW, Translator

    form = LineFormat(input_format, output_format, alignment, tokens, attention)
    with contextlib.ExitStack() as stack:
        name = str(input_file) if input_file else "standard input"
        stream: Any = stack.enter_context(opened(input_file)) if input_file else sys.stdin.buffer
        write = stack.enter_context(_writing(output_file)) if output_file else _print_lines
        translator = Translator.from_runs(_load_runs(run, checkpoint), decode)
        advance = stack.enter_context(_progress_bar(stream))
        groups = arriving_lines(stream, name, enough=WINDOW * decode.batch_tokens)
        for line in translate_lines(translator, groups, form, name, advance):
            write([line])


def score(
    run: Path,
    source: Path,
    target: Path,
    checkpoint: Checkpoint = "best",
    normalize: Literal["none", "tokens", "search"] = "none",
    tokens: bool = False,
    alignment: Literal["words", "pieces"] | None = None,
    alignment_layer: int | None = None,
    alignment_head: int | None = None,
    contrast: tuple[Path, ...] = (),
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False,
    summary: bool = False,
) -> None:
    """Prints the log-probability (natural, end token included) of each target given its source.

    Further columns are parted by tabs. Some commands to start from:

      flaxformer-mt score --run RUN --source test.en --target test.de --summary
      flaxformer-mt score --run RUN --source test.en --target test.de --alignment words
      flaxformer-mt score --run RUN --source test.en --target right.de --contrast wrong.de

    Args:
      run: Folder of the trained model.
      source: Text file, one sentence a line (also .gz).
      target: Text file, the translation of each.
      checkpoint: The best by validation, the last, or that of a step.
      normalize: What log-probabilities are divided by: nothing; the number of tokens, end included;
        or the length penalty of the run's search, which gives the scores that it sorts by.
      tokens: Add a column, the log-probability of each token, parted by spaces.
      alignment: Add a column that links each target word, or piece, to the source word or piece
        that it attends to most: `0-0 1-2`, source-target, both counted from 0.
      alignment_layer: Decoder layer whose attention aligns, from 0; negative from the last.
        Default: as the run is configured.
      alignment_head: Head whose attention aligns, from 0; -1 = the mean of all. Default: as the
        run is configured.
      contrast: Files with other translations of each line, which should be less probable. A line
        then is the number of the translation that the model prefers, 0 being that of --target, and
        the score of each.
      as_json: Print one JSON object a line, with all that is known of the pair.
      summary: Print one JSON object about all lines instead: the perplexity of the targets, and
        with --contrast how often they are preferred.
    """
    if contrast or summary:
        columns = {"tokens": tokens or None, "alignment": None if as_json else alignment}
        _refuse("lines without --contrast and --summary", **columns)
    from rich.console import Console
    from rich.progress import track

    from flaxformer_mt.decoding.scoring.score_report import Totals, to_json, to_text
    from flaxformer_mt.decoding.scoring.scorer import PairScore, Scorer
    from flaxformer_mt.runs.trained_run import load_run

    model = load_run(run, checkpoint)
    places = {"alignment_layer": alignment_layer, "alignment_head": alignment_head}
    given: Any = {name: place for name, place in places.items() if place is not None}
    decode = dataclasses.replace(model.config.decode, **given)
    config = dataclasses.replace(model.config, decode=decode)
    scorer = Scorer(config, model.params, model.tokenizers)
    scored = track(
        scorer.stream_candidates(_candidates(source, (target, *contrast)), alignment),
        "Scoring",
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty() or sys.stdout.isatty(),
    )

    def value(pair: PairScore) -> float:
        return pair.normalized(normalize, decode)

    if summary:
        totals = Totals()
        for each in scored:
            totals.add(each, value)
        _print_json(totals.figures())
    elif as_json:
        _print_lines(json.dumps(to_json(each, value), ensure_ascii=False) for each in scored)
    else:
        _print_lines(to_text(each, value, tokens) for each in scored)


def _candidates(source: Path, targets: Sequence[Path]) -> Iterator[tuple[str, list[str]]]:
    """Each line of `source` with its line in each of `targets`."""
    for pairs in zip(*(stream_parallel(source, target) for target in targets), strict=True):
        yield pairs[0][0], [target for _, target in pairs]


def evaluate(
    source: Path,
    reference: Path,
    run: Runs = (),
    checkpoint: Checkpoint = "best",
    decode: Search = DEFAULT_SEARCH,
) -> None:
    """Translates a file and compares with a reference: BLEU, chrF and TER as JSON.

    Args:
      source: Text file, one sentence a line (also .gz).
      reference: Text file, a translation of each by a person.
      run: Folder of the trained model; several as for `translate`.
      checkpoint: The best by validation, the last, or that of a step.
      decode: How translations are searched for. Defaults are those of the run.
    """
    sources, references = read_parallel(source, reference)
    from flaxformer_mt import evaluation
    from flaxformer_mt.decoding.translator import Translator

    runs = _load_runs(run, checkpoint)
    hypotheses = Translator.from_runs(runs, decode).translate(
        sources, show_progress=sys.stderr.isatty()
    )
    figures = evaluation.evaluate(hypotheses, references)
    steps = [model.step for model in runs]
    step = steps[0] if len(steps) == 1 else steps
    _print_json({"step": step, "sentences": len(sources), **figures})


def inspect(
    run: Path,
    checkpoint: Checkpoint = "last",
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> None:
    """Prints what a run folder holds: step, parameters, fingerprints, configuration.

    Args:
      run: Folder of the trained model.
      checkpoint: The best by validation, the last, or that of a step.
      as_json: Print one JSON object instead of lines.
    """
    from flaxformer_mt.runs.trained_run import describe_run

    description = describe_run(run, checkpoint)
    if as_json:
        _print_json(description)
    else:
        _print_lines(f"{name}: {value}" for name, value in _flatten(description))


def average(
    run: Path,
    last: int | None = None,
    best: int | None = None,
    output: Path | None = None,
) -> None:
    """Averages the parameters of checkpoints, which often translates better than each of them.

    The result is a run folder of its own, to be used like any other:

      flaxformer-mt average --run runs/a --last 5
      flaxformer-mt translate --run runs/a/averaged < source.txt

    Args:
      run: Folder of the trained model.
      last: How many of the newest checkpoints; train with --train.keep-last to have them.
      best: Instead, how many of the best by validation; train with --train.keep-best to have them.
      output: The folder to make. Default: `averaged` in the run folder.
    """
    from flaxformer_mt.training.averaging import average_run

    if (last is None) == (best is None):
        raise UserError("give --last or --best, the number of checkpoints to average")
    which: Literal["last", "best"] = "best" if last is None else "last"
    output = output or run / "averaged"
    steps = average_run(run, output, last or best or 0, which, announce=_note)
    _print_lines([f"{output}: the mean of the checkpoints of steps {', '.join(map(str, steps))}"])


def lexicon(
    run: Path,
    source: Path,
    target: Path,
    output_file: Annotated[Path, tyro.conf.arg(name="output", metavar="FILE")],
) -> None:
    """Learns from parallel text which pieces translate which: a file for `translate --shortlist`.

      flaxformer-mt lexicon --run RUN --source train.en --target train.de --output lex.gz

    Args:
      run: Folder of the trained model, whose vocabulary is used.
      source: Text file, one sentence a line (also .gz).
      target: Text file, the translation of each.
      output_file: Text file to write, "target source probability" a line (also .gz).
    """
    from flaxformer_mt.data.tokenizers.tokenizer import Tokenizers, evenly
    from flaxformer_mt.decoding.shortlists.lexicon import MAX_PAIRS, learn, write_table

    _require_folders(output_file)
    tokenizers = Tokenizers.load(run / "tokenizer")
    pairs = evenly(stream_parallel(source, target), MAX_PAIRS)
    sources, targets = zip(*pairs, strict=True)
    table = learn(tokenizers.source.encode(sources), tokenizers.target.encode(targets))
    write_table(output_file, table, tokenizers)
    _note(f"{output_file}: {len(table):,} entries from {len(pairs):,} pairs")


def convert(
    input_file: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="INPUT")],
    output_file: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="OUTPUT")],
    source: Annotated[str, tyro.conf.arg(name="from", metavar="FAMILY")],
    target: Annotated[str, tyro.conf.arg(name="to", metavar="FAMILY")] = "flaxformer_mt",
    settings: Annotated[tuple[str, ...], tyro.conf.arg(name="set", metavar="NAME=VALUE")] = (),
    accept: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME")] = (),
    quantization: str | None = None,
) -> None:
    """Turns the checkpoint of one published model into that of another, or of our own.

    The result computes the same, or there is none. What had to be done to the weights is told on
    standard error, a line each. Adam's state comes along where it can.

    For example:

      flaxformer-mt convert --from opennmt --to torch model.pt model.safetensors
      flaxformer-mt convert --from torch --to flaxformer_mt a.pt b.safetensors --set num_heads=8

    Either side can be a folder with a whole model, vocabulary included. A run made so can be used
    like any other, and any run whose model has a place in the other format can be written:

      flaxformer-mt convert --from marian opus-mt-en-de RUN
      flaxformer-mt convert --from marian-native firefox-en-pt RUN
      flaxformer-mt convert --from flaxformer_mt --to marian RUN FOLDER
      flaxformer-mt convert --from flaxformer_mt --to ctranslate2 RUN FOLDER
      flaxformer-mt convert --from flaxformer_mt --to jax RUN FOLDER

    Args:
      input_file: The checkpoint: .pt, or .safetensors; or a folder: a run, or one of Hugging Face.
      output_file: The file to write: .pt, or .safetensors, which has no place for Adam's state; or
        the folder to make.
      source: The model that the checkpoint is of: a published one, or `flaxformer_mt`, which is our
        parameters in a .safetensors, or a run.
      target: The model to turn it into.
      settings: Fields of the configuration that the checkpoint cannot tell: `num_heads=8
        norm_position=pre`.
      accept: Switches in which the result may compute something slightly else: `norm_epsilon`.
      quantization: For --to ctranslate2, what its weights are stored in: int8, int8_float32,
        int8_float16, int8_bfloat16, int16, float16, bfloat16 or float32, the default.
    """
    from flaxformer_mt.interop.folders import convert as convert_model

    overrides = dict(map(_field_of_model, settings))
    notes = convert_model(source, target, input_file, output_file, overrides, accept, quantization)
    for note in notes:
        _note(note)


def prepare(
    path: Path,
    output: Path,
    source_language: str,
    target_language: str,
    form: Annotated[Literal["text", "tsv"], tyro.conf.arg(name="format")] = "text",
    splits: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME=FILES ...")] = (
        "train=train",
        "validation=valid",
        "test=test",
    ),
) -> None:
    """Makes a TensorFlow Datasets data set of parallel text, to be shared by runs.

    Some commands to start from:

      flaxformer-mt prepare --path TEXT --output DATA --source-language en --target-language de
      flaxformer-mt prepare ... --splits train=europarl,news-* validation=newstest2013

    Args:
      path: Folder of the text.
      output: Folder to make; it appears when the data set is whole.
      source_language: Ending of the source files, and name of the language in the data set.
      target_language: Ending of the target files, and name of the language in the data set.
      form: text: FILE.LANGUAGE or FILE.LANGUAGE.gz, one sentence a line; tsv: FILE.tsv or
        FILE.tsv.gz, source and target parted by a tab.
      splits: The splits to make, each with the names, or patterns of names, of its files, without
        their endings, parted by commas.
    """
    from flaxformer_mt.data.corpora import tfds_builder
    from flaxformer_mt.data.corpora.corpus import open_corpus

    corpora = {
        name: open_corpus(
            CorpusConfig(
                kind=form,
                path=str(path),
                split=files,
                source_language=source_language,
                target_language=target_language,
            ),
            DataConfig(),
            prefix="--",
        )
        for name, files in map(_split_and_files, splits)
    }
    counts = tfds_builder.prepare(corpora, output)
    options = {
        "corpus": "tfds",
        "path": output,
        "source-language": source_language,
        "target-language": target_language,
    }
    for role in ("train", "valid", "test"):
        options |= {f"{role}-split": name for name in counts if name.startswith(role)}
    _print_lines(
        [
            f"{output}: {', '.join(f'{count:,} pairs {name}' for name, count in counts.items())}",
            "train on it with: python train.py --config=FILE --workdir=RUN "
            + " ".join(f"--data.{name}={value}" for name, value in options.items()),
        ]
    )


def _load_runs(folders: Sequence[Path], checkpoint: Checkpoint) -> list[Any]:
    from flaxformer_mt.runs.trained_run import load_run

    if not folders:
        raise UserError("--run is missing: give the folder of a trained model")
    return [load_run(folder, checkpoint) for folder in folders]


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[Callable[[Iterable[str]], None]]:
    """A function that writes lines to a file, which appears under its name when it is whole."""
    with atomic.new_file(path) as partial, partial.open("wb") as file:
        yield lambda lines: file.writelines(f"{line}\n".encode() for line in lines)


@contextlib.contextmanager
def _progress_bar(stream: io.BufferedIOBase) -> Iterator[Callable[[], object]]:
    """Draws how many of a file's lines are done; a pipe, and a log of errors, get no bar.

    Yields:
      What to call for each line that is done.
    """
    if not (sys.stderr.isatty() and stream.seekable()):
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

    columns = (*Progress.get_default_columns(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("Translating", total=count_lines(stream))
        yield lambda: progress.advance(task)


def _split_and_files(setting: str) -> tuple[str, str]:
    """`NAME=FILES` in two."""
    name, sign, files = setting.partition("=")
    if not (name and sign and files):
        raise UserError(f"--splits {setting}: write NAME=FILES, such as train=europarl,news-*")
    return name, files


def parity(
    family: PublishedFamily,
    checkpoint: Path | None = None,
    settings: Annotated[tuple[str, ...], tyro.conf.arg(name="set", metavar="NAME=VALUE ...")] = (),
    dtype: Literal["float64", "float32"] | None = None,
    size: Literal["toy", "base"] = "toy",
    steps: int | None = None,
    seed: int = 0,
    json_file: Annotated[Path | None, tyro.conf.arg(name="json", metavar="FILE")] = None,
    html: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None,
    markdown: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None,
    verbose: bool = False,
) -> int:
    """Compares our model with a published one in PyTorch, on the same weights and sentences.

    Every sub-layer's value, the loss and every gradient are compared, and optimizer steps if asked
    for. The report marks the first difference and names its cause if it is a known one. Exit code 0
    means that all agree, 1 that something differs or cannot be used.

    Some commands to start from:

      flaxformer-mt parity --family annotated
      flaxformer-mt parity --family torch --checkpoint model.pt --set num_heads=8 --html report.html
      flaxformer-mt parity --family tunz --steps 1000
      flaxformer-mt parity --family all --markdown docs/parity.md

    Args:
      family: The published model, or "all" for a table of all of them.
      checkpoint: A file of that model: .pt, or .safetensors. Default: random weights.
      settings: Fields of the configuration that differ from the published ones, or that the
        checkpoint cannot tell: `num_heads=8 norm_position=pre`.
      dtype: What both sides compute in. In float64, the default, a bug cannot pass for rounding.
        "all" does both.
      size: Of a model with random weights: toy takes seconds; base is the paper's, D 512, F 2048,
        H 8, 6 and 6 layers.
      steps: Optimizer steps to compare as well. Default: 0, but 100 for "all".
      seed: Of random weights and of the sentences.
      json_file: Write the report there as JSON.
      html: Write the report there as one page of HTML, with a plot of the steps.
      markdown: Write the table of "all" there, between the lines that mark its place; a file that
        does not exist is made.
      verbose: Print a line for every value, also where all values of a layer agree.
    """
    fields = dict(map(_field_of_model, settings))
    _require_folders(json_file, html, markdown)
    try:
        from flaxformer_mt.parity import families
        from flaxformer_mt.parity.reports import family_summary as survey
    except ImportError as error:
        raise UserError(str(error)) from error

    if family == ALL:
        _refuse(checkpoint=checkpoint, dtype=dtype, html=html, is_for="a single family")
        if markdown:
            survey.read_document(markdown)  # Better refused now than in some minutes.
        with _announcements() as announce:
            table = survey.check_all(
                size=size,
                num_steps=100 if steps is None else steps,
                seed=seed,
                announce=announce,
                **fields,
            )
        if markdown:
            document = survey.read_document(markdown)
            atomic.write_text(markdown, survey.with_table(document, table.to_markdown()))
        return _deliver(table, json_file, verbose)

    _refuse(markdown=markdown, is_for="--family all")
    with _announcements() as announce:
        announce(f"{canonical_family(family)} in {dtype or 'float64'}")
        report = families.check_family(
            family,
            dtype=dtype or "float64",
            size=size,
            num_steps=steps or 0,
            seed=seed,
            checkpoint=checkpoint,
            **fields,
        )
    if html:
        atomic.write_text(html, report.to_html())
    return _deliver(report, json_file, verbose)


def _field_of_model(setting: str) -> tuple[str, Any]:
    """`NAME=VALUE` as a field of `TransformerConfig`."""
    name, _, text = setting.partition("=")
    check_fields([name])
    kind: Any = typing.get_type_hints(TransformerConfig)[name]
    choices = typing.get_args(kind) or (("true", "false") if kind is bool else ())
    if choices and text not in choices:
        raise UserError(f"--set {setting}: {name} is one of {', '.join(choices)}")
    if kind is bool:
        return name, text == "true"
    try:
        return name, text if choices else kind(text)
    except ValueError as error:
        raise UserError(f"--set {setting}: {name} is a number, {kind.__name__}") from error


def _refuse(is_for: str, **options: object) -> None:
    for name, value in options.items():
        if value is not None:
            raise UserError(f"--{name} is for {is_for} only: leave it out")


def _require_folders(*files: Path | None) -> None:
    for file in files:
        if file is not None and not file.parent.is_dir():
            raise UserError(f"{file} cannot be written: {file.parent} is no folder")


@contextlib.contextmanager
def _announcements() -> Iterator[Callable[[str], None]]:
    """A function that says on the terminal what is being done, until the next call or the end."""
    from rich.console import Console

    console = Console(stderr=True)
    # In a log, a line that is only there to be overwritten would stay.
    if console.is_terminal:
        with console.status("") as status:
            yield status.update
    else:
        yield lambda text: None


def _deliver(result: Any, json_file: Path | None, verbose: bool) -> int:
    """Writes and prints a result of `parity`; returns the exit code."""
    if json_file:
        atomic.write_text(json_file, result.to_json())
    is_terminal = sys.stdout.isatty()
    width = shutil.get_terminal_size().columns if is_terminal else 100
    _print_lines([result.to_text(verbose=verbose, width=width, color=is_terminal)])
    return int(not result.passed)


def _note(line: str) -> None:
    print(f"flaxformer-mt: note: {line}", file=sys.stderr)


def _flatten(values: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _print_json(values: Mapping[str, Any]) -> None:
    _print_lines([json.dumps(values, indent=2)])


def _print_lines(lines: Iterable[str]) -> None:
    # As bytes: text streams follow the locale in their encoding and the system in their line ends.
    sys.stdout.buffer.writelines(f"{line}\n".encode() for line in lines)
    sys.stdout.buffer.flush()
