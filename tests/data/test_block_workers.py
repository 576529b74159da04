"""Worker processes give the batches of a single process, and end with it."""

import dataclasses
import functools
import logging
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import chex
import numpy as np
import pytest

from flaxformer_mt.config import DataConfig, ExperimentConfig, TrainConfig
from flaxformer_mt.data.corpora.corpus import load_corpus
from flaxformer_mt.data.stream import block_workers
from flaxformer_mt.data.stream.batches import DataPosition, Shard
from flaxformer_mt.data.stream.block_workers import default_workers
from flaxformer_mt.data.stream.encoded_corpus import encode_corpus
from flaxformer_mt.data.stream.packing import Sentences, TokenPairs
from flaxformer_mt.data.stream.training_stream import TrainingStream
from flaxformer_mt.data.tokenizers.tokenizer import Tokenizers

DATA = DataConfig(source_row_length=24, target_row_length=24, bucket_lengths=(12, 24))
PHRASES = DataConfig(corpus="phrases", generated_pairs=600, vocab_size=500)


@functools.cache
def phrases(kind="bpe"):
    """Returns a vocabulary and corpora of 14,000 and 9,000 pairs: four streams."""
    setting = dataclasses.replace(PHRASES, tokenizer=kind)
    text = load_corpus(setting, "train")
    tokenizers = Tokenizers.train([text], setting)
    corpus = encode_corpus(text, tokenizers, ExperimentConfig().model)
    texts = Sentences.from_texts(text.sources)

    def repeated(count, weight):
        pairs = TokenPairs(corpus.sources, corpus.targets, {"text": texts})
        pairs = pairs.take(np.arange(count) % len(texts))
        return dataclasses.replace(corpus, **vars(pairs), weight=weight)

    return tokenizers.source, [repeated(14_000, 1.0), repeated(9_000, 2.0)]


def stream_of(workers, kind="bpe", corpora=None, **data):
    tokenizer, default = phrases(kind)
    setting = ExperimentConfig(
        data=dataclasses.replace(DATA, workers=workers, **data),
        train=TrainConfig(batch_tokens=256 * 24, seed=1),
    )
    return TrainingStream(corpora or default, setting, tokenizer)


def read(stream, count, position=DataPosition(), shard=Shard()):  # noqa: B008
    with stream.prefetched(shard, lambda batch: batch, position) as batches:
        return [next(batches) for _ in range(count)]


@pytest.mark.slow_except("packed")
@pytest.mark.parametrize(
    ("kind", "data"),
    [
        ("bpe", {}),
        ("bpe", {"subword_sampling": 0.2}),
        ("unigram", {"subword_sampling": 0.2}),
        ("bpe", {"subword_sampling": 0.2, "batching": "buckets"}),
    ],
    ids=["packed", "bpe", "unigram", "buckets"],
)
def test_batches_are_the_same_with_any_number_of_workers(kind, data):
    """Across blocks and epochs, and resumed in the middle by another number of workers."""
    expected = read(stream_of(0, kind, **data), 100)
    chex.assert_trees_all_equal(read(stream_of(2, kind, **data), 61), expected[:61])
    _, position = expected[60]
    chex.assert_trees_all_equal(read(stream_of(1, kind, **data), 39, position), expected[61:])
    after = expected[-1][1]
    assert max(after.streams or [(after.epoch, after.block)])[:2] > (0, 0)


def test_errors_of_workers_arrive():
    stream = stream_of(1, subword_sampling=0.1)
    stream._arguments = (*stream._arguments[:-2], None, None)
    with pytest.raises(ValueError, match="needs a vocabulary to sample from") as error:
        read(stream, 1)
    (note,) = error.value.__notes__
    assert note.startswith("In a worker process (data.workers):\nTraceback")
    assert "_resample" in note


def children(parent):
    """Returns the worker processes of a process."""
    found = subprocess.run(
        ["pgrep", "-f", "-P", str(parent), "block_workers"], capture_output=True, text=True
    )
    return [int(line) for line in found.stdout.split()]


def is_running(process):
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition):
    while not condition():  # The time limit is that of a test.
        time.sleep(0.05)


