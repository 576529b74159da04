"""Tokenizers: text to token ids and back.

`tokenizer` defines the protocol and the vocabularies of a run, `sentencepiece_tokenizer` and
`marian_tokenizer` implement it. `sentencepiece_model` loads models, and `subword_sampling` segments
words at random.
"""
