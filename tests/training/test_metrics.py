"""Aggregation of metrics, and their writers."""

import jax.numpy as jnp
import pytest

from flaxformer_mt.errors import UserError
from flaxformer_mt.runs.metrics_file import format_line, read_metrics
from flaxformer_mt.training.reporting.metrics import JsonLinesWriter, validate


def write_lines(path, *steps):
    lines = [format_line({"step": step, "split": "train", "loss": 2.5}) for step in steps]
    path.write_text("".join(line + "\n" for line in lines))


def steps_of(path):
    return [line["step"] for line in read_metrics(path)]


def test_validation_adds_batches_and_knows_the_perplexity():
    def eval_step(params, batch):
        return {"loss": (params * batch, batch), "cross_entropy": (jnp.float32(0), batch)}

    batches = [jnp.float32(1), jnp.float32(3)]
    metrics = validate(eval_step, jnp.float32(2), batches)
    assert metrics == {"loss": 2.0, "cross_entropy": 0.0, "perplexity": 1.0}


def test_json_lines_hold_step_split_and_metrics(tmp_path):
    path = tmp_path / "metrics.jsonl"
    writer = JsonLinesWriter(path)
    writer.rewind(0)
    writer.write(50, "train", {"loss": 2.5, "compilations": 1})
    writer.write(50, "valid", {"bleu": 30.0, "bleu_signature": "x", "loss": float("nan")})
    writer.close()
    assert read_metrics(path) == [
        {"step": 50, "split": "train", "loss": 2.5, "compilations": 1},
        {"step": 50, "split": "valid", "bleu": 30.0, "bleu_signature": "x", "loss": None},
    ]


def test_json_lines_of_later_steps_and_an_incomplete_one_go(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_lines(path, 1, 3, 2)
    with path.open("ab") as file:
        file.write(b'{"step": 2, "spl\xff\x00\x00')  # As after a power cut.
    assert steps_of(path) == [1, 3, 2]
    JsonLinesWriter(path, pytest.fail).rewind(2)
    assert steps_of(path) == [1, 2]
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    "line",
    ["", "[]", "{}", "[" * 100_000, '{"step": 1' + "0" * 5000 + ', "split": "a"}', '{"step": 1}'],
)
def test_damaged_json_lines_are_named(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    write_lines(path, 1)
    before = path.read_text()
    path.write_text(before + line + "\n")
    announced = []
    with pytest.raises(UserError, match=r"metrics.jsonl is damaged: line 2 "):
        read_metrics(path)
    JsonLinesWriter(path, announced.append).rewind(2)
    assert [text.partition(": ")[2][:6] for text in announced] == ["line 2"]
    assert steps_of(path) == [1]


def test_each_flipped_bit_of_a_json_line_is_found(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_lines(path, 1, 2)
    whole = path.read_bytes()
    length = whole.index(b"\n") + 1
    for position in range(length):
        for bit in range(8):
            content = bytearray(whole)
            content[position] ^= 1 << bit
            path.write_bytes(content)
            with pytest.raises(UserError, match=r"metrics.jsonl is damaged: line [12] "):
                read_metrics(path)


def test_missing_json_lines_of_a_continued_run_are_named(tmp_path):
    announced = []
    JsonLinesWriter(tmp_path / "metrics.jsonl", announced.append).rewind(7)
    assert announced == [f"{tmp_path / 'metrics.jsonl'} is missing: metrics up to step 7 are lost"]


def test_json_lines_behind_a_link_are_continued_without_it(tmp_path):
    target, path = tmp_path / "target", tmp_path / "metrics.jsonl"
    write_lines(target, 1, 3)
    before = target.read_bytes()
    path.symlink_to(target)
    writer = JsonLinesWriter(path)
    writer.rewind(2)
    writer.write(2, "train", {"loss": 1.0})
    assert target.read_bytes() == before
    assert steps_of(path) == [1, 2]


def test_what_cannot_be_written_is_said(tmp_path):
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(UserError, match=r"file/metrics cannot be written: Not a directory"):
        JsonLinesWriter(tmp_path / "file" / "metrics").write(1, "train", {"loss": 1.0})
