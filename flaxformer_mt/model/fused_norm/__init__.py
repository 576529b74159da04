"""Bias, dropout, residual and layer norm in one kernel: `operation.py` is its interface."""
