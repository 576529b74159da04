"""The command `convert`: checkpoints and whole models between frameworks."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import tyro
from rich.filesize import decimal

from flaxformer_mt.cli import output
from flaxformer_mt.cli.options import model_fields
from flaxformer_mt.errors import UserError

_Texts = Annotated[
    tuple[str, ...], tyro.conf.arg(metavar="TEXT ...", help_behavior_hint="(optional)")
]


def convert(
    input_file: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="INPUT")],
    output_file: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="OUTPUT")],
    source: Annotated[str, tyro.conf.arg(name="from", metavar="FAMILY")],
    target: Annotated[str, tyro.conf.arg(name="to", metavar="FAMILY")] = "flaxformer_mt",
    settings: Annotated[tuple[str, ...], tyro.conf.arg(name="set", metavar="NAME=VALUE")] = (),
    accept: Annotated[
        tuple[str, ...], tyro.conf.arg(metavar="NAME ...", help_behavior_hint="(optional)")
    ] = (),
    base: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None,
    quantization: Annotated[str | None, tyro.conf.arg(metavar="TYPE")] = None,
    no_certificate: bool = False,
    trim_vocabulary: _Texts = (),
    add_token: _Texts = (),
    add_language: _Texts = (),
    like: _Texts = (),
) -> None:
    r"""Converts a checkpoint or a whole model between frameworks.

    The result computes the same function; if the target format cannot represent it, the conversion
    fails. Every change made to the weights is reported on standard error, the files that were
    written on standard output. The state of Adam is converted where both formats store one.

    Examples:
      flaxformer-mt convert --from opennmt --to torch model.pt model.safetensors
      flaxformer-mt convert --from torch model.pt model.safetensors \
          --set num_heads=8

    Input and output may also be folders that hold a whole model, vocabulary included. Imported run
    folders work with every other command, and runs can be exported:

      flaxformer-mt convert --from marian opus-mt-en-de RUN
      flaxformer-mt convert --from marian-native firefox-en-pt RUN
      flaxformer-mt convert --from fairseq FOLDER RUN
      flaxformer-mt convert --from opennmt FOLDER RUN
      flaxformer-mt convert --from flaxformer_mt --to marian RUN FOLDER
      flaxformer-mt convert --from flaxformer_mt --to ctranslate2 RUN FOLDER
      flaxformer-mt convert --from flaxformer_mt --to jax RUN FOLDER

    JAX refuses exported functions of versions that are more than half a year older. An export keeps
    what is needed to renew it with the installed version:

      flaxformer-mt convert --from jax --to jax OLD NEW

    The vocabulary of a folder can be reduced to what a text needs, and extended:

      flaxformer-mt convert --from m2m100 --to m2m100 nllb-200-600M SMALL \
          --trim-vocabulary train.en train.fr \
          --add-language tyv_Cyrl --like kaz_Cyrl

    Args:
      input_file: Checkpoint file (.pt or .safetensors), run folder, or model folder such as those
        on the Hugging Face Hub.
      output_file: File to write (.pt, or .safetensors, which stores the state of Adam only with
        --to flaxformer_mt) or folder to create.
      source: Family of the input: a published model, or `flaxformer_mt` for a run folder or for
        parameters in a .safetensors file.
      target: Family of the output.
      settings: Configuration fields that cannot be inferred from the checkpoint, such as
        `num_heads=8 norm_position=pre`.
      accept: Configuration fields in which the output may differ slightly from the input, such as
        `norm_epsilon`.
      base: Folder of the model that INPUT, an adapter of PEFT, changes. By default it is the one
        beside the adapter, or the one that its settings name.
      quantization: Storage type of the weights, with --to ctranslate2: float32 (the default), int8,
        int8_float32, int8_float16, int8_bfloat16, int16, float16 or bfloat16.
      no_certificate: Do not read what was written again, compare what both compute, and write the
        result beside it (`parity.json`), which `parity --verify OUTPUT` checks.
      trim_vocabulary: Text files. Tokens that none of their lines needs are removed, but for
        special tokens and languages; the logits of the others stay the same.
      add_token: Texts that become one token each. Their embeddings begin as the mean of those of
        the tokens that they consisted of.
      add_language: New languages, as sentences begin with them: tyv_Cyrl, or a tag such as <2ty>.
      like: For each of them the language whose embedding theirs begins with.
    """
    from flaxformer_mt.data.corpora.text_files import read_lines
    from flaxformer_mt.interop.convert import VocabularyEdits, not_written
    from flaxformer_mt.interop.convert import convert as convert_model

    if len(add_language) != len(like):
        raise UserError(
            f"--add-language names {len(add_language)} languages, --like {len(like)}: give for "
            "each the one whose embedding it begins with"
        )
    overrides = model_fields(settings)
    notes = convert_model(
        source,
        target,
        input_file,
        output_file,
        overrides,
        accept,
        quantization,
        certified=not no_certificate,
        vocabulary=VocabularyEdits(
            tuple(line for file in trim_vocabulary for line in read_lines(Path(file))),
            add_token,
            dict(zip(add_language, like, strict=True)),
        ),
        base=base,
    )
    for note in (*notes, *not_written(target, output_file)):
        output.print_note(note)
    output.print_lines(_written(output_file))


def _written(path: Path) -> Iterator[str]:
    yield f"{path}: {decimal(_size(path))}"
    if path.is_dir():
        for part in sorted(path.iterdir()):
            yield f"  {part.name}{'/' if part.is_dir() else ''}: {decimal(_size(part))}"


def _size(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())
