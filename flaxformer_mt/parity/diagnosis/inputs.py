"""The inputs of a diagnosis, and the components of a site's name."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.parity.tokens import Padding, Tokens
from flaxformer_mt.parity.trace import Values


class DiagnosisInputs(NamedTuple):
    """The values of both sides around the first difference; all earlier sites agree."""

    site: str
    """The first site out of tolerance; "loss" if all sites agree and the losses do not."""
    config: TransformerConfig
    params: Mapping[str, np.ndarray]
    """Our parameters by path, with a leading axis L below "layers"."""
    tokens: Tokens
    real: Padding
    ours: Values
    """Our values by site, "logits" among them."""
    theirs: Values
    """The reference's values by site, where it has taps."""
    tolerance: float
    loss: float
    convention: str
    smoothing: float
    again: Mapping[str, np.ndarray] = MappingProxyType({})
    """The reference's values of further calls, see `trace.ModuleValues.again`."""


class ParsedSite(NamedTuple):
    """The components of a site's name."""

    stack: str
    """"encoder" or "decoder"."""
    layer: int | None
    """None outside of the layers."""
    group: str
    """The sub-layer or norm: "self_attention", "embedding", "final" ...; may be ""."""
    part: str
    """"query", "scores", "sum", "norm" ...; "layer" for the output of a layer."""

    @property
    def prefix(self) -> str:
        """The common prefix of the sites of this layer."""
        return f"{self.stack}/layers/{self.layer}"

    @property
    def path(self) -> str:
        """The path of our parameters."""
        return f"{self.stack}/layers/{self.group}/{self.part}"

    @property
    def reads_the_encoder(self) -> bool:
        """Whether the value is computed from the encoder's output, one row per source token."""
        return self.group == "cross_attention" and self.part in ("key", "value")

    @property
    def reads_the_stream(self) -> bool:
        """Whether the value is computed from the input of its sub-layer."""
        first = self.part in ("query", "key", "value", "hidden", "gate")
        return first and not self.reads_the_encoder


def parse_site(site: str) -> ParsedSite:
    """Parses a site's name: ".../0/self_attention_norm" is part "norm" of "self_attention"."""
    first, *rest = site.split("/")
    stack = {"source": "encoder", "target": "decoder", "logits": "decoder"}.get(first, first)
    layer = None
    if rest[:1] == ["layers"]:
        layer, rest = int(rest[1]), rest[2:]
    match rest:
        case [group, part]:
            return ParsedSite(stack, layer, group, part)
        case [name]:
            group, _, part = name.rpartition("_")
            return ParsedSite(stack, layer, group, part)
        case _:
            return ParsedSite(stack, layer, "", first if layer is None else "layer")


def real_rows(site: str, real: Padding) -> np.ndarray:
    """Returns the mask of real tokens that applies to a site, bool [B, S] or [B, T]."""
    found = parse_site(site)
    return real.source if found.stack == "encoder" or found.reads_the_encoder else real.target


def select_rows(site: str, value: np.ndarray, real: Padding) -> np.ndarray:
    """Selects the rows of real tokens [N, ...] of a value [B, T, ...] or [B, H, T, S]."""
    by_row = value.swapaxes(1, 2) if value.ndim == 4 else value
    return by_row[real_rows(site, real)]


def with_values(inputs: DiagnosisInputs, values: Values) -> DiagnosisInputs:
    """Returns the inputs with some values of our model replaced."""
    return inputs._replace(ours=inputs.ours | values)


def parameter(inputs: DiagnosisInputs, path: str, layer: int | None = None) -> np.ndarray:
    """Returns one of our parameters, of one layer if `layer` is given."""
    found = inputs.params[path]
    return found if layer is None else found[layer]


def optional_parameter(
    inputs: DiagnosisInputs, path: str, layer: int | None = None
) -> np.ndarray | None:
    """Returns a parameter, or None if our model has no such parameter."""
    return parameter(inputs, path, layer) if path in inputs.params else None
