"""The Transformer of a well-known PyTorch seq2seq tutorial: its weight map and its equations.

The family is not one of ours. This is all that anyone has to write for a model of their own: a map
(`FAMILY`) to load and save its checkpoints, and where its module computes what (`taps`) to compare
it with ours.

Post-norm without final norms, learned positions, embeddings times sqrt(D), nothing tied.

Source: "Attention is All You Need" in https://github.com/bentrevett/pytorch-seq2seq
"""

import functools
import math
from typing import Any

import torch
from torch import Tensor, nn

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.interop import Family
from flaxformer_mt.interop.checkpoint_files import PublishedCheckpoint
from flaxformer_mt.interop.weight_maps.rules import TensorRule, embeddings, linear, norm, same
from flaxformer_mt.parity.trace.module_values import Tap, for_layers, softmax_input, softmax_output

ENCODER = "encoder.layers.{layer}"
DECODER = "decoder.layers.{layer}"


def _sizes(checkpoint: PublishedCheckpoint, num_heads: int) -> dict[str, Any]:
    return {
        "source_vocab_size": checkpoint.size(("encoder.tok_embedding.weight", 0)),
        "target_vocab_size": checkpoint.size(("decoder.tok_embedding.weight", 0)),
        "d_model": checkpoint.size(("decoder.tok_embedding.weight", 1)),
        "d_ff": checkpoint.size(("decoder.layers.0.positionwise_feedforward.fc_1.bias", 0)),
        "num_encoder_layers": checkpoint.num_layers("encoder.layers."),
        "num_decoder_layers": checkpoint.num_layers("decoder.layers."),
        "max_length": checkpoint.size(("decoder.pos_embedding.weight", 0)),
    }


def _attention(ours: str, theirs: str) -> list[TensorRule]:
    return [
        *linear(f"{ours}/query", f"{theirs}.fc_q", bias=True),
        *linear(f"{ours}/key", f"{theirs}.fc_k", bias=True),
        *linear(f"{ours}/value", f"{theirs}.fc_v", bias=True),
        *linear(f"{ours}/output", f"{theirs}.fc_o", bias=True),
    ]


def _layer(ours: str, theirs: str) -> list[TensorRule]:
    """The rules that layers of both stacks share."""
    hidden, narrow = (f"{theirs}.positionwise_feedforward.fc_{i}" for i in (1, 2))
    return [
        *_attention(f"{ours}/self_attention", f"{theirs}.self_attention"),
        *norm(f"{ours}/self_attention_norm", f"{theirs}.self_attn_layer_norm"),
        *linear(f"{ours}/feed_forward/hidden", hidden, bias=True),
        *linear(f"{ours}/feed_forward/output", narrow, bias=True),
        *norm(f"{ours}/feed_forward_norm", f"{theirs}.ff_layer_norm"),
    ]


def _rules(config: TransformerConfig, layout: str) -> list[TensorRule]:
    tables = ("encoder.tok_embedding.weight", "decoder.tok_embedding.weight")
    return [
        *embeddings(config, *tables, "decoder.fc_out.weight"),
        same("output/bias", "decoder.fc_out.bias"),
        same("source_positions/embedding", "encoder.pos_embedding.weight"),
        same("target_positions/embedding", "decoder.pos_embedding.weight"),
        *_layer("encoder/layers", ENCODER),
        *_layer("decoder/layers", DECODER),
        *_attention("decoder/layers/cross_attention", f"{DECODER}.encoder_attention"),
        *norm("decoder/layers/cross_attention_norm", f"{DECODER}.enc_attn_layer_norm"),
    ]


FAMILY = Family(
    name="seq2seq_tutorial",
    sizes=_sizes,
    rules=_rules,
    preset=functools.partial(
        TransformerConfig,
        norm_epsilon=1e-5,
        output_bias=True,
        position_kind="learned",
        tie_embeddings="none",
        pad_id=1,
        bos_id=2,
        eos_id=3,
    ),
)


def taps(config: TransformerConfig) -> dict[str, Tap]:
    """The taps of the module."""
    in_decoder = {
        **_layer_taps("decoder"),
        **_attention_taps("decoder", "cross_attention", "encoder_attention", "enc_attn_layer_norm"),
    }
    return {
        "source/embedding": Tap("encoder", op="mul"),
        "source/embedded": Tap("encoder", op="add"),
        **for_layers(config.num_encoder_layers, _layer_taps("encoder")),
        "target/embedding": Tap("decoder", op="mul"),
        "target/embedded": Tap("decoder", op="add"),
        **for_layers(config.num_decoder_layers, in_decoder),
    }


def _layer_taps(stack: str) -> dict[str, Tap]:
    site, module = f"{stack}/layers/{{layer}}", f"{stack}.layers.{{layer}}"
    feed_forward = f"{module}.positionwise_feedforward"
    return {
        **_attention_taps(stack, "self_attention", "self_attention", "self_attn_layer_norm"),
        f"{site}/feed_forward/hidden": Tap(f"{feed_forward}.fc_1"),
        f"{site}/feed_forward/activated": Tap(f"{feed_forward}.fc_2", "input"),
        f"{site}/feed_forward/output": Tap(f"{feed_forward}.fc_2"),
        f"{site}/feed_forward_sum": Tap(f"{module}.ff_layer_norm", "input"),
        f"{site}/feed_forward_norm": Tap(f"{module}.ff_layer_norm"),
        site: Tap(module),
    }


