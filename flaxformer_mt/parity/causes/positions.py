"""Causes that the configuration of our model tells: its tables of positions, slopes and buckets."""

import functools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.model.position_biases import alibi_slopes, distance_buckets
from flaxformer_mt.model.positions import rotation_table, sinusoidal_table, sinusoids
from flaxformer_mt.parity.program.diagnosis import Found, combinations
from flaxformer_mt.parity.program.segment import Segment


def causes(config: TransformerConfig) -> list[Any]:
    """Returns the causes of a configuration."""
    found: list[Any] = [feed_forward_replaced]
    if config.position_kind in ("sinusoidal", "learned"):
        found += [another_counting, another_table, narrow_table]
    by_kind = {"rotary": rotation_base, "alibi": another_slope, "t5_relative": another_bucket}
    if config.position_kind in by_kind:
        found.append(by_kind[config.position_kind])
    return [functools.partial(cause, config) for cause in found]


def _table(segment: Segment) -> tuple[int, int] | None:
    """Returns the table of the positions that are added to embeddings, and their vectors."""
    for equation in segment.equations if segment.site.endswith("/embedded") else ():
        table = segment.origin(equation.inputs[0]) if equation.name == "gather" else -1
        is_learned = "_positions/" in segment.program.parameters.get(table, "")
        if is_learned or table in segment.program.constants:
            return table, equation.outputs[0]
    return None


def another_table(config: TransformerConfig, segment: Segment) -> Found:
    """Sinusoids of another layout, exponent, base or offset."""
    found = _table(segment)
    if found is None or found[0] in segment.program.parameters:
        return
    number, _ = found
    own = {
        name: getattr(config, f"position_{name}")
        for name in ("layout", "exponent", "base", "offset")
    }
    bases = [1e4, 1e3, 1e2, 1e5, 5e5]
    mixed = {
        "10 in exp()": math.exp(math.log10(config.position_base)),
        "2 in exp()": math.exp(math.log2(config.position_base)),
        "e in a power of 10": 10 ** math.log(config.position_base),
        "e in a power of 2": 2 ** math.log(config.position_base),
    }
    choices: dict[str, list[Any]] = {
        "layout": ["interleaved", "concatenated"],
        "exponent": ["paper", "tensor2tensor"],
        "base": [*bases, *mixed.values(), *_solved_base(config, segment, *found)],
        "offset": [0, 1, -1, 2, config.pad_id + 1],
    }
    length, width = segment.values[number].shape
    for change in combinations(own, choices, most=4):
        table = sinusoidal_table(length, width, **{**own, **change})
        cause = " and ".join(
            f"position {name}" if name == "offset" else f"sine {name}" for name in change
        )
        words = "; ".join(
            f"the reference's position {name} is {_shown(value)}, ours {_shown(own[name])}"
            for name, value in change.items()
        )
        if [*change] == ["base"] and (name := _key(mixed, change["base"])):
            cause, words = "logarithm base", f"{words}: a logarithm to the base {name}"
        yield segment.cause(cause, words, {number: table})


def _key(values: Mapping[str, float], number: float) -> str:
    return next((name for name, each in values.items() if abs(number / each - 1) < 1e-6), "")


