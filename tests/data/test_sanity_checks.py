import dataclasses

import numpy as np
import pytest

from flaxformer_mt.config import DataConfig, ExperimentConfig
from flaxformer_mt.data.corpora import generated_phrases
from flaxformer_mt.data.corpora.corpus import (
    ParallelCorpus,
    load_corpus,
    open_corpora,
    read_corpus,
)
from flaxformer_mt.data.sanity_checks import (
    check_sides,
    check_unknown_rate,
    cldr_profile,
    letters_of,
    shared_pairs,
    warn_of_shared_pairs,
)
from flaxformer_mt.data.stream.encoded_corpus import encode_corpus
from flaxformer_mt.data.tokenizers.tokenizer import Tokenizers
from flaxformer_mt.errors import UserError

# Universal Declaration of Human Rights, first article.
ARTICLE = {
    "en": "All human beings are born free and equal in dignity and rights. They are endowed with "
    "reason and conscience and should act towards one another in a spirit of brotherhood.",
    "de": "Alle Menschen sind frei und gleich an Würde und Rechten geboren. Sie sind mit Vernunft "
    "und Gewissen begabt und sollen einander im Geiste der Brüderlichkeit begegnen.",
    "nl": "Alle mensen worden vrij en gelijk in waardigheid en rechten geboren. Zij zijn begiftigd "
    "met verstand en geweten, en behoren zich jegens elkander in een geest van broederschap te "
    "gedragen.",
    "es": "Todos los seres humanos nacen libres e iguales en dignidad y derechos y, dotados como "
    "están de razón y conciencia, deben comportarse fraternalmente los unos con los otros.",
    "pt": "Todos os seres humanos nascem livres e iguais em dignidade e em direitos. Dotados de "
    "razão e de consciência, devem agir uns para com os outros em espírito de fraternidade.",
    "cs": "Všichni lidé rodí se svobodní a sobě rovní co do důstojnosti a práv. Jsou nadáni "
    "rozumem a svědomím a mají spolu jednat v duchu bratrství.",
    "ru": "Все люди рождаются свободными и равными в своем достоинстве и правах. Они наделены "
    "разумом и совестью и должны поступать в отношении друг друга в духе братства.",
    "zh": "人人生而自由,在尊严和权利上一律平等。他们赋有理性和良心,并应以兄弟关系的精神相对待。",
}


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


@pytest.mark.parametrize("first", ARTICLE)
@pytest.mark.parametrize("second", ARTICLE)
def test_profiles_distinguish_languages(first, second):
    if first != second:
        text = letters_of([ARTICLE[first]])
        right, wrong = cldr_profile(first), cldr_profile(second)
        assert right.log_likelihood(text) > wrong.log_likelihood(text)


def test_profiles_exist_for_languages_in_the_cldr():
    assert cldr_profile("deu") is not None
    assert cldr_profile("pt-BR") is not None
    for code in ("", "train", "xx", "tgt", "en-tok"):
        assert cldr_profile(code) is None


def test_correct_sides_are_accepted():
    check_sides([TRAIN], [VALID])


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
        check_sides([train], [valid])


def test_a_swapped_split_of_unknown_languages_is_found_by_the_other_splits():
    train = dataclasses.replace(TRAIN, languages=UNKNOWN_LANGUAGES)
    valid = dataclasses.replace(VALID, languages=UNKNOWN_LANGUAGES)
    check_sides([train], [valid])
    check_sides([swapped(train)], [swapped(valid)])
    with pytest.raises(UserError, match="valid and train have opposite directions"):
        check_sides([train], [swapped(valid)])
    other_languages = dataclasses.replace(swapped(valid), languages=("right", "left"))
    check_sides([train], [other_languages])


def test_tags_do_not_hide_swapped_sides():
    tagged = swapped(TRAIN)
    tag = "<translate the following into german>"
    tagged = dataclasses.replace(
        tagged, sources=[f"{tag} {source}" for source in tagged.sources], tag=tag
    )
    with pytest.raises(UserError, match="sources look like de and the targets like en"):
        check_sides([tagged], [])


@pytest.mark.parametrize(
    "corpus",
    [
        ParallelCorpus(TRAIN.sources, TRAIN.sources, "one language", ("en", "de")),
        ParallelCorpus(TRAIN.targets, TRAIN.targets, "the other", ("en", "de")),
        ParallelCorpus(["Guten Tag"], ["good day"], "too short", ("en", "de")),
        load_corpus(DataConfig(corpus="reverse", generated_pairs=500), "train"),
    ],
    ids=lambda corpus: corpus.name,
)
def test_ambiguous_sides_are_accepted(corpus):
    corpus = dataclasses.replace(corpus, languages=("en", "de"))
    check_sides([corpus], [corpus, swapped(corpus)])


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
    with pytest.raises(UserError, match=r"such as '猫': raise data\.vocab_size, or use"):
        check_unknown_rate(corpus, dataclasses.replace(CONFIG.data, tokenizer="word"))
    check_unknown_rate(corpus, dataclasses.replace(CONFIG.data, max_unknown_rate=0.9))
    check_unknown_rate(encode_corpus(DIGITS, TOKENIZERS, CONFIG.model), CONFIG.data)


def counts(training, held_out):
    """The number of pairs of each held-out corpus that are training pairs."""
    return [int(is_shared.sum()) for is_shared in shared_pairs(training, [held_out])]


def test_shared_pairs_are_counted(caplog):
    training = encode_corpus(DIGITS, TOKENIZERS, CONFIG.model)
    held_out = ParallelCorpus(
        ["4 5", "4 5", "5 4", "1 2 3", "6 7"], ["5 4", "4 5", "4 5", "3 2 1", "6 7"], "held out"
    )
    held_out = encode_corpus(held_out, TOKENIZERS, CONFIG.model)
    assert counts(training, held_out) == [2]
    warn_of_shared_pairs([training, training], [held_out])
    assert len(caplog.messages) == 2
    assert caplog.messages[0].startswith(
        "2 of the 5 pairs of held out are also in the training corpus"
    )


def test_of_several_corpora_each_that_leaks_is_named(caplog):
    corpora = [
        ParallelCorpus(["4 5", "1 2 3"], ["5 4", "4 5"], "first"),
        ParallelCorpus(["4 5"], ["4 5"], "second"),
        ParallelCorpus(["6 7", "1 2 3"], ["7 6", "3 2 1"], "third"),
    ]
    training, held_out = (
        encode_corpus(corpus, TOKENIZERS, CONFIG.model) for corpus in (DIGITS, read_corpus(corpora))
    )
    warn_of_shared_pairs([training], [held_out])
    assert [message.partition(" are also")[0] for message in caplog.messages] == [
        "1 of the 2 pairs of first",
        "2 of the 2 pairs of third",
    ]


def test_shared_pairs_do_not_depend_on_the_token_dtype(monkeypatch):
    monkeypatch.setattr("flaxformer_mt.data.sanity_checks._HASH_CHUNK", 2)
    training = encode_corpus(DIGITS, TOKENIZERS, CONFIG.model)
    small = dataclasses.replace(
        training,
        targets=dataclasses.replace(
            training.targets, tokens=training.targets.tokens.astype(np.uint16)
        ),
    )
    assert counts(small, training) == [3]
    model = dataclasses.replace(training, sources=None)
    assert counts(model, model) == [3]
