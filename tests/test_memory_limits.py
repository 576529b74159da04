"""What cannot fit into memory is refused in one line, before anything is allocated."""

import dataclasses
import resource

import jax
import pytest
from talker import exhaust_memory

from flaxformer_mt import experiment, memory_limits
from flaxformer_mt.cli import main, program
from flaxformer_mt.config import (
    DataConfig,
    ExperimentConfig,
    OptimizerConfig,
    TrainConfig,
    TransformerConfig,
)
from flaxformer_mt.config.experiment import with_changes
from flaxformer_mt.data import run_text
from flaxformer_mt.errors import UserError
from flaxformer_mt.training.devices import CompiledStep, make_devices
from flaxformer_mt.training.memory import require_training_memory

SMALL = TransformerConfig(
    source_vocab_size=11,
    target_vocab_size=11,
    d_model=12,
    num_heads=2,
    d_ff=7,
    num_encoder_layers=2,
    num_decoder_layers=3,
)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"d_model": 2**20}, "parameters, more than 1,000,000,000,000: reduce model.d_model"),
        ({"d_model": 2**17, "num_encoder_layers": 10_000}, "parameters, more than"),
        (
            {"d_model": 2**17, "source_vocab_size": 2**24, "target_vocab_size": 2**24},
            "parameters, more than",
        ),
        ({"d_model": 2**16, "max_length": 2**17}, "model.max_length=131072 and model.d_model"),
    ],
)
def test_a_model_of_absurd_size_is_refused_at_once(fields, message):
    with pytest.raises(UserError) as caught:
        TransformerConfig(**fields)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("model", "data", "train", "expected"),
    [
        ({"num_encoder_layers": 10_000}, {}, {}, "470.1 GiB"),
        (
            {},
            {"source_row_length": 2**20},
            {},
            "in rows of 1,048,576 source tokens and 128 target tokens (data.source_row_length, "
            "data.target_row_length) takes, on each device, at least ",
        ),
        (
            {},
            {"batching": "buckets", "bucket_lengths": (32, 2**20)},
            {"batch_tokens": 2**23},
            "1,048,576 target tokens (data.bucket_lengths)",
        ),
    ],
)
def test_training_without_enough_memory_is_refused_before_anything_is_read(
    monkeypatch, tmp_path, model, data, train, expected
):
    def no_corpus(*arguments, **options):
        raise AssertionError("the corpora were opened")

    monkeypatch.setattr(run_text, "open_all", no_corpus)
    monkeypatch.setattr(memory_limits, "host_memory", lambda: 64 * 2**30)
    config = ExperimentConfig(
        model=TransformerConfig(**model),
        data=DataConfig(**{"target_row_length": 128} | data),
        train=TrainConfig(**train),
    )
    with pytest.raises(UserError) as caught:
        experiment.train(config, tmp_path / "run")
    message = str(caught.value)
    assert message.startswith("training a model of ")
    assert expected in message
    assert "GiB of memory, but there is 8.0 GiB" in message
    assert not (tmp_path / "run").exists()


def test_adafactor_needs_no_memory_for_moments(monkeypatch):
    config = ExperimentConfig(model=TransformerConfig(num_encoder_layers=200))
    size = config.model.parameter_count * 4
    monkeypatch.setattr(memory_limits, "host_memory", lambda: 3 * size * jax.device_count())
    with pytest.raises(UserError, match="training a model of"):
        require_training_memory(config, make_devices(config.parallel))
    config = dataclasses.replace(config, optimizer=OptimizerConfig(kind="adafactor"))
    require_training_memory(config, make_devices(config.parallel))


@pytest.mark.parametrize(
    "arguments",
    [["translate", "--run", "x"], ["train", "--config=configs/quickstart.py", "--workdir=x"]],
)
def test_an_address_space_that_is_too_small_for_xla_is_one_line(arguments, monkeypatch, capsys):
    limits = (2**30, resource.RLIM_INFINITY)
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits)
    assert main(arguments) == 1
    line = capsys.readouterr().err
    assert "limited to 1.0 GiB, but XLA needs 4.0 GiB: raise the limit (ulimit -v)" in line
    assert line.count("\n") == 1


def test_exhausted_memory_is_one_line(monkeypatch, capsys):
    def exhaust(*arguments):
        raise MemoryError

    monkeypatch.setattr(program, "run", exhaust)
    assert main(["translate"]) == 1
    line = "flaxformer-mt: error: the memory of this process is exhausted (MemoryError)\n"
    assert capsys.readouterr().err == line


@pytest.mark.slow
def test_a_device_without_enough_memory_is_explained_and_the_corrected_run_starts(
    monkeypatch, tmp_path
):
    config = ExperimentConfig(
        model=dataclasses.replace(SMALL, source_vocab_size=0, target_vocab_size=0),
        data=DataConfig(corpus="reverse", generated_pairs=50, vocab_size=280),
        train=TrainConfig(num_steps=1, batch_tokens=1024, eval_sentences=1),
    )
    with monkeypatch.context() as patched:
        patched.setattr(CompiledStep, "__call__", exhaust_memory)
        with pytest.raises(
            UserError, match=r"^training needs more memory .*model\.remat=full.*bytes"
        ):
            experiment.train(config, tmp_path / "run")
    less = with_changes(config, {"train": {"batch_tokens": 512}})
    assert experiment.train(less, tmp_path / "run").latest_step == 1
