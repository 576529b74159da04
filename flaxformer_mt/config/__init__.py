"""Every static fact of an experiment, as frozen, validated dataclasses.

A field names the mathematics ("pre"), never the project that it came from; `presets.py` says which
published model has which values. Each field's docstring is its `--help` text.
"""

from flaxformer_mt.config.continuation import RESUMABLE_FIELDS, differences
from flaxformer_mt.config.data import CorpusConfig, CorpusKind, DataConfig
from flaxformer_mt.config.decode import DecodeConfig
from flaxformer_mt.config.experiment import ExperimentConfig
from flaxformer_mt.config.model import TransformerConfig, with_vocabulary_sizes
from flaxformer_mt.config.optimizer import OptimizerConfig
from flaxformer_mt.config.parallel import ParallelConfig
from flaxformer_mt.config.serialization import from_dict, from_json, to_dict, to_json
from flaxformer_mt.config.train import TrainConfig, ValidationMetric

__all__ = [
    "RESUMABLE_FIELDS",
    "CorpusConfig",
    "CorpusKind",
    "DataConfig",
    "DecodeConfig",
    "ExperimentConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "TrainConfig",
    "TransformerConfig",
    "ValidationMetric",
    "differences",
    "from_dict",
    "from_json",
    "to_dict",
    "to_json",
    "with_vocabulary_sizes",
]
