"""Search over any step function: greedy, beam search, sampling; it knows no model."""
