"""Hugging Face folders: converted runs compute the same, and converting back is lossless."""

import dataclasses
import functools
import json
import os
import re
import shutil
import warnings

import chex
import jax
import numpy as np
import opus_mt
import pytest
import safetensors.numpy
import talker
import torch
from drawn_params import drawn_params
from rounding import rounding_tolerance

from flaxformer_mt.cli import main
from flaxformer_mt.config import DataConfig, DecodeConfig, TransformerConfig
from flaxformer_mt.data.corpora.corpus import load_corpus
from flaxformer_mt.errors import UserError
from flaxformer_mt.interop.convert import OWN, convert
from flaxformer_mt.interop.formats import generation_config, huggingface
from flaxformer_mt.interop.formats.bundle import ModelBundle
from flaxformer_mt.model.transformer import Transformer
from flaxformer_mt.trained_model import load_run

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from transformers import MarianMTModel, MarianTokenizer

PHRASES = load_corpus(DataConfig(corpus="phrases", generated_pairs=300), "train")


@functools.cache
def spm():
    return tuple(opus_mt.train_model(texts, 150) for texts in (PHRASES.sources, PHRASES.targets))


def save(folder, *, separate=False, shards=False, **options):
    """A folder as written by transformers 5."""
    vocabularies = opus_mt.write_tokenizer(folder, *spm(), separate=separate)
    model = opus_mt.random_model(
        opus_mt.config(vocabularies, share_encoder_decoder_embeddings=not separate, **options)
    )
    model.save_pretrained(folder, max_shard_size="20KB" if shards else "1GB")
    return model


def save_old(folder):
    """A folder of early transformers 4: without generation_config.json or omitted tensors."""
    model = save(folder)
    state = model.state_dict()
    assert {"lm_head.weight", "model.encoder.embed_positions.weight"} <= state.keys()
    (folder / "model.safetensors").unlink()
    torch.save(state, folder / "pytorch_model.bin")
    settings = json.loads((folder / "config.json").read_text())
    search = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").unlink()
    for name in ("share_encoder_decoder_embeddings", "tie_word_embeddings", "decoder_vocab_size"):
        del settings[name]
    settings |= {name: search[name] for name in ("num_beams", "max_length", "bad_words_ids")}
    settings |= {"normalize_before": False, "extra_pos_embeddings": 63}
    (folder / "config.json").write_text(json.dumps(settings))
    return model


def save_half(folder):
    """A folder in float16, like the larger published models."""
    save(folder).half().save_pretrained(folder)
    return MarianMTModel.from_pretrained(folder, dtype=torch.float32).eval()


def save_without_defaults(folder):
    """A folder whose config.json omits what is transformers' default."""
    model = save(folder, activation_function="gelu", scale_embedding=False)
    settings = json.loads((folder / "config.json").read_text())
    del settings["activation_function"], settings["scale_embedding"]
    (folder / "config.json").write_text(json.dumps(settings))
    return model


VARIANTS = {
    "new": save,
    "old": save_old,
    "half": save_half,
    "shards": functools.partial(save, shards=True),
    "separate": functools.partial(save, separate=True),
    "separate, untied": functools.partial(save, separate=True, tie_word_embeddings=False),
    "unscaled gelu": functools.partial(save, activation_function="gelu", scale_embedding=False),
    "without defaults": save_without_defaults,
    "rows to spare": functools.partial(save, vocab_size=400, decoder_vocab_size=400),
}


@functools.cache
def logits_of(config):
    return jax.jit(
        Transformer(config).apply, compiler_options={"xla_backend_optimization_level": 0}
    )


def our_logits(config: TransformerConfig, params, source, target):
    return np.asarray(logits_of(config)({"params": params}, source, target))


def their_logits(model, source, target):
    with torch.no_grad():
        return model(
            input_ids=torch.tensor(source, dtype=torch.int64),
            attention_mask=torch.tensor(source != model.config.pad_token_id),
            decoder_input_ids=torch.tensor(target, dtype=torch.int64),
        ).logits.numpy()


