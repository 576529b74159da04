"""The lines of docs/results.md: what is trained, on which text, and how it is scored."""
