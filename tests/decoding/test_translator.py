"""Text in, text out: what a translation depends on, and what not."""

import dataclasses
import random

import jax
import numpy as np
import pytest
from talker import random_params, sentences, with_decode, with_end_bias

from flaxformer_mt.decoding import translator as translator_room
from flaxformer_mt.decoding.translator import Translator, longest_target
from flaxformer_mt.errors import UserError

SENTENCES = [*sentences(12), "", *sentences(3, seed=3, longest=8), " "]


def make_translator(talker):
    return Translator(talker.config, talker.params, talker.tokenizers)


@pytest.mark.parametrize("beam_size", [1, 3])
def test_log_probabilities_of_the_cached_search_are_those_of_the_full_pass(talker, beam_size):
    found = make_translator(talker).translate_n_best(SENTENCES, beam_size, beam_size, 0.0)
    for sentence, hypotheses in zip(SENTENCES, found, strict=True):
        for hypothesis in hypotheses:
            if hypothesis.tokens:
                expected = talker.full_pass(sentence, hypothesis.tokens).sum()
                np.testing.assert_allclose(hypothesis.score, expected, rtol=1e-5, atol=1e-5)


def test_greedy_search_takes_what_the_full_pass_finds_most_probable(talker):
    for sentence in SENTENCES[:3]:
        ((best,),) = make_translator(talker).translate_n_best([sentence], 1, 1)
        for position, token in enumerate(best.tokens):
            prefix = best.tokens[:position]
            rivals = [
                talker.full_pass(sentence, (*prefix, rival))[-1]
                for rival in range(2, 300, 13)  # Neither padding nor start.
            ]
            assert talker.full_pass(sentence, (*prefix, token))[-1] >= max(rivals) - 1e-5


@pytest.mark.parametrize("beam_size", [1, 3])
def test_a_translation_does_not_depend_on_its_company(talker, beam_size):
    translator = make_translator(talker)
    together = translator.translate_n_best(SENTENCES, beam_size, beam_size)
    alone = [translator.translate_n_best([one], beam_size, beam_size)[0] for one in SENTENCES]
    assert alone == together
    order = random.Random(0).sample(range(len(SENTENCES)), len(SENTENCES))
    shuffled = translator.translate_n_best([SENTENCES[i] for i in order], beam_size, beam_size)
    assert shuffled == [together[i] for i in order]
    assert len({hypotheses[0].text for hypotheses in together}) > 5


def test_a_translation_does_not_depend_on_the_batch_size(talker):
    one_by_one = make_translator(with_decode(talker, batch_tokens=1))
    assert one_by_one.translate(SENTENCES, 1) == make_translator(talker).translate(SENTENCES, 1)


def test_hypotheses_without_end_token_keep_all_their_tokens(talker):
    translator = make_translator(with_end_bias(talker, -1e4))
    found = translator.translate_n_best(SENTENCES, 3)
    for source, hypotheses in zip(talker.tokenizers.source.encode(SENTENCES), found, strict=True):
        expected = len(source) + 3 if source else 0
        assert [len(hypothesis.tokens) for hypothesis in hypotheses] == [expected] * len(hypotheses)
        assert all(translator.model.eos_id not in h.tokens for h in hypotheses)


def test_n_best_lists_are_sorted_distinct_and_begin_with_the_translation(talker):
    translator = make_translator(talker)
    lists = translator.translate_n_best(SENTENCES, 3)
    assert [hypotheses[0].text for hypotheses in lists] == translator.translate(SENTENCES)
    for sentence, hypotheses in zip(SENTENCES, lists, strict=True):
        scores = [hypothesis.score for hypothesis in hypotheses]
        assert scores == sorted(scores, reverse=True)
        assert len({hypothesis.tokens for hypothesis in hypotheses}) == len(hypotheses)
        assert len(hypotheses) == (3 if sentence.strip() else 1)


def test_scores_are_log_probabilities_by_length_penalty(talker):
    translator = make_translator(with_end_bias(talker, 5.0))
    # Greedy search finds the same tokens whatever the penalty.
    plain = translator.translate_n_best(SENTENCES[:5], 1, 1, 0.0)
    divided = translator.translate_n_best(SENTENCES[:5], 1, 1, 2.0)
    for (ours,), (theirs,) in zip(plain, divided, strict=True):
        penalty = ((5 + len(ours.tokens)) / 6) ** 2
        np.testing.assert_allclose(theirs.score, ours.score / penalty, rtol=1e-5)


def test_empty_lines_are_not_translated(talker):
    translator = make_translator(talker)
    assert translator.translate(["", " ", "\t"]) == ["", "", ""]
    assert translator.translate([]) == []
    (empty,) = translator.translate_n_best([""], 3)[0]
    assert (empty.text, empty.score, empty.tokens) == ("", 0.0, ())


def test_new_parameters_need_no_compilation(talker):
    make_translator(talker).translate(SENTENCES)
    compiled = translator_room.search_targets._cache_size()
    others = random_params(talker.model, seed=1)
    make_translator(dataclasses.replace(talker, params=others)).translate(SENTENCES, 3, 0.1)
    assert translator_room.search_targets._cache_size() == compiled


def test_a_translation_is_one_line(talker, monkeypatch):
    # Pieces for single bytes can spell a line break.
    monkeypatch.setattr(
        type(talker.tokenizers.target), "decode", lambda self, rows: ["a\nb\rc" for _ in rows]
    )
    assert make_translator(talker).translate(["Hund"]) == ["a b c"]


def test_a_sentence_longer_than_a_learned_position_table_is_refused(talker):
    model = dataclasses.replace(talker.config.model, position_kind="learned", max_length=20)
    talker = dataclasses.replace(talker, config=dataclasses.replace(talker.config, model=model))
    talker = dataclasses.replace(talker, params=random_params(talker.model))
    translator = make_translator(talker)
    assert len(translator.translate(["Hund"])) == 1
    with pytest.raises(UserError, match=r"sentence 2 has \d+ tokens.*model.max_length=20"):
        translator.translate(["Hund", "Hund " * 30])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_best": 4}, "decode.n_best=4 is more than decode.beam_size=3"),
        ({"beam_size": 0}, "decode.beam_size must be positive"),
        ({"length_penalty": -0.5}, "decode.length_penalty must not be negative"),
    ],
)
def test_options_out_of_range_are_refused(talker, options, message):
    with pytest.raises(UserError, match=message):
        make_translator(talker).translate_n_best(SENTENCES, **options)


@pytest.mark.parametrize("beam_size", [1, 3])
def test_parameters_that_are_not_finite_are_refused(talker, beam_size):
    params = jax.tree.map(lambda leaf: leaf * np.nan, talker.params)
    with pytest.raises(UserError, match="not finite"):
        Translator(talker.config, params, talker.tokenizers).translate(["Hund"], beam_size)


def test_a_language_model_cannot_translate(talker):
    model = dataclasses.replace(talker.config.model, has_inputs=False)
    config = dataclasses.replace(talker.config, model=model)
    with pytest.raises(UserError, match="has_inputs=False"):
        Translator(config, talker.params, talker.tokenizers)


def test_longest_target_counts_source_tokens_without_their_end(talker):
    decode = dataclasses.replace(talker.config.decode, max_length_factor=1.5, max_length_extra=20)
    assert longest_target(11, decode, talker.config.model) == 35
    learned = dataclasses.replace(talker.config.model, position_kind="learned", max_length=32)
    assert longest_target(11, decode, learned) == 32
