"""The compiled programs of a batched search with one model or an ensemble.

Shapes: B batch rows, R admitted rows, S source tokens, P target tokens. Each shape and each
structure of `SearchOptions` is one compilation.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.decoding.search.options import SearchOptions
from flaxformer_mt.decoding.search.search import active, advance, results, start
from flaxformer_mt.decoding.search.state import (
    IMPOSSIBLE,
    ReorderFunction,
    SearchResult,
    SearchState,
    SentenceConstraints,
    StepFunction,
    StepOutput,
    StepState,
)
from flaxformer_mt.model.attention import KeyValue
from flaxformer_mt.model.cache import KeyValueCache, insert_rows, reorder_cache, resize_cache
from flaxformer_mt.model.logical_axes import dividing_axes, mesh_of_rules
from flaxformer_mt.model.numerics import at_least_float32
from flaxformer_mt.model.transformer import Transformer
from flaxformer_mt.runtime import decoding_options


def begin_search(
    params: Any,
    sources: Array,
    constraints: SentenceConstraints,
    options: SearchOptions,
    *,
    configs: tuple[TransformerConfig, ...],
    max_length: int,
) -> SearchState:
    """Encodes source tokens int32 [R, S] and starts their search; `max_length` is P."""
    caches = []
    for config, model_params in zip(configs, params, strict=True):
        model, variables = Transformer(config), {"params": model_params}
        encoded = model.apply(variables, sources, method="encode")
        caches.append(
            model.apply(
                variables, encoded, sources, options.beam_size, max_length, method="init_cache"
            )
        )
    return start(constraints, tuple(caches), options, max_length)


# Its `eval_shape` traces once per configuration and shape, as the programs do.
shapes_of_search = jax.jit(begin_search, static_argnames=("configs", "max_length"))


def _specs(state: SearchState) -> Any:
    """Returns how the mesh in use shards rows and heads of attention; all else is replicated."""

    def specs(node: Any) -> Any:
        has_heads = isinstance(node, KeyValue | KeyValueCache)

        def spec(leaf: Any) -> PartitionSpec:
            rows = dividing_axes("batch", len(leaf)) or None
            if not has_heads:
                return PartitionSpec(rows)
            return PartitionSpec(rows, dividing_axes("attention_heads", leaf.shape[1]) or None)

        return jax.tree.map(spec, node)

    is_leaf = lambda node: isinstance(node, KeyValue | KeyValueCache)  # noqa: E731
    return jax.tree.map(specs, state, is_leaf=is_leaf)


def _sharded(state: SearchState) -> SearchState:
    """Shards a search over the mesh in use, if there is one, always alike: one program for all."""
    if mesh_of_rules() is None:
        return state
    return jax.tree.map(lax.with_sharding_constraint, state, _specs(state))


def _replicated(tree: Any) -> Any:
    """Gives every device of the mesh in use, if there is one, whole arrays."""
    return tree if mesh_of_rules() is None else lax.with_sharding_constraint(tree, PartitionSpec())


def empty_search(single_row: SearchState, num_rows: int, place: Any) -> SearchState:
    """Returns a search of rows without sentences, with shapes and dtypes as in `single_row`.

    `place` is a device, or the mesh in use.
    """

    def zeros(leaf: Any) -> np.ndarray:
        return np.zeros((num_rows, *leaf.shape[1:]), leaf.dtype)

    state: Any = jax.tree.map(zeros, single_row)
    state.hypotheses.log_probabilities[:] = IMPOSSIBLE
    if isinstance(place, Mesh):
        place = jax.tree.map(lambda spec: NamedSharding(place, spec), _specs(state))
    # NumPy needs no compilation. Aliased memory could not be donated later.
    return jax.device_put(state, place, may_alias=False)


_compiled = functools.partial(
    jax.jit, donate_argnames="search_state", compiler_options=decoding_options()
)


@functools.partial(_compiled, static_argnames=("configs", "max_length"))
def admit_rows(
    params: Any,
    sources: Array,
    constraints: SentenceConstraints,
    options: SearchOptions,
    search_state: SearchState,
    slots: Array,
    *,
    configs: tuple[TransformerConfig, ...],
    max_length: int,
) -> SearchState:
    """Starts new searches in the rows `slots` int32 [R]; indices from B on are ignored."""
    new = begin_search(
        params, sources, constraints, options, configs=configs, max_length=max_length
    )
    caches = tuple(
        insert_rows(old, inserted, slots)
        for old, inserted in zip(search_state.state, new.state, strict=True)
    )
    others = jax.tree.map(
        lambda old, inserted: old.at[slots].set(inserted, mode="drop"),
        search_state._replace(state=()),
        new._replace(state=()),
    )
    return _sharded(others._replace(state=caches))


@functools.partial(_compiled, static_argnames=("configs", "ensemble"))
def run_search(
    params: Any,
    search_state: SearchState,
    options: SearchOptions,
    max_active: int,
    *,
    configs: tuple[TransformerConfig, ...],
    ensemble: Literal["log", "probability"],
) -> tuple[SearchState, Array, Array, SearchResult]:
    """Advances until at most `max_active` rows are active, or one of them is full.

    Returns:
      The search; which rows are active, bool [B]; the positions, int32 [B]; and the results, which
      are final for the rows that are not active.
    """
    steps = [
        step_function(config, model_params, options)
        for config, model_params in zip(configs, params, strict=True)
    ]
    step, reorder = combine(steps, ensemble), reorder_each(reorder_cache)
    max_length = search_state.hypotheses.tokens.shape[-1]

    def proceed(state: SearchState) -> Array:
        running = active(state)
        is_full = running & (state.positions >= max_length)
        return (running.sum() > max_active) & ~is_full.any()

    search_state = lax.while_loop(
        proceed, functools.partial(advance, step, reorder, options), search_state
    )
    found = active(search_state), search_state.positions, results(search_state, options)
    return _sharded(search_state), *_replicated(found)


def step_function(config: TransformerConfig, params: Any, options: SearchOptions) -> StepFunction:
    """Returns a model's step function for the search."""
    model, variables = Transformer(config), {"params": params}
    needs_attention = options.coverage_penalty is not None

    def step(tokens: Array, cache: Any, positions: Array) -> tuple[StepOutput, Any]:
        logits, cache, *attention = model.apply(
            variables,
            tokens,
            cache,
            positions,
            method="decode_step",
            return_attention=needs_attention,
        )
        return StepOutput(logits, *attention), cache

    return step


