"""Commands on parallel text: `score` and `lexicon`."""

import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from flaxformer_mt.cli import output
from flaxformer_mt.cli.options import (
    CheckpointChoice,
    OptionalTextFile,
    RunFolder,
    TextFile,
    reject_options,
    require_writable,
)
from flaxformer_mt.data.corpora.text_files import stream_parallel
from flaxformer_mt.errors import UserError

_CHUNK = 4096


def score(
    source: TextFile,
    target: TextFile,
    run: Annotated[Path | None, tyro.conf.arg(metavar="RUN")] = None,
    metric: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None,
    reference: OptionalTextFile = None,
    checkpoint: CheckpointChoice = "best",
    normalize: Literal["none", "tokens", "search"] = "none",
    tokens: bool = False,
    alignment: Literal["words", "pieces"] | None = None,
    alignment_layer: int | None = None,
    alignment_head: int | None = None,
    contrast: Annotated[
        tuple[Path, ...], tyro.conf.arg(metavar="F ...", help_behavior_hint="(optional)")
    ] = (),
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False,
    summary: bool = False,
) -> None:
    r"""Scores translations: log-probabilities and alignments, or a metric.

    With --run, prints the natural log-probability of each target sentence, end token included,
    given its source sentence. Additional columns are tab-separated. With --metric, prints the
    score of each target sentence by MetricX (errors: lower is better) or COMET.

    Examples:
      flaxformer-mt score --run RUN --source test.en --target test.de --summary
      flaxformer-mt score --run RUN --source test.en --target test.de \
          --alignment words
      flaxformer-mt score --run RUN --source test.en --target right.de \
          --contrast wrong.de
      flaxformer-mt score --metric wmt22-comet-da --source test.en \
          --target hypothesis.de --reference test.de

    Args:
      source: Text file of source sentences, one per line (compressed ones are decompressed).
      target: Text file of their translations.
      run: Run folder of the trained model.
      metric: Instead of --run: folder of a learned metric, MetricX or COMET. The options below
        --reference are for --run.
      reference: Text file of reference translations, for --metric.
      checkpoint: "best" by validation, "last", or the step of a checkpoint.
      normalize: Divisor of the log-probability. none: 1; tokens: the number of target tokens, end
        token included; search: the length penalty of the run's search, which gives its ranking
        score, unless the search has further penalties or a shortlist, or renormalizes.
      tokens: Add a column with the space-separated log-probability of each target token.
      alignment: Add a column with word or subword alignments taken from attention, as 0-based
        source-target pairs such as `0-0 1-2`.
      alignment_layer: Decoder layer whose attention is used for alignments, counted from 0;
        negative numbers count from the last. Default: the run's configuration.
      alignment_head: Attention head used for alignments, counted from 0; -1 = mean of all heads.
        Default: the run's configuration.
      contrast: Text files of alternative translations that should be less probable. Each line of
        output is then the number of the preferred translation (0 = --target), followed by all
        scores.
      as_json: Print one JSON object per line, with all available values.
      summary: Print a single JSON object instead: the perplexity of the targets and, with
        --contrast, how often they are preferred.
    """
    if (run is None) == (metric is None):
        raise UserError("give --run or --metric: one of them says what scores")
    if metric is not None:
        given: dict[str, Any] = {
            "normalize": normalize if normalize != "none" else None,
            "alignment": alignment,
        }
        given |= {"tokens": tokens or None, "contrast": contrast or None, "json": as_json or None}
        reject_options("--run", **given, summary=summary or None)
        output.print_lines(_judged(metric, source, target, reference))
        return
    assert run is not None
    reject_options("--metric", reference=reference)
    if summary:
        reject_options("lines without --summary", json=as_json or None)
    if contrast or summary:
        columns = {"tokens": tokens or None, "alignment": None if as_json else alignment}
        reject_options("lines without --contrast and --summary", **columns)
    if alignment is None:
        layers = {"alignment-layer": alignment_layer, "alignment-head": alignment_head}
        reject_options("--alignment", **layers)
    from rich.console import Console
    from rich.progress import track

    from flaxformer_mt.decoding.scoring.score_report import corpus_metrics, to_json, to_text
    from flaxformer_mt.decoding.scoring.scorer import PairScore, Scorer
    from flaxformer_mt.decoding.translator import with_options
    from flaxformer_mt.trained_model import load_run

    model = load_run(run, checkpoint)
    chosen = {"alignment_layer": alignment_layer, "alignment_head": alignment_head}
    decode = with_options(model.config.decode, chosen)
    scorer = Scorer(model.config.model, model.params, model.tokenizers, decode)
    lines = stream_parallel(source, target, *contrast)
    candidates = ((line, translations) for line, *translations in lines)
    scored = track(
        scorer.stream_candidates(candidates, alignment),
        "Scoring",
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty() or sys.stdout.isatty(),
    )

    def value(pair: PairScore) -> float:
        return pair.normalized(normalize, decode)

    if summary:
        output.print_json(corpus_metrics(scored, value))
    elif as_json:
        output.print_lines(json.dumps(to_json(each, value), ensure_ascii=False) for each in scored)
    else:
        output.print_lines(to_text(each, value, tokens) for each in scored)


def _judged(folder: Path, source: Path, target: Path, reference: Path | None) -> Iterator[str]:
    from flaxformer_mt.judges.reading import metric

    judge = metric(folder)
    files = [source, target] if reference is None else [source, target, reference]
    lines = iter(stream_parallel(*files))
    while chunk := list(itertools.islice(lines, _CHUNK)):
        yield from (f"{score:.6f}" for score in judge.scores(*zip(*chunk, strict=True)))


def lexicon(
    run: RunFolder,
    source: TextFile,
    target: TextFile,
    output_file: Annotated[Path, tyro.conf.arg(name="output", metavar="F")],
) -> None:
    r"""Learns a lexical table from parallel text, for --shortlist.

    The table lists probable translations of each source token. `translate --shortlist` restricts
    the output vocabulary to them, which makes decoding on CPUs faster.

    Examples:
      flaxformer-mt lexicon --run RUN --source train.en --target train.de \
          --output lex.gz
      flaxformer-mt translate --run RUN --shortlist lex.gz < source.txt

    Args:
      run: Run folder of the trained model, whose vocabulary is used.
      source: Text file of source sentences, one per line (compressed ones are decompressed).
      target: Text file of their translations.
      output_file: Text file to write, one "target source probability" entry per line (.gz:
        compressed).
    """
    from flaxformer_mt.data.tokenizers.tokenizer import evenly, read_tokenizers
    from flaxformer_mt.decoding.shortlist import MAX_PAIRS, learn, write_table

    require_writable(output_file)
    tokenizers = read_tokenizers(run)
    pairs = evenly(stream_parallel(source, target), MAX_PAIRS)
    sources, targets = zip(*pairs, strict=True)
    table = learn(tokenizers.source.encode(sources), tokenizers.target.encode(targets))
    write_table(output_file, table, tokenizers)
    output.print_note(f"{output_file}: {len(table):,} entries from {len(pairs):,} pairs")
