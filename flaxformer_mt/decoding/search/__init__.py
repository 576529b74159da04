"""Greedy search, beam search and sampling over a step function, independent of any model."""