def assert_logits_agree(ours, model, source, target):
    """Asserts that logits equal those of a Hugging Face model up to rounding."""
    tolerance = rounding_tolerance(model, lambda each: their_logits(each, source, target))
    chex.assert_trees_all_close(ours, their_logits(model, source, target), rtol=0, atol=tolerance)


def tokens(model, seed=0):
    """Returns sources, one padded, and decoder inputs that begin with the start token."""
    size, pad = model.config.vocab_size, model.config.pad_token_id
    draw = np.random.default_rng(seed)
    source, target = (draw.integers(3, min(size, pad or size), (2, n), np.int32) for n in (7, 5))
    source[1, 4:] = pad
    target[:, 0] = model.config.decoder_start_token_id
    return source, target


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_folder_to_run_to_folder(name, tmp_path):
    published, run, again = (tmp_path / part for part in ("published", "run", "again"))
    theirs = VARIANTS[name](published)
    assert convert("marian", OWN, published, run) == ()
    ours = load_run(run)
    assert ours.step == 0
    source, target = tokens(theirs)
    computed = our_logits(ours.config.model, ours.params, source, target)
    assert_logits_agree(computed, theirs, source, target)
    text = [">>fra<< twelve kilometers", "seven </s>"]
    their_tokenizer = MarianTokenizer.from_pretrained(published)
    expected = their_tokenizer(text, add_special_tokens=False).input_ids
    assert ours.tokenizers.source.encode(text) == expected
    assert ours.config.data.source_language == "en"
    assert ours.config.decode.beam_size == 4
    assert ours.config.decode.length_penalty_kind == "average"

    assert convert(OWN, "marian", run, again) == ()
    for file in ("source.spm", "target.spm", "vocab.json", "tokenizer_config.json"):
        assert (again / file).read_bytes() == (published / file).read_bytes()
    read = functools.partial(huggingface.read_tensors, ignores=lambda name: False)
    before, after = map(read, (published, again))
    assert before[1] == after[1]
    chex.assert_trees_all_equal(after[0], before[0])
    chex.assert_trees_all_equal_dtypes(after[0], before[0])
    settings = json.loads((published / "config.json").read_text())
    assert json.loads((again / "config.json").read_text()) == settings
    if (published / "generation_config.json").exists():
        search = json.loads((published / "generation_config.json").read_text())
        assert json.loads((again / "generation_config.json").read_text()) == search
    loaded = MarianMTModel.from_pretrained(again, dtype=torch.float32).eval()
    chex.assert_trees_all_equal(
        their_logits(loaded, source, target), their_logits(theirs, source, target)
    )
    assert loaded.generation_config.num_beams == 4
    assert loaded.generation_config.bad_words_ids == [[theirs.config.pad_token_id]]


def test_a_run_of_ours_to_hugging_face_and_back(trained_run, tmp_path, capsys):
    exported, again = tmp_path / "exported", tmp_path / "again"
    command = ["convert", "--from", OWN, "--to", "marian", str(trained_run), str(exported)]
    assert main(command) == 0
    out, err = capsys.readouterr()
    assert "length_penalty_kind=gnmt is not supported by generate" in err
    assert out.startswith(f"{exported}: ")
    assert {path.name for path in exported.iterdir()} == set(re.findall(r"(?m)^  (\S+): ", out))
    ours = load_run(trained_run)
    model = MarianMTModel.from_pretrained(exported).eval()
    tokenizer = MarianTokenizer.from_pretrained(exported)
    texts = ["", "twelve kilometers", "猫 </s> <unk>", "<pad>  a", *PHRASES.sources[:50]]
    for side, own in (("text", ours.tokenizers.source), ("text_target", ours.tokenizers.target)):
        ids = own.encode(texts)
        assert tokenizer(**{side: texts}).input_ids == [[*each, own.eos_id] for each in ids]
        assert tokenizer.batch_decode(ids, skip_special_tokens=True) == own.decode(ids)
    source, target = tokens(model)
    assert_logits_agree(our_logits(ours.model, ours.params, source, target), model, source, target)
    # Position tables and copies of tied tensors are omitted.
    names = safetensors.numpy.load_file(exported / "model.safetensors").keys()
    assert "model.shared.weight" in names
    assert not {"lm_head.weight", "model.decoder.embed_positions.weight"} & names

    assert main(["convert", "--from", "marian", str(exported), str(again)]) == 0
    back = load_run(again)
    chex.assert_trees_all_equal(back.params, ours.params)
    assert back.config.model == dataclasses.replace(
        ours.model, dropout_rate=back.config.model.dropout_rate
    )
    assert back.tokenizers.target.encode(PHRASES.targets) == ours.tokenizers.target.encode(
        PHRASES.targets
    )


