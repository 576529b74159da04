"""Causes in the order of layers: skipped, repeated and reordered ones."""

from collections.abc import Iterator

from flaxformer_mt.parity.diagnosis import site_operations
from flaxformer_mt.parity.diagnosis.causes.order import per_layer_memory
from flaxformer_mt.parity.diagnosis.causes.registry import Candidate, SuspectSite, cause
from flaxformer_mt.parity.diagnosis.inputs import parse_site
from flaxformer_mt.parity.diagnosis.operations import (
    Given,
    LayerNormalization,
    LinearMap,
    Logits,
    Residual,
)


@cause(Given)
def _skipped_layer(layer: Given, site: SuspectSite) -> Iterator[Candidate]:
    found = site.parsed
    if found.part == "layer" and found.layer is not None:
        yield Candidate(
            "skipped layer",
            f"the reference omits {found.prefix}",
            Given(site_operations.layer_input(site.inputs, found.stack, found.layer)),
        )


@cause(Residual)
def _wrong_residual(residual: Residual, site: SuspectSite) -> Iterator[Candidate]:
    found = site.parsed
    yield Candidate(
        "wrong residual",
        f"the reference adds the output of {found.group} to the input of the layer",
        residual.but(x=site_operations.layer_input(site.inputs, found.stack, found.layer or 0)),
    )


@cause(LayerNormalization)
@cause(LinearMap)
@cause(Residual)
def _other_layer(
    operation: LayerNormalization | LinearMap | Residual, site: SuspectSite
) -> Iterator[Candidate]:
    reads_a_layer = site.parsed.reads_the_stream or site.parsed.reads_the_encoder
    if isinstance(operation, LinearMap) and not (reads_a_layer or isinstance(operation, Logits)):
        return
    own = site.parsed.layer
    for name, value in {**site.inputs.again, **site.inputs.theirs}.items():
        found = parse_site(name.split("#")[0])
        if found.part != "layer" or found.layer is None or value.shape != operation.x.shape:
            continue
        if "#" in name:
            cause, words = "repeated layer", f"the second output of {found.prefix}"
        elif site.parsed.reads_the_encoder:
            each = found.layer == own and per_layer_memory(site.inputs)
            cause = "per-layer memory" if each else "memory of another layer"
            words = f"the output of {found.prefix}"
        else:
            stop = len(site.inputs.ours) if own is None else own
            between = (f"{found.stack}/layers/{i}" for i in range(found.layer + 1, stop))
            passed = found.layer < stop - 1 and not any(x in site.inputs.theirs for x in between)
            cause = "skipped layer" if passed else "layer order"
            words = f"the output of {found.prefix}"
        yield Candidate(cause, f"the reference reads {words} here", operation.but(x=value))