def _attention_taps(stack: str, ours: str, theirs: str, norm: str) -> dict[str, Tap]:
    site, module = f"{stack}/layers/{{layer}}/{ours}", f"{stack}.layers.{{layer}}.{theirs}"
    return {
        f"{site}/query": Tap(f"{module}.fc_q"),
        f"{site}/key": Tap(f"{module}.fc_k"),
        f"{site}/value": Tap(f"{module}.fc_v"),
        f"{site}/scores": softmax_input(module),
        f"{site}/weights": softmax_output(module),
        f"{site}/context": Tap(f"{module}.fc_o", "input"),
        f"{site}/output": Tap(f"{module}.fc_o"),
        f"{site}_sum": Tap(f"{stack}.layers.{{layer}}.{norm}", "input"),
        f"{site}_norm": Tap(f"{stack}.layers.{{layer}}.{norm}"),
    }


class MultiHeadAttentionLayer(nn.Module):
    """Scaled dot-product attention of `heads` heads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.fc_q = nn.Linear(width, width)
        self.fc_k = nn.Linear(width, width)
        self.fc_v = nn.Linear(width, width)
        self.fc_o = nn.Linear(width, width)
        self.heads = heads

    def forward(self, query: Tensor, memory: Tensor, visible: Tensor) -> Tensor:
        """[B, T, D] and [B, S, D] to [B, T, D]; `visible` is bool [B, 1, T or 1, S]."""
        q, k, v = (
            projection(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for projection, x in ((self.fc_q, query), (self.fc_k, memory), (self.fc_v, memory))
        )
        scores = q @ k.transpose(2, 3) / math.sqrt(q.size(-1))
        weights = scores.masked_fill(~visible, -1e10).softmax(-1)
        return self.fc_o((weights @ v).transpose(1, 2).flatten(2))


class PositionwiseFeedforwardLayer(nn.Module):
    """fc_2(relu(fc_1(x)))."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc_1 = nn.Linear(width, hidden)
        self.fc_2 = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D] to [B, T, D]."""
        return self.fc_2(torch.relu(self.fc_1(x)))


class Layer(nn.Module):
    """A layer of the encoder; with `decodes`, one of the decoder."""

    def __init__(self, width: int, heads: int, hidden: int, decodes: bool) -> None:
        super().__init__()
        self.self_attn_layer_norm = nn.LayerNorm(width)
        self.ff_layer_norm = nn.LayerNorm(width)
        self.self_attention = MultiHeadAttentionLayer(width, heads)
        self.positionwise_feedforward = PositionwiseFeedforwardLayer(width, hidden)
        if decodes:
            self.enc_attn_layer_norm = nn.LayerNorm(width)
            self.encoder_attention = MultiHeadAttentionLayer(width, heads)

    def forward(
        self,
        x: Tensor,
        visible: Tensor,
        memory: Tensor | None = None,
        visible_memory: Tensor | None = None,
    ) -> Tensor:
        """[B, T, D] to [B, T, D]."""
        x = self.self_attn_layer_norm(x + self.self_attention(x, x, visible))
        if memory is not None:
            x = self.enc_attn_layer_norm(x + self.encoder_attention(x, memory, visible_memory))
        return self.ff_layer_norm(x + self.positionwise_feedforward(x))


class Stack(nn.Module):
    """Embeddings and layers of one side; with `decodes`, the output projection, too."""

    def __init__(self, config: TransformerConfig, vocab_size: int, depth: int, decodes: bool):
        super().__init__()
        width = config.d_model
        self.tok_embedding = nn.Embedding(vocab_size, width)
        self.pos_embedding = nn.Embedding(config.max_length, width)
        self.layers = nn.ModuleList(
            Layer(width, config.num_heads, config.d_ff, decodes) for _ in range(depth)
        )
        self.fc_out = nn.Linear(width, vocab_size) if decodes else nn.Identity()

    def forward(self, tokens: Tensor, *masks_and_memory: Tensor) -> Tensor:
        """Tokens [B, T] to [B, T, D], or to [B, T, V]."""
        scale = math.sqrt(self.tok_embedding.embedding_dim)
        x = self.tok_embedding(tokens) * scale + self.pos_embedding.weight[: tokens.size(1)]
        for layer in self.layers:
            x = layer(x, *masks_and_memory)
        return self.fc_out(x)


class Seq2Seq(nn.Module):
    """The whole model, without dropout."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        c = config
        self.encoder = Stack(c, c.source_vocab_size, c.num_encoder_layers, decodes=False)
        self.decoder = Stack(c, c.target_vocab_size, c.num_decoder_layers, decodes=True)
        self.pad_id = c.pad_id

    def forward(self, source: Tensor, target_input: Tensor) -> Tensor:
        """Logits [B, T, V] for source [B, S] and target_input [B, T]."""
        source_visible = (source != self.pad_id)[:, None, None]
        target_visible = (target_input != self.pad_id)[:, None, None]
        past = torch.ones(2 * target_input.shape[1:], dtype=torch.bool).tril()
        memory = self.encoder(source, source_visible)
        return self.decoder(target_input, target_visible & past, memory, source_visible)
