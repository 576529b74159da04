"""Lexical shortlists: learned from parallel text, and read to restrict the target vocabulary."""
