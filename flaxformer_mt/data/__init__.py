"""From text to batches.

`corpora` reads, generates and filters parallel text; `tokenizers` converts between text and token
ids; `stream` stores tokens on disk, packs them into rows and yields training batches. `dataset`
combines them into the data of a run, which `sanity_checks` examines before training.
"""
