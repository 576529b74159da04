"""Public models by their own code against short JAX functions, which use nothing of ours."""

import inspect

import clones
import jax_models
import numpy as np
import pytest
import torch
from any_models import GPT2
from jax_models import (
    BERT_WEIGHTS,
    TRANSFORMER_WEIGHTS,
    VIT_WEIGHTS,
    WHISPER_WEIGHTS,
    shapes,
)

from flaxformer_mt import parity
from flaxformer_mt.parity import Tap, references

transformers = pytest.importorskip("transformers")
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
# The eager attention of these models has a softmax in float32.
COMMON = {"initializer_range": 0.3, "attn_implementation": "sdpa"}


def attention_taps(module, output):
    return {
        "scores": parity.softmax_input(module),
        "weights": parity.softmax_output(module),
        "output": Tap(output),
    }


def in_layers(taps):
    return parity.for_layers(2, {f"layers/{{layer}}/{site}": tap for site, tap in taps.items()})


def bert():
    module = transformers.BertModel(
        transformers.BertConfig(
            vocab_size=30, intermediate_size=24, max_position_embeddings=12, **SIZES, **COMMON
        )
    )
    layer = "encoder.layer.{layer}"
    taps = {
        **attention_taps(f"{layer}.attention.self", f"{layer}.attention.output.dense"),
        **{part: Tap(f"{layer}.attention.self.{part}") for part in ("query", "key", "value")},
        "norm_1": Tap(f"{layer}.attention"),
        "hidden": Tap(f"{layer}.intermediate.dense"),
    }
    del taps["output"]
    tokens = np.array([[5, 6, 7, 8, 2, 9, 4], [9, 4, 2, 3, 0, 0, 0], [3, 8, 8, 10, 4, 0, 0]])
    batch = tokens, np.arange(21).reshape(3, 7) % 2, (tokens != 0).astype(int)

    def forward(module, tokens, types, mask):
        found = module(tokens, token_type_ids=types, attention_mask=mask)
        return found.last_hidden_state, found.pooler_output

    return module, BERT_WEIGHTS, batch, {"embedded": "embeddings", **in_layers(taps)}, forward


def vit():
    module = transformers.ViTModel(
        transformers.ViTConfig(intermediate_size=24, image_size=8, patch_size=4, **SIZES, **COMMON)
    )
    layer = "layers.{layer}"
    taps = {
        "attention/norm": Tap(f"{layer}.layernorm_before"),
        "norm_2": Tap(f"{layer}.layernorm_after"),
        "hidden": Tap(f"{layer}.mlp.fc1"),
        "output": Tap(layer),
        **{
            f"attention/{site}": tap
            for site, tap in attention_taps(f"{layer}.attention", f"{layer}.attention").items()
        },
    }
    names = {"embedded": "embeddings", "norm": "layernorm", **in_layers(taps)}
    pixels = np.random.default_rng(0).normal(size=(2, 3, 8, 8))

    def forward(module, pixels):
        found = module(pixels)
        return found.last_hidden_state, found.pooler_output

    return module, VIT_WEIGHTS, pixels, names, forward


def whisper_encoder():
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    config = transformers.WhisperConfig(
        d_model=16,
        encoder_layers=2,
        encoder_attention_heads=4,
        encoder_ffn_dim=24,
        num_mel_bins=6,
        max_source_positions=10,
        init_std=0.3,
        attn_implementation="sdpa",
    )
    layer = "layers.{layer}"
    taps = {
        "attention/norm": Tap(f"{layer}.self_attn_layer_norm"),
        "norm_2": Tap(f"{layer}.final_layer_norm"),
        "hidden": Tap(f"{layer}.fc1"),
        "output": Tap(layer),
        "attention/query": Tap(f"{layer}.self_attn.q_proj"),
        "attention/key": Tap(f"{layer}.self_attn.k_proj"),
        "attention/weights": parity.softmax_output(f"{layer}.self_attn"),
    }
    names = {"norm": "layer_norm", **in_layers(taps)}
    features = np.random.default_rng(0).normal(size=(2, 6, 20))
    return WhisperEncoder(config), WHISPER_WEIGHTS, features, names, hidden_state


def hidden_state(module, inputs):
    return module(inputs).last_hidden_state


