"""MarianMT: Hugging Face's own model, with the interface of the references.

Post-norm, all sines before all cosines, the output tied and with a bias that is not trained, and a
decoder that starts from the padding token and hides nothing but the future.

Source: https://github.com/huggingface/transformers (src/transformers/models/marian)
"""

from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import MarianConfig, MarianMTModel

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.interop.formats.hub_families import HUB_FAMILIES
from flaxformer_mt.parity.references import common
from flaxformer_mt.parity.trace.module_values import Tap


class _Forward:
    config: Any

    def forward(self, source: Tensor, target_input: Tensor) -> Tensor:
        padding: Any = source == self.config.pad_token_id
        outputs: Any = super().forward(  # type: ignore[misc]
            input_ids=source,
            attention_mask=(~padding).long(),
            decoder_input_ids=target_input,
            use_cache=False,
        )
        return outputs.logits


def with_our_forward(published: type[nn.Module]) -> Any:
    """Returns a subclass of a class of Hugging Face with the `forward` of the other references."""
    return type(published.__name__, (_Forward, published), {})


def settings(family: str, config: TransformerConfig) -> dict[str, Any]:
    """Returns the settings of Hugging Face's models of fairseq's kind."""
    return HUB_FAMILIES[family].settings(config, {}) | {
        "attn_implementation": "eager",
        "encoder_layerdrop": 0.0,
        "decoder_layerdrop": 0.0,
        "forced_eos_token_id": config.eos_id,
        # With the published 0.02, a small model would not attend to anything.
        "init_std": config.d_model**-0.5,
    }


def _position_table(rows: int, d_model: int) -> Tensor:
    """Sines [rows, ceil(D/2)], then cosines [rows, floor(D/2)], in float64."""
    pairs = torch.arange((d_model + 1) // 2, dtype=torch.float64)
    angles = torch.arange(rows)[:, None] / 10000 ** (2 * pairs / d_model)
    return torch.cat([angles.sin(), angles.cos()[:, : d_model // 2]], dim=1)


def build(config: TransformerConfig) -> nn.Module:
    model = with_our_forward(MarianMTModel)(MarianConfig(**settings("marian", config)))
    if config.tie_embeddings == "source_target":  # Without a tied output, only version 4 ties them.
        model.model.set_input_embeddings(model.model.shared)
    return with_exact_positions(model, config)


def with_exact_positions(model: Any, config: TransformerConfig) -> nn.Module:
    """Computes the tables of sinusoids of a model in float64 anew, in place.

    Hugging Face always rounds them to float32: nothing could agree with it to more digits.
    """
    if torch.get_default_dtype() == torch.float64:
        table = _position_table(config.max_length, config.d_model)
        with torch.no_grad():
            for stack in (model.model.encoder, model.model.decoder):
                stack.embed_positions.weight.copy_(table)
    return cast(nn.Module, model)


def taps(config: TransformerConfig, module: nn.Module) -> dict[str, Tap]:
    return common.fairseq_taps(config, "model.", Tap("", op="mul"), Tap("layers.0", "input"))
