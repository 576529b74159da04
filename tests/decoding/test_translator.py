"""Text in, text out: what a translation depends on, and what not."""

import dataclasses
import random

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decoding.conftest import random_params, sentences, with_decode, with_end_bias
from flaxformer_mt.config import with_vocabulary_sizes
from flaxformer_mt.decoding import translator as translator_room
from flaxformer_mt.decoding.buckets import Bucket, fill_rows, plan_buckets
from flaxformer_mt.decoding.scoring import score_pairs
from flaxformer_mt.decoding.translator import Translator, longest_target
from flaxformer_mt.errors import UserError
from flaxformer_mt.model.transformer import Transformer

SENTENCES = [*sentences(12), "", *sentences(6, seed=3, longest=25), " "]


def make_translator(setup):
    return Translator(setup.config, setup.params, setup.tokenizers)


def full_pass_greedy(setup, sentence, max_length):
    """The tokens that the uncached model finds most probable, one by one."""
    model, target = make_translator(setup).model, []
    source = np.array([[*setup.tokenizers.source.encode([sentence])[0], model.eos_id]], np.int32)
    while len(target) < max_length and model.eos_id not in target:
        inputs = np.array([[model.bos_id, *target]], np.int32)
        logits = Transformer(model).apply({"params": setup.params}, source, inputs)[0, -1]
        logits = logits.at[jnp.array([model.pad_id, model.bos_id])].set(-jnp.inf)
        target.append(int(logits.argmax()))
    return tuple(target)


def test_greedy_translation_equals_the_full_pass(setup):
    setup = with_end_bias(setup, 5.0)
    for sentence in sentences(3):
        (best,) = make_translator(setup).translate_n_best([sentence], 1, 1)[0]
        length = len(setup.tokenizers.source.encode([sentence])[0]) + 3
        assert best.tokens == full_pass_greedy(setup, sentence, length)


@pytest.mark.parametrize("beam_size", [1, 3])
def test_log_probabilities_of_the_cached_search_are_those_of_the_full_pass(setup, beam_size):
    found = make_translator(setup).translate_n_best(SENTENCES, beam_size, beam_size, 0.0)
    model = make_translator(setup).model
    for sentence, hypotheses in zip(SENTENCES, found, strict=True):
        if not sentence.strip():
            continue
        source = [[*setup.tokenizers.source.encode([sentence])[0], model.eos_id]]
        for hypothesis in hypotheses:
            inputs = np.array([[model.bos_id, *hypothesis.tokens[:-1]]], np.int32)
            logits = Transformer(model).apply(
                {"params": setup.params}, np.array(source, np.int32), inputs
            )
            chosen = jax.nn.log_softmax(logits)[0, np.arange(inputs.size), hypothesis.tokens]
            np.testing.assert_allclose(hypothesis.score, chosen.sum(), rtol=1e-5)


@pytest.mark.parametrize("beam_size", [1, 3])
def test_a_translation_does_not_depend_on_its_company(setup, beam_size):
    translator = make_translator(setup)
    together = translator.translate_n_best(SENTENCES, beam_size, beam_size)
    alone = [translator.translate_n_best([one], beam_size, beam_size)[0] for one in SENTENCES]
    assert alone == together
    order = random.Random(0).sample(range(len(SENTENCES)), len(SENTENCES))
    shuffled = translator.translate_n_best([SENTENCES[i] for i in order], beam_size, beam_size)
    assert shuffled == [together[i] for i in order]
    assert len({hypotheses[0].text for hypotheses in together}) > 5


def test_a_translation_does_not_depend_on_the_batch_size(setup):
    texts = [
        make_translator(with_decode(setup, batch_tokens=tokens)).translate(SENTENCES)
        for tokens in (1, 64, 512)
    ]
    assert texts[0] == texts[1] == texts[2]


def test_hypotheses_without_end_token_keep_all_their_tokens(setup):
    translator = make_translator(with_end_bias(setup, -1e4))
    found = translator.translate_n_best(SENTENCES, 3)
    for source, hypotheses in zip(
        setup.tokenizers.source.encode(SENTENCES), found, strict=True
    ):
        expected = len(source) + 3 if source else 0
        assert [len(hypothesis.tokens) for hypothesis in hypotheses] == [expected] * len(hypotheses)
        assert all(translator.model.eos_id not in h.tokens for h in hypotheses)


