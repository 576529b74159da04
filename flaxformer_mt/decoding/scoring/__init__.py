"""Scores, alignments and reports for given translations."""
