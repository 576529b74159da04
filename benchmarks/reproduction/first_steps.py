"""The first steps of every family beside its PyTorch reference, on equal weights and batches."""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flaxformer_mt import presets
from flaxformer_mt.config import DataConfig, TransformerConfig, with_vocabulary_sizes
from flaxformer_mt.data.corpora.corpus import ParallelCorpus, load_corpus
from flaxformer_mt.data.tokenizers.tokenizer import Tokenizers
from flaxformer_mt.plotting import drawing
from reproduction.families import POSITION_KINDS, tiny
from reproduction.texts import multi30k

NUM_STEPS = 200
WARMUP_STEPS = 2000
LENGTH = 20
"""Of the rows, on both sides; longer sentences are left out."""
ROWS = 16
SIZES = {"d_model": 64, "d_ff": 128, "num_encoder_layers": 2, "num_decoder_layers": 2}
VOCABULARY = 1000

NAME = "first-steps"
"""Of this comparison, beside those of recipes."""
NAMES = (*presets.FAMILIES, *(f"opennmt-{kind}" for kind in POSITION_KINDS))


def compare(name: str, data: Path, out: Path) -> dict[str, Any]:
    """Trains both sides of a family for `NUM_STEPS`, in float64, without dropout.

    Args:
      name: one of `NAMES`: a family, or `opennmt` with another kind of positions.
      data: the folder of the raw corpora.
      out: the prepared text goes there.

    Returns:
      JSON values: both loss curves, and the largest relative difference of the loss.
    """
    import torch

    from flaxformer_mt.parity import references
    from flaxformer_mt.parity.families.model_pair import model_pair, real_tokens
    from flaxformer_mt.parity.families.recipes import recipe
    from flaxformer_mt.parity.sides import precision, without_dropout
    from flaxformer_mt.parity.trajectories import of_recipe, train_ours, train_reference

    family, _, kind = name.partition("-")
    options: dict[str, Any] = {"position_kind": kind} if kind else {}
    corpus, tokenizers = _corpus(data, out)
    model = with_vocabulary_sizes(
        tiny(family, **SIZES | options),
        tokenizers.source.vocab_size,
        tokenizers.target.vocab_size,
    )
    torch.manual_seed(1)
    module = references.of_config(family, model, "float64")
    # The sizes are read from the tensors.
    options |= {name: getattr(model, name) for name in ("num_heads", "pad_id", "bos_id", "eos_id")}
    training = recipe(family, WARMUP_STEPS, NUM_STEPS)
    sides = model_pair(family, module, options, its_recipe=training)
    batches = _batches(corpus, tokenizers, sides.ours.config, training.source_padding)
    tokens = [real_tokens(sides, batch)[0] for batch in batches]
    with precision("float64"), without_dropout(module):
        optimizers = of_recipe(training, model.d_model, NUM_STEPS)
        ours = train_ours(sides, tokens, NUM_STEPS, optimizers).loss
        theirs = train_reference(sides, tokens, NUM_STEPS, optimizers).loss
    return {
        "name": name,
        "ours": ours.round(6).tolist(),
        "pytorch": theirs.round(6).tolist(),
        "largest_difference": float(np.abs(ours / theirs - 1).max()),
    }


def fingerprint(data: Path, out: Path) -> str:
    """Returns the SHA-256 of the training text of all families; arguments as in `compare`."""
    return _corpus(data, out)[0].fingerprint


@functools.cache
def _corpus(data: Path, out: Path) -> tuple[ParallelCorpus, Tokenizers]:
    """Returns the training text of all families, and its vocabulary."""
    folder = multi30k("de", tokenized=False).prepare(data, out)
    config = DataConfig(
        corpus="text", path=str(folder), source_language="en", target_language="de",
        vocab_size=VOCABULARY,
    )  # fmt: skip
    corpus = load_corpus(config, "train")
    return corpus, Tokenizers.for_run([corpus], config, True)


def _batches(
    corpus: ParallelCorpus, tokenizers: Tokenizers, model: TransformerConfig, source_padding: str
) -> list[tuple[np.ndarray, ...]]:
    """Returns `NUM_STEPS` batches of one shape: source, target input and target output."""
    eos = model.eos_id
    pairs = [
        ([*source, eos], [*target, eos])
        for source, target in zip(
            tokenizers.source.encode(corpus.sources),
            tokenizers.target.encode(corpus.targets),
            strict=True,
        )
        if max(len(source), len(target)) < LENGTH
    ]
    order = np.random.default_rng(1).permutation(len(pairs))
    batches = []
    for step in range(NUM_STEPS):
        chosen = [pairs[index] for index in order[step * ROWS : (step + 1) * ROWS]]
        sources = [source for source, _ in chosen]
        batches.append((
            _rows(sources, model.pad_id, source_padding),
            _rows([[model.bos_id, *target[:-1]] for _, target in chosen], model.pad_id),
            _rows([target for _, target in chosen], model.pad_id),
        ))  # fmt: skip
    return batches


def _rows(sentences: Sequence[Sequence[int]], pad_id: int, side: str = "right") -> np.ndarray:
    rows = np.full((len(sentences), LENGTH), pad_id, np.int32)
    for row, tokens in zip(rows, sentences, strict=True):
        start = LENGTH - len(tokens) if side == "left" else 0
        row[start : start + len(tokens)] = tokens
    return rows


def plot(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Draws both loss curves of every family, one panel each."""
    columns = 5
    lines = -(-len(results) // columns)
    figure = drawing.new_figure(2.6 * columns, 2.1 * lines)
    axes = np.atleast_1d(figure.subplots(lines, columns, sharex=True)).flat
    for panel, values in zip(axes, results, strict=False):
        panel.plot(values["pytorch"], color="#f59e0b", linewidth=4, alpha=0.6, label="PyTorch")
        panel.plot(values["ours"], color="#1d4ed8", linewidth=1, label="ours")
        panel.set_title(f"{values['name']}, {values['largest_difference']:.0e}", fontsize=9)
        panel.tick_params(labelsize=7)
    for panel in axes[len(results) :]:
        panel.set_axis_off()
    axes[0].legend(fontsize=7)
    figure.supxlabel("step", fontsize=9)
    figure.supylabel("loss per token", fontsize=9)
    path.write_bytes(drawing.to_file(figure, "png"))
