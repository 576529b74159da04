"""The weight map of `annotated_wide_heads`: that of `annotated`, whose head sizes are free."""

import dataclasses

from flaxformer_mt.interop.families import annotated

FAMILY = dataclasses.replace(annotated.FAMILY, name="annotated_wide_heads")
