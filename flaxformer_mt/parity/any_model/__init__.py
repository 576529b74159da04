"""Compares any PyTorch module with any JAX function of the same weights."""
