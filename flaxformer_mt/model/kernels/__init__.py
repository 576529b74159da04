"""What only accelerators need: attention and norms in one kernel, and products that share inputs.

`fused_attention` and `fused_norm` choose a kernel and make it a differentiable function of sharded
arrays; `attention_gpu`, `attention_tpu` and `norm_gpu` are the kernels.
"""
