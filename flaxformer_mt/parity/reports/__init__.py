"""Parity reports: terminal text, JSON, HTML, plots, and the table of all families."""
