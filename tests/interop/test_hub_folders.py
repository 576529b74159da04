"""Folders of the Hugging Face Hub: the same tokens, values and files as published."""

import copy
import dataclasses
import importlib
import json
import shutil

import hub_models
import jax
import numpy as np
import pytest
import safetensors.torch
import torch
import transformers
from rounding import rounding_tolerance

from flaxformer_mt.cli import main
from flaxformer_mt.config import DataConfig
from flaxformer_mt.data.corpora.corpus import load_corpus
from flaxformer_mt.data.tokenizers.tokenizer import Tokenizers
from flaxformer_mt.decoding.scoring.alignment import words
from flaxformer_mt.decoding.sentence_decoder import Sentence, SentenceDecoder
from flaxformer_mt.decoding.translator import Translator, into_languages
from flaxformer_mt.errors import UserError
from flaxformer_mt.interop.convert import OWN, convert
from flaxformer_mt.interop.exports import exports
from flaxformer_mt.interop.formats import huggingface
from flaxformer_mt.interop.formats.bundle import ModelBundle
from flaxformer_mt.interop.weight_maps.mapping import model_params
from flaxformer_mt.model.transformer import Transformer
from flaxformer_mt.run_reader import Run

PHRASES = load_corpus(DataConfig(corpus="phrases", generated_pairs=300), "train")
TEXTS = [*PHRASES.sources, *PHRASES.targets]
ODD = ["", " ", "a  b ", "猫 x", "</s> a", "<unk>", "ﬁne Ⅷ é", "<extra_id_0> b", "a\tb"]


def special_tokens(config):
    return config.pad_id, config.bos_id, config.eos_id


def read(kind, folder) -> ModelBundle:
    bundle, notes = huggingface.read(folder, family=hub_models.family_of(kind))
    assert notes == ()
    return bundle


@pytest.mark.parametrize("kind", hub_models.KINDS)
def test_tokens_are_those_of_transformers(kind, saved):
    folder, _, theirs = saved(kind)
    tokenizers = Tokenizers.load(folder)
    for side, argument in (("source", "text"), ("target", "text_target")):
        ours = getattr(tokenizers, side)
        ids = ours.encode([*TEXTS, *ODD])
        if kind in ("fsmt", "t5gemma") and side == "target":
            continue  # transformers encodes targets as sources.
        assert [ours.with_source_end(each) for each in ids] == theirs(
            **{argument: [*TEXTS, *ODD]}
        ).input_ids
        # Ours ends at the end token; theirs keeps M2M-100's languages.
        whole = [each for each in ids if ours.eos_id not in each]
        bare = [[token for token in each if token not in ours.language_ids] for each in whole]
        decoder = tokenizers.target if kind == "fsmt" else ours
        assert decoder.decode(whole) == theirs.batch_decode(bare, skip_special_tokens=True)
        assert [len(pieces) for pieces in ours.split(TEXTS)] == [len(i) for i in ids[: len(TEXTS)]]
        assert (ours.pad_id, ours.eos_id, ours.unk_id) == (
            theirs.pad_token_id, theirs.eos_token_id or theirs.sep_token_id, theirs.unk_token_id,
        )  # fmt: skip
        assert ours.vocab_size >= max(map(max, filter(None, ids)))
        assert ours.encode([]) == ours.encode_parts([]) == []


@pytest.mark.parametrize("kind", ["nllb", "mbart50"])
def test_added_tokens_are_no_languages(kind, saved, tmp_path):
    theirs = copy.deepcopy(saved(kind)[2])
    theirs.add_tokens(["[ENT]"])
    theirs.save_pretrained(tmp_path / "added")
    source = Tokenizers.load(tmp_path / "added").source
    text = f"[ENT] {TEXTS[0]}"
    assert [[*ids, source.eos_id] for ids in source.encode([text])] == theirs([text]).input_ids


