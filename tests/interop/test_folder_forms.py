"""Folders of the Hub as libraries and people write them: tokens and outputs of transformers'."""

import copy
import dataclasses
import functools
import json
import re
import shutil
import sys

import chex
import hub_models
import jax
import numpy as np
import pytest
import safetensors.torch
import torch
import transformers
from rounding import rounding_tolerance
from toy_references import others_are_slow

import flaxformer_mt as fmt
from flaxformer_mt import interop
from flaxformer_mt.config import DataConfig
from flaxformer_mt.data.corpora.corpus import load_corpus
from flaxformer_mt.data.tokenizers.tokenizer import Tokenizers
from flaxformer_mt.decoding.sentence_decoder import longest_source
from flaxformer_mt.errors import UserError
from flaxformer_mt.interop.convert import convert
from flaxformer_mt.interop.formats import huggingface
from flaxformer_mt.interop.weight_maps.mapping import model_params
from flaxformer_mt.model.transformer import Transformer

PHRASES = load_corpus(DataConfig(corpus="phrases", generated_pairs=300), "train")
TEXTS = [*PHRASES.sources[:20], "", " a  b ", "</s> x", "<mask> y"]
TOKENIZER = "tokenizer_config.json"


@pytest.fixture
def copied(saved, tmp_path):
    """Returns a copy of a kind's folder; a setting of its tokenizer that is None is removed."""

    def copy(kind, **changes):
        shutil.copytree(saved(kind)[0], tmp_path / kind)
        edit(tmp_path / kind / TOKENIZER, **changes)
        return tmp_path / kind

    return copy


def edit(path, **changes):
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: v for key, v in values.items() if v is not None}))


def read(kind, folder):
    return huggingface.read(folder, family=hub_models.family_of(kind))


def assert_tokens_agree(tokenizers, theirs, texts=TEXTS):
    for side, argument in (("source", "text"), ("target", "text_target")):
        ours = getattr(tokenizers, side)
        ids = [[*each, ours.eos_id] for each in ours.encode(texts)]
        assert ids == theirs(**{argument: texts}).input_ids


@pytest.mark.parametrize("name", ["PreTrainedTokenizerFast", "TokenizersBackend", "Unheard"])
@pytest.mark.parametrize("kind", ["t5", "nllb", "mbart50", "bart"])
def test_special_tokens_do_not_hang_on_a_class(kind, name, copied):
    folder = copied(kind, tokenizer_class=name)
    bundle, notes = read(kind, folder)
    assert_tokens_agree(bundle.tokenizers, transformers.AutoTokenizer.from_pretrained(folder))
    is_noted = name == "Unheard" or kind in ("nllb", "mbart50")
    assert [note.split(" ")[0] for note in notes] == (
        [f"tokenizer_class={name.removesuffix('Fast')}"] if is_noted else []
    )


@pytest.mark.parametrize("kind", ["t5", "nllb", "bart"])
def test_special_tokens_without_settings(kind, copied):
    folder = copied(kind)
    own = {"nllb": transformers.NllbTokenizer}.get(kind, transformers.AutoTokenizer)
    (folder / TOKENIZER).unlink()
    source = read(kind, folder)[0].tokenizers.source
    theirs = own.from_pretrained(folder)
    assert [[*ids, source.eos_id] for ids in source.encode(TEXTS)] == theirs(TEXTS).input_ids


@pytest.mark.parametrize("has_settings", [True, False])
@pytest.mark.parametrize("kind", ["t5", "flan", "mbart50", "nllb", "bart"])
def test_vocabularies_of_earlier_versions(kind, has_settings, saved, copied):
    folder = copied(kind)
    (folder / "tokenizer.json").unlink()
    if not has_settings:
        (folder / TOKENIZER).unlink()
    shutil.copytree(hub_models.earlier(saved(kind)[0]), folder, dirs_exist_ok=True)
    if not has_settings and kind in ("mbart50", "nllb"):
        # transformers reads the first as mBART-25, and lacks a file of M2M-100 for the second.
        message = r"puts nothing before sentences and </s> en_XX|cannot be read by transformers"
        with pytest.raises(UserError, match=message):
            read(kind, folder)
        return
    bundle, _ = read(kind, folder)
    assert_tokens_agree(bundle.tokenizers, transformers.AutoTokenizer.from_pretrained(folder))
    huggingface.write(bundle, folder / "again", family=hub_models.family_of(kind))
    again = Tokenizers.load(folder / "again")
    assert again.target.fingerprint == bundle.tokenizers.target.fingerprint


