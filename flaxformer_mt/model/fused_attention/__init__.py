"""Attention in one kernel, which never writes its weights to memory.

`backends` chooses the kernel of a case, `operation` makes it a differentiable function of sharded
arrays, `blocks` has the mathematics of one block, `gpu` and `tpu` are the kernels.
"""
