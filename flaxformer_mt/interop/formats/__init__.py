"""Whole models on disk: Hugging Face, Marian, CTranslate2, jax.export, run folders."""
