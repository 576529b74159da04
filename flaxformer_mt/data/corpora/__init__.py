"""Parallel text: reading, generating, filtering and checking it."""
