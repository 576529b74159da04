"""A check that sentences packed into one row do not see each other."""

import chex
import jax.numpy as jnp


def check_packed_rows(model, variables, sources, targets, tolerance):
    """Compares the logits of one packed row, with padding, with those of each sentence alone.

    `tolerance` has the options of `chex.assert_trees_all_close`.
    """

    def pack(rows):
        tokens = jnp.array([[token for row in rows for token in row] + [0]], jnp.int32)
        segments = [i + 1 for i, row in enumerate(rows) for _ in row] + [0]
        positions = [j for row in rows for j in range(len(row))] + [0]
        return tokens, jnp.array([segments]), jnp.array([positions])

    source, source_segments, source_positions = pack(sources)
    target, target_segments, target_positions = pack(targets)
    packed = model.apply(
        variables,
        source,
        target,
        encoder_segment_ids=source_segments,
        decoder_segment_ids=target_segments,
        encoder_positions=source_positions,
        decoder_positions=target_positions,
    )
    start = 0
    for one_source, one_target in zip(sources, targets, strict=True):
        alone = model.apply(variables, jnp.array([one_source]), jnp.array([one_target]))
        end = start + len(one_target)
        chex.assert_trees_all_close(packed[:, start:end], alone, **tolerance)
        start = end
