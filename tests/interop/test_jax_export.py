"""The `jax.export` format translates without this package, with the same results."""

import json
import subprocess
import sys

import jax
import numpy as np
import pytest
from jax import export

from flaxformer_mt.config import CorpusConfig, DataConfig, ExperimentConfig, TransformerConfig
from flaxformer_mt.data.corpora.corpus import ParallelCorpus, load_corpus
from flaxformer_mt.data.tokenizers.tokenizer import Tokenizers
from flaxformer_mt.decoding.translator import Translator
from flaxformer_mt.errors import UserError
from flaxformer_mt.interop.convert import convert
from flaxformer_mt.interop.formats import jax_server
from flaxformer_mt.interop.formats.bundle import ModelBundle
from flaxformer_mt.interop.formats.jax_export import export_functions, metadata, write
from flaxformer_mt.interop.weight_maps.mapping import by_path
from flaxformer_mt.model.cache import reorder_cache
from flaxformer_mt.model.transformer import Transformer

# Runs server.py with imports of this package and of Flax blocked.
ALONE = """
import runpy, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("flaxformer_mt", "flax"):
            raise ImportError(f"{name} is not installed")

sys.meta_path.insert(0, Absent())
runpy.run_path(sys.argv[1], run_name="__main__")
"""


@pytest.fixture(scope="module")
def exported(trained_run, tmp_path_factory):
    """A trained run, and its exported folder."""
    folder = tmp_path_factory.mktemp("exported") / "jax"
    assert convert("flaxformer_mt", "jax", trained_run, folder) == ()
    return ModelBundle.of_run(trained_run), folder


def test_a_server_without_this_package_translates_the_same(exported):
    bundle, folder = exported
    corpus = load_corpus(DataConfig(corpus="phrases", generated_pairs=400), "valid")
    lines = [*corpus.sources[:20], "", *corpus.sources[20:24]]
    translator = Translator(
        bundle.config.model, bundle.params, bundle.tokenizers, bundle.config.decode
    )
    expected = translator.translate(lines, beam_size=1)
    assert len(set(expected)) > 10
    result = subprocess.run(
        [sys.executable, "-I", "-c", ALONE, folder / "server.py"],
        input="".join(f"{line}\n" for line in lines).encode(),
        capture_output=True,
        check=True,
    )
    assert result.stdout.decode().split("\n") == [*expected, ""]
    assert sorted(path.name for path in folder.iterdir()) == [
        "encode.jax", "metadata.json", "parameters.npz", "reorder.jax", "server.py", "source.spm",
        "step.jax", "target.spm",
    ]  # fmt: skip


def load(folder, name):
    return export.deserialize(bytearray((folder / f"{name}.jax").read_bytes()))


def test_functions_are_for_any_size_and_platform(exported):
    bundle, folder = exported
    model, params = bundle.config.model, bundle.params
    functions = {name: load(folder, name) for name in ("encode", "step", "reorder")}
    assert {each.platforms for each in functions.values()} == {("cpu", "cuda", "tpu")}
    with np.load(folder / "parameters.npz") as file:
        parameters = dict(file)
    assert parameters.keys() == by_path(params).keys()

    transformer = Transformer(model)

    @jax.jit
    def direct(source, room, tokens, parents):
        encoded = transformer.apply({"params": params}, source, method="encode")
        cache = transformer.apply(
            {"params": params}, encoded, source, *room.shape, method="init_cache"
        )
        logits = []
        for position in range(tokens.shape[0]):
            positions = np.full(source.shape[0], position, np.int32)
            step, cache = transformer.apply(
                {"params": params}, tokens[position], cache, positions, method="decode_step"
            )
            cache = reorder_cache(cache, parents)
            logits.append(step)
        return logits

    # The server uses other sizes: 16 sentences, at least 16 tokens, and one hypothesis each.
    batch, length, beams, longest = 2, 5, 3, 4
    draw = np.random.default_rng(0)
    source = draw.integers(4, 300, (batch, length), np.int32)
    tokens = draw.integers(4, 300, (longest, batch, beams), np.int32)
    parents = draw.integers(0, beams, (batch, beams), np.int32)
    room = np.zeros((beams, longest), bool)
    cache = functions["encode"].call(parameters, source, room)
    for position, expected in enumerate(direct(source, room, tokens, parents)):
        positions = np.full(batch, position, np.int32)
        logits, cache = functions["step"].call(parameters, tokens[position], cache, positions)
        cache = functions["reorder"].call(cache, parents)
        np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-5)


def test_metadata_contains_what_a_server_needs(exported):
    bundle, folder = exported
    facts = json.loads((folder / "metadata.json").read_text())
    assert facts == json.loads(json.dumps(metadata(bundle)))
    model, tokenizer = bundle.config.model, bundle.tokenizers.source
    assert (facts["pad_id"], facts["bos_id"], facts["eos_id"]) == (0, 0, 2)
    assert facts["never_chosen"] == [0]
    assert facts["longest"] == model.max_length
    assert len(facts["pieces"]["source"]) == model.source_vocab_size == tokenizer.vocab_size
    assert facts["functions"].keys() == {"encode", "step", "reorder"}


@pytest.mark.parametrize("kind", ["bpe", "word"])
def test_the_server_encodes_tags_and_unknown_words_as_the_run(tmp_path, kind):
    texts = [">>de<< the house", ">>de<< the old houses"]
    tags = (CorpusConfig(tag=">>de<<"),)
    data = DataConfig(tokenizer=kind, byte_fallback=False, train_corpora=tags)
    tokenizers = Tokenizers.train([ParallelCorpus(texts, texts, "houses")], data)
    for name in ("source.spm", "target.spm"):
        (tmp_path / name).write_bytes(tokenizers.source.model)
    size = tokenizers.source.vocab_size
    config = ExperimentConfig(model=TransformerConfig(size, size, max_length=32))
    facts = json.loads(json.dumps(metadata(ModelBundle(config, {}, tokenizers))))
    server = jax_server.Text(tmp_path, facts)
    for text in (*texts, "the xxx yyy house", "xxx"):
        assert server.encode(text) == tokenizers.source.encode([text])[0]


@pytest.mark.parametrize(
    "options",
    [
        {"position_kind": "learned"},
        {"decoder_kind": "ssru"},
        {"position_kind": "rotary"},
        {"position_kind": "t5_relative"},
    ],
)
def test_other_models_can_be_exported(options):
    values = {"d_model": 8, "num_heads": 2, "d_ff": 8, "max_length": 32} | options
    model = TransformerConfig(20, 20, num_encoder_layers=1, num_decoder_layers=1, **values)
    tokens = np.ones((1, 1), np.int32)
    params = jax.eval_shape(Transformer(model).init, jax.random.key(0), tokens, tokens)["params"]
    functions = export_functions(model, params)
    logits, _ = functions["step"].out_tree.unflatten(functions["step"].out_avals)
    assert str(logits.shape) == "(b, w, 20)"


def test_language_models_are_refused(exported, tmp_path):
    bundle, _ = exported
    model = TransformerConfig(has_inputs=False)
    language_model = ModelBundle(ExperimentConfig(model=model), bundle.params, bundle.tokenizers)
    with pytest.raises(UserError, match=r"model\.has_inputs=False"):
        write(language_model, tmp_path / "jax")
    assert not list(tmp_path.iterdir())
