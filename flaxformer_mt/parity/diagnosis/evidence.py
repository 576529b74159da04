"""What is known about a first difference."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.parity.tokens import Padding
from flaxformer_mt.parity.trace import Values


class Evidence(NamedTuple):
    """What is known at the first site where the two sides differ; all sites before it agree."""

    site: str
    """The first site out of tolerance; "loss" if all sites agree and the losses do not."""
    config: TransformerConfig
    params: Mapping[str, np.ndarray]
    """Our parameters by path, with a leading axis L below "layers"."""
    source: np.ndarray
    """int [B, S] tokens."""
    target_input: np.ndarray
    """int [B, T] tokens."""
    target_output: np.ndarray
    """int [B, T] tokens."""
    real_source: np.ndarray
    """bool [B, S], False for padding."""
    real_target: np.ndarray
    """bool [B, T], False for padding."""
    ours: Values
    """Our values by site, "logits" among them."""
    theirs: Values
    """The reference's, where it has taps."""
    tolerance: float
    """The share of the largest magnitude by which equal values may differ."""
    loss: float
    """The reference's loss per token."""
    convention: str
    """Our convention of label smoothing."""
    smoothing: float
    """e of the label smoothing."""

    @property
    def real(self) -> Padding:
        """Where tokens are real."""
        return Padding(self.real_source, self.real_target)


class Place(NamedTuple):
    """Where in the model a site is."""

    stack: str
    """"encoder" or "decoder"."""
    layer: int | None
    """None outside of the layers."""
    group: str
    """What the part belongs to: "self_attention", "embedding", "final" ...; "" if nothing."""
    part: str
    """"query", "scores", "sum", "norm" ...; "layer" is a layer's result."""

    @property
    def prefix(self) -> str:
        """What the sites of this layer begin with."""
        return f"{self.stack}/layers/{self.layer}"

    @property
    def path(self) -> str:
        """Where our parameters of this part are."""
        return f"{self.stack}/layers/{self.group}/{self.part}"

    @property
    def reads_the_encoder(self) -> bool:
        """Whether it is computed from the encoder's output, one row a source token."""
        return self.group == "cross_attention" and self.part in ("key", "value")

    @property
    def reads_the_stream(self) -> bool:
        """Whether it is computed from what goes into its sub-layer."""
        first = self.part in ("query", "key", "value", "hidden")
        return first and not self.reads_the_encoder


def place(site: str) -> Place:
    """Reads a site's name: ".../0/self_attention_norm" is part "norm" of "self_attention"."""
    first, *rest = site.split("/")
    stack = {"source": "encoder", "target": "decoder", "logits": "decoder"}.get(first, first)
    layer = None
    if rest[:1] == ["layers"]:
        layer, rest = int(rest[1]), rest[2:]
    match rest:
        case [group, part]:
            return Place(stack, layer, group, part)
        case [name]:
            group, _, part = name.rpartition("_")
            return Place(stack, layer, group, part)
        case _:
            return Place(stack, layer, "", first if layer is None else "layer")


def real_rows(site: str, real: Padding) -> np.ndarray:
    """Which rows of a site's value are of real tokens: bool, [B, S] or [B, T]."""
    found = place(site)
    return real.source if found.stack == "encoder" or found.reads_the_encoder else real.target


def select_rows(site: str, value: np.ndarray, real: Padding) -> np.ndarray:
    """The rows of real tokens [N, ...] of a site's value [B, T, ...] or, by heads, [B, H, T, S]."""
    by_row = value.swapaxes(1, 2) if value.ndim == 4 else value
    return by_row[real_rows(site, real)]


def with_values(evidence: Evidence, values: Values) -> Evidence:
    """The evidence as it would be if our model had computed other values."""
    return evidence._replace(ours=evidence.ours | values)


def parameter(evidence: Evidence, path: str, layer: int | None = None) -> np.ndarray:
    """One of our parameters, in a layer if there is one.

    Raises:
      KeyError: our model has no such parameter.
    """
    found = evidence.params[path]
    return found if layer is None else found[layer]


def optional_parameter(
    evidence: Evidence, path: str, layer: int | None = None
) -> np.ndarray | None:
    """The same, or None if our model has no such parameter."""
    return parameter(evidence, path, layer) if path in evidence.params else None
