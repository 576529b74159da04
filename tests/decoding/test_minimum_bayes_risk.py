import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sacrebleu.metrics import CHRF

from flaxformer_mt.decoding.minimum_bayes_risk import choose, chrf_matrix

words = st.lists(st.sampled_from(["a", "ab", "aba", "b", "c\u00e4", "\U0001f600", ","]), max_size=8)
texts = st.lists(st.one_of(words.map(" ".join), st.text(max_size=10)), min_size=1, max_size=6)


def slow_choice(samples, n_best):
    """Computes the same as `choose` from individual sentence scores of sacrebleu."""
    different = list(dict.fromkeys(samples))
    expected = {
        text: sum(CHRF().sentence_score(text, [other]).score for other in samples) / len(samples)
        for text in different
    }
    best = sorted(different, key=lambda text: -round(expected[text], 6))[:n_best]
    return [samples.index(text) for text in best]


@settings(max_examples=100)
@given(texts)
def test_chrf_is_that_of_sacrebleu(samples):
    expected = [[CHRF().sentence_score(hyp, [ref]).score for ref in samples] for hyp in samples]
    np.testing.assert_allclose(chrf_matrix(samples), expected, atol=1e-9)


@settings(max_examples=100)
@given(texts, st.integers(1, 4))
def test_choices_match_a_slow_implementation(samples, n_best):
    assert choose(samples, n_best) == slow_choice(samples, n_best)


def test_the_most_similar_is_chosen_and_duplicates_count():
    samples = ["ein Hund rennt", "zwei Katzen schlafen", "ein Hund läuft", "ein Hund rennt"]
    assert choose(samples, 3) == [0, 2, 1]
    assert choose(["x", "y", "y"], 1) == [1]


def test_equally_good_ones_stay_in_order():
    assert choose(["abc", "def", "ghi"], 3) == [0, 1, 2]
    # The expected chrF differ only in the order of summation.
    around = [f"{'x' * 7}{letter}" for letter in "abcdefg"]
    assert choose(around, 7) == list(range(7))
    assert choose(["0", "a", "0", "a", "a a a aba"], 3) == [1, 0, 4]  # 44, 40 and 40.


@pytest.mark.parametrize("samples", [[""], ["", ""], ["", " "]])
def test_empty_samples_can_be_chosen(samples):
    assert choose(samples, 1) == [0]