def combine(steps: Sequence[StepFunction], how: Literal["log", "probability"]) -> StepFunction:
    r"""Returns the step function of an ensemble of M models with equal weights.

    .. math::
        \text{log:}\ \frac{1}{M} \sum_m \log p_m(v) \qquad
        \text{probability:}\ \log \frac{1}{M} \sum_m p_m(v)

    "log" is a geometric mean, whose probabilities sum to less than 1 until the search normalizes
    them. A token to which one model gives a logit of minus infinity is impossible with "log", and
    with "probability" only if all models do. The attention is averaged over the models, which may
    differ in everything but their vocabularies.

    The state of the step function is a tuple of the models' states. Its logits are the logarithms
    above, in float32 or wider; those of a single model are returned unchanged.
    """

    def step(tokens: Array, states: StepState, positions: Array) -> tuple[StepOutput, StepState]:
        outputs, new_states = zip(
            *(
                single(tokens, state, positions)
                for single, state in zip(steps, states, strict=True)
            ),
            strict=True,
        )
        if len(outputs) == 1:
            return outputs[0], new_states
        attentions = [output.attention for output in outputs if output.attention is not None]
        return (
            StepOutput(
                mean_log_probabilities([output.logits for output in outputs], how),
                jnp.mean(_stack(attentions), axis=0) if attentions else None,
            ),
            new_states,
        )

    return step


def reorder_each(reorder: ReorderFunction) -> ReorderFunction:
    """Returns a function that applies `reorder` to every state of a tuple."""
    return lambda states, parents: tuple(reorder(state, parents) for state in states)


def mean_log_probabilities(logits: Sequence[Array], how: Literal["log", "probability"]) -> Array:
    """Averages the distributions of M models, logits [..., V] each; see `combine`."""
    log_probabilities = jax.nn.log_softmax(_stack(logits))
    if how == "log":
        return jnp.mean(log_probabilities, axis=0)
    return jax.nn.logsumexp(log_probabilities, axis=0) - math.log(len(logits))


def _stack(arrays: Sequence[Array]) -> Array:
    return jnp.stack([array.astype(at_least_float32(array.dtype)) for array in arrays])


@jax.jit
def select_rows(search_state: SearchState, rows: Array) -> SearchState:
    """Returns the search of some rows, int32 [R]."""
    return _sharded(jax.tree.map(lambda leaf: leaf[rows], search_state))


@functools.partial(jax.jit, static_argnames="max_length")
def resize_search(search_state: SearchState, *, max_length: int) -> SearchState:
    """Returns the search with arrays for hypotheses of `max_length` tokens."""

    def resize(tokens: Array) -> Array:
        missing = max(0, max_length - tokens.shape[-1])
        return jnp.pad(tokens, ((0, 0), (0, 0), (0, missing)))[..., :max_length]

    hypotheses, finished = search_state.hypotheses, search_state.finished
    return _sharded(
        search_state._replace(
            hypotheses=hypotheses._replace(tokens=resize(hypotheses.tokens)),
            finished=finished._replace(tokens=resize(finished.tokens)),
            state=tuple(resize_cache(cache, max_length) for cache in search_state.state),
        )
    )
