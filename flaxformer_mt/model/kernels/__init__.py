"""What only accelerators need: attention and norms in one kernel, and products that share inputs.

`fused_attention` chooses a kernel, `attention_gpu` or `attention_tpu`, and makes it a
differentiable function of sharded arrays. `fused_norm` has the norm and its kernel.
"""
