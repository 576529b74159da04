"""Causes in embeddings and position vectors."""

import math
from typing import Any

import numpy as np
import torch

from flaxformer_mt.parity.diagnosis import operations as ops
from flaxformer_mt.parity.diagnosis.causes.registry import (
    Candidate,
    Found,
    SuspectSite,
    alternatives,
    cause,
    combinations,
    several_switches,
    shown,
)


@cause(ops.Lookup)
def _embedding_scale(lookup: ops.Lookup, site: SuspectSite) -> Found:
    root = lookup.table.shape[1] ** 0.5
    listed = {"1": 1.0, "sqrt(D)": root, "D": root**2, "1 / sqrt(D)": 1 / root}
    solved = site.solved_scale(lookup.but(scale=1.0).value())
    words = f"the reference multiplies embeddings by {{}}, ours by {lookup.scale:g}"
    yield from alternatives(lookup, "embedding scale", words, "scale", listed | solved)


@cause(ops.Lookup)
def _shifted_tokens(lookup: ops.Lookup, site: SuspectSite) -> Found:
    stack = site.parsed.stack
    words = f"the reference's {stack} tokens are ours in reverse order"
    yield Candidate("reversed tokens", words, lookup.but(tokens=lookup.tokens[:, ::-1]))
    after_zero = np.pad(lookup.tokens, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
    shifted = {
        "ours, shifted one column to the left": np.roll(lookup.tokens, -1, axis=1),
        "ours, shifted one column to the right": np.roll(lookup.tokens, 1, axis=1),
        "ours, shifted to the right after a zero vector": after_zero,
    }
    if stack == "decoder":
        shifted["the targets to be predicted"] = site.inputs.tokens.target_output
    words = f"the reference's {stack} tokens are {{}}"
    yield from alternatives(lookup, "shifted tokens", words, "tokens", shifted)


@cause(ops.Lookup)
def _zeroed_tokens(lookup: ops.Lookup, site: SuspectSite) -> Found:
    zero = ~site.theirs.any(axis=-1) & site.real
    tokens = tuple(int(token) for token in np.unique(lookup.tokens[zero]))
    words = (
        f"the tokens {tokens} of this batch embed to the zero vector in the reference; in "
        f"ours {lookup.zeroed} do"
    )
    yield Candidate("zeroed tokens", words, lookup.but(zeroed=tokens))


@cause(ops.Lookup)
def _wrong_table(lookup: ops.Lookup, site: SuspectSite) -> Found:
    params = site.inputs.params
    tables = {
        "source embedding": params.get("source_embedding/embedding"),
        "target embedding": params.get("target_embedding/embedding"),
        "output matrix": params["output/kernel"].T if "output/kernel" in params else None,
    }
    last = lookup.tokens.max()
    tables = {name: x for name, x in tables.items() if x is not None and last < len(x)}
    words = f"the reference looks {site.parsed.stack} tokens up in the {{}}"
    yield from alternatives(lookup, "wrong embedding table", words, "table", tables)


@cause(ops.AddPositions)
def _position_vectors(added: ops.AddPositions, site: SuspectSite) -> Found:
    words = "the reference does not add positions to the embeddings"
    yield Candidate("positions missing", words, ops.Given(added.embedding))
    batch, length = added.embedding.shape[:2]
    counted = {
        "sentences of the batch, not tokens": np.arange(batch)[:, None],
        "real tokens only": ops.token_positions(site.real),
        "columns, padding included": np.arange(length)[None],
        "from the end of the row": np.arange(length)[None, ::-1],
    }
    words = "the reference's positions count {}"
    yield from alternatives(added, "position counting", words, "positions", counted)


@cause(ops.AddPositions)
def _position_table(added: ops.AddPositions, site: SuspectSite) -> Found:
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
        "offset": [0, 1, -1, 2, site.inputs.config.pad_id + 1],
    }
    if added.learned is not None:
        choices = {"offset": choices["offset"]}
    for name, words, change in several_switches("position", added, names, choices, len(choices)):
        yield Candidate(name, words, added.but(**change))


