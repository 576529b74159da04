"""Exported servers print the words of shared vocabularies as we do, whichever model knows them."""

import dataclasses
import functools
import importlib.util
import io
import json
import random
import re
import sys
from pathlib import Path

import opus_mt
import pytest
import torch

from flaxformer_mt.data.tokenizers.tokenizer import Tokenizers
from flaxformer_mt.decoding.translator import Translator
from flaxformer_mt.interop.formats import huggingface, jax_export

OPUS = Path(__file__).parents[2] / "docs" / "opus-mt.md"
SOURCES = ["we enjoy this game", "they enjoy that game", "you enjoy it"] * 20
TARGETS = ["wir genießen das Spiel", "sie genießen jenes Spiel", "ihr genießt es"] * 20


@functools.cache
def spm():
    source = opus_mt.train_model(SOURCES, 60, user_defined_symbols=["\u2581enjoy"])
    return source, opus_mt.train_model(TARGETS, 60)


@pytest.fixture
def published(tmp_path):
    """A folder with a shared vocabulary, whose model repeats a piece of `source.spm` only."""
    vocabulary, _ = opus_mt.write_tokenizer(tmp_path / "opus", *spm())
    model = opus_mt.random_model(opus_mt.config((vocabulary, vocabulary)))
    with torch.no_grad():
        model.final_logits_bias[0, vocabulary["\u2581enjoy"]] = 1e4
    model.generation_config.update(num_beams=1, max_length=4)
    model.save_pretrained(tmp_path / "opus")
    return tmp_path / "opus"


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


@pytest.mark.slow
def test_the_script_for_ctranslate2_prints_our_translations(
    published, tmp_path, monkeypatch, capsys
):
    ctranslate2 = pytest.importorskip("flaxformer_mt.interop.formats.ctranslate2")
    bundle, _ = huggingface.read(published)
    decode = dataclasses.replace(bundle.config.decode, max_length=3, force_end=False)
    bundle = dataclasses.replace(bundle, config=dataclasses.replace(bundle.config, decode=decode))
    ours = Translator(
        bundle.config.model, bundle.params, bundle.tokenizers, bundle.config.decode
    ).translate(["we enjoy it"])
    assert ours == ["enjoy enjoy enjoy"]
    ctranslate2.write(bundle, tmp_path / "opus-ct2")
    (script,) = re.findall("```python\n(import json\n.*?)```", OPUS.read_text(), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.StringIO("we enjoy it\n"))
    exec(compile(script, str(OPUS), "exec"), {})
    assert capsys.readouterr().out.splitlines() == ours
