# The public names: for type checkers, and for `__init__.py`, which imports each on first use.

from flaxformer_mt.config import ExperimentConfig as ExperimentConfig
from flaxformer_mt.config import TransformerConfig as TransformerConfig
from flaxformer_mt.data.library import packed as packed
from flaxformer_mt.data.library import padded as padded
from flaxformer_mt.data.library import read_pairs as read_pairs
from flaxformer_mt.data.library import train_tokenizers as train_tokenizers
from flaxformer_mt.data.stream.batches import Batch as Batch
from flaxformer_mt.decoding.training_samples import sample as sample
from flaxformer_mt.decoding.translator import Translator as Translator
from flaxformer_mt.decoding.translator import translate as translate
from flaxformer_mt.experiment import train as train
from flaxformer_mt.loading import Model as Model
from flaxformer_mt.loading import load as load
from flaxformer_mt.loading import save_run as save_run
from flaxformer_mt.model.attention import MultiHeadAttention as MultiHeadAttention
from flaxformer_mt.model.attention import register_attention as register_attention
from flaxformer_mt.model.functional import apply as apply
from flaxformer_mt.model.functional import fused_attention as fused_attention
from flaxformer_mt.model.functional import init as init
from flaxformer_mt.model.functional import residual_norm as residual_norm
from flaxformer_mt.model.transformer import Transformer as Transformer
from flaxformer_mt.objectives.cross_entropy import Sums as Sums
from flaxformer_mt.objectives.cross_entropy import cross_entropy as cross_entropy
from flaxformer_mt.objectives.distillation import Distillation as Distillation
from flaxformer_mt.objectives.guided_alignment import guided_alignment as guided_alignment
from flaxformer_mt.objectives.r_drop import RDrop as RDrop
from flaxformer_mt.run_reader import Run as Run
from flaxformer_mt.runs.checkpoint import Checkpoints as Checkpoints
from flaxformer_mt.training.devices import compile_step as compile_step
from flaxformer_mt.training.devices import create as create
from flaxformer_mt.training.devices import make_mesh as make_mesh
from flaxformer_mt.training.devices import place as place
from flaxformer_mt.training.hooks import Hooks as Hooks
from flaxformer_mt.training.hooks import StepInfo as StepInfo

__version__: str
