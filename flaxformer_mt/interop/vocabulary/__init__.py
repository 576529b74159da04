"""Vocabularies of trained models made smaller or larger, and the rows of their tables with them."""
