"""Exported servers print the words of shared vocabularies as we do, whichever model knows them."""

import functools
import importlib.util
import json
import random

import opus_mt
import pytest

from flaxformer_mt.data.tokenizers.tokenizer import Tokenizers
from flaxformer_mt.interop.formats import jax_export

SOURCES = ["we enjoy this game", "they enjoy that game", "you enjoy it"] * 20
TARGETS = ["wir genießen das Spiel", "sie genießen jenes Spiel", "ihr genießt es"] * 20


@functools.cache
def spm():
    source = opus_mt.train_model(SOURCES, 60, user_defined_symbols=["\u2581enjoy"])
    return source, opus_mt.train_model(TARGETS, 60)


def server_text(folder, tokenizers):
    """`Text` of the exported `server.py`, with the metadata of a vocabulary."""
    for side, content in tokenizers.sentencepiece_models.items():
        (folder / f"{side}.spm").write_bytes(content)
    source, target = tokenizers.source, tokenizers.target
    facts = {
        "has_codes": False,
        "unk_id": {"source": source.unk_id, "target": target.unk_id},
        "pieces": {"source": jax_export._pieces(source), "target": jax_export._pieces(target)},
        "decoding": jax_export._decoding(target),
    }
    spec = importlib.util.spec_from_file_location("server", jax_export.SERVER)
    server = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(server)
    return server.Text(folder, json.loads(json.dumps(facts)))


@pytest.mark.parametrize("settings", [{}, {"clean_up_tokenization_spaces": True}])
@pytest.mark.parametrize("separate", [False, True])
def test_the_jax_server_decodes_every_token_as_we_do(tmp_path, separate, settings):
    opus_mt.write_tokenizer(tmp_path / "opus", *spm(), separate=separate, **settings)
    tokenizers = Tokenizers.load(tmp_path / "opus")
    text = server_text(tmp_path, tokenizers)
    target = tokenizers.target
    draw = random.Random(0)
    for _ in range(200):
        tokens = [draw.randrange(target.vocab_size) for _ in range(draw.randrange(8))]
        tokens = [token for token in tokens if token != target.eos_id]
        assert text.decode(tokens) == " ".join(target.decode([tokens])[0].splitlines())
    if not separate:
        enjoy = json.loads(target.files["vocab.json"])["\u2581enjoy"]
        assert text.decode([enjoy, enjoy]) == "enjoy enjoy"
        assert text.encode("enjoy") == [enjoy]
