"""What only accelerators need: attention and norms in one kernel, and products that share inputs.

`fused_attention` chooses a kernel, `attention_gpu` or `attention_tpu`, and makes it a
differentiable function of sharded arrays. `fused_norm` has the norm and its kernel.
"""

import re

import jax

OLDEST_JAX = (0, 11)
"""The first that has all which the kernels for GPUs need."""
HOPPER = re.compile(r"\bG?H(20|100|200|800)\b")
"""In the names of the GPUs whose instructions these kernels use."""


def gpu_refusal(platform: str, device_kind: str) -> str:
    """Returns why a program for these devices has no kernels for GPUs, or "" if it has them."""
    if platform != "gpu":
        return f"is for platform gpu, but this program is for {platform}"
    if jax.__version_info__ < OLDEST_JAX:
        return f"needs JAX 0.11 (Python 3.12) or newer, not {jax.__version__}"
    if not HOPPER.search(device_kind):
        return f"needs a GPU of the Hopper generation, such as H100, not {device_kind}"
    return ""
