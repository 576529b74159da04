"""`torch.nn.Transformer`, inside the embeddings and output of PyTorch's translation tutorial.

Post-norm or pre-norm, final norms in either case.

Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.Transformer.html, and for the names
around it https://docs.pytorch.org/tutorials/beginner/translation_transformer.html
"""

import math
from typing import Any

import numpy as np
from torch import Tensor, nn

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.interop.families.torch import layers
from flaxformer_mt.parity.references import common
from flaxformer_mt.parity.trace.module_values import Tap, request_weights, time_major


class TokenEmbedding(nn.Module):
    """Token embeddings times sqrt(D), as published, or unscaled."""

    def __init__(self, config: TransformerConfig, vocab_size: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, config.d_model)
        self.scale = math.sqrt(config.d_model) if config.scale_embeddings else 1.0

    def forward(self, tokens: Tensor) -> Tensor:
        return self.embedding(tokens) * self.scale


class Seq2SeqTransformer(common.EncoderDecoder):
    """The whole model; `batch_first` is the layout inside `transformer`, forward has [B, ...]."""

    def __init__(self, config: TransformerConfig, batch_first: bool = False) -> None:
        super().__init__(config)
        emb_size, epsilon, activation = config.d_model, config.norm_epsilon, config.activation
        sizes: dict[str, Any] = {
            "d_model": emb_size,
            "nhead": config.num_heads,
            "dim_feedforward": config.d_ff,
            "dropout": config.dropout_rate,
            # Saved modules keep a name that PyTorch knows.
            "activation": activation
            if activation in ("relu", "gelu")
            else common.ACTIVATIONS[activation],
            "layer_norm_eps": epsilon,
            "norm_first": config.norm_position == "pre",
            "batch_first": batch_first,
        }
        # The encoder that nn.Transformer makes itself would leave out padded positions in a fast
        # path, with other results for them.
        encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(**sizes),
            config.num_encoder_layers,
            nn.LayerNorm(emb_size, eps=epsilon),
            enable_nested_tensor=False,
        )
        self.transformer = nn.Transformer(
            **sizes, num_decoder_layers=config.num_decoder_layers, custom_encoder=encoder
        )
        self.generator = nn.Linear(emb_size, config.target_vocab_size)
        self.src_tok_emb = TokenEmbedding(config, config.source_vocab_size)
        self.tgt_tok_emb = TokenEmbedding(config, config.target_vocab_size)
        self.positional_encoding = common.InterleavedPositions(config, "pos_embedding", axis=0)
        common.xavier_uniform(self)
        for part in self.modules():
            # The hook also keeps its layers off the inference fast path.
            if isinstance(part, nn.MultiheadAttention):
                part.register_forward_pre_hook(request_weights, with_kwargs=True)
        common.tie(config, self.src_tok_emb.embedding, self.tgt_tok_emb.embedding, self.generator)

    def forward(self, source: Tensor, target_input: Tensor, *masks: Tensor) -> Tensor:
        padding = source == self.pad_id
        x = self.positional_encoding(self.src_tok_emb(source.T))  # [S, B, D]
        y = self.positional_encoding(self.tgt_tok_emb(target_input.T))  # [T, B, D]
        batch_first = self.transformer.batch_first
        y = self.transformer(
            x.transpose(0, 1) if batch_first else x,
            y.transpose(0, 1) if batch_first else y,
            tgt_mask=~common.not_future(target_input)[0],
            src_key_padding_mask=padding,
            tgt_key_padding_mask=target_input == self.pad_id,
            memory_key_padding_mask=padding,
        )
        return self.generator(y if batch_first else y.transpose(0, 1))


build = Seq2SeqTransformer


def taps(config: TransformerConfig, module: nn.Module) -> dict[str, Tap]:
    """Returns the taps of this reference or of a bare `torch.nn.Transformer`."""
    # `torch.nn.MultiheadAttention` computes everything itself, without sub-modules. It multiplies
    # queries [B*H, T, K] by their scale and then with keys [B*H, K, S], at last weights with values
    # [B*H, S, K], and the context [T*B, H*K] with the output projection.
    bare = isinstance(module, nn.Transformer)
    transformer: Any = module if bare else module.transformer
    prefix = "" if bare else "transformer."
    layout = None if transformer.batch_first else time_major

    def keys_joined(value: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        return common.heads_joined(value.swapaxes(1, 2), shape)

    def in_stack(side, stack, sublayers, found):
        for site, tap in found.items():
            if tap.op != "_softmax":
                found[site] = tap._replace(reshape=layout)
        found[f"{stack}/final_norm"] = Tap(f"{prefix}{stack}.norm", reshape=layout)
        for name in sublayers[:-1]:
            site = f"{stack}/layers/{{layer}}/{name}"
            inside = found[f"{site}/output"].module
            products = Tap(inside, "input", "bmm", argument=1)
            found |= {
                f"{site}/query": Tap(inside, "input", "mul", reshape=common.heads_joined),
                f"{site}/key": products._replace(reshape=keys_joined),
                f"{site}/value": products._replace(call=-1, reshape=common.heads_joined),
                f"{site}/context": Tap(
                    inside, "input", "addmm", -1, argument=1, reshape=time_major
                ),
            }
        if not bare:
            table = f"{'src' if side == 'source' else 'tgt'}_tok_emb"
            call = int(side == "target")
            found[f"{side}/embedding"] = Tap(table, reshape=time_major)
            found[f"{side}/embedded"] = Tap("positional_encoding", call=call, reshape=time_major)

    return common.both_stacks(config, layers(bare), in_stack)
