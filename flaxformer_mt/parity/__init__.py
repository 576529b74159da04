"""Checks that a published Transformer and ours are the same function."""
