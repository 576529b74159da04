"""The known causes of a difference between a reference and our model.

A cause is a function of the operation of our model at a site (`diagnosis/operations`) and a
`SuspectSite`. It yields candidates: an operation that the reference may have instead, with a
description. The prediction of each candidate is compared with the reference's value. To add a
cause, write such a function and register it with `registry.cause` for the operation that it
concerns:

    @cause(LayerNormalization)
    def mean_kept(norm: LayerNormalization, site: SuspectSite) -> Iterator[Candidate]:
        yield Candidate("mean kept", "the reference does not center", norm.but(centers=False))

Register specific causes before general ones: of two candidates that explain a difference equally
well, the first is reported.
"""

from flaxformer_mt.parity.diagnosis.causes import (
    attention,
    attention_positions,
    embeddings,
    losses,
    norms,
    order,
    projections,
    streams,
    sublayers,
)

__all__ = [
    "attention",
    "attention_positions",
    "embeddings",
    "losses",
    "norms",
    "order",
    "projections",
    "streams",
    "sublayers",
]
