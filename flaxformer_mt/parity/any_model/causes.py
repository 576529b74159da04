"""The known causes of a difference between two sites of any program.

Each cause changes the equations of ours in one way, and yields the value that the site has then.
It is right if this is the reference's value. To add a cause, write such a function and append it
to `CAUSES`.
"""

from collections.abc import Callable

from flaxformer_mt.parity.any_model import numeric_causes, structural_causes
from flaxformer_mt.parity.any_model.cause import Found
from flaxformer_mt.parity.any_model.segment import Segment

CAUSES: list[Callable[[Segment], Found]] = [
    numeric_causes.another_constant,
    numeric_causes.another_norm,
    structural_causes.left_out,
    structural_causes.another_activation,
    structural_causes.another_softmax,
    structural_causes.another_mask,
    structural_causes.another_order,
    structural_causes.other_inputs,
    structural_causes.other_parameters,
    numeric_causes.lower_precision,
    numeric_causes.active_dropout,
    numeric_causes.solved_for,
]
"""Specific causes before general ones."""
