"""FSMT: Hugging Face's own model, with the interface of the references.

Post-norm without final norms, fairseq's sinusoids, which are counted over real tokens from
`pad_id` + 1 on, and vocabularies of their own for source and target.

Source: https://github.com/huggingface/transformers (src/transformers/models/fsmt)
"""

import torch
from torch import Tensor, nn
from transformers import FSMTConfig, FSMTForConditionalGeneration

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.parity.references import common
from flaxformer_mt.parity.references.marian import settings
from flaxformer_mt.parity.trace.module_values import Tap


class _FSMT(FSMTForConditionalGeneration):
    """The model, whose own `forward` cannot make the causal mask in float64."""

    def forward(self, source: Tensor, target_input: Tensor) -> Tensor:
        padding = self.config.pad_token_id
        visible, hidden = source != padding, target_input == padding
        causal = torch.full(2 * target_input.shape[1:], -torch.inf).triu(1)
        encoded = self.model.encoder(source, visible).last_hidden_state
        outputs = self.model.decoder(target_input, encoded, visible, hidden, causal)
        logits: Tensor = outputs.last_hidden_state
        return logits


def build(config: TransformerConfig) -> nn.Module:
    model = _FSMT(FSMTConfig(langs=["en", "de"], **settings("fsmt", config)))
    encoder, decoder = model.model.encoder, model.model.decoder
    common.tie(config, encoder.embed_tokens, decoder.embed_tokens, decoder.output_projection)
    for stack in (encoder, decoder):
        positions = stack.embed_positions.weight.requires_grad_(False)
        # Always float32 in Hugging Face: nothing could agree with it to more digits.
        if torch.get_default_dtype() == torch.float64:
            positions.copy_(common.concatenated_sinusoids(*positions.shape))
            positions[config.pad_id] = 0
    return model


def taps(config: TransformerConfig, module: nn.Module) -> dict[str, Tap]:
    return common.fairseq_taps(config, "model.", Tap("", op="mul"), Tap("layers.0", "input"))
