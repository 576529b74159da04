"""The forms of a parity report: terminal text, JSON, HTML, plots, the table of families."""
