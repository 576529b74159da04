"""The weight map of `questions`: the names of `annotated`, with heads that need not divide D."""

import dataclasses

from flaxformer_mt.interop.families import annotated

FAMILY = dataclasses.replace(annotated.FAMILY, name="questions")
