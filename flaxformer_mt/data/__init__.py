"""From text to batches.

A corpus (`corpus.py`) becomes tokens (`tokenizer.py`, `encoding.py`), which a training corpus keeps
on disk (`store.py`); the tokens are planned into rows (`packing.py`), and the rows are read as
batches (`batches.py`), for training in an endless stream (`stream.py`).
"""
