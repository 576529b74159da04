"""Which implementation computes an attention."""

from typing import NamedTuple

import jax.numpy as jnp

from flaxformer_mt.errors import UserError

PLATFORMS = {"pallas_gpu": "gpu", "pallas_tpu": "tpu", "cudnn": "gpu"}
"""The platform of each fused backend."""
AUTO = ("pallas_gpu", "pallas_tpu")
"""What "auto" chooses from: the backends whose parity every run of the tests shows."""
LANES = 128
"""The width of a TPU's registers: longer rows are padded to multiples."""
SUBLANES = 32
"""The height of a TPU's registers, for numbers of 8 bits: short rows are padded to multiples."""
MAX_KEYS = 1024
"""The longest row of keys on TPUs: the scores of a block, in float32, are in fast memory."""


class AttentionCase(NamedTuple):
    """What the choice of a backend depends on."""

    platform: str
    """Of the program: "cpu", "gpu" or "tpu"."""
    dtype: jnp.dtype
    """Of queries, keys and values."""
    query_shape: tuple[int, ...]
    """[B, H, T, K]."""
    key_length: int
    """S."""
    value_width: int
    """U."""
    is_whole_pass: bool
    """Whether the mask is given by segments: not a step of decoding, nor initialization."""
    needs_weights: bool
    """Whether somebody reads the weights."""
    has_bias: bool
    """Whether a bias is added to the scores."""
    has_dropout: bool
    """Whether weights are dropped."""


def choose_backend(requested: str, case: AttentionCase) -> str:
    """Returns the backend that computes an attention: "einsum", or a key of `PLATFORMS`.

    Steps of decoding, and attention whose weights are read, take the einsum.

    Args:
      requested: `config.attention_backend`. "auto" takes the fused backend of the platform for
        every case that it can do; `tests/model/test_fused_attention.py` compares them.
      case: of this attention.

    Raises:
      UserError: the requested backend cannot do the case.
    """
    if requested == "einsum" or case.needs_weights or not case.is_whole_pass:
        return "einsum"
    if requested != "auto":
        if reason := refusal(requested, case):
            raise UserError(f"model.attention_backend={requested} {reason}: use auto or einsum")
        return requested
    for backend in AUTO:
        if PLATFORMS[backend] == case.platform and not refusal(backend, case):
            return backend
    return "einsum"


def refusal(backend: str, case: AttentionCase) -> str:
    """Returns why a fused backend cannot compute a case, or "" if it can.

    On CPUs it is interpreted, and can do what it can on its own platform.
    """
    _, heads, _, width = case.query_shape
    if case.platform not in (PLATFORMS[backend], "cpu"):
        return f"is for platform {PLATFORMS[backend]}, but this program is for {case.platform}"
    if not all(isinstance(size, int) for size in (*case.query_shape, case.key_length)):
        return "needs shapes that are known when the program is compiled"
    if case.dtype not in (jnp.float32, jnp.bfloat16):
        return f"computes in float32 or bfloat16, not in {case.dtype}"
    if width != case.value_width:
        return f"needs values as wide as keys, not {case.value_width} and {width}"
    if backend == "cudnn":
        return _cudnn_refusal(case)
    if backend == "pallas_gpu" and width not in (16, 32, 64, 128):
        return f"needs heads of width 16, 32, 64 or 128, not {width}"
    if backend == "pallas_tpu":
        if heads_per_block(heads, width) is None:
            return f"needs {LANES} features in a whole number of heads, not {heads} x {width}"
        if case.key_length > MAX_KEYS:
            return f"takes rows of at most {MAX_KEYS} keys, not {case.key_length}"
    return ""


def _cudnn_refusal(case: AttentionCase) -> str:
    *_, queries, width = case.query_shape
    if case.dtype != jnp.bfloat16:
        return f"computes in bfloat16, not in {case.dtype}"
    if case.has_bias or case.has_dropout:
        return f"has no {'bias of the scores' if case.has_bias else 'dropout of the weights'}"
    if width % 8 or width > 128:
        return f"needs heads of a width up to 128, in multiples of 8, not {width}"
    if queries % 2 or case.key_length % 2:
        return f"needs rows of even lengths, not {queries} and {case.key_length}"
    return ""


def heads_per_block(heads: int, width: int) -> int | None:
    """Returns the number of heads of one block on TPUs, None if their widths do not add up."""
    together = max(LANES // width, 1)
    if heads * width <= LANES or (heads % together == 0 and together * width % LANES == 0):
        return min(together, heads)
    return None
