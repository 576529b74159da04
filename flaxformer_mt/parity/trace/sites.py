"""The sites of our model: the values that both sides compute, in the order of computation.

A *site* names a value, such as "encoder/layers/0/self_attention/query"; docs/parity.md has all
names and shapes. `sites` lists those of a configuration in the order of computation, so that the
first difference is the relevant one. Our values come from Linen's "intermediates" collection.
"""

import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from flax.traverse_util import flatten_dict

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.model.positions import POSITION_KINDS

Values = dict[str, np.ndarray]
"""Arrays by site, in the order of computation."""

MASKED = -1e8
"""Scores below this are masked: publications write -1e9, -inf or the minimum of a dtype."""


class Site(NamedTuple):
    """A value that is compared, and its location among our intermediates."""

    name: str
    path: str
    call: int = 0
    """Index among the values recorded at the path."""
    layer: int | None = None
    """Index into the leading axis L; None outside of the stacks."""


def sites(config: TransformerConfig) -> list[Site]:
    """Returns every site of a model except the logits, in the order of computation."""
    if not config.has_inputs:
        return _stack_sites("target", "decoder", "target_embedding", 0, config)
    shared = config.shares_source_and_target
    table = "target_embedding" if shared else "source_embedding"
    source = _stack_sites("source", "encoder", table, 0, config)
    return source + _stack_sites("target", "decoder", "target_embedding", int(shared), config)


def _stack_sites(
    side: str, stack: str, table: str, call: int, config: TransformerConfig
) -> list[Site]:
    found = []
    if config.target_vocab_size:  # Bare layers take vectors.
        found.append(Site(f"{side}/embedding", f"{table}/__call__", call))
        if POSITION_KINDS[config.position_kind].encoding is not None:
            call = int(stack == "decoder" and config.has_inputs)
            found.append(Site(f"{side}/embedded", "embedding_dropout/__call__", call))
        if config.embedding_norm:
            found.append(Site(f"{stack}/embedding_norm", f"{stack}/embedding_norm/__call__"))
    in_encoder = stack == "encoder"
    for layer in range(config.num_encoder_layers if in_encoder else config.num_decoder_layers):
        found += _layer_sites(stack, layer, config)
    if config.final_norm:
        found.append(Site(f"{stack}/final_norm", f"{stack}/final_norm/__call__"))
    return found


def _layer_sites(stack: str, layer: int, config: TransformerConfig) -> list[Site]:
    ours, name = f"{stack}/layers", f"{stack}/layers/{layer}"
    attentions = ["self_attention"]
    if stack == "decoder" and config.has_inputs:
        attentions.append("cross_attention")
    is_pre, found = config.norm_position != "post", []
    for sublayer, following in itertools.pairwise([*attentions, "feed_forward", None]):
        parts = _FEED_FORWARD if sublayer == "feed_forward" else _ATTENTION
        inside = [
            Site(f"{name}/{sublayer}/{part}", f"{ours}/{sublayer}/{path}", 0, layer)
            for part, path in parts.items()
            if part != "gate" or config.feed_forward_gate
        ]
        reader = following if is_pre else sublayer
        path = f"{ours}/{reader}_norm/input" if reader else f"{ours}/__call__"
        residual = Site(f"{name}/{sublayer}_sum", path, 0, layer)
        norm = Site(f"{name}/{sublayer}_norm", f"{ours}/{sublayer}_norm/__call__", 0, layer)
        if config.norm_position == "both":
            path = f"{ours}/{sublayer}_output_norm/__call__"
            inside.append(Site(f"{name}/{sublayer}_output_norm", path, 0, layer))
        found += [norm, *inside, residual] if is_pre else [*inside, residual, norm]
    return [*found, Site(name, f"{ours}/__call__", 0, layer)]


_ATTENTION = {
    "query": "query/__call__",
    "key": "key/__call__",
    "value": "value/__call__",
    "scores": "scores",
    "weights": "dropout/__call__",
    "context": "context",
    "output": "output/__call__",
}
_FEED_FORWARD = {
    "hidden": "hidden/__call__",
    "gate": "gate/__call__",
    "activated": "dropout/__call__",
    "output": "output/__call__",
}


def values_of_model(config: TransformerConfig, intermediates: Mapping[str, Any]) -> Values:
    """Returns the values of our model by site, from its "intermediates" collection."""
    kept = flatten_dict(dict(intermediates), sep="/")
    found = {}
    for site in sites(config):
        value = kept[site.path][site.call]
        value = value[0] if isinstance(value, tuple) else value
        value = np.asarray(value if site.layer is None else value[site.layer])
        found[site.name] = comparable(site.name, value)
    return found


def comparable(site: str, value: np.ndarray) -> np.ndarray:
    """Returns the value of a site; masked scores become -inf."""
    return np.where(value < MASKED, -np.inf, value) if is_scores(site) else value


def is_scores(site: str) -> bool:
    """Returns whether a site has attention scores."""
    return site.split("#")[0].endswith("scores")
