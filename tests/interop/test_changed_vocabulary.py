"""Trimmed and extended vocabularies: tokens, logits, and round trips through transformers."""

import hub_models
import numpy as np
import pytest
import transformers

from flaxformer_mt.cli import main
from flaxformer_mt.config import DataConfig
from flaxformer_mt.data.corpora.corpus import load_corpus
from flaxformer_mt.data.tokenizers.sentencepiece_tokenizer import train_sentencepiece
from flaxformer_mt.data.tokenizers.tokenizer import Tokenizers
from flaxformer_mt.decoding.translator import Translator
from flaxformer_mt.interop.certificate import values_of_modules
from flaxformer_mt.interop.formats import huggingface
from flaxformer_mt.interop.vocabulary.tokens import extended, trimmed

PHRASES = load_corpus(DataConfig(corpus="phrases", generated_pairs=300), "train")
TEXTS = [*PHRASES.sources, *PHRASES.targets]
NEEDED = [*PHRASES.sources[:12], *PHRASES.targets[:12]]
KINDS = ["t5", "nllb", "mbart50", "bart", "m2m100", "marian"]


def convert(kind, folder, output, *options):
    family = hub_models.family_of(kind)
    arguments = ["--from", family, "--to", family, str(folder), str(output), *options]
    assert main(["convert", *arguments]) == 0
    return huggingface.read(output, family=family)[0]


def logits(bundle, source, target):
    values = values_of_modules(
        bundle.config.model, bundle.params, np.array([source]), np.array([target])
    )
    return values["logits"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_trimmed_vocabulary_computes_the_same(kind, saved, tmp_path, capsys):
    (tmp_path / "text").write_text("\n".join(NEEDED))
    before = huggingface.read(saved(kind)[0], family=hub_models.family_of(kind))[0]
    options = ("--trim-vocabulary", str(tmp_path / "text"))
    after = convert(kind, saved(kind)[0], tmp_path / "small", *options)
    assert "are equal to the bit" in capsys.readouterr().err
    old, new = before.tokenizers, after.tokenizers
    assert new.target.vocab_size < old.target.vocab_size
    names = new.target.entries(range(new.target.vocab_size))
    by_name = {name: id for id, name in enumerate(old.target.entries(range(old.target.vocab_size)))}
    kept = [by_name[name] for name in names]
    for text in NEEDED:
        ids = new.source.encode([text])[0]
        assert [kept[id] for id in ids] == old.source.encode([text])[0]
    # As to transformers, so to us.
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "small")
    assert theirs(NEEDED).input_ids == [
        [*ids, new.source.eos_id] for ids in new.source.encode(NEEDED)
    ]
    source, target = new.source.encode([NEEDED[0]])[0], new.target.encode([NEEDED[-1]])[0]
    mapped = [[kept[id] for id in ids] for ids in (source, target)]
    np.testing.assert_array_equal(logits(after, source, target), logits(before, *mapped)[..., kept])
    assert_translates_as_generate(after, tmp_path / "small", NEEDED[:4])


def assert_translates_as_generate(bundle, folder, texts):
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder)
    generated = model.generate(**theirs(texts, return_tensors="pt", padding=True)).tolist()
    translator = Translator(
        bundle.config.model, bundle.params, bundle.tokenizers, bundle.config.decode
    )
    removed = {bundle.config.model.pad_id, bundle.config.model.eos_id}
    for (best, *_), (_, *tokens) in zip(translator.translate_n_best(texts), generated, strict=True):
        assert [token for token in best.tokens if token not in removed] == [
            token for token in tokens if token not in removed
        ]


