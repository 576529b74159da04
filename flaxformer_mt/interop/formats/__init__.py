"""Formats of whole models: Hugging Face, Marian, CTranslate2, jax.export, run folders."""
