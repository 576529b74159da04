"""The experiments: configuration, text, averaging and published scores of each."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

from flaxformer_mt import presets
from flaxformer_mt.config import (
    DataConfig,
    DecodeConfig,
    ExperimentConfig,
    OptimizerConfig,
    TrainConfig,
)
from flaxformer_mt.config.files import load_config

WU = "Wu et al. 2021, Good for Misconceived Reasons, table 2 (text only, Transformer-Tiny)"


@dataclasses.dataclass(frozen=True)
class Recipe:
    """One experiment."""

    title: str
    config: Callable[[], ExperimentConfig]
    """Without `data.path` and `train.seed`, which the runner sets."""
    corpus: str = ""
    """Folder of the raw text below --data; "" if it is generated."""
    tokenized: bool = False
    """Lower-cased, normalised and tokenised text, scored as it is; otherwise cased and raw."""
    averaged: int = 1
    """The number of last checkpoints whose mean is scored; 1 = the best checkpoint."""
    tests: tuple[str, ...] = ("test",)
    published: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """BLEU by test set, with the scoring of `tokenized`."""
    source: str = ""
    """Where the published scores are."""


def multi30k(
    target: Literal["de", "fr"], *, published: bool, steps: int = 8000
) -> ExperimentConfig:
    """The Transformer-Tiny of Wu et al. 2021; `published=False` adds what the toolkit offers.

    An epoch has some 112 steps. As in fairseq, which the publication used, each epoch ends with a
    validation and a checkpoint, and training ends after 10 epochs without a better loss.
    """
    model = presets.fairseq(
        d_model=128,
        num_heads=4,
        d_ff=256,
        num_encoder_layers=4,
        num_decoder_layers=4,
        dropout_rate=0.3,
        tie_embeddings="all",
        # The tokenizer's own ids.
        pad_id=0,
        eos_id=2,
    )
    train = TrainConfig(
        num_steps=steps,
        batch_tokens=4096,
        label_smoothing=0.1,
        label_smoothing_convention="others",
        eval_every=112,
        eval_sentences=100,
        checkpoint_every=112,
        keep_last=10,
        log_every=112,
        early_stopping_patience=10,
    )
    data = DataConfig(corpus="text", source_language="en", target_language=target, vocab_size=10000)
    if not published:
        model = dataclasses.replace(model, norm_position="pre", final_norm=True)
        train = dataclasses.replace(train, r_drop=5.0)
        data = dataclasses.replace(data, subword_sampling=0.1)
    return ExperimentConfig(
        model=model,
        data=data,
        optimizer=OptimizerConfig(
            schedule="inverse_square_root",
            learning_rate=5e-3,
            warmup_steps=2000,
            epsilon=1e-8,
            # The default of the publication's copy of fairseq.
            clip_norm=25.0,
        ),
        train=train,
        decode=DecodeConfig(beam_size=5, length_penalty=1.0, length_penalty_kind="average"),
    )


MULTI30K_TESTS = ("test", "test_2017_flickr", "test_2017_mscoco")
WU_BLEU = {
    "de": dict(zip(MULTI30K_TESTS, (41.02, 33.36, 29.88), strict=True)),
    "fr": dict(zip(MULTI30K_TESTS, (61.80, 53.46, 44.52), strict=True)),
}


def _multi30k_recipes(target: Literal["de", "fr"]) -> dict[str, Recipe]:
    name, title = f"multi30k-en-{target}", f"Multi30k, English to {target}"
    published = Recipe(
        f"{title}, as published",
        lambda: multi30k(target, published=True),
        corpus=name,
        tokenized=True,
        averaged=10,
        tests=MULTI30K_TESTS,
        published=WU_BLEU[target],
        source=WU,
    )
    best = dataclasses.replace(
        published,
        title=f"{title}, with what the toolkit offers",
        config=lambda: multi30k(target, published=False),
    )
    cased = dataclasses.replace(
        best,
        title=f"{title}, cased and detokenised",
        tokenized=False,
        published={},
        source="",
    )
    return {name: published, f"{name}-best": best, f"{name}-cased": cased}


def _from_file(name: str) -> Callable[[], ExperimentConfig]:
    path = Path(__file__).parents[2] / "configs" / f"{name}.py"
    return lambda: load_config(path)


RECIPES: dict[str, Recipe] = {
    "reverse": Recipe("Digits reversed", _from_file("reverse")),
    "quickstart": Recipe("Generated phrases, English to French", _from_file("quickstart")),
    **_multi30k_recipes("de"),
    **_multi30k_recipes("fr"),
}
"""All experiments, by the name that `benchmarks/results.py --run` takes."""