def own_bundle(trained_run, **model):
    run = load_run(trained_run)
    config = dataclasses.replace(run.config, model=dataclasses.replace(run.model, **model))
    return ModelBundle(config, drawn_params(config.model), run.tokenizers)


REFUSED = {
    "norm_position=pre cannot be converted to post": {"norm_position": "pre", "final_norm": True},
    "position_layout=interleaved cannot be converted to": {"position_layout": "interleaved"},
    "norm_epsilon=1e-06 cannot be converted to 1e-05": {"norm_epsilon": 1e-6},
    "bos_id=-1 and pad_id=0 cannot be written": {"bos_id": -1},
}


@pytest.mark.parametrize("message", REFUSED)
def test_a_model_that_marian_cannot_represent_is_rejected_by_switch(message, trained_run, tmp_path):
    ours = own_bundle(trained_run, **REFUSED[message])
    with pytest.raises(UserError) as caught:
        huggingface.write(ours, tmp_path / "exported")
    assert message in str(caught.value)
    assert not [*tmp_path.iterdir()]


# Search options.

MODEL = TransformerConfig(pad_id=9, bos_id=9, eos_id=0, max_length=512)
OPUS = {
    "bad_words_ids": [[9]], "decoder_start_token_id": 9, "eos_token_id": 0, "pad_token_id": 9,
    "forced_eos_token_id": 0, "max_length": 512, "num_beams": 6, "renormalize_logits": True,
    "bos_token_id": 0, "transformers_version": "4.32.0.dev0",
}  # fmt: skip


def test_the_search_of_opus_mt():
    decode, notes = generation_config.to_decode(OPUS, MODEL)
    assert notes == []
    assert decode == DecodeConfig(
        beam_size=6, length_penalty=1.0, length_penalty_kind="average", early_stopping="heuristic",
        max_length_factor=2.0, max_length_extra=50, force_end=True, renormalize=True,
    )  # fmt: skip
    assert generation_config.from_decode(decode, MODEL, OPUS) == (OPUS, [])
    greedy = dataclasses.replace(decode, beam_size=1, force_end=False)
    changed, _ = generation_config.from_decode(greedy, MODEL, OPUS)
    assert changed == OPUS | {"num_beams": 1, "forced_eos_token_id": None}


def test_every_search_option_survives_a_round_trip():
    settings = {
        "num_beams": 4, "num_return_sequences": 2, "length_penalty": 0.6, "early_stopping": "never",
        "min_length": 3, "max_length": 100, "no_repeat_ngram_size": 3, "repetition_penalty": 1.2,
        "bad_words_ids": [[9], [5], [3, 4]], "forced_eos_token_id": None,
    }  # fmt: skip
    decode, notes = generation_config.to_decode(settings, MODEL)
    assert notes == []
    assert (decode.n_best, decode.length_penalty, decode.early_stopping) == (2, 0.6, "never")
    assert (decode.min_length, decode.max_length) == (2, 99)
    assert decode.bad_word_ids == ("5", "3,4")
    assert (decode.no_repeat_ngram_size, decode.repetition_penalty) == (3, 1.2)
    assert not decode.force_end
    written, notes = generation_config.from_decode(decode, MODEL, {})
    assert notes == []
    assert generation_config.to_decode(written, MODEL) == (decode, [])
    sampling = {
        "do_sample": True,
        "top_k": 7,
        "top_p": 0.9,
        "temperature": 0.5,
        "max_new_tokens": 8,
    }
    drawn, _ = generation_config.to_decode(sampling, MODEL)
    assert (drawn.sampling, drawn.top_k, drawn.top_p, drawn.max_length) == (True, 7, 0.9, 8)


