"""Tokenizers: text to token ids and back, for learned and for published vocabularies."""
