"""Commands that process parallel text: `prepare` and `lexicon`."""

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

import tyro

from flaxformer_mt.cli import output
from flaxformer_mt.cli.options import RunFolder, TextFile, require_writable
from flaxformer_mt.config import CorpusConfig, DataConfig
from flaxformer_mt.config.data import Quoting
from flaxformer_mt.data.corpora.text_files import stream_parallel
from flaxformer_mt.errors import UserError


def prepare(
    path: Annotated[Path, tyro.conf.arg(metavar="FOLDER")],
    output_folder: Annotated[Path, tyro.conf.arg(name="output", metavar="FOLDER")],
    source_language: Annotated[str, tyro.conf.arg(metavar="CODE")],
    target_language: Annotated[str, tyro.conf.arg(metavar="CODE")],
    form: Annotated[Literal["text", "tsv"], tyro.conf.arg(name="format")] = "text",
    columns: Annotated[tuple[str, ...], tyro.conf.arg(metavar="SOURCE TARGET")] = (),
    quoting: Quoting = "auto",
    bad_rows: Literal["error", "drop"] = "error",
    splits: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME=FILES ...")] = (
        "train=train",
        "validation=valid",
        "test=test",
    ),
) -> None:
    r"""Prepares parallel text as a data set, or the tokens of a run.

    Without --workdir, builds a TensorFlow Datasets data set, which is read without loading it into
    memory. With --workdir, learns the vocabulary of a run and tokenizes its text, in several
    processes or on several machines, so that training does not wait for it; `flaxformer-mt prepare
    --workdir RUN --help` describes its options.

    Examples:
      flaxformer-mt prepare --path TEXT --output DATA \
          --source-language en --target-language de
      flaxformer-mt prepare --path TEXT --output DATA \
          --source-language en --target-language de \
          --splits train=europarl,news-* validation=newstest2013
      flaxformer-mt prepare --config configs/quickstart.py --workdir RUN

    Args:
      path: Folder of the text files.
      output_folder: Folder to create. It appears under its name only when the data set is complete.
      source_language: Suffix of the source files and name of the source language in the data set.
      target_language: Suffix of the target files and name of the target language in the data set.
      form: text: FILE.LANGUAGE, one sentence per line; tsv: FILE.tsv, tab-separated source and
        target sentences. Both may be compressed.
      columns: Columns of source and target in tab-separated files, by name or by number from 1, if
        there are further ones.
      quoting: Whether their cells are quoted, like data.quoting.
      bad_rows: What happens to malformed rows, like data.bad_rows.
      splits: Splits to build, each with the comma-separated names (or glob patterns) of its files,
        without their suffixes.
    """
    from flaxformer_mt.data.corpora import tfds_builder
    from flaxformer_mt.data.corpora.corpus import open_corpus
    from flaxformer_mt.data.sanity_checks import check_not_blank

    files_of_splits: dict[str, str] = {}
    for name, files in map(_split_and_files, splits):
        if name in files_of_splits:
            raise UserError(
                f"--splits {name} is given twice: write {name}={files_of_splits[name]},{files}"
            )
        files_of_splits[name] = files
    if not path.is_dir():
        raise UserError(f"--path={path} is not a folder: name the one with the files of all splits")
    given = CorpusConfig(
        kind=form,
        path=str(path),
        source_language=source_language,
        target_language=target_language,
        columns=columns,
    )
    data = DataConfig(quoting=quoting, bad_rows=bad_rows)
    corpora = {
        name: open_corpus(dataclasses.replace(given, split=files), data, prefix="--")
        for name, files in files_of_splits.items()
    }
    check_not_blank([*corpora.values()])
    counts = tfds_builder.build_dataset(corpora, output_folder)
    options = {
        "corpus": "tfds",
        "path": output_folder,
        "source-language": source_language,
        "target-language": target_language,
    }
    for role in ("train", "valid", "test"):
        named = [split for split in counts if split.startswith(role)]
        split = role if role in named else next(iter(named), "")
        if split or role == "test":  # Training needs the other two.
            options[f"{role}-split"] = split
    for name, corpus in corpora.items():
        for kind, rows in corpus.malformed().items():
            output.print_note(f"{name}: {kind}: {rows}")
    sizes = ", ".join(f"{count:,} pairs {name}" for name, count in counts.items())
    output.print_lines(
        [
            f"{output_folder}: {sizes}",
            "train on it with: python train.py --config=FILE --workdir=RUN "
            + " ".join(f"--data.{name}={value}" for name, value in options.items()),
        ]
    )


def _split_and_files(setting: str) -> tuple[str, str]:
    name, sign, files = setting.partition("=")
    if not (name and sign and files):
        raise UserError(f"--splits {setting}: write NAME=FILES, such as train=europarl,news-*")
    return name, files


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
