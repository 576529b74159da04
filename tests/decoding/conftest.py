"""A tiny model that talks: real tokenizer, random parameters, text of any length."""

import dataclasses
import random

import jax
import numpy as np
import pytest

from flaxformer_mt.config import (
    DataConfig,
    DecodeConfig,
    ExperimentConfig,
    TransformerConfig,
    with_vocabulary_sizes,
)
from flaxformer_mt.data.corpus import ParallelCorpus
from flaxformer_mt.data.tokenizer import Tokenizers
from flaxformer_mt.model.transformer import Transformer

WORDS = "ein kleiner roter Hund läuft schnell über die grüne Wiese und bellt laut".split()
DATA = DataConfig(vocab_size=300)
MODEL = TransformerConfig(
    d_model=16, num_heads=2, d_ff=32, num_encoder_layers=1, num_decoder_layers=1, output_bias=True
)
DECODE = DecodeConfig(beam_size=3, max_length_factor=1.0, max_length_extra=3, batch_tokens=64)


@dataclasses.dataclass(frozen=True)
class Setup:
    """What `Translator` and `score_pairs` take."""

    config: ExperimentConfig
    params: dict
    tokenizers: Tokenizers


def sentences(count, seed=0, longest=10):
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randint(1, longest))) for _ in range(count)]


def random_params(model, seed=0):
    """Parameters large enough that different sentences get different translations."""
    tokens = np.ones((1, 1), np.int32)
    params = Transformer(model).init(jax.random.key(seed), tokens, tokens)["params"]
    return jax.tree.map(lambda leaf: leaf * 3.0, params)


def with_end_bias(setup, bias):
    """The same model, but that much more ready to end a sentence."""
    output = {"bias": setup.params["output"]["bias"].at[setup.config.model.eos_id].set(bias)}
    return dataclasses.replace(setup, params={**setup.params, "output": output})


def with_decode(setup, **values):
    """The same model, searched otherwise."""
    decode = dataclasses.replace(setup.config.decode, **values)
    return dataclasses.replace(setup, config=dataclasses.replace(setup.config, decode=decode))


@pytest.fixture(scope="session")
def setup():
    corpus = ParallelCorpus(sentences(200, seed=1), sentences(200, seed=2), "made up")
    tokenizers = Tokenizers.train(corpus, DATA)
    size = tokenizers.source.vocab_size
    model = with_vocabulary_sizes(MODEL, size, size)
    return Setup(
        ExperimentConfig(model=MODEL, data=DATA, decode=DECODE), random_params(model), tokenizers
    )
