"""A string gives a string, a list a list, anything else a TypeError that says what is expected."""

import pytest
from talker import sentences

from flaxformer_mt import interop
from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.decoding.scoring.scorer import Scorer
from flaxformer_mt.decoding.sentence_decoder import Sentence
from flaxformer_mt.decoding.translator import Translator
from flaxformer_mt.errors import UserError
from flaxformer_mt.evaluation import evaluate


@pytest.fixture(scope="module")
def translator(talker):
    return Translator(*talker.parts)


@pytest.fixture(scope="module")
def scorer(talker):
    return Scorer(*talker.parts)


TEXTS = sentences(3)


NO_TEXTS = [
    (["a", b"b"], r"sentences\[1\] must be a string, not bytes"),
    (None, "sentences must be a list of strings or Sentence, not NoneType"),
    ({"a": 1}, "sentences must be a list of strings or Sentence, not dict"),
    ([Sentence(None)], r"sentences\[0\]\.text must be a string, not NoneType"),
    ([Sentence("a", "", "bc")], r"\.phrases must be a list of strings, not a single string"),
]


@pytest.mark.parametrize(("given", "message"), NO_TEXTS)
def test_what_is_no_text_is_a_type_error(translator, given, message):
    for translate in (translator.translate, translator.translate_n_best):
        with pytest.raises(TypeError, match=message):
            translate(given)


@pytest.mark.parametrize("given", ["a", Sentence("a"), None, [None], b"a"])
def test_a_stream_is_of_an_iterable(translator, given):
    with pytest.raises(TypeError, match="sentences"):
        list(translator.stream(given))


@pytest.mark.parametrize("given", ["ab", [("a", None)], ["ab"], [("a",)], [("a", "b", "c")], None])
def test_what_is_no_pair_is_a_type_error(scorer, given):
    with pytest.raises(TypeError, match="pairs"):
        list(scorer.stream(given))


@pytest.mark.parametrize("given", ["ab", [("a", "b")], [("a", None)], ["ab"], [(None, ["b"])], 3])
def test_what_is_no_candidate_is_a_type_error(scorer, given):
    with pytest.raises(TypeError, match="candidates"):
        list(scorer.stream_candidates(given))


@pytest.mark.parametrize("given", ["ab", None, [None], b"ab", 3])
def test_what_cannot_be_evaluated_is_a_type_error(given):
    with pytest.raises(TypeError, match="hypotheses"):
        evaluate(given, ["ab"])
    with pytest.raises(TypeError, match="references"):
        evaluate(["ab"], given)


def test_text_that_no_file_can_contain_is_named(translator):
    with pytest.raises(
        UserError, match=r"sentences\[1\] has a character that is not valid Unicode"
    ):
        translator.translate(["a", "b\ud800"])


def test_an_unknown_unit_is_named(translator, scorer):
    with pytest.raises(UserError, match="the unit 'letters' is unknown: align words or pieces"):
        translator.translate_n_best(["a"], unit="letters")
    with pytest.raises(UserError, match="the unit 'letters' is unknown"):
        list(scorer.stream([("a", "b")], "letters"))


def test_what_is_no_checkpoint_is_a_type_error():
    for given in (None, 3, ["a"], b"model.pt"):
        with pytest.raises(TypeError, match="must be a path or a state dict, not"):
            interop.load("tunz", given)
    with pytest.raises(TypeError, match="config must be a TransformerConfig, not dict"):
        interop.save("tunz", {}, {}, "model.safetensors")
    with pytest.raises(TypeError, match="params must be nested dicts of arrays, not list"):
        interop.save("tunz", TransformerConfig(), [], "model.safetensors")
    with pytest.raises(TypeError, match="family must be a name or a Family, not NoneType"):
        interop.load(None, {})
