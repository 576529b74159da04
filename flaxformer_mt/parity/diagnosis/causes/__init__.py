"""The known causes of a difference between a reference and our model.

A cause is a function of our operation at a site (`diagnosis/operations.py`) and a `SuspectSite`. It
yields candidates: operations that the reference may have instead, whose values are compared with
the reference's. To add a cause, register such a function for the operation that it concerns:

    @cause(LayerNormalization)
    def _mean_kept(norm: LayerNormalization, site: SuspectSite) -> Iterator[Candidate]:
        yield Candidate("mean kept", "the reference does not center", norm.but(centers=False))

A cause ends where it reads the reference's value of a site without a tap (`site.theirs`).

Register specific causes before general ones: of two candidates that explain a difference equally
well, the first is reported.
"""

from flaxformer_mt.parity.diagnosis.causes import attention as attention
from flaxformer_mt.parity.diagnosis.causes import embeddings as embeddings
from flaxformer_mt.parity.diagnosis.causes import order as order
from flaxformer_mt.parity.diagnosis.causes import projections as projections
from flaxformer_mt.parity.diagnosis.causes import sublayers as sublayers
