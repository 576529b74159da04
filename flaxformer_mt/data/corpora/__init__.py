"""Parallel corpora.

`corpus` opens corpora of every kind: text and TSV files (`text_files`), TensorFlow Datasets
(`tfds_reader`; `tfds_builder` builds them) and generated ones (`generated_phrases`). `filters`
drops training pairs.
"""