def test_changed_lengths_replace_those_without_the_start():
    kept = {"max_new_tokens": 100, "min_new_tokens": 5}
    decode, _ = generation_config.to_decode(kept, MODEL)
    assert (decode.max_length, decode.min_length) == (100, 5)
    assert generation_config.from_decode(decode, MODEL, kept)[0].items() >= kept.items()
    changed = dataclasses.replace(decode, max_length=50, min_length=0)
    written, _ = generation_config.from_decode(changed, MODEL, kept)
    assert generation_config.to_decode(written, MODEL)[0] == changed


def test_limits_above_the_table_are_kept():
    assert MODEL.max_length == 512
    for name, given, kept in (
        ("max_length", 512, 0),
        ("max_new_tokens", 512, 0),
        ("max_length", 1000, 999),
        ("max_new_tokens", 600, 600),
        ("max_new_tokens", 40, 40),
    ):
        decode, _ = generation_config.to_decode({name: given}, MODEL)
        assert decode.max_length == kept, (name, given)
    # T5's distances need no table.
    distances = dataclasses.replace(MODEL, position_kind="t5_relative")
    assert generation_config.to_decode({"max_length": 512}, distances)[0].max_length == 511


def test_suppressed_tokens_are_excluded():
    settings = {"suppress_tokens": [4, 9], "bad_words_ids": [[7, 3]], "length_penalty": -1.5}
    decode, notes = generation_config.to_decode(settings, MODEL)
    assert notes == []
    assert decode.bad_word_ids == ("7,3", "4")  # Padding is never chosen.
    assert decode.length_penalty == -1.5
    assert generation_config.from_decode(decode, MODEL, settings)[0].items() >= settings.items()


def test_generate_starts_as_its_own_settings_say(published, tmp_path):
    folder = tmp_path / "folder"
    shutil.copytree(published, folder)
    edit(SETTINGS, decoder_start_token_id=1)(folder)
    bundle, (note,) = huggingface.read(folder)
    start = json.loads((folder / SEARCH).read_text())["decoder_start_token_id"]
    assert bundle.config.model.bos_id == start != 1
    assert note.startswith(f"decoder_start_token_id is 1 in config.json, and {start} in")
    huggingface.write(bundle, tmp_path / "again")
    for name in (SETTINGS, SEARCH):
        assert (tmp_path / "again" / name).read_bytes() == (folder / name).read_bytes()


def test_samples_are_drawn_without_beams():
    _, notes = generation_config.to_decode({"do_sample": True, "num_beams": 4}, MODEL)
    assert notes == [
        "num_beams=4 is not supported with do_sample, and ignored: samples are drawn independently"
    ]
    written, _ = generation_config.from_decode(DecodeConfig(sampling=True, n_best=8), MODEL, {})
    assert (written["do_sample"], written["num_return_sequences"]) == (True, 8)
    assert written.get("num_beams", 1) == 1


def test_unsupported_settings_are_reported():
    _, notes = generation_config.to_decode({"forced_bos_token_id": 4, "typical_p": 1.0}, MODEL)
    assert notes == ["forced_bos_token_id=4 is not supported, and ignored"]
    target = talker.make_talker().tokenizers.target
    _, notes = generation_config.to_decode({"forced_bos_token_id": -1}, MODEL, target)
    assert notes == ["forced_bos_token_id=-1 is not supported, and ignored"]
    decode = DecodeConfig(coverage_penalty=0.2, length_penalty_kind="gnmt")
    _, notes = generation_config.from_decode(decode, MODEL, {})
    assert notes[0] == "decode.coverage_penalty=0.2 is not supported by generate"
    assert "length_penalty_kind=gnmt" in notes[1]


