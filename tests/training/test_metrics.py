"""Sums to figures, figures to lines."""

import io
import json

import jax.numpy as jnp
import pytest
from rich.console import Console

from flaxformer_mt.training.metrics import (
    ConsoleWriter,
    JsonLinesWriter,
    TensorBoardWriter,
    means,
    validate,
)


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_means_weigh_by_tokens():
    steps = [
        {"loss": (jnp.float32(6), jnp.float32(3)), "nothing": (jnp.float32(0), jnp.float32(0))},
        {"loss": (jnp.float32(2), jnp.float32(1)), "nothing": (jnp.float32(0), jnp.float32(0))},
    ]
    assert means(steps) == {"loss": 2.0}


def test_validation_adds_batches_and_knows_the_perplexity():
    def eval_step(params, batch):
        return {"loss": (params * batch, batch), "cross_entropy": (jnp.float32(0), batch)}

    batches = [jnp.float32(1), jnp.float32(3)]
    figures = validate(eval_step, jnp.float32(2), batches)
    assert figures == {"loss": 2.0, "cross_entropy": 0.0, "perplexity": 1.0}


def test_json_lines_hold_step_split_and_figures(tmp_path):
    path = tmp_path / "metrics.jsonl"
    writer = JsonLinesWriter(path)
    writer.rewind(0)
    writer.write(50, "train", {"loss": 2.5, "compilations": 1})
    writer.write(50, "valid", {"bleu": 30.0, "bleu_signature": "x", "loss": float("nan")})
    writer.close()
    assert lines_of(path) == [
        {"step": 50, "split": "train", "loss": 2.5, "compilations": 1},
        {"step": 50, "split": "valid", "bleu": 30.0, "bleu_signature": "x", "loss": None},
    ]


def test_json_lines_of_later_steps_and_damaged_ones_go(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        '{"step": 1, "split": "train"}\n{"step": 3, "split": "train"}\n'
        '{"step": 2, "split": "valid"}\n[]\n{"step": 2, "spl'
    )
    JsonLinesWriter(path).rewind(2)
    assert [line["step"] for line in lines_of(path)] == [1, 2]
    assert list(tmp_path.iterdir()) == [path]


def test_tensorboard_gets_the_numbers(tmp_path):
    writer = TensorBoardWriter(tmp_path)
    writer.rewind(0)
    writer.write(5, "valid", {"bleu": 30.0, "bleu_signature": "x"})
    writer.close()
    (events,) = tmp_path.iterdir()
    assert b"valid/bleu" in events.read_bytes()
    assert b"signature" not in events.read_bytes()


@pytest.mark.parametrize("terminal", [True, False])
def test_console_says_where_training_is(terminal):
    out = io.StringIO()
    writer = ConsoleWriter(100, Console(file=out, force_terminal=terminal, width=200))
    writer.rewind(10)
    figures = {"loss": 2.5, "target_tokens_per_second": 1234.5, "learning_rate": 1e-3}
    writer.write(20, "train", figures)
    writer.write(20, "valid", {"loss": 2.0, "bleu": 31.5})
    writer.close()
    assert "continuing after step 10" in out.getvalue()
    assert "step 20/100 valid  loss 2.0000  BLEU 31.50" in out.getvalue()
    if not terminal:
        assert "step 20/100 train  loss 2.5000  1,234 tokens/s  rate 1.00e-03" in out.getvalue()
        assert "0:00:00 left" in out.getvalue()


def test_console_says_that_nothing_is_left():
    out = io.StringIO()
    writer = ConsoleWriter(100, Console(file=out))
    writer.rewind(100)
    writer.close()
    assert out.getvalue() == "nothing to train: step 100 of 100 is reached\n"