@pytest.mark.slow
@pytest.mark.parametrize("kind", hub_models.KINDS)
def test_folder_to_run_to_folder(kind, saved, tmp_path):
    folder, theirs, _ = saved(kind)
    bundle = read(kind, folder)
    huggingface.write(bundle, tmp_path / "again", family=hub_models.family_of(kind))
    names = sorted(path.name for path in folder.iterdir())
    assert sorted(path.name for path in (tmp_path / "again").iterdir()) == names
    for name in names:
        assert (tmp_path / "again" / name).read_bytes() == (folder / name).read_bytes(), name
    if kind == "fsmt":
        return  # It cannot make its causal mask in float64, from which the tolerance comes.

    config = bundle.config.model
    draw = np.random.default_rng(0)
    source, target = (draw.integers(3, 40, (2, n)) for n in (7, 5))
    source[1, 4:], target[:, 0] = config.pad_id, config.bos_id

    def logits(model):
        with torch.no_grad():
            return model(
                input_ids=torch.tensor(source),
                attention_mask=torch.tensor(source != config.pad_id),
                decoder_input_ids=torch.tensor(target),
            ).logits.numpy()

    apply = jax.jit(
        Transformer(config).apply, compiler_options={"xla_backend_optimization_level": 0}
    )
    ours = apply({"params": model_params(bundle.params)}, np.int32(source), np.int32(target))
    tolerance = rounding_tolerance(theirs, logits)
    np.testing.assert_allclose(np.asarray(ours), logits(theirs), rtol=0, atol=tolerance)


def test_a_folder_of_a_model_without_output_layer_is_read(saved, tmp_path):
    folder, theirs, _ = saved("bart")
    shutil.copytree(folder, tmp_path / "base")
    theirs.model.save_pretrained(tmp_path / "base")
    with torch.no_grad():
        assert not theirs.final_logits_bias.any()
    whole, base = read("bart", folder), huggingface.read(tmp_path / "base", family="mbart")[0]
    jax.tree.map(
        np.testing.assert_array_equal, model_params(base.params), model_params(whole.params)
    )


def test_the_dtype_of_a_folder_is_that_of_its_weights(saved, tmp_path):
    folder, theirs, _ = saved("m2m100")
    shutil.copytree(folder, tmp_path / "half")
    copy.deepcopy(theirs).half().save_pretrained(tmp_path / "half")
    bundle = read("m2m100", tmp_path / "half")
    huggingface.write(bundle, tmp_path / "same", family="m2m100")
    tuned = jax.tree.map(lambda array: array + np.float32(1e-6), model_params(bundle.params))
    trained = dataclasses.replace(bundle, params={**bundle.params, **tuned})
    huggingface.write(trained, tmp_path / "tuned", family="m2m100")
    names = {"same": torch.float16, "tuned": torch.float32}
    for name, dtype in names.items():
        model = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / name, dtype="auto")
        assert model.dtype == dtype


def test_madlad_is_read_as_it_is_published(saved, tmp_path):
    """The start token is <unk>, the table has the decoder's name, tags begin every segment."""
    folder, _, theirs = saved("madlad")
    shutil.copytree(folder, tmp_path / "madlad")
    path = tmp_path / "madlad" / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    tensors["decoder.embed_tokens.weight"] = tensors.pop("shared.weight")
    safetensors.torch.save_file(tensors, path, {"format": "pt"})
    bundle = read("madlad", tmp_path / "madlad")
    assert special_tokens(bundle.config.model) == (1, 0, 2)
    huggingface.write(bundle, tmp_path / "again", family="t5")
    assert safetensors.torch.load_file(tmp_path / "again" / path.name).keys() == tensors.keys()
    model = bundle.config.model, model_params(bundle.params), bundle.tokenizers
    decoder = SentenceDecoder([model[:2]], dataclasses.replace(bundle.config.decode), model[2])
    tag = theirs.convert_tokens_to_ids("<2de>")
    segments = decoder._split("<2de> " + " ".join(PHRASES.sources[:5]), 20)
    assert len(segments) > 2
    assert all(tag in each.tokens[:2] for each in segments)