@pytest.mark.parametrize(
    "settings", [{"early_stopping": "late"}, {"bad_words_ids": [1]}, {"max_length": "long"}]
)
def test_damaged_settings_are_refused(settings):
    with pytest.raises(UserError, match="its generation settings are damaged"):
        generation_config.to_decode(settings, MODEL)


# Errors.


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    folder = tmp_path_factory.mktemp("published") / "opus"
    save(folder)
    return folder


@pytest.fixture
def refused(published, tmp_path, capsys):
    """Converts a damaged copy, checks that nothing is written, and returns the error message."""

    def run(damage, *options):
        copy, run = tmp_path / "copy", tmp_path / "run"
        shutil.copytree(published, copy)
        damage(copy)
        assert main(["convert", "--from", "marian", str(copy), str(run), *options]) == 1
        assert sorted(path.name for path in tmp_path.iterdir()) == ["copy"]
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        return error

    return run


def edit(name, **changes):
    def damage(folder):
        values = json.loads((folder / name).read_text()) | changes
        (folder / name).write_text(json.dumps(values))

    return damage


def without(name):
    return lambda folder: (folder / name).unlink()


def truncated(name):
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:100])


def swapped(piece, id):
    def damage(folder):
        ids = json.loads((folder / "vocab.json").read_text())
        other = next(name for name, each in ids.items() if each == id)
        edit("vocab.json", **{piece: id, other: ids[piece]})(folder)

    return damage


def written(name, content):
    return lambda folder: (folder / name).write_bytes(content)


def a_pipe(name):
    def damage(folder):
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return damage


