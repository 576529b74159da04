"""The `jax.export` format translates without this package, with the same results."""

import dataclasses
import json
import re
import shutil
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
from flaxformer_mt.input_files import read_json
from flaxformer_mt.interop.convert import convert
from flaxformer_mt.interop.formats import jax_server
from flaxformer_mt.interop.formats.bundle import ModelBundle
from flaxformer_mt.interop.formats.jax_export import export_functions, metadata, write
from flaxformer_mt.interop.weight_maps.mapping import by_path
from flaxformer_mt.loading import load as load_model
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


@pytest.mark.slow
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
        "encode.jax", "metadata.json", "parameters.npz", "parity.json", "recipe", "reorder.jax",
        "server.py", "source.spm", "step.jax", "target.spm",
    ]  # fmt: skip


def test_a_line_that_the_server_cannot_translate_loses_no_other(exported):
    bundle, folder = exported
    longest = bundle.config.model.max_length
    lines = [b"two dogs", b"bad \xff", b"", b"dog " * longest, b"two dogs"]
    command = [sys.executable, "-I", "-c", ALONE, folder / "server.py"]
    result = subprocess.run(command, input=b"\n".join(lines), capture_output=True, check=False)
    first, *empty, last, end = result.stdout.decode().split("\n")
    assert empty == [""] * 3
    assert first == last != ""
    assert not end
    message = result.stderr.decode()
    assert "Traceback" not in message
    assert "server.py: error: line 2: 'utf-8' codec can't decode" in message
    assert re.search(
        rf"^server.py: error: line 4: \d+ tokens, but the model takes {longest}$", message, re.M
    )
    assert message.count("server.py: error: ") == 2
    assert result.returncode == 1


def load(folder, name):
    return export.deserialize(bytearray((folder / f"{name}.jax").read_bytes()))


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"position_kind": "learned"},
        {"decoder_kind": "ssru"},
        {"position_kind": "rotary"},
        {"position_kind": "t5_relative"},
        {"attention_window": 4},
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


def contents(folder):
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.fixture
def copy(exported, tmp_path):
    """A copy of the exported folder, to change it; its name has to be quoted for a shell."""
    return shutil.copytree(exported[1], tmp_path / "the export")


def set_version(folder, version):
    path = folder / "metadata.json"
    path.write_text(json.dumps(read_json(path) | {"jax_version": version}))


NOW = f"and this is JAX {jax.__version__}"
# How versions of JAX refuse functions: by the format of the file, or when they read the module
# that is in it, or by the number of devices, which later versions write otherwise.
REFUSED = {
    "file": lambda exported: b"\0" * 64,
    "module": lambda exported: dataclasses.replace(
        exported, mlir_module_serialized=b"ML\xefR"
    ).serialize(),
    "devices": lambda exported: dataclasses.replace(exported, nr_devices=3).serialize(),
}


@pytest.mark.parametrize(
    ("name", "kind", "version", "reason"),
    [
        ("encode", "file", "0.4.30", f"has expired: it is of JAX 0.4.30, {NOW};"),
        ("encode", "devices", "0.9.1", f"has expired: it is of JAX 0.9.1, {NOW};"),
        ("step", "module", "99.0", f"is too new: it is of JAX 99.0, {NOW}; update JAX, or"),
        ("step", "devices", jax.__version__, "is damaged:"),
    ],
)
def test_functions_that_jax_refuses_are_one_line(copy, monkeypatch, name, kind, version, reason):
    (copy / f"{name}.jax").write_bytes(REFUSED[kind](load(copy, name)))
    set_version(copy, version)
    monkeypatch.setattr(jax_server, "__file__", str(copy / "server.py"))
    with pytest.raises(SystemExit) as stopped:
        jax_server.main()
    assert stopped.value.code == (
        f"server.py: error: {copy} {reason} renew it with this version of JAX: "
        f"flaxformer-mt convert --from jax --to jax '{copy}' NEW"
    )


@pytest.mark.slow
def test_an_expired_export_is_renewed(exported, copy):
    original = contents(exported[1])
    for path in copy.glob("*.jax"):
        path.write_bytes(b"")
    set_version(copy, "0.4.30")
    new = copy.with_name("new")
    assert convert("jax", "jax", copy, new) == ()
    renewed = contents(new)
    assert renewed.keys() == original.keys()
    # The functions name the lines of the program that exported them, the certificate its source.
    assert {name for name in original if renewed[name] != original[name]} <= {
        "encode.jax", "reorder.jax", "step.jax", "parity.json"
    }  # fmt: skip
    sources = [[5, 6, 7], [8, 9]]
    first, second = (jax_server.Model(folder) for folder in (exported[1], new))
    assert first.translate(sources) == second.translate(sources) != []


def test_what_is_not_a_matter_of_versions_keeps_its_error(copy, monkeypatch):
    monkeypatch.setitem(sys.modules, "jax._src.export.serialization", None)
    with pytest.raises(ImportError):
        jax_server.Model(copy)
    (copy / "step.jax").unlink()
    with pytest.raises(FileNotFoundError, match=r"step\.jax"):
        jax_server.Model(copy)


@pytest.mark.slow
def test_an_export_is_read_back_without_its_functions(exported, copy):
    bundle, _ = exported
    (copy / "encode.jax").write_bytes(b"")
    run = copy.with_name("run")
    assert convert("jax", "flaxformer_mt", copy, run) == ()
    read = ModelBundle.of_run(run)
    assert read.config == bundle.config
    assert read.tokenizers.files == bundle.tokenizers.files
    jax.tree.map(np.testing.assert_array_equal, read.params, bundle.params)
    model = load_model(copy)
    assert model.family == "jax"
    assert model.translate("a dog", beam_size=1) == load_model(run).translate("a dog", beam_size=1)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda folder: shutil.rmtree(folder / "recipe"),
            r"there is no run folder .*export/recipe",
        ),
        (lambda folder: (folder / "metadata.json").unlink(), r"not a folder of --to jax"),
        (
            lambda folder: np.savez(folder / "parameters.npz", a=np.zeros(2)),
            r"parameters\.npz: parameter a is unexpected",
        ),
        (
            lambda folder: (folder / "parameters.npz").write_bytes(b"PK"),
            r"parameters\.npz: damaged, or not an \.npz file",
        ),
        (
            lambda folder: (folder / "parameters.npz").unlink(),
            r"parameters\.npz: there is no such file",
        ),
        (
            lambda folder: (folder / "recipe" / "tokenizer" / "joint.model").write_bytes(b""),
            r"joint\.model",
        ),
        (lambda folder: (folder / "recipe" / "config.json").unlink(), r"recipe .*config\.json"),
    ],
)
def test_an_export_that_cannot_be_renewed_is_one_line(copy, damage, message):
    damage(copy)
    with pytest.raises(UserError, match=message):
        convert("jax", "jax", copy, copy.with_name("new"))
    assert [path.name for path in copy.parent.iterdir()] == [copy.name]


def test_fields_of_an_export_cannot_be_overridden(copy):
    with pytest.raises(UserError, match="contains num_heads: fields cannot be overridden"):
        convert("jax", "jax", copy, copy.with_name("new"), {"num_heads": 2})
    with pytest.raises(UserError, match="is not a folder of --to jax"):
        convert("jax", "jax", copy / "parameters.npz", copy.with_name("new"))
