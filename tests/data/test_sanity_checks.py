import dataclasses
import itertools

import pytest

from flaxformer_mt.config import DataConfig, ExperimentConfig
from flaxformer_mt.data.corpora import generated_phrases
from flaxformer_mt.data.corpora.corpus import (
    ParallelCorpus,
    load_corpus,
    open_corpora,
)
from flaxformer_mt.data.corpora.shared_text import HeldOutText
from flaxformer_mt.data.sanity_checks import (
    check_languages,
    check_unknown_rate,
    warn_of_shared_text,
)
from flaxformer_mt.data.stream.encoded_corpus import encode_corpus
from flaxformer_mt.data.tokenizers.tokenizer import Tokenizers
from flaxformer_mt.errors import UserError


def phrase_corpus(role, source_language="en", target_language="de", **names):
    config = DataConfig(
        corpus="phrases",
        source_language=source_language,
        target_language=target_language,
        generated_pairs=500,
    )
    (corpus,) = open_corpora(config, role)
    read = load_corpus(config, {"train": "train", "valid": "valid"}[role])
    return dataclasses.replace(read, name=role, languages=corpus.languages, **names)


def swapped(corpus):
    return dataclasses.replace(corpus, sources=corpus.targets, targets=corpus.sources)


TRAIN, VALID = phrase_corpus("train"), phrase_corpus("valid")
UNKNOWN_LANGUAGES = ("left", "right")


def test_correct_sides_are_accepted():
    check_languages([TRAIN], [VALID])


@pytest.mark.parametrize("first", [250, 375, 425])
def test_a_part_whose_sides_are_swapped_is_found(first):
    other = swapped(TRAIN)
    sources = [*TRAIN.sources[:first], *other.sources[first:]]
    targets = [*TRAIN.targets[:first], *other.targets[first:]]
    train = dataclasses.replace(TRAIN, sources=sources, targets=targets)
    with pytest.raises(UserError, match="train: the sides are swapped in a part of it"):
        check_languages([train], [VALID])
    # The pieces of a short text are voted on, too, and languages that are not the identifier's.
    unknown = dataclasses.replace(train, languages=UNKNOWN_LANGUAGES)
    with pytest.raises(UserError, match="train: the sides are swapped in a part of it"):
        check_languages([unknown], [])


@pytest.mark.slow_except("languages0", "languages1")
@pytest.mark.parametrize("languages", [("en", "fr"), ("fr", "de"), ("en", "de")])
def test_swapped_sides_are_found_by_their_languages(languages):
    source, target = languages
    train = swapped(phrase_corpus("train", source, target))
    valid = swapped(phrase_corpus("valid", source, target))
    assert set(languages) <= set(generated_phrases.LANGUAGES)
    with pytest.raises(
        UserError,
        match=f"train: the sides are swapped: the sources look like {target} and the targets like "
        f"{source}; swap the files or columns, or data.source_language",
    ):
        check_languages([train], [valid])


def test_a_swapped_split_of_unknown_languages_is_found_by_the_other_splits():
    train = dataclasses.replace(TRAIN, languages=UNKNOWN_LANGUAGES)
    valid = dataclasses.replace(VALID, languages=UNKNOWN_LANGUAGES)
    check_languages([train], [valid])
    check_languages([swapped(train)], [swapped(valid)])
    with pytest.raises(UserError, match="valid and train have opposite directions"):
        check_languages([train], [swapped(valid)])
    other_languages = dataclasses.replace(swapped(valid), languages=("right", "left"))
    check_languages([train], [other_languages])


@pytest.mark.parametrize("name", ["fr", "fra", "fr_CA", "FR", "fr.tok"])
@pytest.mark.parametrize("languages", [("fr", "en"), ("en", "fr")])
def test_a_side_in_another_language_is_refused(name, languages):
    languages = tuple(name if code == "fr" else code for code in languages)
    corpus = dataclasses.replace(TRAIN, languages=languages)
    if languages[0] == "en":
        message = f"train: the targets look like de, not like {name}: set data.target_language=de"
    else:
        message = f"train: the sources look like en, not like {name}: set data.source_language=en"
    with pytest.raises(UserError, match=f"^{message}, .*data.check_languages=False$"):
        check_languages([corpus], [])
    with pytest.raises(UserError, match=message):
        check_languages([], [corpus])


CONFIG = ExperimentConfig(data=DataConfig(byte_fallback=False))
DIGITS = ParallelCorpus(["1 2 3", "4 5", "6 7"], ["3 2 1", "5 4", "7 6"], "digits")
TOKENIZERS = Tokenizers.train([DIGITS], CONFIG.data)


