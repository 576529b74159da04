"""Text to token ids and back: SentencePiece, and Marian's vocabularies."""
