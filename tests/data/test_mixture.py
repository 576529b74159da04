"""The order of the pairs: permutations by formula, chunks and windows, and how random it is."""

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from flaxformer_mt.config import DataConfig
from flaxformer_mt.data.stream import mixture
from flaxformer_mt.data.stream.mixture import Mixture, generator, permuted


@hypothesis.given(size=st.integers(1, 70_000), seed=st.integers(0, 3))
@hypothesis.settings(max_examples=50)
def test_a_permutation_has_every_number_once(size, seed):
    found = permuted(np.arange(size), size, generator(seed))
    np.testing.assert_array_equal(np.sort(found), np.arange(size))
    # In parts, as in the whole.
    part = np.arange(size // 3, size // 2)
    np.testing.assert_array_equal(permuted(part, size, generator(seed)), found[part])


@pytest.mark.parametrize("size", [1025, 3000, 2**16, 100_003])
def test_a_permutation_by_formula_is_as_random_as_any(size):
    """Moments of the ranks and of what follows what, beside their standard errors."""
    found = permuted(np.arange(size), size, generator(7)) / size
    error = size**-0.5
    assert abs(np.corrcoef(np.arange(size), found)[0, 1]) < 4 * error
    assert abs(np.corrcoef(found[1:], found[:-1])[0, 1]) < 4 * error
    counts = np.histogram2d(np.arange(size) / size, found, bins=16, range=[[0, 1], [0, 1]])[0]
    expected = size / 256
    chi_squared = ((counts - expected) ** 2 / expected).sum()
    assert abs(chi_squared - 225) < 6 * 450**0.5
    other = permuted(np.arange(size), size, generator(8)) / size
    assert abs(np.corrcoef(other, found)[0, 1]) < 4 * error


def order_of(mixed, epoch=0):
    """The pairs of an epoch, blocks of the same number together, as streams are read."""
    return [
        mixed.draws(epoch, stream, block)
        for block in range(mixed.blocks(epoch))
        for stream in range(mixed.streams)
    ]


@hypothesis.given(
    sizes=st.lists(st.integers(1, 300), min_size=1, max_size=3),
    chunked=st.integers(1, 400),
    seed=st.integers(0, 3),
)
@hypothesis.settings(max_examples=25)
def test_an_epoch_has_every_pair_once(sizes, chunked, seed):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mixture, "BLOCK_PAIRS", 5)
        patch.setattr(mixture, "CHUNK_PAIRS", 7)
        patch.setattr(mixture, "CHUNKED_PAIRS", max(chunked, 7))
        mixed = Mixture(sizes, [1.0] * len(sizes), DataConfig(), seed)
        for epoch in range(3):
            found = np.concatenate(order_of(mixed, epoch))
            np.testing.assert_array_equal(np.sort(found), np.arange(sum(sizes)))


def test_each_window_has_its_share_of_each_corpus():
    sizes = [900_000, 100_000]
    mixed = Mixture(sizes, [1.0, 4.0], DataConfig(), 0)
    assert mixed.streams == 128
    for stream in (0, 17, 127):
        draws = [mixed.draws(0, stream, block) for block in range(mixture.WINDOW_BLOCKS)]
        shares = [np.mean(each < 900_000) for each in (*draws, np.concatenate(draws))]
        assert shares[-1] == pytest.approx(9 / 13, abs=1e-3)
        assert shares == pytest.approx([9 / 13] * len(shares), abs=0.05)


@pytest.mark.slow_except("1000000-False")
@pytest.mark.parametrize(("pairs", "is_chunked"), [(1_000_000, False), (4_000_000, True)])
def test_neighbors_of_the_corpus_are_far_apart(pairs, is_chunked):
    """Pairs of one chunk stay in a window; apart from that, the order is that of a shuffle."""
    mixed = Mixture([pairs], [1.0], DataConfig(), 0)
    blocks = order_of(mixed)
    order = np.concatenate(blocks)
    place = np.empty(pairs, np.int64)
    place[order] = np.arange(pairs)
    # Between two random places is a third of all.
    far = np.abs(place[mixture.CHUNK_PAIRS * 2 :] - place[: -mixture.CHUNK_PAIRS * 2]).mean()
    assert far == pytest.approx(pairs / 3, rel=0.06)
    block_of = np.repeat(np.arange(len(blocks)), [len(block) for block in blocks])[place]
    together = np.mean(block_of[1:] == block_of[:-1])
    if is_chunked:
        # One of the blocks of the window has both.
        assert together == pytest.approx(1 / mixture.WINDOW_BLOCKS, abs=0.01)
    else:
        assert together < 2 / len(blocks)
    # A batch has pairs of all the corpus.
    first = np.sort(np.concatenate([block[:4] for block in blocks[: mixed.streams]]))
    assert np.diff(first).max() < pairs / 10
    # Chunks begin elsewhere in the next epoch.
    assert not np.array_equal(
        order % mixture.CHUNK_PAIRS, np.concatenate(order_of(mixed, 1)) % mixture.CHUNK_PAIRS
    )