@cause(ops.AddPositions)
def _unlisted_base(added: ops.AddPositions, site: SuspectSite) -> Found:
    d_model = added.embedding.shape[-1]
    at_one = (added.positions + added.offset == 1) & site.real
    if added.learned is not None or d_model < 4 or not at_one.any():
        return
    wave = (site.theirs - added.embedding)[at_one][0]
    sine, cosine = (2, 3) if added.layout == "interleaved" else (1, 1 + (d_model + 1) // 2)
    frequency = np.arctan2(wave[sine], wave[cosine])
    power = 2 / d_model if added.exponent == "paper" else 1 / max(d_model // 2 - 1, 1)
    base = float(frequency ** (-1 / power))
    mixed = {
        "10 in exp()": math.exp(math.log10(added.base)),
        "2 in exp()": math.exp(math.log2(added.base)),
        "e in a power of 10": 10 ** math.log(added.base),
        "e in a power of 2": 2 ** math.log(added.base),
    }
    for name, value in mixed.items():
        if abs(base / value - 1) < 1e-6:
            words = (
                f"the reference takes the logarithm of the position base to the base {name}: its "
                f"frequencies are those of the base {value:.6g}, ours {added.base:g}"
            )
            yield Candidate("logarithm base", words, added.but(base=value))
    words = f"the reference's position base is {base:.6g}, ours {added.base:g}"
    yield Candidate("sine base", words, added.but(base=base))


@cause(ops.AddPositions)
def _positions_scaled(added: ops.AddPositions, site: SuspectSite) -> Found:
    listed = {"sqrt(D)": added.embedding.shape[-1] ** 0.5}
    vectors = np.broadcast_to(added.vectors(), added.embedding.shape)
    solved = site.solved_scale(vectors, added.embedding)
    words = (
        "the reference multiplies positions by {}, as if they were added before the embeddings are "
        "scaled; ours does not"
    )
    yield from alternatives(added, "positions scaled", words, "scale", listed | solved)


@cause(ops.AddPositions)
def _narrow_table(added: ops.AddPositions, site: SuspectSite) -> Found:
    site.require_float64()
    off = float(np.max(np.abs(site.rows(site.theirs - added.value())), initial=0.0))
    vectors = torch.tensor(site.rows(site.theirs - added.embedding))
    noise = 4 * np.finfo(np.float64).eps * float(np.max(np.abs(site.theirs)))
    for dtype in (torch.bfloat16, torch.float16):
        # The narrower format first: its numbers are also some of the wider one's.
        rounded = float((vectors - vectors.to(dtype).double()).abs().max())
        if rounded < noise and off <= torch.finfo(dtype).eps:
            name = str(dtype).removeprefix("torch.")
            words = f"the reference's sinusoids are rounded to {name}, and differ by {off:.1e}"
            yield Candidate(f"{name} positions", words, ops.Given(site.theirs))
    # The rounding error of a float32 angle is proportional to the angle.
    if off < 1e-6 * (1 + np.max(added.positions + added.offset)):
        words = (
            f"the reference's sinusoids differ by {off:.1e}, as if the table, angles or "
            "frequencies were computed in float32; casting to float64 does not restore them"
        )
        yield Candidate("float32 positions", words, ops.Given(site.theirs))


@cause(ops.Loss)
def _conventions(loss: ops.Loss, site: SuspectSite) -> Found:
    names = {
        "convention": "label-smoothing convention",
        "smoothing": "smoothing amount",
        "pad_id": "padding in the loss",
        "reduction": "loss reduction",
    }
    choices: dict[str, list[Any]] = {
        "convention": [*ops.CONVENTIONS],
        "smoothing": [0.0, 0.1, 0.05, 0.15, 0.2, 0.3],
        "pad_id": [ops.NO_PADDING],
        "reduction": [*ops.REDUCTIONS],
    }
    ours = {name: getattr(loss, name) for name in choices}
    for change in combinations(ours, choices, most=2):
        changed = loss.but(**change)
        # Two conventions label padding as a class of its own.
        labels_padding = changed.convention in ("non_pad_kl", "annotated_wide_heads")
        if changed.pad_id == ops.NO_PADDING and labels_padding:
            continue
        words = [
            "padding counted in"
            if name == "pad_id"
            else f"{names[name]} {shown(value)} in place of {shown(ours[name])}"
            for name, value in change.items()
        ]
        label = " and ".join(names[name] for name in change)
        yield Candidate(label, f"the reference's loss has {', '.join(words)}", changed)


@cause(ops.Loss)
def _logarithm_base(loss: ops.Loss, site: SuspectSite) -> Found:
    words = "the reference's loss has logarithms to the base {}, ours natural ones"
    values = {str(base): loss.value() / math.log(base) for base in (2, 10)}
    yield from alternatives(ops.Given(loss.value()), "logarithm base", words, "result", values)


@cause(ops.Loss)
def _shifted_targets(loss: ops.Loss, site: SuspectSite) -> Found:
    inputs = site.inputs.tokens.target_input
    words = "the reference's loss compares logits with the decoder's inputs instead of its targets"
    if inputs.min() >= 0:
        yield Candidate("shifted targets", words, loss.but(targets=inputs.astype(np.int64)))