def test_earlier_vocabularies_need_transformers(saved, copied, monkeypatch):
    folder = copied("bart")
    (folder / "tokenizer.json").unlink()
    shutil.copytree(hub_models.earlier(saved("bart")[0]), folder, dirs_exist_ok=True)
    monkeypatch.setitem(sys.modules, "transformers", None)
    message = r"to make it from vocab.json and merges.txt needs .* pip install transformers"
    with pytest.raises(UserError, match=message):
        read("bart", folder)


def test_a_class_that_transformers_implies_is_refused(copied):
    """transformers reads mBART's folders as mBART-25, which puts the language at the end."""
    folder = copied("mbart50", tokenizer_class=None)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    assert theirs("two").input_ids[-1] != theirs.eos_token_id
    with pytest.raises(UserError, match=r"takes MBartTokenizer: .* set MBart50Tokenizer"):
        read("mbart50", folder)
    # Earlier versions had the class in the other file.
    edit(folder / "config.json", tokenizer_class="MBart50Tokenizer")
    bundle, notes = read("mbart50", folder)
    assert_tokens_agree(bundle.tokenizers, transformers.AutoTokenizer.from_pretrained(folder))
    assert notes == ()


def test_a_class_of_another_kind_of_vocabulary_is_refused(copied):
    for kind, name in (("nllb", "BartTokenizer"), ("bart", "T5TokenizerFast")):
        with pytest.raises(UserError, match=rf"class={name[:9]}.* does not fit tokenizer"):
            Tokenizers.load(copied(kind, tokenizer_class=name))


def test_a_class_that_the_files_are_not_of_is_noted(copied):
    bundle, (note,) = read("m2m100", copied("m2m100", tokenizer_class="Unheard"))
    assert note.endswith("is not that of its files: they are read as M2M100Tokenizer")
    assert bundle.tokenizers.source.first_id is not None


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "puts nothing before sentences and nothing after them"),
        ([{"Sequence": {"id": "A", "type_id": 0}}], "nothing before sentences and nothing after"),
        (
            [
                {"Sequence": {"id": "A", "type_id": 0}},
                {"SpecialToken": {"id": "</s>", "type_id": 0}},
                {"SpecialToken": {"id": "eng_Latn", "type_id": 0}},
            ],
            "before sentences and </s> eng_Latn after them",
        ),
    ],
)
def test_sentences_that_end_in_another_way_are_refused(template, message, copied):
    folder = copied("nllb", tokenizer_class="TokenizersBackend")
    content = json.loads((folder / "tokenizer.json").read_text())
    processor = template and content["post_processor"] | {"single": template}
    edited = content | {"post_processor": processor}
    (folder / "tokenizer.json").write_text(json.dumps(edited))
    with pytest.raises(UserError, match=message):
        Tokenizers.load(folder)


@pytest.mark.parametrize("name", ["tyv_Cyrl_new", "kinyarwanda"])
@pytest.mark.parametrize("is_special", [False, True])
def test_added_languages_are_not_put_twice(name, is_special, saved, tmp_path):
    theirs = transformers.AutoTokenizer.from_pretrained(saved("nllb")[0])
    theirs.add_tokens(["[ENT]"])
    theirs.add_tokens([name, "[TAG]"], special_tokens=is_special)
    theirs.save_pretrained(tmp_path)
    edit(tmp_path / TOKENIZER, src_lang=name)
    source = Tokenizers.load(tmp_path).source
    with_language, plain = source.encode([f"{name} two dogs", "two dogs"])
    assert with_language[0] == theirs.convert_tokens_to_ids(name)
    assert with_language.count(with_language[0]) == plain.count(with_language[0]) == 1
    for tag in ("[ENT]", "[TAG]", "<mask>"):
        assert source.encode([f"{tag} two"])[0][:2] == [
            plain[0], theirs.convert_tokens_to_ids(tag),
        ]  # fmt: skip


# Weights and settings.

WEIGHTS, SEARCH = "model.safetensors", "generation_config.json"
EXTRA = {
    "model.encoder.version": torch.tensor([3.0]),
    "model.decoder.version": torch.tensor([3]),
    "model.encoder.embed_positions._float_tensor": torch.zeros(1),
    "model.encoder.embed_positions.position_ids": torch.arange(5),
    "n_averaged": torch.tensor(7),
}
EXTRA_OF = {
    "t5": {"n_averaged": torch.tensor(7)},
    "marian": {name: EXTRA[name] for name in [*EXTRA][-2:]},
    "m2m100": EXTRA | {"model.encoder.embed_positions.weights": torch.zeros(9, 16)},
}


