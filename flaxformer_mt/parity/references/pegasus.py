"""Pegasus: Hugging Face's own model, with the interface of the references.

Pre-norm with final norms, the sinusoids of Marian, and one table of embeddings.

Source: https://github.com/huggingface/transformers (src/transformers/models/pegasus)
"""

from torch import nn
from transformers import PegasusConfig, PegasusForConditionalGeneration

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.parity.references import common, marian
from flaxformer_mt.parity.trace.module_values import Tap


def build(config: TransformerConfig) -> nn.Module:
    options = PegasusConfig(**marian.settings("pegasus", config))
    model = marian.with_our_forward(PegasusForConditionalGeneration)(options)
    return marian.with_exact_positions(model, config)


def taps(config: TransformerConfig, module: nn.Module) -> dict[str, Tap]:
    return common.fairseq_taps(config, "model.", Tap("", op="mul"), Tap("layers.0", "input"))