SEARCH, SETTINGS, NAMES = "generation_config.json", "config.json", "tokenizer_config.json"
DAMAGES = {
    "empty pieces": (written("source.spm", b""), "source.spm is not a SentencePiece model: it is"),
    "decoder layers": (edit(SETTINGS, decoder_layers=10**9), "decoder_layers=1000000000, but its"),
    "layers": (edit(SETTINGS, decoder_layers="1"), "decoder_layers: expected an integer"),
    "no start": (edit(SEARCH, decoder_start_token_id=9999), "bos_id=9999 is outside"),
    "an end": (edit(SETTINGS, eos_token_id="0"), "eos_token_id: expected an integer or a list"),
    "ends that differ": (edit(SEARCH, eos_token_id=1), "eos_token_id=1, but the model has 0"),
    "beams": (edit(SEARCH, num_beams=True), "num_beams: expected an integer"),
    "a kept setting": (edit(SETTINGS, unknown=json.loads("[" * 1000 + "]" * 1000)), "nested too"),
    "a language": (edit(NAMES, target_lang=["de"]), "target_lang: expected a string or null"),
    "tokens": (edit(NAMES, added_tokens_decoder={"1": {}}), "there is no field content"),
    "a vocabulary": (written("vocab.json", b"[]"), "vocab.json is damaged: expected an object"),
    "two pieces": (written("vocab.json", b'{"a": 0, "a": 1}'), "'a' occurs twice"),
    "utf-16": (written(SETTINGS, "{}".encode("utf-16")), "characters that are not valid Unicode"),
    "paddings": (edit(SEARCH, pad_token_id=-1), "pad_token_id=-1: there are embeddings"),
    "a forced token": (edit(SEARCH, forced_eos_token_id=5), "forced_eos_token_id=5 is not the end"),
    "a bad word": (edit(SEARCH, bad_words_ids=[[9999]]), "bad_words_ids has 9999, which is out"),
    "a length": (edit(SEARCH, max_length=-3), "max_length: expected an integer >= 0"),
    "nested": (written(SETTINGS, b"[" * 100_000), "config.json is damaged: its JSON is nested"),
    "digits": (written(SEARCH, b'{"a":' + b"1" * 5000 + b"}"), "a number of too many digits"),
    "a pipe": (a_pipe(SETTINGS), "config.json: a named pipe, not a file"),
    "another model": (edit("config.json", model_type="bart"), "model_type=bart, not marian"),
    "no weights": (without("model.safetensors"), "has no model.safetensors and no pytorch_model"),
    "damaged weights": (truncated("model.safetensors"), "model.safetensors: not a safetensors"),
    "no settings": (without("config.json"), "config.json: there is no such file"),
    "no vocabulary": (without("vocab.json"), "has no vocabulary file"),
    "a long vocabulary": (edit("vocab.json", more=999), "ids up to 999, but there are embeddings"),
    "another vocabulary": (swapped("<pad>", 7), "pad_id is 7 in the vocabulary"),
    "two widths": (edit("config.json", decoder_attention_heads=4), "2 heads and the decoder 4"),
    "a search that cannot be": (
        edit("generation_config.json", num_return_sequences=9), "n-best=9 is more than"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_folder_is_refused_in_one_line(name, refused):
    damage, message = DAMAGES[name]
    assert message in refused(damage)


@pytest.mark.parametrize("file", [SEARCH, SETTINGS])
def test_several_end_tokens(file, published, tmp_path, capsys):
    folder, run, again = (tmp_path / name for name in ("folder", "run", "again"))
    shutil.copytree(published, folder)
    edit(file, eos_token_id=[0, 1])(folder)
    if file == SETTINGS:  # Older folders have no other file.
        without(SEARCH)(folder)
    assert main(["convert", "--from", "marian", str(folder), str(run)]) == 0
    note = "eos_token_id=[0, 1] has several end tokens: only 0, that of the vocabulary, ends"
    assert note in capsys.readouterr().err
    assert load_run(run).config.model.eos_id == 0
    # The older file does not exclude padding.
    assert all("allow the padding" in note for note in convert(OWN, "marian", run, again))
    assert json.loads((again / file).read_text())["eos_token_id"] == [0, 1]


def test_shards_outside_of_the_folder_are_not_read(refused):
    def damage(folder):
        (folder / "model.safetensors").unlink()
        index = {"weight_map": {"lm_head.weight": "../secret.safetensors"}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    assert "'../secret.safetensors' is not a file in its folder" in refused(damage)


def test_an_existing_folder_is_not_overwritten(published, tmp_path, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine").touch()
    assert main(["convert", "--from", "marian", str(published), str(tmp_path / "run")]) == 1
    assert "exists: remove it, or choose another folder" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["mine"]


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        ("tunz", "flaxformer_mt", "is a folder: tunz is read from a file"),
        ("marian", "fairseq", "use the suffix"),
        ("mariam", "flaxformer_mt", "--from mariam: unknown family"),
        ("marian", "mariam", "--to mariam: unknown family"),
    ],
)
def test_invalid_arguments_are_rejected(source, target, message, published, tmp_path):
    with pytest.raises(UserError, match=message):
        convert(source, target, published, tmp_path / "output")


def test_a_file_has_no_vocabulary(published, tmp_path):
    with pytest.raises(UserError, match=r"model\.safetensors is not a folder, so it has no vocab"):
        convert("marian", OWN, published / "model.safetensors", tmp_path / "run")


@pytest.mark.parametrize("command", ["inspect", "translate"])
def test_a_published_folder_must_be_converted_to_a_run_first(command, published, capsys):
    assert main([command, "--run", str(published)]) == 1
    assert "convert --from marian FOLDER RUN" in capsys.readouterr().err


def test_a_run_whose_vocabulary_does_not_match_is_rejected(published, tmp_path):
    run = tmp_path / "run"
    convert("marian", OWN, published, run)
    edit("tokenizer/vocab.json", more=999)(run)
    with pytest.raises(UserError, match=r"vocab\.json is truncated: .* not the vocabulary that"):
        load_run(run)
