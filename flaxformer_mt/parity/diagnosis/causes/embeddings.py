"""Causes in the embeddings and positions."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from flaxformer_mt.parity.diagnosis.causes.registry import (
    Clue,
    Hypothesis,
    cause,
    combinations,
    shown,
)
from flaxformer_mt.parity.diagnosis.equations import AddPositions, Given, Lookup, token_positions


@cause(Lookup)
def embedding_scale(lookup: Lookup, clue: Clue) -> Iterator[Hypothesis]:
    """Multiplied by 1, sqrt(D), D, 1 / sqrt(D), or whatever the reference's vectors tell."""
    root = lookup.table.shape[1] ** 0.5
    listed = {"1": 1.0, "sqrt(D)": root, "D": root**2, "1 / sqrt(D)": 1 / root}
    solved = clue.solved_scale(lookup.but(scale=1.0).value())
    for name, scale in (listed | solved).items():
        yield Hypothesis(
            "embedding scale",
            f"the reference multiplies embeddings by {name}, ours by {lookup.scale:g}",
            lookup.but(scale=scale),
        )


@cause(Lookup)
def shifted_tokens(lookup: Lookup, clue: Clue) -> Iterator[Hypothesis]:
    """Looked up one column too early or too late, or targets in place of decoder inputs."""
    behind_zero = np.pad(lookup.tokens, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
    shifted = {
        "ours, shifted one column to the left": np.roll(lookup.tokens, -1, axis=1),
        "ours, shifted one column to the right": np.roll(lookup.tokens, 1, axis=1),
        "ours, shifted to the right behind a zero vector": behind_zero,
    }
    if clue.place.stack == "decoder":
        shifted["the targets that shall be predicted"] = clue.evidence.target_output
    for what, tokens in shifted.items():
        yield Hypothesis(
            "shifted tokens",
            f"the reference's {clue.place.stack} tokens are {what}",
            lookup.but(tokens=tokens),
        )


@cause(Lookup)
def zeroed_tokens(lookup: Lookup, clue: Clue) -> Iterator[Hypothesis]:
    """Other tokens give the zero vector: those that do in the reference's values."""
    if clue.theirs is not None:
        zero = ~clue.theirs.any(axis=-1) & clue.real
        tokens = tuple(int(token) for token in np.unique(lookup.tokens[zero]))
        yield Hypothesis(
            "zeroed tokens",
            f"the tokens {tokens} of this batch embed to the zero vector in the reference; in "
            f"ours {lookup.zeroed} do",
            lookup.but(zeroed=tokens),
        )


@cause(Lookup)
def wrong_table(lookup: Lookup, clue: Clue) -> Iterator[Hypothesis]:
    """The other side's embedding, or the output's matrix."""
    params = clue.evidence.params
    tables = {
        "source embedding": params.get("source_embedding/embedding"),
        "target embedding": params.get("target_embedding/embedding"),
        "output's matrix": params["output/kernel"].T if "output/kernel" in params else None,
    }
    for name, table in tables.items():
        if table is not None and lookup.tokens.max() < len(table):
            yield Hypothesis(
                "wrong embedding table",
                f"the reference looks {clue.place.stack} tokens up in the {name}",
                lookup.but(table=table),
            )


@cause(AddPositions)
def positions_missing(added: AddPositions, clue: Clue) -> Iterator[Hypothesis]:
    """Nothing is added."""
    yield Hypothesis(
        "positions missing",
        "the reference does not add positions to the embeddings",
        Given(added.embedding),
    )


@cause(AddPositions)
def position_counting(added: AddPositions, clue: Clue) -> Iterator[Hypothesis]:
    """Counted along the wrong axis or from the wrong end, with or without padding."""
    batch, length = added.embedding.shape[:2]
    counted = {
        "sentences of the batch, not tokens": np.arange(batch)[:, None],
        "real tokens only": token_positions(clue.real),
        "columns, padding included": np.arange(length)[None],
        "from the end of the row": np.arange(length)[None, ::-1],
    }
    for what, positions in counted.items():
        yield Hypothesis(
            "position counting",
            f"the reference's positions count {what}",
            added.but(positions=positions),
        )


@cause(AddPositions)
def position_table(added: AddPositions, clue: Clue) -> Iterator[Hypothesis]:
    """Another layout, exponent, base or first position, or several of these; fewest first."""
    names = {
        "layout": "sine layout",
        "exponent": "sine exponent",
        "base": "sine base",
        "offset": "position offset",
    }
    choices: dict[str, list[Any]] = {
        "layout": ["interleaved", "concatenated"],
        "exponent": ["paper", "tensor2tensor"],
        "base": [1e4, 1e3, 1e2, 1e5, 5e5],
        "offset": [0, 1, -1, 2, clue.evidence.config.pad_id + 1],
    }
    if added.learned is not None:
        choices = {"offset": choices["offset"]}
    ours = {name: getattr(added, name) for name in choices}
    for change in combinations(ours, choices, most=len(choices)):
        yield Hypothesis(
            " and ".join(names[name] for name in change),
            "; ".join(
                f"the reference's position {name} is {shown(value)}, ours {shown(ours[name])}"
                for name, value in change.items()
            ),
            added.but(**change),
        )


@cause(AddPositions)
def unlisted_base(added: AddPositions, clue: Clue) -> Iterator[Hypothesis]:
    """Solved for from the second frequency, which is the angle of a token at position 1."""
    d_model = added.embedding.shape[-1]
    at_one = (added.positions + added.offset == 1) & clue.real
    if clue.theirs is None or added.learned is not None or d_model < 4 or not at_one.any():
        return
    wave = (clue.theirs - added.embedding)[at_one][0]
    sine, cosine = (2, 3) if added.layout == "interleaved" else (1, 1 + (d_model + 1) // 2)
    frequency = np.arctan2(wave[sine], wave[cosine])
    power = 2 / d_model if added.exponent == "paper" else 1 / max(d_model // 2 - 1, 1)
    base = float(frequency ** (-1 / power))
    yield Hypothesis(
        "sine base",
        f"the reference's position base is {base:.6g}, ours {added.base:g}",
        added.but(base=base),
    )


@cause(AddPositions)
def positions_scaled(added: AddPositions, clue: Clue) -> Iterator[Hypothesis]:
    """Added before the embeddings are scaled, or with a scale of their own."""
    listed = {"sqrt(D)": added.embedding.shape[-1] ** 0.5}
    solved = {}
    if clue.theirs is not None:
        difference = clue._replace(theirs=clue.theirs - added.embedding)
        vectors = np.broadcast_to(added.vectors(), added.embedding.shape)
        solved = difference.solved_scale(vectors)
    for name, scale in (listed | solved).items():
        yield Hypothesis(
            "positions scaled",
            f"the reference multiplies positions by {name}, as if they were added before the "
            "embeddings are scaled; ours does not",
            added.but(scale=scale),
        )


@cause(AddPositions)
def narrow_table(added: AddPositions, clue: Clue) -> Iterator[Hypothesis]:
    """The right table in float32: so are those of float32 modules that were cast to float64."""
    if clue.theirs is None or clue.evidence.config.dtype != "float64":
        return
    off = float(np.max(np.abs(clue.rows(clue.theirs - added.value())), initial=0.0))
    # An angle in float32 is off by its last bit, and so the more, the larger it is.
    if off < 1e-6 * (1 + np.max(added.positions + added.offset)):
        yield Hypothesis(
            "float32 positions",
            f"the reference's sinusoids are off by {off:.1e}, as those are whose table, angles or "
            "frequencies were computed in float32; casting the module to float64 comes too late",
            Given(clue.theirs),
        )
