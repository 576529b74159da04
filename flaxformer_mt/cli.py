"""The console script `flaxformer-mt`: one function a subcommand, its arguments are the options.

Whatever takes long to import is imported by the subcommand that needs it, so that `--help` and
mistyped options answer at once.
"""

import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from flaxformer_mt.data.corpus import decode_lines, read_parallel
from flaxformer_mt.errors import UserError

Checkpoint = Literal["best", "last"] | int


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the subcommand that `arguments` (by default the command line) name.

    Returns:
      The exit code: 0, or 1 if what the user gave cannot be used. (Options that cannot be parsed
      raise SystemExit with code 2.)
    """
    try:
        tyro.extras.subcommand_cli_from_dict(
            {"translate": translate, "score": score, "evaluate": evaluate, "inspect": inspect},
            prog="flaxformer-mt",
            description="Uses trained translation models.",
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
    return 0


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
