"""Parallel corpora: `corpus` opens those of every kind, by way of the other modules."""
