"""Folders of the Hub as libraries and people write them: tokens and outputs of transformers'."""

import functools
import json
import shutil

import hub_models
import pytest
import transformers

from flaxformer_mt.config import DataConfig
from flaxformer_mt.data.corpora.corpus import load_corpus
from flaxformer_mt.data.tokenizers.tokenizer import Tokenizers
from flaxformer_mt.errors import UserError
from flaxformer_mt.interop.formats import huggingface

PHRASES = load_corpus(DataConfig(corpus="phrases", generated_pairs=300), "train")
TEXTS = [*PHRASES.sources[:20], "", " a  b ", "</s> x", "<mask> y"]
TOKENIZER = "tokenizer_config.json"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Returns the folder of a kind, and its model."""
    root = tmp_path_factory.mktemp("forms")
    texts = [*PHRASES.sources, *PHRASES.targets]

    @functools.cache
    def make(kind):
        return root / kind, hub_models.save(kind, texts, root / kind)[0]

    return make


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
    return huggingface.read(folder, family=hub_models.KINDS[kind][0])


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