def tensors_of(folder):
    return safetensors.torch.load_file(folder / WEIGHTS)


def as_bin(folder, model, prefix="", keys=()):
    content = {prefix + name: tensor for name, tensor in tensors_of(folder).items()}
    for key in keys:
        content = {key: content, "epoch": 3, "optimizer": {"state": {}, "param_groups": []}}
    torch.save(content, folder / "pytorch_model.bin")
    (folder / WEIGHTS).unlink()


def with_prefix(prefix, folder, model):
    tensors = {prefix + name: tensor for name, tensor in tensors_of(folder).items()}
    safetensors.torch.save_file(tensors, folder / WEIGHTS, {"format": "pt"})


def in_shards(folder, model):
    (folder / WEIGHTS).unlink()
    model.save_pretrained(folder, max_shard_size="20KB")
    assert (folder / f"{WEIGHTS}.index.json").exists()


def in_dtype(dtype, folder, model):
    copy.deepcopy(model).to(dtype).save_pretrained(folder)


def with_other_buffers(folder, model):
    kind = model.config.model_type.replace("_", "")
    extra = EXTRA_OF.get(kind, EXTRA)
    tensors = tensors_of(folder) | extra
    if hasattr(model, "final_logits_bias") and not model.final_logits_bias.any():
        del tensors["final_logits_bias"]
    safetensors.torch.save_file(tensors, folder / WEIGHTS, {"format": "pt"})


WEIGHT_FORMS = {
    "bin": as_bin,
    "shards": in_shards,
    "bfloat16": functools.partial(in_dtype, torch.bfloat16),
    "float16": functools.partial(in_dtype, torch.float16),
    "of DataParallel": functools.partial(with_prefix, "module."),
    "of Lightning, compiled": functools.partial(with_prefix, "model._orig_mod."),
    "of PEFT": functools.partial(with_prefix, "base_model.model."),
    "of DataParallel, bin": functools.partial(as_bin, prefix="module."),
    "of a training checkpoint": functools.partial(as_bin, keys=["model_state_dict"]),
    "under two keys": functools.partial(as_bin, prefix="module.", keys=["model", "state_dict"]),
    "buffers": with_other_buffers,
}
ALL_KINDS = ["t5", "flan", "mt5", "nllb", "m2m100", "mbart50", "bart", "marian"]


@pytest.mark.parametrize("form", WEIGHT_FORMS)
@pytest.mark.parametrize("kind", others_are_slow(ALL_KINDS, ["m2m100", "bart"]))
def test_weights_as_libraries_write_them(kind, form, saved, tmp_path):
    folder, theirs, _ = saved(kind)
    written, again = tmp_path / "written", tmp_path / "again"
    shutil.copytree(folder, written)
    WEIGHT_FORMS[form](written, theirs)
    bundle, notes = read(kind, written)
    assert notes == ()
    expected = read(kind, folder)[0].params
    if form in ("bfloat16", "float16"):
        narrow = {"bfloat16": jax.numpy.bfloat16, "float16": np.float16}[form]
        expected = jax.tree.map(lambda array: array.astype(narrow).astype("f4"), expected)
    chex.assert_trees_all_equal(model_params(bundle.params), model_params(expected))
    huggingface.write(bundle, again, family=hub_models.family_of(kind))
    dtypes = {tensor.dtype for tensor in tensors_of(again).values()}
    assert dtypes == {getattr(torch, form, torch.float32)}
    chex.assert_trees_all_equal(
        model_params(read(kind, again)[0].params), model_params(bundle.params)
    )
    if form == "bfloat16":
        published, back = tensors_of(written), tensors_of(again)
        assert published.keys() == back.keys()
        assert all(torch.equal(published[name], back[name]) for name in back)


def test_a_bias_that_a_file_omits_is_written_once_it_is_trained(saved, tmp_path):
    folder, theirs, _ = saved("bart")
    shutil.copytree(folder, tmp_path / "bart")
    with_other_buffers(tmp_path / "bart", theirs)
    bundle = read("bart", tmp_path / "bart")[0]
    huggingface.write(bundle, tmp_path / "same", family="mbart")
    assert "final_logits_bias" not in tensors_of(tmp_path / "same")
    bundle.params["output"]["bias"][3] = 1
    huggingface.write(bundle, tmp_path / "tuned", family="mbart")
    assert tensors_of(tmp_path / "tuned")["final_logits_bias"][0, 3] == 1


