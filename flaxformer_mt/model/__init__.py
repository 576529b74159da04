"""The Transformer: plain functions for the mathematics, Linen modules that hold the parameters."""
