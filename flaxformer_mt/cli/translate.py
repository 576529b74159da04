"""The command `translate`."""

import contextlib
import dataclasses
import functools
import math
import os
import stat
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from flaxformer_mt.cli import output
from flaxformer_mt.cli.options import (
    DEFAULT_SEARCH,
    CheckpointChoice,
    DecodeOptions,
    RunFolders,
    load_runs,
    require_writable,
)
from flaxformer_mt.cli.resumed_output import resumed_writer
from flaxformer_mt.config.fields import Bounds
from flaxformer_mt.data.corpora.text_files import arriving_lines, count_lines, digest_file, opened
from flaxformer_mt.errors import UserError, shown
from flaxformer_mt.standard_output import progress_bar

MetricFolder = Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")]
Milliseconds = Annotated[int | None, Bounds(0, 10**9), tyro.conf.arg(metavar="MS")]
_MAX_LATENCY = 100


def translate(
    run: RunFolders = (),
    input_file: Annotated[Path | None, tyro.conf.arg(name="input", metavar="FILE")] = None,
    output_file: Annotated[Path | None, tyro.conf.arg(name="output", metavar="FILE")] = None,
    input_format: Literal["text", "jsonl"] = "text",
    output_format: Annotated[Literal["text", "jsonl"], tyro.conf.arg(name="format")] = "text",
    alignment: Literal["words", "pieces"] | None = None,
    tokens: bool = False,
    attention: bool = False,
    rerank: MetricFolder = None,
    mbr: MetricFolder = None,
    max_latency: Milliseconds = None,
    resume: bool = False,
    checkpoint: CheckpointChoice = "best",
    decode: DecodeOptions = DEFAULT_SEARCH,
) -> None:
    """Translates text, one sentence per line.

    Reads standard input (on a terminal, after a prompt) and writes standard output unless --input
    and --output name files. Each translation is printed as soon as it and all earlier ones are
    ready, even while more input is arriving. Empty lines stay empty; lines that are too long for
    the model are translated sentence by sentence. A note at the end has the number of translations
    that look wrong, such as empty ones. See docs/decoding.md for the search options.

    Examples:
      flaxformer-mt translate --run RUN < source.txt > translation.txt
      flaxformer-mt translate --run RUN --input source.txt.gz --output out.txt
      flaxformer-mt translate --run RUN --n-best 4 --format jsonl < source.txt
      flaxformer-mt translate --run RUN --sampling --seed 1 < source.txt
      flaxformer-mt translate --run RUN_1 --run RUN_2 < source.txt
      flaxformer-mt translate --run RUN --input source.txt --output out --resume
      flaxformer-mt translate --run RUN --mbr-samples 32 --mbr comet < source.txt

    Args:
      run: Run folder of the trained model. Repeat the option to decode with an ensemble of models
        that share a vocabulary.
      input_file: Read this text file (compressed ones are decompressed) instead of standard input.
      output_file: Write to this file instead of standard output. The file appears under its name
        only when it is complete.
      input_format: text: one sentence per line. jsonl: one JSON object per line, {"text": ...,
        "prefix": ..., "phrases": [...]}: the translation starts with the prefix and contains every
        phrase; both are optional.
      output_format: text: one translation per line; with --n-best above 1, one line per hypothesis,
        `index ||| text ||| score`, best first, with the 0-based number of the input line. jsonl:
        {"translations": [{"text": ..., "score": ..., "log_probability": ...}, ...]}.
      alignment: Add word or subword alignments taken from attention, as 0-based source-target pairs
        such as `0-0 1-2`; in text output, after another ` ||| `.
      tokens: Add the token ids and the subword pieces of both sides. Requires --format jsonl.
      attention: Add the attention weights, one row of source pieces per target piece. Requires
        --format jsonl.
      rerank: Folder of a learned metric that scores without references (MetricX, CometKiwi): the
        best of the --mbr-samples samples, or of the hypotheses of the beam, by its score.
      mbr: Folder of a learned metric that scores with references (MetricX, COMET): the best
        candidate by its mean score with every candidate as the reference (minimum Bayes risk).
        Without this option, --mbr-samples compares them by chrF.
      max_latency: Longest time in milliseconds that a line waits for others to share its batch
        (default: 100, and without a limit if the input is a regular file).
      resume: Keep what is translated beside --output until that is complete, and continue there if
        the command was interrupted. Requires --input and --output.
      checkpoint: "best" by validation, "last", or the step of a checkpoint.
      decode: Search options. Their defaults are those of the run.
    """
    from flaxformer_mt.decoding.doubtful_output import Doubts
    from flaxformer_mt.decoding.line_format import LineFormat, translate_lines
    from flaxformer_mt.decoding.translator import Translator, window_characters

    require_writable(output_file)
    if rerank and mbr:
        raise UserError("--rerank and --mbr choose translations in two ways: leave one out")
    form = LineFormat(input_format, output_format, alignment, tokens, attention)
    if resume and not (input_file and input_file.is_file() and output_file):
        raise UserError("--resume continues files: give --input and --output")
    with contextlib.ExitStack() as stack:
        name = str(input_file) if input_file else "standard input"
        stream: Any = stack.enter_context(opened(input_file)) if input_file else sys.stdin.buffer
        runs = load_runs(run, checkpoint)
        translator: Any = Translator.from_runs(runs, decode)
        judge = None
        if folder := rerank or mbr:
            from flaxformer_mt.judges.reading import metric
            from flaxformer_mt.judges.selection import JudgedTranslator

            judge = metric(folder)
            translator = JudgedTranslator(translator, judge, "quality" if rerank else "risk")
        is_counted = resume or (sys.stderr.isatty() and stream.seekable())
        total, done = count_lines(stream, name) if is_counted else None, 0
        write: Callable[[Iterable[str]], None] = output.print_lines
        if resume and input_file and output_file:
            settings = {
                "input": digest_file(input_file).hex(),
                "models": [[shown(str(each.folder.absolute())), each.step] for each in runs],
                "search": dataclasses.asdict(translator.decode),
                "formats": dataclasses.asdict(form),
                "metric": judge and [judge.signature, bool(mbr)],
            }
            lines_each = translator.decode.n_best if output_format == "text" else 1
            done, write = stack.enter_context(
                resumed_writer(output_file, settings, total or 0, lines_each)
            )
        elif output_file:
            write = stack.enter_context(output.line_writer(output_file))
        left = None if total is None else total - done
        advance = functools.partial(stack.enter_context(progress_bar("Translating", left)), 1)
        if max_latency is None and not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
            max_latency = _MAX_LATENCY
        max_wait = math.inf if max_latency is None else max_latency / 1000
        groups = arriving_lines(stream, name, window_characters(translator.decode), max_wait)
        groups = _after(groups, done)
        if input_file is None and stream.isatty():
            groups = output.prompted(groups, "type a sentence; Ctrl-D ends")
        doubts = Doubts()
        for line in translate_lines(translator, groups, form, name, advance, done, doubts):
            write([line])
    if doubts.counts:
        output.print_note(str(doubts))


def _after(groups: Iterable[list[str]], done: int) -> Iterator[list[str]]:
    """Yields the groups without the first lines."""
    for group in groups:
        if rest := group[done:]:
            yield rest
        done = max(done - len(group), 0)