@pytest.fixture(scope="module")
def translator(saved):
    bundle = read("nllb", saved("nllb")[0])
    return Translator(
        bundle.config.model, model_params(bundle.params), bundle.tokenizers, bundle.config.decode
    )


def test_each_sentence_can_have_its_languages(translator, saved):
    _, _, theirs = saved("nllb")
    assert translator.decode.first_token == "fra_Latn"
    sentences = [
        Sentence("one two"),
        Sentence("deu_Latn zwei", prefix="spa_Latn"),
        Sentence("one", prefix="deu_Latn two"),
        Sentence("one", prefix="two"),
    ]
    options = {"beam_size": 1, "max_length": 6}
    lists = translator.translate_n_best(sentences, **options)
    firsts = [hypotheses[0].tokens[0] for hypotheses in lists]
    names = ["fra_Latn", "spa_Latn", "deu_Latn", "fra_Latn"]
    assert theirs.convert_ids_to_tokens(firsts) == names
    own = [*lists[2], *lists[3]]
    assert all(hypothesis.text.startswith("two") for hypothesis in own)
    assert "fra_Latn" not in lists[0][0].text
    source = translator.tokenizers.source
    assert source.pieces([ids[0] for ids in source.encode(["one", "deu_Latn zwei"])]) == [
        "eng_Latn", "deu_Latn",
    ]  # fmt: skip
    german = [Sentence("one", prefix="two")]
    (hypotheses,) = translator.translate_n_best(german, first_token="deu_Latn", **options)
    assert hypotheses[0].tokens == lists[2][0].tokens


def test_words_of_byte_level_vocabularies_begin_with_a_space(saved):
    tokenizer = Tokenizers.load(saved("bart")[0]).source
    (pieces,) = tokenizer.split(["one two three"])
    assert [piece for piece in pieces if piece.startswith("\u2581")][-1:]
    assert max(words(pieces[1:])) == 2
    assert tokenizer.pieces(tokenizer.encode(["one two three"])[0]) == pieces


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "german"), [("nllb", "deu_Latn"), ("m2m100", "__de__"), ("mbart50", "de_DE")]
)
def test_references_name_the_language_to_translate_into(kind, german, saved, tmp_path, capfd):
    run, bundle = tmp_path / "run", read(kind, saved(kind)[0])
    convert(hub_models.family_of(kind), OWN, saved(kind)[0], run)
    options = {"beam_size": 1, "max_length": 4}
    into_german = Sentence("one two", prefix=german)
    translations = Translator(
        bundle.config.model, model_params(bundle.params), bundle.tokenizers, bundle.config.decode
    ).translate([into_german, "one two"], **options)
    texts = ["one two"] * 2, [f"{german} {translations[0]}", translations[1]]
    sentences, references = into_languages(
        texts[0], [texts[1], translations], bundle.tokenizers.target
    )
    assert sentences == [into_german, Sentence("one two")]
    assert references == [translations, translations]
    assert Run(run).evaluate(*texts, **options)["ter"] == 0
    (tmp_path / "source").write_text("one two\none two\n")
    (tmp_path / "target").write_text(f"{german} {translations[0]}\n{translations[1]}\n")
    short = ["--run", str(run), "--beam-size", "1", "--max-length", "4"]
    files = ["--source", str(tmp_path / "source"), "--reference", str(tmp_path / "target")]
    assert main(["evaluate", *short, *files]) == 0
    assert json.loads(capfd.readouterr().out)["ter"] == 0


def test_a_language_that_there_is_none_of_is_refused(translator):
    with pytest.raises(UserError, match=r"decode.first_token=French is not a token"):
        translator.translate("one", first_token="French")


def test_the_first_token_is_written_for_generate(saved, tmp_path):
    bundle = read("nllb", saved("nllb")[0])
    decode = dataclasses.replace(bundle.config.decode, first_token="deu_Latn")
    config = dataclasses.replace(bundle.config, decode=decode)
    changed = dataclasses.replace(bundle, config=config)
    assert huggingface.write(changed, tmp_path / "again", family="m2m100") == ()
    written = json.loads((tmp_path / "again" / "generation_config.json").read_text())
    (expected,) = bundle.tokenizers.target.encode_parts(["deu_Latn"])[0]
    assert written["forced_bos_token_id"] == expected
    assert read("nllb", tmp_path / "again").config.decode == decode


