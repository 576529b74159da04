"""Weight maps between published models and ours, one module per model."""

from flaxformer_mt.interop.families import (
    annotated,
    double_projection,
    fairseq,
    fsmt,
    jadore801120,
    marian,
    mbart,
    opennmt,
    t5,
    t5gemma,
    torch,
    tunz,
)
from flaxformer_mt.interop.weight_maps.family import Family
from flaxformer_mt.presets import find_family

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        jadore801120.FAMILY,
        double_projection.FAMILY,
        annotated.WIDE_HEADS,
        annotated.FAMILY,
        tunz.FAMILY,
        torch.FAMILY,
        marian.FAMILY,
        fairseq.FAMILY,
        opennmt.FAMILY,
        mbart.FAMILY,
        mbart.M2M100,
        marian.PEGASUS,
        fsmt.FAMILY,
        t5.FAMILY,
        t5.UMT5,
        t5gemma.FAMILY,
    )
}
"""The weight maps of all families, by name."""


def find(family: str | Family) -> Family:
    """Returns a family by its name or alias; a `Family` is returned as it is.

    Raises:
      TypeError: it is neither.
      UserError: there is no family of that name.
    """
    if isinstance(family, Family):
        return family
    if not isinstance(family, str):
        raise TypeError(f"family must be a name or a Family, not {type(family).__name__}")
    return find_family(family, FAMILIES)
