"""A toy world to search: every logit is a random number that depends on all tokens before it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from flaxformer_mt.decoding.search import search as search_room
from flaxformer_mt.decoding.search.search import Rows, StepOutput

V, P, B, S = 6, 5, 3, 4  # Vocabulary, longest hypothesis, rows, source tokens.
PAD, BOS, EOS = 0, 1, 2
WORDS = (3, 4, 5)
SPECIAL = {"bos_id": BOS, "eos_id": EOS, "pad_id": PAD, "forbidden_ids": (PAD, BOS)}
NODES = sum(V**depth for depth in range(P))  # Prefixes of fewer than P tokens.


def child(node, token):
    """The number of the prefix that is prefix `node` and one more token; 0 is the empty one."""
    return node * V + token + 1


def node_of(tokens):
    return functools.reduce(child, tokens, 0)


def random_world(seed, end=0.0, batch_size=B):
    """Logits [B, NODES, V] of the token after each prefix, to whose end tokens `end` is added, and
    attentions [B, NODES, S] when it is chosen."""
    random = np.random.default_rng(seed)
    logits = random.normal(size=(batch_size, NODES, V)).astype(np.float32) * 2
    logits[..., EOS] += end
    attention = random.dirichlet(np.full(S, 0.3), (batch_size, NODES)).astype(np.float32)
    return logits, attention + np.float32(1e-3)


def step(tokens, state, positions):
    """Looks up logits and attention; the state is the world and the prefix of each hypothesis."""
    nodes, logits, attention = state
    nodes = jnp.where(positions[:, None] == 0, 0, child(nodes, tokens))
    found = (jnp.take_along_axis(array, nodes[..., None], axis=1) for array in (logits, attention))
    return StepOutput(*found), (nodes, logits, attention)


def reorder(state, parents):
    nodes, logits, attention = state
    return jnp.take_along_axis(nodes, parents, axis=1), logits, attention


# Tests run each program a few times only: it need not be fast.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


@jit
def begin(world, rows, options):
    """The beginning of a search in a `random_world`."""
    nodes = jnp.zeros((rows.max_lengths.shape[0], options.beam_size), jnp.int32)
    return search_room.start(rows, (nodes, *world), options, P)


advance = jit(functools.partial(search_room.advance, step, reorder))
active = jit(search_room.active)
results = jit(search_room.results)


@jit
def find(world, rows, options):
    """Searches a `random_world`."""
    nodes = jnp.zeros((rows.max_lengths.shape[0], options.beam_size), jnp.int32)
    return search_room.search(step, (nodes, *world), rows, options, P, reorder)


def rows_of(wishes, seeds=None, prefix_length=2):
    """`Rows` of `Wish`es; all sources have S tokens."""
    prefix = np.full((len(wishes), prefix_length), -1, np.int32)
    allowed = np.ones((len(wishes), V), bool)
    for row, wish in enumerate(wishes):
        prefix[row, : len(wish.prefix)] = wish.prefix
        if wish.allowed is not None:
            allowed[row] = np.isin(np.arange(V), list(wish.allowed))
    seeds = np.zeros(len(wishes)) if seeds is None else np.array(seeds)
    return Rows(
        max_lengths=np.array([wish.limit for wish in wishes], np.int32),
        min_lengths=np.array([wish.minimum for wish in wishes], np.int32),
        prefix=prefix,
        keys=np.stack([np.zeros(len(wishes)), seeds], axis=1).astype(np.uint32),
        phrases=np.zeros((len(wishes), 0, 0), np.int32),
        source_mask=np.ones((len(wishes), S), bool),
        allowed=allowed,
    )


def find_one_after_the_other(world, rows, options):
    """Like `find`, but each row begins two steps after the one before it."""
    newcomers = begin(world, rows, options)
    together = begin(world, rows._replace(max_lengths=np.zeros_like(rows.max_lengths)), options)
    for row in np.eye(B, dtype=bool):
        together = jax.tree.map(
            lambda old, new, row=row: np.where(row.reshape(B, *[1] * (old.ndim - 1)), new, old),
            together,
            newcomers,
        )
        for _ in range(2):
            together = advance(options, together)
    while active(together).any():
        together = advance(options, together)
    return results(together, options)
