"""Machine translation with encoder-decoder Transformers in JAX."""
