"""The weight map of `jadore801120`.

The published `train.py` saves {"epoch", "settings", "model"}; heads, tying and scale are read from
the settings. A bare state dict, which is also what is written, needs `num_heads`, and
`scale_logits` or `scale_embeddings` if they are not the published defaults.
"""

from typing import Any

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.errors import UserError
from flaxformer_mt.interop.checkpoint_files import PublishedCheckpoint
from flaxformer_mt.interop.weight_maps import family
from flaxformer_mt.interop.weight_maps.rules import Layers, TensorRule, embeddings

SOURCE = "encoder.src_word_emb.weight"
TARGET = "decoder.trg_word_emb.weight"
OUTPUT = "trg_word_prj.weight"
LAYERS = Layers(
    encoder="encoder.layer_stack.{layer}.",
    decoder="decoder.layer_stack.{layer}.",
    modules={
        "self_attention": "slf_attn",
        "self_attention_norm": "slf_attn.layer_norm",
        "cross_attention": "enc_attn",
        "cross_attention_norm": "enc_attn.layer_norm",
        "feed_forward/hidden": "pos_ffn.w_1",
        "feed_forward/output": "pos_ffn.w_2",
        "feed_forward_norm": "pos_ffn.layer_norm",
    },
    stack_norms={"embedding_norm": "{stack}.layer_norm"},
    projections=(".w_qs", ".w_ks", ".w_vs", ".fc"),
)

_FIELDS_OF_SETTINGS = {
    "n_head": "num_heads",
    "d_k": "head_dim",
    "d_v": "value_dim",
    "d_model": "d_model",
    "d_inner_hid": "d_ff",
    "dropout": "dropout_rate",
    "src_pad_idx": "pad_id",
}
_KINDS: dict[str, Any] = {
    "trg_pad_idx": int,
    "proj_share_weight": bool,
    "embs_share_weight": bool,
    "scale_emb_or_prj": str,
}


def _guess(checkpoint: PublishedCheckpoint) -> dict[str, Any]:
    settings = checkpoint.settings
    family.check_kinds(settings, _KINDS)
    fields: dict[str, Any] = family.guess_tying(checkpoint, SOURCE, TARGET, OUTPUT)
    fields |= family.fields_of_settings(settings, _FIELDS_OF_SETTINGS)
    if fields.get("pad_id") == 1:  # Its vocabularies begin with <unk>, <blank>, <s>, </s>.
        fields |= {"bos_id": 2, "eos_id": 3}
    source, target = (settings.get(f"{side}_pad_idx") for side in ("src", "trg"))
    if None not in (source, target) and source != target:
        raise UserError(f"sources are padded with {source} and targets with {target}: unsupported")
    if {"proj_share_weight", "embs_share_weight"} <= settings.keys():
        ties = (bool(settings["embs_share_weight"]), bool(settings["proj_share_weight"]))
        fields["tie_embeddings"] = family.TYINGS[ties]
    if "scale_emb_or_prj" in settings:
        scales = fields["tie_embeddings"] in ("all", "target_output")
        fields["scale_embeddings"] = scales and settings["scale_emb_or_prj"] == "emb"
        fields["scale_logits"] = scales and settings["scale_emb_or_prj"] == "prj"
    return fields


def _rules(config: TransformerConfig, layout: str) -> list[TensorRule]:
    return [
        *embeddings(config, SOURCE, TARGET, OUTPUT),
        *LAYERS.rules(config),
    ]


def _buffers(config: TransformerConfig) -> list[family.Buffer]:
    names = (f"{stack}.position_enc.pos_table" for stack in ("encoder", "decoder"))
    return family.sinusoid_buffers(config, *names, rows=200, axis=1)


FAMILY = family.Family(
    name="jadore801120",
    sizes=LAYERS.sizes_of_model([SOURCE], [TARGET, OUTPUT], free_heads=True),
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
