"""Decoding with a trained model: search, translation and scoring of text."""
