"""The configurations of the repository, for models that train in a second."""

import dataclasses
from pathlib import Path

from documentation.pages import ROOT

from flaxformer_mt.config import ExperimentConfig
from flaxformer_mt.config.files import load_config

CONFIG = '''"""The configuration of the same name, with a tiny model."""

from documentation.tiny import tiny


def get_config():
    return tiny("{name}")
'''


def write_configs(folder: Path) -> None:
    """Writes tiny configurations under the names of those of the repository."""
    (folder / "configs").mkdir()
    for path in (ROOT / "configs").glob("*.py"):
        (folder / "configs" / path.name).write_text(CONFIG.format(name=path.name))


def tiny(name: str) -> ExperimentConfig:
    """Returns a configuration of the repository with small sizes and few steps."""
    config = load_config(ROOT / "configs" / name)
    data = dataclasses.replace(config.data, vocab_size=420, generated_pairs=600)
    if data.corpus in ("tfds", "text") and not data.train_corpora:
        splits = {"train_split": "train", "valid_split": "valid", "test_split": "test"}
        data = dataclasses.replace(data, corpus="text", path="mytext", **splits)
    return dataclasses.replace(
        config,
        model=dataclasses.replace(
            config.model, d_model=32, num_heads=2, d_ff=64, num_encoder_layers=1,
            num_decoder_layers=1, dtype="float32",
        ),
        data=data,
        train=dataclasses.replace(
            config.train, num_steps=6, batch_tokens=2048, log_every=3, eval_every=3,
            checkpoint_every=3, eval_sentences=4,
        ),
    )  # fmt: skip
