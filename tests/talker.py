"""A tiny model with a real tokenizer and random parameters, which translates any text."""

import dataclasses
import functools
import random

import jax
import numpy as np

from flaxformer_mt.config import (
    DataConfig,
    DecodeConfig,
    ExperimentConfig,
    TransformerConfig,
    with_vocabulary_sizes,
)
from flaxformer_mt.data.corpora.corpus import ParallelCorpus
from flaxformer_mt.data.tokenizers.tokenizer import Tokenizers
from flaxformer_mt.model.transformer import Transformer

WORDS = [
    "ein",
    "kleiner",
    "roter",
    "Hund",
    "läuft",
    "über",
    "die",
    "grüne",
    "Wiese",
    "und",
    "bellt",
]
DATA = DataConfig(vocab_size=300)
MODEL = TransformerConfig(
    d_model=16, num_heads=2, d_ff=32, num_encoder_layers=1, num_decoder_layers=1, output_bias=True
)
DECODE = DecodeConfig(beam_size=3, max_length_factor=1.0, max_length_extra=3, batch_tokens=64)


@dataclasses.dataclass(frozen=True)
class Talker:
    """A model with its vocabularies and search options."""

    config: ExperimentConfig
    params: dict
    tokenizers: Tokenizers

    @property
    def parts(self):
        """The arguments of `Translator` and `Scorer`."""
        return self.config.model, self.params, self.tokenizers, self.config.decode

    @property
    def model(self):
        size = self.tokenizers.source.vocab_size
        return with_vocabulary_sizes(self.config.model, size, size)

    def full_pass(self, source, target):
        """Returns log-probabilities of `target` tokens given the text `source`, without a cache."""
        source = [*self.tokenizers.source.encode([source])[0], self.model.eos_id]
        inputs = [self.model.bos_id, *target[:-1]]
        all_tokens = full_pass(self.params, padded(source), padded(inputs), model=self.model)
        return np.asarray(all_tokens)[0, np.arange(len(target)), target]


@functools.partial(jax.jit, static_argnames="model")
def full_pass(params, source, inputs, *, model):
    logits = Transformer(model).apply({"params": params}, source, inputs)
    return jax.nn.log_softmax(logits)


def padded(tokens):
    """Returns one row of 100 tokens, so that all tests compile a single shape."""
    return np.pad(np.array([tokens], np.int32), ((0, 0), (0, 100 - len(tokens))))


def sentences(count, seed=0, longest=4):
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randint(1, longest))) for _ in range(count)]


def random_params(model, seed=0):
    """Returns parameters so large that different sentences have different translations."""
    tokens = np.ones((1, 1), np.int32)
    init = jax.jit(Transformer(model).init)
    params = init(jax.random.key(seed), tokens, tokens)["params"]
    return jax.tree.map(lambda leaf: leaf * 2.0, params)


def with_end_bias(talker, bias):
    """Returns the model with `bias` as the output bias of the end token."""
    output = {"bias": talker.params["output"]["bias"].at[talker.config.model.eos_id].set(bias)}
    return dataclasses.replace(talker, params={**talker.params, "output": output})


def with_decode(talker, **values):
    """Returns the model with other decoding options."""
    decode = dataclasses.replace(talker.config.decode, **values)
    return dataclasses.replace(talker, config=dataclasses.replace(talker.config, decode=decode))


@functools.cache
def make_talker():
    corpus = ParallelCorpus(sentences(200, seed=1), sentences(200, seed=2), "made up")
    tokenizers = Tokenizers.train([corpus], DATA)
    talker = Talker(ExperimentConfig(model=MODEL, data=DATA, decode=DECODE), {}, tokenizers)
    return dataclasses.replace(talker, params=random_params(talker.model))


def exhaust_memory(*arguments, **options):
    """Fails like a program that needs more memory than the device has."""
    # Really asking for it can end the process on CPUs.
    raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 99 bytes.")
