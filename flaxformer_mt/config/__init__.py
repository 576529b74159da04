"""The configuration of an experiment: frozen, validated dataclasses.

The values of a field name the mathematics ("pre"), not the project that it was published in;
`presets.py` maps published models to values. The docstring of a field is its `--help` text; its
declaration states its roles and bounds (`fields.py`).
"""

from flaxformer_mt.config.data import GENERATED as GENERATED
from flaxformer_mt.config.data import CorpusConfig as CorpusConfig
from flaxformer_mt.config.data import CorpusKind as CorpusKind
from flaxformer_mt.config.data import DataConfig as DataConfig
from flaxformer_mt.config.decode import DecodeConfig as DecodeConfig
from flaxformer_mt.config.experiment import CONTINUATIONS as CONTINUATIONS
from flaxformer_mt.config.experiment import ExperimentConfig as ExperimentConfig
from flaxformer_mt.config.experiment import changes as changes
from flaxformer_mt.config.experiment import differences as differences
from flaxformer_mt.config.model import TransformerConfig as TransformerConfig
from flaxformer_mt.config.model import with_vocabulary_sizes as with_vocabulary_sizes
from flaxformer_mt.config.optimizer import OptimizerConfig as OptimizerConfig
from flaxformer_mt.config.serialization import from_dict as from_dict
from flaxformer_mt.config.serialization import from_json as from_json
from flaxformer_mt.config.serialization import to_dict as to_dict
from flaxformer_mt.config.serialization import to_json as to_json
from flaxformer_mt.config.train import ParallelConfig as ParallelConfig
from flaxformer_mt.config.train import TrainConfig as TrainConfig
from flaxformer_mt.config.train import ValidationMetric as ValidationMetric
