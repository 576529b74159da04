"""The command `attention`: a picture of every head for one sentence."""

from pathlib import Path
from typing import Annotated

import tyro

from flaxformer_mt.cli.options import (
    DEFAULT_SEARCH,
    CheckpointChoice,
    DecodeOptions,
    RunFolder,
    require_folders,
)
from flaxformer_mt.errors import UserError


def attention(
    run: RunFolder,
    source: Annotated[str, tyro.conf.arg(metavar="TEXT")],
    output_file: Annotated[Path, tyro.conf.arg(name="output", metavar="FILE")],
    target: Annotated[str | None, tyro.conf.arg(metavar="TEXT")] = None,
    checkpoint: CheckpointChoice = "best",
    decode: DecodeOptions = DEFAULT_SEARCH,
) -> None:
    r"""Shows what each token of a sentence attends to.

    Writes an interactive page, one file that needs no network, or an image: self-attention of the
    encoder and of the decoder, and cross-attention, of every layer and head, with entropies and
    alignments. The model is that of a run folder, trained or converted from a published model.

    Examples:
      flaxformer-mt attention --run RUN --source "A dog is running." \
          --output attention.html
      flaxformer-mt attention --run RUN --source "A dog is running." \
          --target "Ein Hund rennt." --output attention.png

    Args:
      run: Run folder of the model.
      source: A sentence.
      output_file: Picture to write: .html for the page; .png, .svg or .pdf for an image of all
        heads.
      target: Its translation. Default: that of the model.
      checkpoint: "best" by validation, "last", or the step of a checkpoint.
      decode: Options of the search for the translation, if there is no --target. Their defaults
        are those of the run.
    """
    from flaxformer_mt.plotting.attention_page import AttentionPicture
    from flaxformer_mt.plotting.drawing import format_of

    format_of(output_file)
    require_folders(output_file)
    from flaxformer_mt.decoding.attention_weights import sentence_attention
    from flaxformer_mt.decoding.translator import Translator
    from flaxformer_mt.runs.trained_model import load_run

    model = load_run(run, checkpoint)
    if target is not None and decode != model.config.decode:
        raise UserError("search options have no effect on a given --target: leave them out")
    found = sentence_attention(Translator.from_runs([model], decode), source, target)
    AttentionPicture(found, f"Attention of {run}, step {model.step}").save(output_file)
    print(f"{output_file}: {found.source} -> {found.target}")