def test_n_best_lists_are_sorted_distinct_and_begin_with_the_translation(setup):
    translator = make_translator(setup)
    lists = translator.translate_n_best(SENTENCES, 3)
    assert [hypotheses[0].text for hypotheses in lists] == translator.translate(SENTENCES)
    for sentence, hypotheses in zip(SENTENCES, lists, strict=True):
        scores = [hypothesis.score for hypothesis in hypotheses]
        assert scores == sorted(scores, reverse=True)
        assert len({hypothesis.tokens for hypothesis in hypotheses}) == len(hypotheses)
        assert len(hypotheses) == (3 if sentence.strip() else 1)


def test_scores_are_log_probabilities_by_length_penalty(setup):
    translator = make_translator(with_end_bias(setup, 5.0))
    # Greedy search finds the same tokens whatever the penalty.
    plain = translator.translate_n_best(SENTENCES[:5], 1, 1, 0.0)
    divided = translator.translate_n_best(SENTENCES[:5], 1, 1, 2.0)
    for (ours,), (theirs,) in zip(plain, divided, strict=True):
        penalty = ((5 + len(ours.tokens)) / 6) ** 2
        np.testing.assert_allclose(theirs.score, ours.score / penalty, rtol=1e-5)


def test_empty_lines_are_not_translated(setup):
    translator = make_translator(setup)
    assert translator.translate(["", " ", "\t"]) == ["", "", ""]
    assert translator.translate([]) == []
    (empty,) = translator.translate_n_best([""], 3)[0]
    assert (empty.text, empty.score, empty.tokens) == ("", 0.0, ())


def test_new_parameters_need_no_compilation(setup):
    make_translator(setup).translate(SENTENCES)
    compiled = translator_room.search_targets._cache_size()
    others = random_params(make_translator(setup).model, seed=1)
    make_translator(dataclasses.replace(setup, params=others)).translate(SENTENCES, 3, 0.1)
    assert translator_room.search_targets._cache_size() == compiled


def test_a_translation_is_one_line(setup):
    translator = make_translator(setup)
    pieces = [f"<0x{byte:02X}>" for byte in b"a\n\rb"]
    tokens = [setup.tokenizers.target._processor.piece_to_id(piece) for piece in pieces]
    assert setup.tokenizers.target.decode([tokens]) == ["a\n\rb"]
    assert translator_room._on_one_line("a\n\rb") == "a  b"
    assert translator is not None


def test_a_sentence_longer_than_a_learned_position_table_is_refused(setup):
    model = dataclasses.replace(setup.config.model, position_kind="learned", max_length=20)
    config = dataclasses.replace(setup.config, model=model)
    size = setup.tokenizers.source.vocab_size
    params = random_params(with_vocabulary_sizes(model, size, size))
    translator = Translator(config, params, setup.tokenizers)
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
def test_options_out_of_range_are_refused(setup, options, message):
    with pytest.raises(UserError, match=message):
        make_translator(setup).translate_n_best(SENTENCES, **options)


@pytest.mark.parametrize("beam_size", [1, 3])
def test_parameters_that_are_not_finite_are_refused(setup, beam_size):
    params = jax.tree.map(lambda leaf: leaf * np.nan, setup.params)
    with pytest.raises(UserError, match="not finite"):
        Translator(setup.config, params, setup.tokenizers).translate(["Hund"], beam_size)


def test_a_language_model_cannot_translate(setup):
    model = dataclasses.replace(setup.config.model, has_inputs=False)
    config = dataclasses.replace(setup.config, model=model)
    with pytest.raises(UserError, match="model.has_inputs=False"):
        Translator(config, setup.params, setup.tokenizers)


def test_longest_target_counts_source_tokens_without_their_end(setup):
    decode = dataclasses.replace(setup.config.decode, max_length_factor=1.5, max_length_extra=20)
    assert longest_target(11, decode, setup.config.model) == 35
    learned = dataclasses.replace(setup.config.model, position_kind="learned", max_length=32)
    assert longest_target(11, decode, learned) == 32
