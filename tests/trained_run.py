"""A tiny model with Marian's architecture, trained on generated phrases from English to German."""

import fcntl
import os

from flaxformer_mt import experiment
from flaxformer_mt.cli import training

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
    "--train.batch-tokens=512",
    "--train.eval-every=200",
    "--train.checkpoint-every=200",
    "--train.eval-sentences=1",
    "--train.best-metric=loss",
    "--optimizer.schedule=inverse_square_root",
    "--optimizer.clip-norm=0",
    "--optimizer.learning-rate=1e-2",
    "--optimizer.warmup-steps=60",
    "--parallel.num-devices=1",
)


def trained_once(folder):
    """Returns the run folder `folder`; the first test process that needs it trains the model."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "checkpoints").is_dir():
            config = training.parse_flags([*OPTIONS, f"--workdir={folder}"]).experiment()
            with experiment.open_folder(folder):
                experiment.fit(experiment.prepare(config, folder), folder)
    return folder


def shared_folder(tmp_path_factory):
    """Returns where the run is: under pytest-xdist, a folder common to all workers."""
    base = tmp_path_factory.getbasetemp()
    return (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "trained_run"
