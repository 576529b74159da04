"""Training batches: from encoded corpora to an infinite, resumable stream.

In the order of processing: `encoded_corpus` and `token_store` (tokens in memory and on disk),
`mixture` (the pairs of each epoch), `packing` (pairs into rows), `batches` (rows into batches),
`training_stream` (all of these) and `prefetch` (batches ahead of time).
"""
