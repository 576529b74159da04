"""UMT5: Hugging Face's own model, with the interface of the references.

T5 1.1 with a bias of distances in every layer.

Source: https://github.com/huggingface/transformers (src/transformers/models/umt5)
"""

from torch import nn
from transformers import UMT5Config, UMT5ForConditionalGeneration

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.parity.references.t5 import of_classes
from flaxformer_mt.parity.references.t5 import taps as taps


def build(config: TransformerConfig) -> nn.Module:
    return of_classes(config, "umt5", UMT5Config, UMT5ForConditionalGeneration)
