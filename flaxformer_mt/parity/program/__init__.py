"""A JAX function as equations, and where and why a reference computes other values."""
