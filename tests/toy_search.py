"""Search problems with random logits that depend on all preceding tokens."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from slow_search import Constraints

from flaxformer_mt.decoding.search import search
from flaxformer_mt.decoding.search.state import IMPOSSIBLE, SentenceConstraints, StepOutput

V, P, B, S = 6, 5, 3, 4  # Vocabulary, longest hypothesis, rows, source tokens.
PAD, BOS, EOS = 0, 1, 2
WORDS = (3, 4, 5)
SPECIAL = {"bos_id": BOS, "eos_id": EOS, "pad_id": PAD, "forbidden_ids": (PAD, BOS)}
NODES = sum(V**depth for depth in range(P))  # Prefixes of fewer than P tokens.


def child(node, token):
    """Returns the index of prefix `node` extended by a token; 0 is the empty prefix."""
    return node * V + token + 1


def node_of(tokens):
    return functools.reduce(child, tokens, 0)


def random_world(seed, end=0.0, batch_size=B):
    """Returns logits [B, NODES, V] after each prefix, with `end` added to those of the end token,
    and attention [B, NODES, S]."""
    random = np.random.default_rng(seed)
    logits = random.normal(size=(batch_size, NODES, V)).astype(np.float32) * 2
    logits[..., EOS] += end
    attention = random.dirichlet(np.full(S, 0.3), (batch_size, NODES)).astype(np.float32)
    return logits, attention + np.float32(1e-3)


def step(tokens, state, positions):
    """Looks up logits and attention; the state holds them and the prefix of each hypothesis."""
    nodes, logits, attention = state
    nodes = jnp.where(positions[:, None] == 0, 0, child(nodes, tokens))
    found = (jnp.take_along_axis(array, nodes[..., None], axis=1) for array in (logits, attention))
    return StepOutput(*found), (nodes, logits, attention)


def reorder(state, parents):
    nodes, logits, attention = state
    return jnp.take_along_axis(nodes, parents, axis=1), logits, attention


# Tests run each program only a few times: compiling fast matters more than running fast.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def started(world, rows, options):
    """Starts a search in a `random_world`."""
    nodes = jnp.zeros((rows.max_lengths.shape[0], options.beam_size), jnp.int32)
    return search.start(rows, (nodes, *world), options, P)


begin = jit(started)
advance = jit(functools.partial(search.advance, step, reorder))
active = jit(search.active)
results = jit(search.results)


@jit
def find(world, rows, options):
    """Searches a `random_world`."""
    return search.search(step, reorder, options, started(world, rows, options))


def batched(per_row, seeds=None, prefix_length=2):
    """Converts `Constraints` of each row to `SentenceConstraints`; all sources have S tokens."""
    prefix = np.full((len(per_row), prefix_length), -1, np.int32)
    allowed = np.ones((len(per_row), V), bool)
    for row, constraints in enumerate(per_row):
        prefix[row, : len(constraints.prefix)] = constraints.prefix
        if constraints.allowed is not None:
            allowed[row] = np.isin(np.arange(V), list(constraints.allowed))
    seeds = np.zeros(len(per_row)) if seeds is None else np.array(seeds)
    return SentenceConstraints(
        max_lengths=np.array([constraints.limit for constraints in per_row], np.int32),
        min_lengths=np.array([constraints.minimum for constraints in per_row], np.int32),
        prefix=prefix,
        keys=np.stack([np.zeros(len(per_row)), seeds], axis=1).astype(np.uint32),
        phrases=np.zeros((len(per_row), 0, 0), np.int32),
        source_mask=np.ones((len(per_row), S), bool),
        allowed=allowed,
        certain=np.array([constraints.certain for constraints in per_row], np.int32),
    )


# What Hypothesis draws: worlds, options and constraints.
seeds = st.integers(0, 2**32 - 1)
ends = st.floats(-4, 4)
numbers = st.fixed_dictionaries(
    {
        "length_penalty": st.floats(0, 4),
        "coverage_penalty": st.floats(0.01, 1),
        "repetition_penalty": st.floats(0.5, 3),
        "diversity_penalty": st.floats(0, 3),
    }
)
three_constraints = st.lists(
    st.builds(
        Constraints,
        limit=st.integers(0, P),
        minimum=st.integers(0, P),
        prefix=st.lists(st.sampled_from(WORDS), max_size=2).map(tuple),
        certain=st.integers(0, 1),
        allowed=st.none() | st.frozensets(st.sampled_from(WORDS)).map(lambda some: some | {EOS}),
    ),
    min_size=B,
    max_size=B,
)


def with_numbers(options, drawn):
    """Returns the options with those numbers replaced that are not None."""
    kept = {name: v for name, v in drawn.items() if getattr(options, name) is not None}
    return dataclasses.replace(options, **kept)


def assert_row_is(result, row, expected):
    """Asserts that the row has exactly the expected hypotheses, in order."""
    empty = result.lengths.shape[1] - len(expected)
    assert result.lengths[row].tolist() == [len(found.tokens) for found in expected] + [0] * empty
    for position, found in enumerate(expected):
        padding = [PAD] * (P - len(found.tokens))
        assert result.tokens[row, position].tolist() == [*found.tokens, *padding]
        np.testing.assert_allclose(result.scores[row, position], found.score, atol=2e-5)
        np.testing.assert_allclose(
            result.log_probabilities[row, position], found.log_probability, atol=2e-5
        )
    assert (result.scores[row, len(expected) :] == np.float32(IMPOSSIBLE)).all()
    assert (result.tokens[row, len(expected) :] == PAD).all()
