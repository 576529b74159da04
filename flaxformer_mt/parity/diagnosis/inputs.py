"""The inputs and the result of a diagnosis, the names of sites, and how values are compared."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

import numpy as np

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.parity.tokens import Padding, Tokens
from flaxformer_mt.parity.trace import Values

Select: TypeAlias = Callable[[str, np.ndarray], np.ndarray]
"""Maps a site and its value to the rows that are compared."""


class Diagnosis(NamedTuple):
    """A known cause, and how well it explains the difference."""

    cause: str
    """Short and stable, such as "norm epsilon"."""
    explanation: str
    """One sentence that states what the reference and our model compute."""
    residual: float
    """The difference that remains if the cause is assumed, relative to the largest magnitude."""


Untested: TypeAlias = dict[str, str]
"""Causes that failed themselves, with a sentence on why."""


@contextlib.contextmanager
def testing(cause: str, untested: Untested) -> Iterator[None]:
    """Notes the failure of a cause, which must not hide the differences that were found."""
    try:
        yield
    except Exception as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())
        name = cause.replace("_", " ")
        untested[cause] = f"The cause {name} was not tested everywhere ({why})."


def beside(theirs: float, ours: float) -> str:
    """Formats a number of the reference so that it is told from ours."""
    if f"{theirs:.6g}" != f"{ours:.6g}":
        return f"{0.0 if abs(theirs) < 1e-14 else theirs:.6g}"
    rounded = abs(theirs - float(np.float32(ours))) <= 1e-12 * abs(ours)
    return f"{ours:.6g} rounded to float32" if rounded else f"{theirs:.12g}"


def most_specific(found: Iterable[Diagnosis], tolerance: float) -> Diagnosis | None:
    """Returns the first of those that explain a difference up to rounding, if any does."""
    right = [each for each in found if each.residual <= tolerance]
    best = min((each.residual for each in right), default=0.0)
    return next((each for each in right if each.residual <= 10 * best + 0.05 * tolerance), None)


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
    untested: Untested
    again: Mapping[str, np.ndarray] = MappingProxyType({})
    """The reference's values of further calls, see `trace.ModuleValues.again`."""

    def in_float64(self) -> "DiagnosisInputs":
        """Returns the inputs with all values and parameters in float64."""
        params, ours, theirs, again = (
            {name: np.asarray(array, np.float64) for name, array in arrays.items()}
            for arrays in (self.params, self.ours, self.theirs, self.again)
        )
        return self._replace(params=params, ours=ours, theirs=theirs, again=again)

    def with_value(self, site: str, value: np.ndarray) -> "DiagnosisInputs":
        """Returns the inputs with our value of a site replaced."""
        return self._replace(ours=self.ours | {site: value})

    def parameter(self, path: str, layer: int | None = None) -> np.ndarray | None:
        """Returns one of our parameters, of one layer if `layer` is given; None without it."""
        found = self.params.get(path)
        return found if found is None or layer is None else found[layer]

    def beside(self, site: ParsedSite, part: str) -> np.ndarray:
        """Returns our value of another part of the site's sub-layer."""
        return self.ours[f"{site.prefix}/{site.group}/{part}"]

    def inside(self, site: ParsedSite) -> list[str]:
        """Returns the sites inside the site's sub-layer, in the order of computation."""
        return [name for name in self.ours if name.startswith(f"{site.prefix}/{site.group}/")]

    def num_layers(self, stack: str) -> int:
        """Returns the number of layers of a stack."""
        c = self.config
        return c.num_encoder_layers if stack == "encoder" else c.num_decoder_layers

    def sublayers(self, stack: str) -> list[str]:
        """Returns the sub-layers of a layer, in the order in which ours runs them."""
        attends = stack == "decoder" and self.config.has_inputs
        return ["self_attention", *(["cross_attention"] if attends else []), "feed_forward"]

    def sublayer_end(self, prefix: str, group: str) -> str:
        """Returns the site of the residual stream after a sub-layer."""
        return f"{prefix}/{group}_{'norm' if self.config.norm_position == 'post' else 'sum'}"


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


def relative_difference(ours: np.ndarray, theirs: np.ndarray, floor: float = 0.0) -> float:
    """Returns the largest difference; inf where only one side is finite.

    It is relative to the reference's largest magnitude, or to `floor` if this is larger.
    """
    if ours.shape != theirs.shape:
        return np.inf
    if not np.issubdtype(ours.dtype, np.inexact):  # Unsigned and bool differences are no numbers.
        ours, theirs = ours.astype(np.float64), theirs.astype(np.float64)
    finite = np.isfinite(theirs)
    if not np.array_equal(ours[~finite], theirs[~finite], equal_nan=True):
        return np.inf
    if not np.isfinite(ours[finite]).all():
        return np.inf
    difference = float(np.max(np.abs(ours[finite] - theirs[finite]), initial=0.0))
    scale = max(float(np.max(np.abs(theirs[finite]), initial=0.0)), floor)
    return difference / scale if scale else difference