@pytest.mark.slow
@pytest.mark.parametrize("build", [bert, vit, whisper_encoder], ids=lambda f: f.__name__)
def test_a_public_model_in_float64(build):
    with references.default_dtype("float64"):
        torch.manual_seed(0)
        module, weights, batch, names, forward = build()
        references.perturb(module)
    report = parity.compare_models(
        module,
        getattr(jax_models, build.__name__),
        shapes(weights, module, 2),
        batch,
        names=names,
        weights=weights,
        forward=forward,
        unused=["embeddings.mask_token"],
    )
    assert report.passed, report
    assert max(row.max_rel for row in report.rows) < 1e-10


def test_gpt2_in_float64():
    report = GPT2.compare()
    assert report.passed, report
    assert max(row.max_rel for row in report.rows) < 1e-10


def original_transformer():
    """The model of hyunwoongko/transformer by its own code."""
    with clones.imported(
        "https://github.com/hyunwoongko/transformer",
        "63286547b9cd174a6cfc204832271814d685181f",
        "models.model.transformer",
    ) as code:
        return code.Transformer(
            src_pad_idx=1,
            trg_pad_idx=1,
            trg_sos_idx=2,
            enc_voc_size=13,
            dec_voc_size=11,
            d_model=16,
            n_head=4,
            max_len=12,
            ffn_hidden=24,
            n_layers=2,
            drop_prob=0.1,
            device="cpu",
        )


def test_hyunwoongkos_transformer_in_float64():
    with references.default_dtype("float64"):
        torch.manual_seed(0)
        module = references.perturb(original_transformer())
    attentions = {"encoder": {"attention": "attention"}}
    attentions["decoder"] = {"attention": "self_attention", "cross": "enc_dec_attention"}
    norms = {"encoder": {1: 1, 3: 2}, "decoder": {1: 1, 2: 2, 3: 3}}
    names = {}
    for stack in ("encoder", "decoder"):
        layer = f"{stack}.layers.{{layer}}"
        taps = {"hidden": Tap(f"{layer}.ffn.linear1"), "narrow": Tap(f"{layer}.ffn.linear2")}
        taps |= {f"norm_{ours}": Tap(f"{layer}.norm{i}") for ours, i in norms[stack].items()}
        for ours, theirs in attentions[stack].items():
            own = attention_taps(f"{layer}.{theirs}", f"{layer}.{theirs}.w_concat")
            own |= {
                name: Tap(f"{layer}.{theirs}.w_{name[0]}") for name in ("query", "key", "value")
            }
            taps |= {f"{ours}/{name}": tap for name, tap in own.items()}
        names[f"{stack}/embedded"] = f"{stack}.emb"
        names |= {f"{stack}/{site}": tap for site, tap in in_layers(taps).items()}
    source = np.array([[5, 6, 7, 8, 2, 9, 12], [9, 4, 2, 3, 1, 1, 1], [3, 8, 8, 10, 4, 1, 1]])
    target = np.array([[2, 6, 7, 8, 4], [2, 4, 10, 1, 1], [2, 8, 8, 1, 1]])
    # Its sinusoids are computed in float32, and are no buffer.
    table = module.encoder.emb.pos_emb.encoding
    report = parity.compare_models(
        module,
        jax_models.transformer,
        shapes(TRANSFORMER_WEIGHTS, module, 2),
        (source, target, table),
        names=names,
        weights=TRANSFORMER_WEIGHTS,
        forward=lambda module, source, target, table: module(source, target),
    )
    assert report.passed, report
    assert not report.untapped
    assert max(row.max_rel for row in report.rows) < 1e-10


def test_the_functions_are_short():
    lines = {}
    for name in ("gpt2", "bert", "vit", "whisper_encoder", "transformer"):
        wanted, text = [name], ""
        while wanted:
            source = inspect.getsource(getattr(jax_models, wanted.pop()))
            text += source
            wanted += [
                part
                for part in ("layer_norm", "dense", "attend", "sandwich", "convolution")
                if f"{part}(" in source and f"def {part}(" not in text and part not in wanted
            ]
        lines[name] = len(text.splitlines())
    assert all(count < 60 for count in lines.values()), lines
