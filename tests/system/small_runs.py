"""Runs of `train.py` that take seconds."""

import os

from flaxformer_mt.runs.metrics_file import read_metrics

TINY_MODEL = (
    "--model.d-model=8",
    "--model.num-heads=2",
    "--model.d-ff=16",
    "--model.num-encoder-layers=1",
    "--model.num-decoder-layers=1",
    "--model.dropout-rate=0.1",
)
SMALL = (
    "--model.d-model=16",
    "--model.num-heads=2",
    "--model.d-ff=32",
    "--model.num-encoder-layers=1",
    "--model.num-decoder-layers=1",
    "--data.vocab-size=400",
    "--optimizer.schedule=inverse_square_root",
    "--optimizer.warmup-steps=1120",
    "--train.batch-tokens=512",
    "--train.eval-every=4",
    "--train.checkpoint-every=2",
    "--train.log-every=2",
    "--train.eval-sentences=4",
    "--train.show-translations=1",
    "--train.best-metric=loss",
    "--decode.max-length-factor=0",
    "--decode.max-length-extra=4",
    "--decode.beam-size=2",
    "--parallel.num-devices=2",
)


def flags(text, workdir, *options):
    return [
        "--config=configs/multi30k_tiny_en_de.py",
        f"--data.path={text}",
        f"--workdir={workdir}",
        *SMALL,
        *options,
    ]


def xla_flags(*flags):
    """Returns XLA_FLAGS for a child process: the caller's, less simulated devices, and `flags`."""
    given = os.environ.get("XLA_FLAGS", "").split()
    return " ".join([*(flag for flag in given if "device_count" not in flag), *flags])


def metrics(workdir):
    return read_metrics(workdir / "metrics.jsonl")
