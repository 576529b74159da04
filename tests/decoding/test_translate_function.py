"""`flaxformer_mt.translate`: translation in a script, with parameters from anywhere."""

import dataclasses
import doctest

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from talker import random_params, sentences

from flaxformer_mt.decoding import training_samples, translator
from flaxformer_mt.decoding.parameters import on_one_device
from flaxformer_mt.decoding.scoring.scorer import Scorer
from flaxformer_mt.decoding.translator import Translator, translate
from flaxformer_mt.errors import UserError

SENTENCES = sentences(6, longest=2)
# Those of the talker, whose programs are compiled already.
OPTIONS = {"beam_size": 3, "max_length_factor": 1.0, "max_length_extra": 3, "batch_tokens": 64}


@pytest.mark.slow
def test_another_call_compiles_nothing(talker):
    config, params, tokenizers, _ = talker.parts
    events = []
    jax.monitoring.register_event_duration_secs_listener(lambda name, *_, **__: events.append(name))
    try:
        # The first sharded parameters compile how they are gathered.
        for given in (params, sharded(params)):
            translate(config, given, tokenizers, SENTENCES, **OPTIONS)
        assert any(name.endswith("backend_compile_duration") for name in events)
        others = random_params(talker.model, seed=1)
        for given in (others, sharded(others)):
            events.clear()
            translate(config, given, tokenizers, SENTENCES, **OPTIONS)
            assert not any(name.endswith("backend_compile_duration") for name in events)
    finally:
        jax.monitoring.clear_event_listeners()


def sharded(params):
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("rows", "columns"))

    def place(leaf):
        last = "columns" if leaf.shape[-1] % 2 == 0 else None
        spec = PartitionSpec(*[None] * (leaf.ndim - 1), last)
        return jax.device_put(leaf, NamedSharding(mesh, spec))

    return jax.tree.map(place, params)


def test_sharded_parameters_are_gathered(talker):
    config, params, tokenizers, _ = talker.parts
    given = sharded(params)
    assert any(not leaf.is_fully_replicated for leaf in jax.tree.leaves(given))
    found = translate(config, given, tokenizers, SENTENCES, **OPTIONS)
    assert found == translate(config, params, tokenizers, SENTENCES, **OPTIONS)
    for leaf in jax.tree.leaves(on_one_device(given)):
        assert len(leaf.devices()) == 1
    on_host = jax.tree.map(np.asarray, params)
    assert translate(config, on_host, tokenizers, SENTENCES, **OPTIONS) == found


def test_wrong_arguments_are_errors_that_name_them(talker):
    config, params, tokenizers, _ = talker.parts
    with pytest.raises(TypeError, match="no search option beam_sise; did you mean beam_size"):
        translate(config, params, tokenizers, SENTENCES, beam_sise=4)
    with pytest.raises(TypeError, match="config must be a TransformerConfig, not ExperimentConfig"):
        translate(talker.config, params, tokenizers, SENTENCES)
    state = {"params": params, "opt": (), "step": 5}
    with pytest.raises(UserError, match=r'found opt, params, step; give its entry "params"'):
        translate(config, state, tokenizers, SENTENCES)


@pytest.mark.parametrize("load", [Translator, Scorer])
def test_parameters_of_another_model_are_refused(talker, load):
    config, params, tokenizers, _ = talker.parts
    without = {name: leaf for name, leaf in params.items() if name != "target_embedding"}
    with pytest.raises(UserError, match="target_embedding/embedding is missing; found decoder, "):
        load(config, without, tokenizers)
    with pytest.raises(UserError, match=r"decoder/.* and \d+ others are missing"):
        load(config, {"target_embedding": params["target_embedding"]}, tokenizers)
    with pytest.raises(UserError, match="not a model, which is nested dicts of arrays, but list"):
        load(config, [params], tokenizers)
    wider = dataclasses.replace(config, d_ff=64)
    with pytest.raises(UserError, match=r"has the shape \(1, 32\), .*configuration \(1, 64\)"):
        load(wider, params, tokenizers)


@pytest.mark.slow
@pytest.mark.parametrize("function", [translator.translate, training_samples.sample])
def test_the_examples_run(talker, function):
    """Their outputs are those of a trained model, except for shapes."""
    names = {"config": talker.model, "params": talker.params, "tokenizers": talker.tokenizers}
    names |= {"jax": jax, "jnp": jnp, "key": jax.random.key(0), function.__name__: function}
    (test,) = doctest.DocTestFinder(recurse=False).find(function, globs=names)
    for example in test.examples:
        value = eval(compile(example.source, "example", "single"), names)
        assert value is None
