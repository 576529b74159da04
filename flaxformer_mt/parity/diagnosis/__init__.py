"""Finds the cause of a first difference among the known causes."""
