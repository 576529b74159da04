"""The console script `flaxformer-mt`: one function a subcommand, its arguments are the options.

Whatever takes long to import is imported by the subcommand that needs it, so that `--help` and
mistyped options answer at once.
"""

import contextlib
import json
import os
import shutil
import sys
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from flaxformer_mt.config import CorpusConfig, DataConfig, TransformerConfig
from flaxformer_mt.data.text import decode_lines, read_parallel
from flaxformer_mt.errors import UserError
from flaxformer_mt.presets import FAMILIES, check_fields

Checkpoint = Literal["best", "last"] | int

ALL = "all"
PublishedFamily = Annotated[
    str, tyro.conf.arg(constructor=tyro.extras.literal_type_from_choices((*FAMILIES, ALL)))
]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the subcommand that `arguments` (by default the command line) name.

    Returns:
      The exit code: 0, or 1 if what the user gave cannot be used, or if `parity` finds a
      difference. (Options that cannot be parsed raise SystemExit with code 2.)
    """
    try:
        code = tyro.extras.subcommand_cli_from_dict(
            {
                "translate": translate,
                "score": score,
                "evaluate": evaluate,
                "inspect": inspect,
                "average": average,
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
        print(f"flaxformer-mt: error: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # Nobody reads any more. Python flushes standard output once again when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code or 0


def translate(
    run: Path,
    beam_size: int | None = None,
    n_best: int = 1,
    length_penalty: float | None = None,
    checkpoint: Checkpoint = "best",
) -> None:
    """Translates standard input, one sentence a line, to standard output.

    Args:
      run: Folder of the trained model.
      beam_size: Hypotheses that the search follows, 1 = greedy. Default: as the run is configured.
      n_best: Translations per sentence. More than 1 are printed as `index ||| text ||| score`,
        best first, where the index counts input lines from 0.
      length_penalty: alpha of ((5 + length) / 6)**alpha, which divides log-probabilities; more
        favours longer translations. Default: as the run is configured.
      checkpoint: The best by validation, the last, or that of a step.
    """
    from flaxformer_mt.decoding.translator import Translator

    translator = Translator.from_run(run, checkpoint)
    translations = translator.translate_n_best(
        decode_lines(sys.stdin.buffer.read(), "standard input"),
        n_best,
        beam_size,
        length_penalty,
        show_progress=sys.stderr.isatty(),
    )
    if n_best == 1:
        _print_lines(hypotheses[0].text for hypotheses in translations)
    else:
        _print_lines(
            f"{index} ||| {hypothesis.text} ||| {hypothesis.score:.6f}"
            for index, hypotheses in enumerate(translations)
            for hypothesis in hypotheses
        )


def score(run: Path, source: Path, target: Path, checkpoint: Checkpoint = "best") -> None:
    """Prints the log-probability (natural, end token included) of each target given its source.

    Args:
      run: Folder of the trained model.
      source: Text file, one sentence a line (also .gz).
      target: Text file, the translation of each.
      checkpoint: The best by validation, the last, or that of a step.
    """
    sources, targets = read_parallel(source, target)
    from flaxformer_mt.decoding.run import load_run
    from flaxformer_mt.decoding.scoring import score_pairs

    model = load_run(run, checkpoint)
    scores = score_pairs(model.config, model.params, model.tokenizers, sources, targets)
    _print_lines(f"{pair.log_probability:.6f}" for pair in scores)


def evaluate(
    run: Path,
    source: Path,
    reference: Path,
    beam_size: int | None = None,
    length_penalty: float | None = None,
    checkpoint: Checkpoint = "best",
) -> None:
    """Translates a file and compares with a reference: BLEU, chrF and TER as JSON.

    Args:
      run: Folder of the trained model.
      source: Text file, one sentence a line (also .gz).
      reference: Text file, a translation of each by a person.
      beam_size: Hypotheses that the search follows, 1 = greedy. Default: as the run is configured.
      length_penalty: alpha of ((5 + length) / 6)**alpha. Default: as the run is configured.
      checkpoint: The best by validation, the last, or that of a step.
    """
    sources, references = read_parallel(source, reference)
    from flaxformer_mt import evaluation
    from flaxformer_mt.decoding.run import load_run
    from flaxformer_mt.decoding.translator import Translator

    model = load_run(run, checkpoint)
    hypotheses = Translator(model.config, model.params, model.tokenizers).translate(
        sources, beam_size, length_penalty, show_progress=sys.stderr.isatty()
    )
    figures = evaluation.evaluate(hypotheses, references)
    _print_json({"step": model.step, "sentences": len(sources), **figures})


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
    from flaxformer_mt.decoding.run import describe_run

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


def convert(
    input_file: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="INPUT")],
    output_file: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="OUTPUT")],
    source: Annotated[str, tyro.conf.arg(name="from", metavar="FAMILY")],
    target: Annotated[str, tyro.conf.arg(name="to", metavar="FAMILY")],
    settings: Annotated[tuple[str, ...], tyro.conf.arg(name="set", metavar="NAME=VALUE")] = (),
    accept: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME")] = (),
) -> None:
    """Turns the checkpoint of one published model into that of another, or of our own.

    The result computes the same, or there is none. What had to be done to the weights is told on
    standard error, a line each. Adam's state comes along where it can.

    For example:

      flaxformer-mt convert --from opennmt --to torch model.pt model.safetensors
      flaxformer-mt convert --from torch --to flaxformer_mt a.pt b.safetensors --set num_heads=8

    Args:
      input_file: The checkpoint: .pt, or .safetensors.
      output_file: The file to write: .pt, or .safetensors, which has no place for Adam's state.
      source: The model that the checkpoint is of: a published one, or `flaxformer_mt`, which is our
        parameters in a .safetensors.
      target: The model to turn it into.
      settings: Fields of the configuration that the checkpoint cannot tell: `num_heads=8
        norm_position=pre`.
      accept: Switches in which the result may compute something slightly else: `norm_epsilon`.
    """
    from flaxformer_mt.interop.convert import convert as convert_file

    overrides = dict(map(_field_of_model, settings))
    for note in convert_file(source, target, input_file, output_file, overrides, accept):
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
    from flaxformer_mt.data import tfds_builder
    from flaxformer_mt.data.corpus import open_corpus

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
        from flaxformer_mt.parity import families, survey
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
            _write(markdown, survey.with_table(document, table.to_markdown()))
        return _deliver(table, json_file, verbose)

    _refuse(markdown=markdown, is_for="--family all")
    with _announcements() as announce:
        announce(f"{family} in {dtype or 'float64'}")
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
        _write(html, report.to_html())
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
        _write(json_file, result.to_json())
    is_terminal = sys.stdout.isatty()
    width = shutil.get_terminal_size().columns if is_terminal else 100
    _print_lines([result.to_text(verbose=verbose, width=width, color=is_terminal)])
    return int(not result.passed)


def _write(path: Path, text: str) -> None:
    from flaxformer_mt.interop.files import replaced_when_whole

    with replaced_when_whole(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8")


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
