"""Compares our model with a published one in PyTorch, and locates the first difference.

    report = parity.compare("annotated", module, batch, num_heads=8)
    print(report)

`compare` compares one batch, `trajectory` a training run. Both require PyTorch.
"""

import importlib.util

if importlib.util.find_spec("torch") is None:
    raise ImportError("parity needs PyTorch: pip install 'flaxformer_mt[parity]'")

from flaxformer_mt.parity.any_model.compare_models import compare_models
from flaxformer_mt.parity.any_model.taps import equinox_taps, linen_taps, scope, tap
from flaxformer_mt.parity.compare_family import compare
from flaxformer_mt.parity.diagnosis.inputs import Diagnosis
from flaxformer_mt.parity.reports.baseline import assert_parity
from flaxformer_mt.parity.reports.comparison import Row
from flaxformer_mt.parity.reports.plots import plot_trajectory
from flaxformer_mt.parity.reports.report import Report
from flaxformer_mt.parity.tokens import Tokens, example
from flaxformer_mt.parity.trace import Tap, for_layers, softmax_input, softmax_output, time_major
from flaxformer_mt.parity.trajectories import Trajectory, trajectory

__all__ = [
    "Diagnosis",
    "Report",
    "Row",
    "Tap",
    "Tokens",
    "Trajectory",
    "assert_parity",
    "compare",
    "compare_models",
    "equinox_taps",
    "example",
    "for_layers",
    "linen_taps",
    "plot_trajectory",
    "scope",
    "softmax_input",
    "softmax_output",
    "tap",
    "time_major",
    "trajectory",
]
