"""The configuration of an experiment: frozen, validated dataclasses.

The values of a field name the mathematics ("pre"), not the project that it was published in;
`presets.py` maps published models to values. The docstring of a field is its `--help` text; its
declaration states its roles and bounds (`fields.py`).
"""

from flaxformer_mt.config.data import GENERATED, CorpusConfig, CorpusKind, DataConfig
from flaxformer_mt.config.decode import DecodeConfig
from flaxformer_mt.config.experiment import (
    CONTINUATIONS,
    RESUMABLE_FIELDS,
    ExperimentConfig,
    changes,
    differences,
)
from flaxformer_mt.config.model import TransformerConfig, with_vocabulary_sizes
from flaxformer_mt.config.optimizer import OptimizerConfig
from flaxformer_mt.config.parallel import ParallelConfig
from flaxformer_mt.config.serialization import from_dict, from_json, to_dict, to_json
from flaxformer_mt.config.train import TrainConfig, ValidationMetric

__all__ = [
    "CONTINUATIONS",
    "GENERATED",
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
    "changes",
    "differences",
    "from_dict",
    "from_json",
    "to_dict",
    "to_json",
    "with_vocabulary_sizes",
]
