"""The token sequences that a translation must not contain."""

from flaxformer_mt.config import DecodeConfig
from flaxformer_mt.data.tokenizers.tokenizer import Tokenizer
from flaxformer_mt.errors import UserError


def bad_phrases(
    decode: DecodeConfig, target: Tokenizer, vocab_size: int
) -> tuple[tuple[int, ...], ...]:
    """Returns the sequences that `decode.bad_words` and `decode.bad_word_ids` exclude.

    Words that the target vocabulary does not know are left out: they cannot be generated.

    Raises:
      UserError: an id of `bad_word_ids` is not a token.
    """
    words = target.encode_parts([word.strip() for word in decode.bad_words])
    known = [phrase for phrase in words if target.unk_id not in phrase]
    ids = [[int(token) for token in phrase.split(",")] for phrase in decode.bad_word_ids]
    for token in (token for phrase in ids for token in phrase if token >= vocab_size):
        raise UserError(
            f"decode.bad_word_ids: {token} is not a token; ids must be less than {vocab_size}, the "
            "size of the vocabulary"
        )
    return tuple(tuple(phrase) for phrase in (*known, *ids) if phrase)
