"""The attention of a sentence is that of the model, with its tokens, entropies and alignment."""

import jax
import numpy as np
import pytest
from talker import with_decode

from flaxformer_mt.decoding import attention_weights
from flaxformer_mt.decoding.attention_weights import AttentionMaps, sentence_attention
from flaxformer_mt.decoding.translator import Translator
from flaxformer_mt.errors import UserError
from flaxformer_mt.model.transformer import Transformer


def translator(talker):
    return Translator(*talker.parts)


def test_weights_are_those_of_the_model(talker):
    source, target = "die grüne Wiese", "ein Hund"
    found = sentence_attention(translator(talker), source, target)
    tokenizers, model = talker.tokenizers, talker.model
    sources = [*tokenizers.source.encode([source])[0], model.eos_id]
    targets = [*tokenizers.target.encode([target])[0], model.eos_id]
    inputs = [model.bos_id, *targets[:-1]]
    _, expected = jax.jit(Transformer(model).apply, static_argnames="return_attention")(
        {"params": talker.params}, np.array([sources]), np.array([inputs]), return_attention=True
    )
    by_kind = {
        "encoder": expected.encoder_self,
        "decoder": expected.decoder_self,
        "cross": expected.decoder_cross,
    }
    assert found.maps.keys() == by_kind.keys()
    for kind, weights in by_kind.items():
        maps = found.maps[kind]
        assert maps.weights.dtype == np.float32
        np.testing.assert_allclose(maps.weights, weights[:, 0], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(maps.weights.sum(axis=-1), 1, atol=1e-6)
    assert not np.triu(found.maps["decoder"].weights, 1).any()
    assert found.source_tokens == tuple(tokenizers.source.pieces(sources))
    assert found.target_tokens == tuple(tokenizers.target.pieces(targets))
    assert found.input_tokens == tuple(tokenizers.target.pieces(inputs))


def test_a_given_target_begins_as_translations_do(talker):
    target = talker.tokenizers.target
    piece = target.pieces(target.encode(["ein"])[0][:1])[0]
    first = piece.removeprefix("\u2581")
    assert target.encode_parts([first]) == [target.encode(["ein"])[0][:1]]
    begun = with_decode(talker, first_token=first)
    found = sentence_attention(translator(begun), "die grüne Wiese", "Hund")
    own = [*target.split(["Hund"])[0], *target.pieces([talker.model.eos_id])]
    assert found.target_tokens == (piece, *own)


def test_entropy_and_alignment():
    weights = np.array([[[[1, 0, 0, 0], [0.25] * 4, [0, 0.5, 0.5, 0], [0] * 4]]], np.float32)
    maps = AttentionMaps(weights)
    np.testing.assert_allclose(maps.entropies, [[[0, 2, 1, 0]]])
    assert maps.entropies.dtype == np.float32
    assert maps.alignment.tolist() == [[[0, 0, 1, 0]]]
    assert not np.signbit(maps.entropies).any()


def test_what_cannot_be_shown_is_an_error(talker, monkeypatch):
    ours = translator(with_decode(talker, max_source_length=4))
    with pytest.raises(UserError, match="the source is empty"):
        sentence_attention(ours, " ")
    with pytest.raises(UserError, match="the source has no tokens"):
        sentence_attention(ours, "\u2581")
    with pytest.raises(UserError, match=r"would be split into sentences of at most 4: give one"):
        sentence_attention(ours, "die grüne Wiese und ein Hund")
    with pytest.raises(TypeError, match="source must be a string, not"):
        sentence_attention(ours, ["Hund"])
    with pytest.raises(TypeError, match="target must be a string, not"):
        sentence_attention(ours, "Hund", 1)
    monkeypatch.setattr(attention_weights, "MAX_WEIGHTS", 100)
    with pytest.raises(UserError, match="more than 100 attention weights: give a shorter"):
        sentence_attention(ours, "die grüne Wiese", "die grüne Wiese")