def test_a_file_of_weights_is_read_like_a_folder(saved, tmp_path):
    folder, theirs, _ = saved("bart")
    shutil.copytree(folder, tmp_path / "bart")
    with_other_buffers(tmp_path / "bart", theirs)
    with_prefix("module.", tmp_path / "bart", theirs)
    _, params = interop.load(
        "mbart", tmp_path / "bart" / WEIGHTS, num_heads=2, norm_position="post"
    )
    expected = read("bart", folder)[0].params
    chex.assert_trees_all_equal(interop.model_params(params), model_params(expected))


def untied(kind, size, tie_word_embeddings):
    """Returns a model of three or, without ties, four different tables."""
    options = {} if tie_word_embeddings else {"tie_word_embeddings": False}
    model = hub_models.random_model(hub_models.config(kind, size, **options))
    model.lm_head.weight = torch.nn.Parameter(0.3 * torch.randn_like(model.lm_head.weight))
    return model


@pytest.mark.parametrize(
    ("kind", "is_tied"), [("nllb", False), ("bart", True), ("mbart50", False), ("m2m100", True)]
)
def test_outputs_that_are_not_tied(kind, is_tied, saved, tmp_path):
    """Merged and fine-tuned models, of which transformers keeps both tables, whatever is set."""
    folder, published, _ = saved(kind)
    shutil.copytree(folder, tmp_path / "untied")
    untied(kind, published.config.vocab_size, is_tied).save_pretrained(tmp_path / "untied")
    path = tmp_path / "untied" / "config.json"
    edit(path, tie_word_embeddings=is_tied)
    bundle, _ = read(kind, tmp_path / "untied")
    config = bundle.config.model
    assert config.tie_embeddings == ("source_target" if is_tied else "none")
    family = hub_models.family_of(kind)
    huggingface.write(bundle, tmp_path / "same", family=family)
    assert tensors_of(tmp_path / "same").keys() == tensors_of(tmp_path / "untied").keys()
    huggingface.write(dataclasses.replace(bundle, origin={}), tmp_path / "new", family=family)
    draw = np.random.default_rng(0)
    source, target = (draw.integers(4, 40, (2, length)) for length in (7, 5))

    def logits(model):
        with torch.no_grad():
            return model(
                torch.tensor(source), decoder_input_ids=torch.tensor(target)
            ).logits.numpy()

    names = ("untied", "same", "new")
    models = [transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / name) for name in names]
    tolerance = rounding_tolerance(models[0], logits)
    apply = jax.jit(
        Transformer(config).apply, compiler_options={"xla_backend_optimization_level": 0}
    )
    ours = apply({"params": model_params(bundle.params)}, np.int32(source), np.int32(target))
    for model in models:
        np.testing.assert_allclose(np.asarray(ours), logits(model), rtol=0, atol=tolerance)


QUANTIZED = {
    "8-bit weights of bitsandbytes": {"q.SCB": torch.ones(2), "q.weight": torch.ones(2, 2).char()},
    "4-bit weights of bitsandbytes": {"q.weight.absmax": torch.ones(2)},
    "4-bit weights of GPTQ or AWQ": {"q.qweight": torch.ones(2, 2).int()},
    "is int8, but must be float32 or float64 (if it is quantized": {"q": torch.ones(2).char()},
}