def _solved_base(
    config: TransformerConfig, segment: Segment, number: int, vectors: int
) -> list[float]:
    width, offset = config.d_model, config.position_offset
    if width < 4 or offset > 1:
        return []
    without = segment.changed({vectors: np.zeros_like(segment.values[vectors])})
    ours = segment.value - without
    # The wave at position 1 tells the second frequency.
    at_one = np.isclose(ours, segment.values[number][1 - offset], atol=1e-6).all(axis=-1)
    waves = (segment.expected - without)[at_one]
    if not len(waves):
        return []
    first = config.position_layout == "interleaved"
    sine, cosine = (2, 3) if first else (1, 1 + (width + 1) // 2)
    frequency = float(np.arctan2(waves[0][sine], waves[0][cosine]))
    power = 2 / width if config.position_exponent == "paper" else 1 / max(width // 2 - 1, 1)
    return [frequency ** (-1 / power)] if frequency > 0 else []


def _shown(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def another_counting(config: TransformerConfig, segment: Segment) -> Found:
    """Positions count something else than ours, or a learned table is read from another row on."""
    found = _table(segment)
    if found is None:
        return
    number, vectors = found
    table = segment.values[number]
    without = segment.changed({vectors: np.zeros_like(segment.values[vectors])})
    batch, length = segment.value.shape[:2]
    columns = np.arange(length)[None]
    counted = {"sentences of the batch, not tokens": np.arange(batch)[:, None]}
    counted |= {"columns, padding included": columns, "from the end of the row": columns[:, ::-1]}
    for tokens in segment.values.values():
        if tokens.shape == (batch, length) and np.issubdtype(tokens.dtype, np.integer):
            real = np.maximum(np.cumsum(tokens != config.pad_id, axis=1) - 1, 0)
            yield from _counted(segment, without, table, {"real tokens only": real})
    yield from _counted(segment, without, table, counted)
    if number in segment.program.parameters:
        for offset in {0, 1, -1, 2, config.pad_id + 1} - {config.position_offset}:
            words = f"the reference's position offset is {offset}, ours {config.position_offset}"
            value = without + _rows(table, columns + offset)
            yield segment.diagnosis("position offset", words, value)


def _counted(
    segment: Segment, without: np.ndarray, table: np.ndarray, counted: Mapping[str, np.ndarray]
) -> Found:
    for name, positions in counted.items():
        words = f"the reference's positions count {name}"
        yield segment.diagnosis("position counting", words, without + _rows(table, positions))


def _rows(table: np.ndarray, positions: np.ndarray) -> np.ndarray:
    inside = (positions >= 0) & (positions < len(table))
    return np.where(inside[..., None], table[np.where(inside, positions, 0)], np.nan)


def narrow_table(config: TransformerConfig, segment: Segment) -> Found:
    """The table of positions was computed from angles or frequencies in float32."""
    found = _table(segment)
    if found is None or segment.expected.dtype != np.float64:
        return
    change, last = segment.select(segment.expected - segment.value), segment.value.shape[1]
    off = float(np.max(np.abs(change), initial=0.0))
    # The rounding error of a float32 angle is proportional to the angle.
    if off < 1e-6 * (last + abs(config.position_offset)):
        words = (
            f"the reference's sinusoids differ by {off:.1e}, as if the table, angles or "
            "frequencies were computed in float32; casting to float64 does not restore them"
        )
        yield segment.diagnosis("precision", words, segment.expected)


def feed_forward_replaced(config: TransformerConfig, segment: Segment) -> Found:
    """A feed-forward network is replaced by nothing, by zeros or by positions."""
    if not segment.site.endswith("feed_forward/output"):
        return
    for number in segment.leaves:
        x = segment.values[number]
        if number not in segment.known or x.shape != segment.value.shape:
            continue
        others = {"zeros": np.zeros_like(x), "nothing": x}
        if config.position_kind == "sinusoidal":
            others["a positional encoding"] = x + sinusoids(config, x.shape[1])
        for name, value in others.items():
            words = f"the reference has {name} in place of the feed-forward network"
            yield segment.diagnosis("feed-forward replaced", words, value)


def rotation_base(config: TransformerConfig, segment: Segment) -> Found:
    """Queries and keys are rotated by the frequencies of another base."""
    for number in segment.leaves:
        table = segment.values[number]
        if number in segment.program.constants and table.ndim == 2:
            for base in (1e4, 1e3, 1e2, 1e5, 5e5, 1e6):
                words = f"the reference's rotation base is {base:g}, ours {config.position_base:g}"
                other = rotation_table(*table.shape, base)
                yield segment.cause("rotation base", words, {number: other})


def another_slope(config: TransformerConfig, segment: Segment) -> Found:
    """The slopes of ALiBi are others."""
    heads = np.arange(1, config.num_heads + 1)
    ours = alibi_slopes(config.num_heads)
    for number in segment.leaves:
        value = segment.values[number]
        if value.size != len(ours) or not np.allclose(np.abs(value.ravel()), ours):
            continue

        def bias(slopes: np.ndarray, number: int = number, value: np.ndarray = value) -> np.ndarray:
            sign = np.sign(value.ravel()[0])
            return segment.changed({number: sign * slopes.reshape(value.shape)})

        without = bias(np.zeros_like(ours))
        unit, change = bias(np.ones_like(ours)) - without, segment.expected - without
        known = np.isfinite(unit) & np.isfinite(change)
        products, squares = (
            np.sum(np.where(known, unit * each, 0), axis=(0, 2, 3)) for each in (change, unit)
        )
        solved = products / squares
        listed = ", ".join(f"{slope:.6g}" for slope in solved)
        others = [
            ("slope order", "are ours in reverse order", ours[::-1]),
            ("slope order", "are ours in decreasing order", np.sort(ours)[::-1]),
            ("slope sign", "have the opposite sign", -ours),
            ("slope values", "are 2^(-8h/H) for all heads", 2.0 ** (-8 * heads / len(heads))),
            ("slope values", "start at 1", 2.0 ** (-8 * (heads - 1) / len(heads))),
            ("slope values", f"are ({listed})", solved),
        ]
        if np.max(np.abs(solved)) < 1e-9 * np.max(ours):  # The bias is missing.
            return
        for cause, words, slopes in others:
            words = f"the reference's ALiBi slopes {words}"
            yield segment.diagnosis(cause, words, bias(slopes))


def another_bucket(config: TransformerConfig, segment: Segment) -> Found:
    """Distances are in other buckets of the learned bias of T5."""
    own = {
        "bidirectional": segment.site.startswith("encoder"),
        "max_distance": config.relative_position_max_distance,
        "mirrored": False,
    }
    choices: dict[str, list[Any]] = {
        "bidirectional": [True, False],
        "max_distance": [8, 10, 16, 20, 32, 64, 128, 256],
        "mirrored": [False, True],
    }
    for equation in segment.equations:
        found = [n for n in equation.inputs if segment.origin(n) in segment.parameters]
        paths = [segment.parameters[segment.origin(n)] for n in found]
        if equation.name != "dot_general" or "position_bias" not in "".join(paths):
            continue
        table = segment.values[segment.origin(found[0])]
        output = equation.outputs[0]
        shape = segment.values[output].shape
        for change in combinations(own, choices, most=2):
            settings = {**own, **change}
            buckets = len(table) // (2 if settings["bidirectional"] else 1)
            if settings["max_distance"] <= buckets // 2:
                continue
            indices = _buckets(shape[-2], shape[-1], buckets, **settings)
            words = ", ".join(
                f"{name}={value} in place of {own[name]}" for name, value in change.items()
            )
            words = f"the reference's buckets of distances have {words}"
            bias = table[indices].transpose(2, 0, 1).reshape(shape)
            yield segment.cause("bucket rule", words, {output: bias})


def _buckets(
    queries: int, keys: int, buckets: int, bidirectional: bool, max_distance: int, mirrored: bool
) -> np.ndarray:
    distances = (np.arange(keys) - np.arange(queries)[:, None]) * (-1 if mirrored else 1)
    lengths = np.abs(distances) if bidirectional else np.maximum(-distances, 0)
    indices = distance_buckets(buckets, max_distance)[np.minimum(lengths, max_distance)]
    return indices + buckets * (distances > 0) if bidirectional else indices
