"""Batches of fixed shapes: continuous batching for searches, length buckets for full passes."""