@pytest.mark.parametrize("is_forced", [False, True])
def test_a_missing_target_language_is_noted(is_forced, saved, tmp_path):
    for path in saved("mbart50")[0].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    for name, field in (
        ("tokenizer_config.json", "tgt_lang"),
        ("generation_config.json", "forced_bos_token_id"),
    ):
        if is_forced and name == "generation_config.json":
            continue
        settings = json.loads((tmp_path / name).read_text())
        del settings[field]
        (tmp_path / name).write_text(json.dumps(settings))
    _, notes = huggingface.read(tmp_path, family="mbart")
    (note,) = notes
    assert note.startswith("no target language is set: ")
    assert ("--first-token" in note) != is_forced
    assert "to train or score, set tgt_lang" in note


def test_a_missing_start_token_is_noted(saved, tmp_path):
    for path in saved("mbart50")[0].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    for name in ("config.json", "generation_config.json"):
        settings = json.loads((tmp_path / name).read_text())
        settings.pop("decoder_start_token_id", None)
        (tmp_path / name).write_text(json.dumps(settings))
    bundle, notes = huggingface.read(tmp_path, family="mbart")
    (note,) = notes
    assert note.startswith("no decoder_start_token_id is set: translations start from token 2,")
    assert bundle.config.model.bos_id == 2
    assert huggingface.read(tmp_path, {"bos_id": 0}, family="mbart")[1] == ()
    assert huggingface.read(tmp_path, {"max_length": 256}, family="mbart")[1] == notes


def test_a_missing_limit_of_the_length_is_noted(saved, tmp_path):
    for path in saved("mbart50")[0].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    search = json.loads((tmp_path / "generation_config.json").read_text())
    del search["max_length"]
    (tmp_path / "generation_config.json").write_text(json.dumps(search))
    _, (note,) = huggingface.read(tmp_path, family="mbart")
    assert note.startswith("no max_length is set: `generate` ends translations after 20 tokens")
    search["max_new_tokens"] = 30
    (tmp_path / "generation_config.json").write_text(json.dumps(search))
    assert huggingface.read(tmp_path, family="mbart")[1] == ()


@pytest.mark.parametrize("kind", ["nllb", "t5", "bart"])
def test_exports_that_the_vocabulary_prevents_are_not_offered(kind, saved):
    bundle = read(kind, saved(kind)[0])
    assert not bundle.tokenizers.has_sentencepiece
    offered = exports(bundle.config.model, bundle.tokenizers.has_sentencepiece)
    assert offered["jax"] == "its vocabulary is not a SentencePiece model"
    assert not offered["ctranslate2"]


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("nllb", {"tokenizer_class": "MBartTokenizer"}, "language after the end"),
        ("nllb", {"tgt_lang": "french"}, "has no french"),
        ("nllb", {"pad_token": "<nothing>"}, "has no <nothing>"),
        ("m2m100", {"src_lang": "klingon"}, "the language 'klingon'"),
        ("m2m100", {"language_codes": "new"}, "language_codes='new'"),
    ],
)
def test_settings_of_a_vocabulary_that_cannot_be_followed(kind, changes, message, saved, tmp_path):
    for path in saved(kind)[0].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | changes))
    with pytest.raises(UserError, match=message):
        Tokenizers.load(tmp_path)


def test_a_damaged_vocabulary_is_refused_in_one_line(saved, tmp_path):
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(UserError, match=r"tokenizer.json is damaged: ") as caught:
        Tokenizers.load(tmp_path)
    assert "\n" not in str(caught.value)