def test_batches_go_on_when_workers_are_killed(caplog):
    expected = read(stream_of(0, subword_sampling=0.2), 40)
    found = []
    with (
        caplog.at_level(logging.WARNING),
        stream_of(2, subword_sampling=0.2).prefetched(Shard(), lambda b: b, DataPosition()) as it,
    ):
        found += [next(it) for _ in range(5)]
        for worker in children(os.getpid()):
            os.kill(worker, signal.SIGKILL)
        found += [next(it) for _ in range(35)]
    chex.assert_trees_all_equal(found, expected)
    assert "a worker process that prepares batches was killed" in caplog.text
    assert not children(os.getpid())


@pytest.mark.slow_except("KILL")
@pytest.mark.parametrize("advice", ["CONT", "KILL"])
def test_a_worker_that_is_stopped_is_named_and_its_advice_helps(advice, monkeypatch):
    expected = read(stream_of(0, subword_sampling=0.2), 100)
    stopped, commands = [], []

    class Obedient(logging.Handler):
        def emit(self, record):
            found = re.findall(rf"`(kill -{advice} \d+)`", record.getMessage())
            for command in found if stopped else ():  # Before, it may be slow.
                commands.append(command)
                subprocess.run(command, shell=True, check=True)

    monkeypatch.setattr(block_workers, "SILENT_SECONDS", 0.1)
    handler = Obedient()
    block_workers._log.addHandler(handler)
    try:
        with stream_of(1, subword_sampling=0.2).prefetched(
            Shard(), lambda batch: batch, DataPosition()
        ) as batches:
            found = [next(batches)]
            stopped += children(os.getpid())
            os.kill(stopped[0], signal.SIGSTOP)
            found += [next(batches) for _ in range(99)]
    finally:
        block_workers._log.removeHandler(handler)
    chex.assert_trees_all_equal(found, expected)
    assert {*commands} == {f"kill -{advice} {pid}" for pid in stopped}


def test_workers_end_with_the_last_iterator():
    stream = stream_of(1)
    position = DataPosition()
    with stream.prefetched(Shard(), lambda batch: batch, position) as outer:
        first = next(outer)
        with stream.prefetched(Shard(), lambda batch: batch, position) as inner:
            chex.assert_trees_all_equal(next(inner), first)
            (worker,) = children(os.getpid())
        assert is_running(worker)
        next(outer)
    outer.close()
    assert not is_running(worker)
    # The stream is used on, without workers.
    chex.assert_trees_all_equal(stream.read(position), first)


SCRIPT = """
    import signal, sys, time
    # A shell that starts this in the background has it ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    from tests.data.test_block_workers import *
    stream = stream_of(2, subword_sampling=0.2)
    batches = stream.prefetched(Shard(), lambda batch: batch, DataPosition())
    print("ready", next(batches)[1].step, flush=True)
    for _ in batches:
        pass
"""


@pytest.mark.slow_except("SIGKILL")
@pytest.mark.parametrize("name", ["SIGKILL", "SIGINT"])
def test_no_worker_outlives_the_process(name):
    script = "\n".join(line.strip() for line in SCRIPT.splitlines()).replace("pass", "    pass")
    command = [sys.executable, "-c", script]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            assert process.stdout.readline() == "ready 1\n"
            workers = children(process.pid)
            assert len(workers) == 2
            assert all(map(is_running, workers))
            # As Ctrl-C and SLURM do: to all processes of the group.
            os.killpg(process.pid, getattr(signal, name))
            errors = process.communicate()[1]
        finally:
            process.kill()
    assert process.returncode in (-getattr(signal, name), 1, 130)
    wait_until(lambda: not any(map(is_running, workers)))
    # One traceback at most: that of the process itself.
    assert errors.count("Traceback") == (name == "SIGINT")


def test_the_default(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(6))
    assert default_workers(10**7, False, "gpu") == 4
    assert default_workers(10**6, False, "tpu") == 0
    assert default_workers(10**6, True, "tpu") == 4
    assert default_workers(20_000, True, "gpu") == 0
    assert default_workers(10**9, True, "cpu") == 0
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(2))
    assert default_workers(10**9, True, "gpu") == 0
