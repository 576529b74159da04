"""Every preset, tiny, on the same text for the same number of tokens.

Each has its own architecture, initial values, loss and schedule, which are those of
`parity.recipes`, with 1,000 steps of warm-up; T5 has its own optimizer and no label smoothing.
Learning rates that do not depend on the width are those of wide models; `_LEARNING_RATES` replaces
them.
"""

import dataclasses
import functools
from typing import Any

from flaxformer_mt import presets
from flaxformer_mt.config import (
    DataConfig,
    ExperimentConfig,
    OptimizerConfig,
    TrainConfig,
    TransformerConfig,
)
from reproduction import transformers_marian
from reproduction.recipe import Recipe
from reproduction.texts import multi30k as text

SIZES = {
    "d_model": 128,
    "num_heads": 4,
    "d_ff": 512,
    "num_encoder_layers": 2,
    "num_decoder_layers": 2,
}
NUM_STEPS = 3000
BATCH_TOKENS = 1024
WARMUP_STEPS = 1000
TOKENIZER_IDS = {"pad_id": 0, "bos_id": 1, "eos_id": 2}
"""Of a vocabulary that the run learns."""
# Families that start decoding in another way.
_STARTS = {"tunz": -1, "marian": 0, "t5": 0, "fairseq": 2, "mbart": 2, "m2m100": 2}
# The peak of their schedules. At this width `noam` has a peak of 2.8e-3 times its factor of 1 or 2.
_LEARNING_RATES = {
    "annotated_wide_heads": 3e-3,
    "marian": 3e-3,
    "fairseq": 3e-3,
    "mbart": 3e-3,
    "m2m100": 3e-3,
    # Constant, without warm-up.
    "double_projection": 1e-3,
    "torch": 1e-3,
}
# Published with the training code of another family.
_TRAINED_AS = {"mbart": "fairseq", "m2m100": "fairseq"}
# Raffel et al. 2020: a constant rate in the first 10,000 steps, and no label smoothing.
_T5_OPTIMIZER = OptimizerConfig(kind="adafactor", schedule="constant", learning_rate=1e-2)

POSITION_KINDS = ("rotary", "alibi", "t5_relative")


def tiny(family: str, **overrides: Any) -> TransformerConfig:
    """Returns the tiny model of a family, with the special tokens of a learned vocabulary."""
    ids = TOKENIZER_IDS | {"bos_id": _STARTS.get(family, TOKENIZER_IDS["bos_id"])}
    if family == "double_projection":  # The published layers have no positions.
        overrides = {"position_kind": "sinusoidal"} | overrides
    return presets.preset(family, **SIZES | ids | overrides)


def family(name: str, model: TransformerConfig | None = None) -> ExperimentConfig:
    """Returns the experiment of a family; `model` replaces its own."""
    from flaxformer_mt.parity.families.recipes import recipe  # Needs PyTorch.

    training = recipe(_TRAINED_AS.get(name, name), WARMUP_STEPS, NUM_STEPS)
    optimizer, smoothing = training.optimizer, training.smoothing
    if name == "t5":
        optimizer, smoothing = _T5_OPTIMIZER, 0.0
    if name in _LEARNING_RATES:
        optimizer = dataclasses.replace(optimizer, learning_rate=_LEARNING_RATES[name])
    return ExperimentConfig(
        model=model or tiny(name),
        data=DataConfig(corpus="text", source_language="en", target_language="de", vocab_size=4000),
        optimizer=optimizer,
        train=TrainConfig(
            num_steps=NUM_STEPS,
            batch_tokens=BATCH_TOKENS,
            label_smoothing=smoothing,
            label_smoothing_convention=training.convention,
            log_every=100,
            eval_every=500,
            eval_sentences=100,
            checkpoint_every=500,
        ),
    )


def position_kind(kind: Any) -> ExperimentConfig:
    """Returns the experiment of a position kind, in the preset `opennmt`."""
    return family("opennmt", tiny("opennmt", position_kind=kind))


def _recipe(title: str, config: Any, note: str = "") -> Recipe:
    return Recipe(title, "families", config, text=text("de", tokenized=False), note=note)


JADORE_NOTE = (
    "The published default (`scale_emb_or_prj` of `prj`) scales the logits and not the embeddings. "
    "At first the tokens have a standard deviation of 0.02, and the positions added to them of "
    "0.7: after 500 steps the perplexity is 208, against 38 with `emb`, the other published "
    "option, which is a line of its own. The published run has 400 epochs, this table six."
)
T5_NOTE = (
    "Trained with Adafactor and without label smoothing, as published. Adafactor's steps are "
    "proportional to the size of the parameters; Adam hardly changes embeddings that start with a "
    "standard deviation of 1. In trials with label smoothing, the training loss after 600 steps "
    "was 5.46 with Adam (peak rate 1e-2) and 4.43 with Adafactor."
)
TRANSFORMERS_NOTE = (
    "`MarianMTModel` of transformers, trained in PyTorch from the initial values of "
    "`family-marian`, with the same sentences, loss, optimizer and learning rate in each step. "
    "Only the random numbers of dropout differ. Search and scoring are those of the other lines."
)
# Further options, by the name of their line.
_VARIANTS = {
    "jadore801120-emb": ("jadore801120", {"scale_embeddings": True}),
    "t5-v1_1": (
        "t5",
        {
            "tie_embeddings": "source_target",
            "feed_forward_gate": True,
            "activation": "gelu_tanh",
        },
    ),
}
_NOTES = {"jadore801120": JADORE_NOTE, "t5": T5_NOTE}


RECIPES = {
    **{
        f"family-{name}": _recipe(
            f"preset `{name}`",
            functools.partial(family, name),
            _NOTES.get(name, ""),
        )
        for name in presets.FAMILIES
    },
    **{
        f"family-{line}": _recipe(
            f"preset `{name}` as `{line}`",
            functools.partial(family, name, tiny(name, **options)),
        )
        for line, (name, options) in _VARIANTS.items()
    },
    "family-marian-transformers": dataclasses.replace(
        _recipe(
            "preset `marian` in transformers",
            functools.partial(family, "marian"),
            TRANSFORMERS_NOTE,
        ),
        train=transformers_marian.train,
    ),
    **{
        f"positions-{kind}": _recipe(f"`{kind}` positions", functools.partial(position_kind, kind))
        for kind in POSITION_KINDS
    },
}