@pytest.mark.parametrize("what", QUANTIZED)
def test_quantized_weights_are_named(what, copied):
    folder = copied("bart")
    safetensors.torch.save_file(tensors_of(folder) | QUANTIZED[what], folder / WEIGHTS)
    for source in (folder, folder / WEIGHTS):
        with pytest.raises(UserError, match=re.escape(what)):
            read("bart", folder) if source == folder else interop.load("mbart", source)
    edit(folder / "config.json", quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(UserError, match="quantized by gptq to 4 bits: take the model that was"):
        read("bart", folder)


@pytest.mark.parametrize(
    "name", [WEIGHTS, "model-00001-of-00002.safetensors", "config.json", "tokenizer.json"]
)
def test_pointers_of_git_lfs_are_named(name, saved, tmp_path):
    folder, model, _ = saved("bart")
    shutil.copytree(folder, tmp_path / "bart")
    if "of" in name:
        in_shards(tmp_path / "bart", model)
        name = sorted(path.name for path in (tmp_path / "bart").glob("model-*"))[-1]
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"
    (tmp_path / "bart" / name).write_text(pointer)
    with pytest.raises(UserError, match=rf"{name}: a pointer of Git LFS, .*git lfs pull"):
        fmt.load(tmp_path / "bart")


FOREIGN = {
    "a model of CTranslate2": ["model.bin", "shared_vocabulary.json", "config.json"],
    "a package of Argos Translate": ["metadata.json", "model/model.bin", "sentencepiece.model"],
    "a model of eole": ["model.00.safetensors", "vocab.json", "config.json"],
    "a checkpoint of T5X": ["checkpoint", "target.decoder.logits_dense.kernel/.zarray"],
    "a checkpoint of TensorFlow": ["checkpoint", "m-9.index", "m-9.data-00000-of-00001"],
    "a model of Keras": ["model.weights.h5", "config.json"],
    "a graph of ONNX": ["encoder_model.onnx", "decoder_model.onnx", "config.json"],
    "weights of Flax": ["flax_model.msgpack", "config.json"],
    "weights of TensorFlow": ["tf_model.h5", "config.json"],
}


@pytest.mark.parametrize("what", FOREIGN)
def test_folders_of_other_programs_are_named(what, tmp_path):
    for name in FOREIGN[what]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"model_type": "bart"}')
    for load in (fmt.load, functools.partial(read, "bart"), opus):
        with pytest.raises(UserError, match=f"holds {what}, which cannot be read: ") as caught:
            load(tmp_path)
        assert "\n" not in str(caught.value)
    assert (
        what not in ("weights of Flax", "weights of TensorFlow")
        or str(tmp_path) in str(caught.value).partition("from_pretrained(")[2]
    )


def opus(folder):
    return convert("marian-native", "marian", folder, folder / "new")


def test_forced_tokens_as_lists(saved, tmp_path):
    folder, *_ = saved("nllb")
    shutil.copytree(folder, tmp_path / "nllb")
    expected, _ = read("nllb", folder)
    path = tmp_path / "nllb" / SEARCH
    first = json.loads(path.read_text())["forced_bos_token_id"]
    lists = {"forced_bos_token_id": [first], "decoder_start_token_id": [2], "pad_token_id": [1]}
    edit(path, **lists, forced_eos_token_id=[2])
    edit(tmp_path / "nllb" / "config.json", **lists)
    bundle, notes = read("nllb", tmp_path / "nllb")
    assert notes == ()
    decode = dataclasses.replace(expected.config.decode, force_end=True)
    assert bundle.config == dataclasses.replace(expected.config, decode=decode)
    edit(path, forced_bos_token_id=[first, first + 1], forced_decoder_ids=[[1, first]])
    _, notes = read("nllb", tmp_path / "nllb")
    assert [note.partition("=")[0] for note in notes] == [
        "forced_bos_token_id",
        "forced_decoder_ids",
    ]


@pytest.mark.parametrize("more", [5, -5])
def test_weights_of_more_and_fewer_tokens_than_the_vocabulary(more, saved, tmp_path):
    folder, model, tokenizer = saved("bart")
    shutil.copytree(folder, tmp_path / "bart")
    resized = copy.deepcopy(model)
    resized.resize_token_embeddings(len(tokenizer) + more, mean_resizing=False)
    resized.save_pretrained(tmp_path / "bart")
    if more < 0:
        with pytest.raises(UserError, match=r"and none of '.*': add them in transformers"):
            read("bart", tmp_path / "bart")
        return
    bundle, _ = read("bart", tmp_path / "bart")
    assert bundle.config.model.target_vocab_size == len(tokenizer) + more


@pytest.mark.parametrize("kind", ["bart", "m2m100"])
def test_inputs_are_as_long_as_the_positions_that_a_model_has(kind, saved, tmp_path):
    folder, published, _ = saved(kind)
    shutil.copytree(folder, tmp_path / "long")
    settings = hub_models.config(kind, published.config.vocab_size, max_position_embeddings=700)
    hub_models.random_model(settings).save_pretrained(tmp_path / "long")
    for path, longest in ((tmp_path / "long", 700), (folder, 256 if kind == "bart" else 512)):
        config = read(kind, path)[0].config
        assert longest_source(config.decode, [config.model]) == longest