PANICS = {
    "a character map of noise": {
        "normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA/w=="}
    },
    "an empty regular expression": {
        "normalizer": {"type": "Replace", "pattern": {"Regex": "(" * 5000}, "content": ""}
    },
    "no model": {"model": {"type": "Unigram", "unk_id": 7, "vocab": [], "byte_fallback": False}},
}  # fmt: skip


@pytest.mark.parametrize("name", PANICS)
def test_a_vocabulary_at_which_the_library_panics_is_refused_in_one_line(
    name, saved, tmp_path, capfd
):
    folder, *_ = saved("t5")
    values = json.loads((folder / "tokenizer.json").read_text()) | PANICS[name]
    (tmp_path / "tokenizer.json").write_text(json.dumps(values))
    (tmp_path / "tokenizer_config.json").write_bytes(
        (folder / "tokenizer_config.json").read_bytes()
    )
    with pytest.raises(UserError, match=r"tokenizer.json (is damaged|has no)") as caught:
        Tokenizers.load(tmp_path)
    assert "\n" not in str(caught.value)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(("kind", "target"), [("nllb", "jax_export"), ("m2m100", "huggingface")])
def test_formats_that_cannot_have_the_vocabulary_refuse_it(kind, target, saved, tmp_path):
    module = importlib.import_module(f"flaxformer_mt.interop.formats.{target}")
    bundle = read(kind, saved(kind)[0])
    with pytest.raises(UserError, match=r"marian has norm_position=post|its vocabulary is not"):
        module.write(bundle, tmp_path / "exported")
    assert not [*tmp_path.iterdir()]


def test_a_folder_of_another_family_is_refused(saved):
    with pytest.raises(UserError, match=r"is of model_type=t5, not m2m_100"):
        huggingface.read(saved("t5")[0], family="m2m100")


def _with_settings(folder, changed, **changes):
    """Copies a folder of T5Gemma with other settings: {"decoder.head_dim": 8}."""
    shutil.copytree(folder, changed)
    settings = json.loads((changed / "config.json").read_text())
    for name, value in changes.items():
        stack, field = name.split(".")
        settings[stack][field] = value
    (changed / "config.json").write_text(json.dumps(settings))
    return changed


FULL = {f"{stack}.layer_types": ["full_attention"] * 2 for stack in ("encoder", "decoder")}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"decoder.hidden_size": 32}, "hidden_size of 16 in its encoder and 32 in its decoder"),
        ({"decoder.sliding_window": 5}, "sliding_window of 4 in its encoder and 5"),
        ({"decoder.query_pre_attn_scalar": 8, "encoder.query_pre_attn_scalar": 8}, "only 6"),
        ({"encoder.layer_types": ["full_attention", "sliding_attention"]}, "encoder.layer_types"),
        ({"decoder.layer_types": FULL["decoder.layer_types"]}, "layer_types and sliding_window"),
    ],
)
def test_settings_of_t5gemma_that_the_model_cannot_have(changes, message, saved, tmp_path):
    folder = _with_settings(saved("t5gemma")[0], tmp_path / "changed", **changes)
    with pytest.raises(UserError, match=message):
        huggingface.read(folder, family="t5gemma")


def test_settings_of_t5gemma_are_kept(saved, tmp_path):
    """No caps, no windows, and the base as earlier versions of transformers write it."""
    values = {"attn_logit_softcapping": None, "rope_parameters": None, "rope_theta": 500.0}
    changes = {f"{stack}.{n}": v for stack in ("encoder", "decoder") for n, v in values.items()}
    folder = _with_settings(saved("t5gemma")[0], tmp_path / "changed", **changes, **FULL)
    bundle = read("t5gemma", folder)
    model = bundle.config.model
    found = (model.score_cap, model.logit_cap, model.attention_window, model.position_base)
    assert found == (0.0, 30.0, 0, 500.0)
    assert exports(model)["ctranslate2"] == "norm_position=both"
    huggingface.write(bundle, tmp_path / "again", family="t5gemma")
    name = "config.json"
    assert (tmp_path / "again" / name).read_bytes() == (folder / name).read_bytes()
