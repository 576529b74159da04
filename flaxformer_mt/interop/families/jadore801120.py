"""The weight map of `jadore801120`.

The published `train.py` saves {"epoch", "settings", "model"}; heads, tying and scale are read from
the settings. A bare state dict, which is also what is written, needs `num_heads`, and
`scale_logits` or `scale_embeddings` if they are not the published defaults.
"""

from typing import Any

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.errors import UserError
from flaxformer_mt.interop.checkpoint_files import PublishedCheckpoint
from flaxformer_mt.interop.weight_maps.family import (
    Buffer,
    Family,
    fields_of_settings,
    guess_tying,
    head_width,
    sinusoids,
)
from flaxformer_mt.interop.weight_maps.rules import TensorRule, embeddings, linear, norm

SOURCE = "encoder.src_word_emb.weight"
TARGET = "decoder.trg_word_emb.weight"
OUTPUT = "trg_word_prj.weight"
ENCODER = "encoder.layer_stack.{layer}"
DECODER = "decoder.layer_stack.{layer}"

_FIELDS_OF_SETTINGS = {
    "n_head": "num_heads",
    "d_k": "head_dim",
    "d_v": "value_dim",
    "d_model": "d_model",
    "d_inner_hid": "d_ff",
    "dropout": "dropout_rate",
    "src_pad_idx": "pad_id",
}


def _sizes(checkpoint: PublishedCheckpoint, num_heads: int) -> dict[str, Any]:
    layer = DECODER.format(layer=0)
    hidden, narrow = f"{layer}.pos_ffn.w_1", f"{layer}.pos_ffn.w_2.weight"
    query, key = f"{layer}.slf_attn.w_qs.weight", f"{layer}.slf_attn.w_ks.weight"
    value, joined = f"{layer}.slf_attn.w_vs.weight", f"{layer}.slf_attn.fc.weight"
    return {
        "source_vocab_size": checkpoint.size((SOURCE, 0)),
        "target_vocab_size": checkpoint.size((TARGET, 0), (OUTPUT, 0)),
        "d_model": checkpoint.size((SOURCE, 1), (TARGET, 1), (OUTPUT, 1)),
        "d_ff": checkpoint.size((f"{hidden}.weight", 0), (f"{hidden}.bias", 0), (narrow, 1)),
        "head_dim": head_width(checkpoint.size((query, 0), (key, 0)), num_heads),
        "value_dim": head_width(checkpoint.size((value, 0), (joined, 1)), num_heads),
        "num_encoder_layers": checkpoint.num_layers("encoder.layer_stack."),
        "num_decoder_layers": checkpoint.num_layers("decoder.layer_stack."),
    }


def _guess(checkpoint: PublishedCheckpoint) -> dict[str, Any]:
    settings = checkpoint.settings
    fields: dict[str, Any] = guess_tying(checkpoint, SOURCE, TARGET, OUTPUT)
    fields |= fields_of_settings(settings, _FIELDS_OF_SETTINGS)
    source, target = (settings.get(f"{side}_pad_idx") for side in ("src", "trg"))
    if None not in (source, target) and source != target:
        raise UserError(f"sources are padded with {source} and targets with {target}: unsupported")
    if {"proj_share_weight", "embs_share_weight"} <= settings.keys():
        ties_output, ties_source = settings["proj_share_weight"], settings["embs_share_weight"]
        if ties_output:
            fields["tie_embeddings"] = "all" if ties_source else "target_output"
        else:
            fields["tie_embeddings"] = "source_target" if ties_source else "none"
    if "scale_emb_or_prj" in settings:
        scales = fields["tie_embeddings"] in ("all", "target_output")
        fields["scale_embeddings"] = scales and settings["scale_emb_or_prj"] == "emb"
        fields["scale_logits"] = scales and settings["scale_emb_or_prj"] == "prj"
    return fields


def _attention(ours: str, theirs: str) -> list[TensorRule]:
    return [
        *linear(f"{ours}/query", f"{theirs}.w_qs", bias=False),
        *linear(f"{ours}/key", f"{theirs}.w_ks", bias=False),
        *linear(f"{ours}/value", f"{theirs}.w_vs", bias=False),
        *linear(f"{ours}/output", f"{theirs}.fc", bias=False),
        *norm(f"{ours}_norm", f"{theirs}.layer_norm"),
    ]


def _feed_forward(ours: str, theirs: str) -> list[TensorRule]:
    return [
        *linear(f"{ours}/hidden", f"{theirs}.w_1", bias=True),
        *linear(f"{ours}/output", f"{theirs}.w_2", bias=True),
        *norm(f"{ours}_norm", f"{theirs}.layer_norm"),
    ]


def _rules(config: TransformerConfig, layout: str) -> list[TensorRule]:
    return [
        *embeddings(config, SOURCE, TARGET, OUTPUT),
        *norm("encoder/embedding_norm", "encoder.layer_norm"),
        *_attention("encoder/layers/self_attention", f"{ENCODER}.slf_attn"),
        *_feed_forward("encoder/layers/feed_forward", f"{ENCODER}.pos_ffn"),
        *norm("decoder/embedding_norm", "decoder.layer_norm"),
        *_attention("decoder/layers/self_attention", f"{DECODER}.slf_attn"),
        *_attention("decoder/layers/cross_attention", f"{DECODER}.enc_attn"),
        *_feed_forward("decoder/layers/feed_forward", f"{DECODER}.pos_ffn"),
    ]


def _buffers(config: TransformerConfig) -> list[Buffer]:
    table = sinusoids(config)
    return [
        Buffer(f"{stack}.position_enc.pos_table", lambda rows: table(rows)[None], rows=200, axis=1)
        for stack in ("encoder", "decoder")
    ]


FAMILY = Family(
    name="jadore801120",
    sizes=_sizes,
    also_reads="its options (settings) and vocabularies",
    guess=_guess,
    rules=_rules,
    buffers=_buffers,
    open_switches=frozenset({"tie_embeddings", "scale_embeddings", "scale_logits"}),
    head_widths="free",
    order=(
        "encoder", "decoder", "trg_word_prj", "src_word_emb", "trg_word_emb", "position_enc",
        "pos_table", "layer_stack", "slf_attn", "enc_attn", "pos_ffn", "w_qs", "w_ks", "w_vs", "fc",
        "w_1", "w_2", "layer_norm", "weight", "bias",
    ),
)  # fmt: skip
