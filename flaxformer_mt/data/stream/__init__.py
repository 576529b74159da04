"""Training batches: from encoded corpora to an infinite, resumable stream.

In the order of processing: `encoded_corpus`, `token_store`, `mixture` (the pairs of each epoch),
`packing` (pairs into rows), `blocks` (of planned rows, by `block_workers`), `batches` (rows into
batches), `training_stream` (all of these).
"""
