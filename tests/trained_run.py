"""A tiny model in Marian's arrangement that has learned something: generated phrases, en to de."""

import fcntl
import os

import train

OPTIONS = (
    "--config=configs/multi30k_marian_en_de.py",
    "--data.corpus=phrases",
    "--data.generated-pairs=4000",
    "--data.vocab-size=400",
    "--model.d-model=32",
    "--model.d-ff=64",
    "--model.num-encoder-layers=2",
    "--model.num-decoder-layers=2",
    "--model.dropout-rate=0",
    "--train.num-steps=200",
    "--train.batch-tokens=1024",
    "--train.eval-every=200",
    "--train.checkpoint-every=200",
    "--train.eval-sentences=1",
    "--train.best-metric=loss",
    "--optimizer.learning-rate=1e-2",
    "--optimizer.warmup-steps=60",
    "--parallel.num-devices=1",
)


def shared_run(folder):
    """The run folder `folder`; of several test processes the first one that asks trains it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "checkpoints").is_dir():
            flags = train.parse_flags([*OPTIONS, f"--workdir={folder}"])
            with train.open_folder(flags):
                train.train_to_the_end(train.prepare(flags, folder), folder)
    return folder


def place(tmp_path_factory):
    """Where the run is: under pytest-xdist the workers' folders have a common parent."""
    base = tmp_path_factory.getbasetemp()
    return (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "trained_run"
