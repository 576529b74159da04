"""Compares our model with a published one in PyTorch, and locates the first difference.

    report = parity.compare("annotated", module, batch, num_heads=8)
    print(report)

`compare` compares one batch, `trajectory` a training run. Both require PyTorch.
"""

import importlib.util

if importlib.util.find_spec("torch") is None:
    raise ImportError("parity needs PyTorch: pip install 'flaxformer_mt[parity]'")

from flaxformer_mt.parity.compare_models import compare_models as compare_models
from flaxformer_mt.parity.families.compare import compare as compare
from flaxformer_mt.parity.families.tokens import Tokens as Tokens
from flaxformer_mt.parity.families.tokens import example as example
from flaxformer_mt.parity.program.diagnosis import Diagnosis as Diagnosis
from flaxformer_mt.parity.reports.baseline import assert_parity as assert_parity
from flaxformer_mt.parity.reports.comparison import Row as Row
from flaxformer_mt.parity.reports.plots import plot_trajectory as plot_trajectory
from flaxformer_mt.parity.reports.report import Report as Report
from flaxformer_mt.parity.trace.module_values import Tap as Tap
from flaxformer_mt.parity.trace.module_values import for_layers as for_layers
from flaxformer_mt.parity.trace.module_values import softmax_input as softmax_input
from flaxformer_mt.parity.trace.module_values import softmax_output as softmax_output
from flaxformer_mt.parity.trace.module_values import time_major as time_major
from flaxformer_mt.parity.trace.taps import equinox_taps as equinox_taps
from flaxformer_mt.parity.trace.taps import linen_taps as linen_taps
from flaxformer_mt.parity.trace.taps import scope as scope
from flaxformer_mt.parity.trace.taps import tap as tap
from flaxformer_mt.parity.trajectories import Trajectory as Trajectory
from flaxformer_mt.parity.trajectories import trajectory as trajectory