LANGUAGES = {
    "nllb": ("tyv_Cyrl", "fra_Latn"),
    "mbart50": ("tyv_TY", "fr_XX"),
    "m2m100": ("__tyv__", "__fr__"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_new_tokens_have_the_mean_of_their_pieces(kind, saved, tmp_path, capsys):
    before = huggingface.read(saved(kind)[0], family=hub_models.family_of(kind))[0]
    after = convert(kind, saved(kind)[0], tmp_path / "large", "--add-token", "[CITE]", "qqq")
    assert "are equal to the bit" in capsys.readouterr().err
    old, new = before.tokenizers.source, after.tokenizers.source
    size = old.vocab_size
    assert new.encode_parts(["[CITE]", "qqq"]) == [[size], [size + 1]]
    assert new.entries(range(size)) == old.entries(range(size))
    texts = ["a [CITE] b", "qqq", *NEEDED]
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "large")
    assert theirs(texts).input_ids == [[*ids, new.eos_id] for ids in new.encode(texts)]
    for path, axis in (("target_embedding/embedding", 0), ("output/kernel", 1)):
        module, name = path.split("/")
        if name in before.params.get(module, {}):
            rows = np.moveaxis(before.params[module][name], axis, 0)
            changed = np.moveaxis(after.params[module][name], axis, 0)
            np.testing.assert_array_equal(changed[:size], rows[:size])
            expected = rows[old.encode_parts(["[CITE]"])[0]].mean(0, dtype=np.float64)
            np.testing.assert_array_equal(changed[size], expected.astype(np.float32))
    assert_translates_as_generate(after, tmp_path / "large", texts[:4])


@pytest.mark.slow
@pytest.mark.parametrize("kind", LANGUAGES)
def test_new_languages_begin_as_related_ones(kind, saved, tmp_path, capsys):
    name, like = LANGUAGES[kind]
    options = ("--add-language", name, "--like", like)
    after = convert(kind, saved(kind)[0], tmp_path / "large", *options)
    source = after.tokenizers.source
    (token,), (related,) = source.encode_parts([name, like])
    assert token in source.language_ids
    table = after.params["target_embedding"]["embedding"]
    np.testing.assert_array_equal(table[token], table[related])
    text = NEEDED[0]
    is_noted = "src_lang and tgt_lang cannot name" in capsys.readouterr().err
    assert is_noted == (kind != "nllb")
    if not is_noted:
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "large", src_lang=name)
        assert theirs(text).input_ids == [*source.encode([f"{name} {text}"])[0], source.eos_id]
    translator = Translator(after.config.model, after.params, after.tokenizers, after.config.decode)
    pair = translator.translate([f"{name} {text}", f"{like} {text}"])
    assert pair[0] == pair[1]


def test_marian_learns_a_language_code(saved, tmp_path):
    options = ("--add-language", ">>tyv<<", "--like", ">>fra<<")
    after = convert("marian", saved("marian")[0], tmp_path / "large", *options)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "large")
    (token,), (related,) = after.tokenizers.source.encode_parts([">>tyv<<", ">>fra<<"])
    assert theirs(">>tyv<< a").input_ids[0] == token
    table = after.params["target_embedding"]["embedding"]
    np.testing.assert_array_equal(table[token], table[related])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--add-language", "x_Latn"), "names 1 languages, --like 0"),
        (("--add-token", "<s>"), "<s> is already a token"),
        (("--add-token", "a", "a"), "'a' cannot be added: give each token once"),
        (("--add-language", "x_Latn", "--like", "y_Latn"), "y_Latn is not a language"),
        (("--add-language", "fra_Latn", "--like", "fra_Latn"), "fra_Latn is already a token"),
        (("--trim-vocabulary", "missing.txt"), "missing.txt"),
    ],
)
def test_refusals(options, message, saved, tmp_path, capsys):
    folder = str(saved("nllb")[0])
    arguments = ["--from", "m2m100", "--to", "m2m100", folder, str(tmp_path / "out"), *options]
    assert main(["convert", *arguments]) != 0
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("joint", [True, False])
@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_vocabularies_learned_here(kind, joint):
    config = DataConfig(vocab_size=500, tokenizer=kind)
    source = train_sentencepiece(TEXTS, config, ["<2de>"])
    before = Tokenizers(source, source if joint else train_sentencepiece(TEXTS, config))
    change = trimmed(before, NEEDED)
    for side in ("source", "target"):
        old, new = getattr(before, side), getattr(change.tokenizers, side)
        rows = getattr(change, side)
        assert new.vocab_size == len(rows) < old.vocab_size
        mapped = [[rows[id][0] for id in ids] for ids in new.encode(NEEDED)]
        assert mapped == old.encode(NEEDED)
        assert new.decode(new.encode(NEEDED)) == NEEDED
    change = extended(before, ["[CITE]"], {"<2ty>": "<2de>"})
    new = change.tokenizers
    assert new.joint == joint
    size = source.vocab_size
    assert new.source.encode(["<2ty> a [CITE]"])[0][0] == size + 1
    assert new.target.encode(["[CITE]"]) == [[before.target.vocab_size]]
    assert new.target.encode(["a([CITE])"])[0][-2] == new.target.vocab_size - 1
    assert change.source[size + 1] == tuple(source.encode(["<2de>"])[0])
    assert new.source.decode(new.source.encode(NEEDED)) == NEEDED
