import concurrent.futures
import threading

import pytest

from flaxformer_mt.data.stream.batches import DataPosition
from flaxformer_mt.data.stream.training_stream import Prefetched


def count(position):
    """Returns n as batch n."""
    return position.row, position._replace(row=position.row + 1)


def reader_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("prefetch")]


def test_batches_are_in_order_with_the_position_after_each():
    with Prefetched(count, DataPosition(epoch=2, row=5)) as batches:
        assert [next(batches) for _ in range(10)] == [
            (number, DataPosition(2, 0, number + 1)) for number in range(5, 15)
        ]


def test_at_most_depth_batches_are_prefetched():
    read = []

    def read_and_note(position):
        read.append(position.row)
        return count(position)

    with Prefetched(read_and_note, DataPosition(), depth=3) as batches:
        concurrent.futures.wait(batches._batches)
        # Three prefetched batches, and one in the thread.
        assert read == [0, 1, 2, 3]
        next(batches)
        concurrent.futures.wait(batches._batches)
        assert read == [0, 1, 2, 3, 4]


def test_errors_of_the_thread_are_raised_in_order():
    def fail_at_third(position):
        if position.row == 2:
            raise ValueError("unreadable")
        return count(position)

    with Prefetched(fail_at_third, DataPosition()) as batches:
        assert [next(batches)[0], next(batches)[0]] == [0, 1]
        with pytest.raises(ValueError, match="unreadable"):
            next(batches)
        with pytest.raises(StopIteration):
            next(batches)
    assert not reader_threads()


@pytest.mark.parametrize("taken", [0, 1, 5])
def test_closing_stops_the_thread(taken):
    batches = Prefetched(count, DataPosition())
    for _ in range(taken):
        next(batches)
    assert reader_threads()
    batches.close()
    assert not reader_threads()
    batches.close()
    assert list(batches) == []
