"""The command `lexicon`."""

from pathlib import Path
from typing import Annotated

import tyro

from flaxformer_mt.cli import output
from flaxformer_mt.cli.options import RunFolder, TextFile, require_writable
from flaxformer_mt.data.corpora.text_files import stream_parallel


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