def test_too_many_unknown_tokens_are_rejected():
    corpus = encode_corpus(
        ParallelCorpus(["1 2", "3"], ["2 猫", "犬"], "animals"), TOKENIZERS, CONFIG.model
    )
    with pytest.raises(
        UserError,
        match=r"animals: \d\d\.\d% of the target tokens are unknown \(data\.max_unknown_rate=0\.1\)"
        r", such as '猫': set data\.byte_fallback, raise data\.character_coverage",
    ):
        check_unknown_rate(corpus, CONFIG.data)
    with pytest.raises(UserError, match=r"such as '猫': segment the .*vocab_size=10000, or use"):
        check_unknown_rate(corpus, dataclasses.replace(CONFIG.data, tokenizer="word"))
    check_unknown_rate(corpus, dataclasses.replace(CONFIG.data, max_unknown_rate=0.9))
    check_unknown_rate(encode_corpus(DIGITS, TOKENIZERS, CONFIG.model), CONFIG.data)


def corpus_of(name, *pairs, **fields):
    return ParallelCorpus(*([pair[side] for pair in pairs] for side in (0, 1)), name, **fields)


def warn(training, held_out, data, **options):
    warn_of_shared_text(training, HeldOutText.of(held_out), data, **options)


def kinds(training, held_out):
    """What each held-out pair shares: "pair", "source", "target" or ""."""
    text = HeldOutText.of([held_out])
    shared = text.find(training.pairs(), itertools.count(1))
    names = ["pair", "source", "target"]
    return [names[shared[held][0]] if held in shared else "" for held in range(len(held_out))]


@pytest.mark.parametrize(
    ("source", "target", "kind"),
    [
        ("where is the café?", "Où est le café ?", "pair"),
        ("Where is the cafe\u0301?", "Où est le café ?", "pair"),
        ("Where is\xa0the café?", "Où est le café\u202f?", "pair"),
        ("Where is the café", "Où est le café", "pair"),
        ("Where is the caf\u200bé?", "Où est le café ?", "pair"),
        ("Where is the café?", "Où se trouve le café ?", "source"),
        ("Where's the café?", "Où est le café ?", "target"),
        ("There was a house.", "Il y avait une maison.", ""),
        ("", "?", ""),
    ],
)
def test_what_a_held_out_pair_shares(source, target, kind):
    training = corpus_of("training", ("Where is the café?", "Où est le café ?"), ("", ""))
    held_out = corpus_of("held out", (source, target))
    assert kinds(training, held_out) == [kind]


def test_shared_text_is_counted_with_an_example_of_each_kind(caplog):
    training = corpus_of("europarl", ("a", "b"), ("c", "d"), ("long " * 9, "e"))
    held_out = corpus_of(
        "valid", ("x", "y"), ("A!", "b"), ("c", "z"), ("a", "d"), ("a", "B"), ("u", "b"),
        ("long " * 9, "e"),
    )  # fmt: skip
    warn([training], [held_out], DataConfig(max_words=5))
    end = " europarl{}: its scores will be too good; the first is "
    assert caplog.messages == [
        "2 of the 7 pairs of valid are also in the training corpus" + end.format("")
        + "A! | b (pair 2), in training a | b (pair 1)",
        "2 of the 7 pairs of valid have a source that the training corpus"
        + end.format(" translates otherwise") + "c | z (pair 3), in training c | d (pair 2)",
        "1 of the 7 pairs of valid have a target that the training corpus"
        + end.format(" has with another source") + "u | b (pair 6), in training a | b (pair 1)",
    ]  # fmt: skip


def test_shared_text_is_named_by_its_lines(tmp_path, caplog):
    (tmp_path / "train.tsv").write_bytes(b"en\tde\nno tab\nA dog.\tEin Hund.\n")
    (tmp_path / "valid.tsv").write_bytes(b"en\tde\nno tab\nA cat.\tKatze.\na dog\tein hund\n")
    data = DataConfig(corpus="tsv", path=str(tmp_path), bad_rows="drop", target_language="de")
    training, held_out = (open_corpora(data, role) for role in ("train", "valid"))
    warn(training, held_out, data)
    assert f"a dog | ein hund ({tmp_path}/valid.tsv, line 4), in training " in caplog.text
    assert f"A dog. | Ein Hund. ({tmp_path}/train.tsv, line 3)" in caplog.text
