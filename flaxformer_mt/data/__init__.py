"""From text to batches.

A corpus (`corpus.py`) becomes tokens (`tokenizer.py`, `encoding.py`), the tokens are planned into
rows (`packing.py`), and the rows are read as batches (`batches.py`).
"""
