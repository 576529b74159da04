"""Searches with the same weights here and in `generate` of Hugging Face transformers."""

import random
import warnings

import opus_mt
import pytest
import torch
from generate_pairs import ModelPair, differences

from flaxformer_mt import interop

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import hub_models


# The token that translations begin with.
HUB = {"t5": None, "flan": None, "nllb": 5, "mbart50": 6, "bart": None}


SEARCHES = (
    {"beam_size": 1},
    {"beam_size": 1, "repetition_penalty": 1.4, "no_repeat_ngram_size": 3},
    {"early_stopping": "never", "length_penalty": 0.6},
    {"early_stopping": True, "length_penalty": 2.0, "min_length": 5},
    {"early_stopping": "never", "length_penalty": -1.2},
    {"early_stopping": False, "length_penalty": -0.5, "max_length": None, "max_new_tokens": 9},
    {"no_repeat_ngram_size": 2, "repetition_penalty": 1.2},
    {"suppress_tokens": [8, 12], "bad_words_ids": [[1], [0], [9, 10]], "renormalize_logits": True},
    {"beam_size": 6, "bad_words_ids": [], "early_stopping": True},
)
"""Settings of `generate`; by default a beam of 4 that stops by the heuristic."""


def random_hub_pair(seed, kind=None):
    """Returns a model of a random shape, and of a random kind unless it is given; what it is."""
    draw = random.Random(seed)
    kind = kind or draw.choice(["bart", "mbart50", "nllb", "t5", "flan", "mt5", "marian"])
    size, layers = draw.randint(30, 60), [draw.randint(1, 3) for _ in range(2)]
    width = 4 * draw.randint(2, 8)
    options = {"d_model": width}
    if kind == "t5gemma":
        groups, head = draw.choice([1, 2]), draw.choice([4, 6, 8])
        options = {
            "hidden_size": width, "intermediate_size": draw.randint(9, 40), "head_dim": head,
            "num_attention_heads": groups * draw.choice([1, 2]), "num_key_value_heads": groups,
            "sliding_window": draw.randint(2, 5), "query_pre_attn_scalar": head,
            "encoder": {"num_hidden_layers": layers[0]},
            "decoder": {"num_hidden_layers": layers[1]},
        }  # fmt: skip
    elif kind in ("t5", "flan", "mt5", "umt5", "madlad"):
        options |= {
            "d_kv": draw.randint(3, 9), "d_ff": draw.randint(9, 40),
            "num_layers": layers[0], "num_decoder_layers": layers[1],
            "num_heads": draw.randint(1, 4),
            "relative_attention_num_buckets": draw.choice([4, 8, 32]),
            "relative_attention_max_distance": draw.choice([16, 20, 128]),
        }  # fmt: skip
        # Smaller distances are refused: their buckets are not defined.
        least = options["relative_attention_num_buckets"] // 2 + 1
        options["relative_attention_max_distance"] = max(
            least, options["relative_attention_max_distance"]
        )
        if kind == "t5":
            options["feed_forward_proj"] = draw.choice(["relu", "gated-silu", "gated-gelu"])
    else:
        heads, inner = draw.choice([1, 2, 4]), draw.randint(9, 40)
        options |= {
            "encoder_layers": layers[0], "decoder_layers": layers[1],
            "encoder_attention_heads": heads, "decoder_attention_heads": heads,
            "encoder_ffn_dim": inner, "decoder_ffn_dim": inner,
            "scale_embedding": draw.choice([True, False]), "init_std": draw.choice([0.3, 0.6]),
            "activation_function": draw.choice(["relu", "gelu", "swish"]),
        }  # fmt: skip
    if kind == "marian":
        vocabulary = {"</s>": 0, "<unk>": 1, "<pad>": size - 1}
        theirs = opus_mt.random_model(opus_mt.config([vocabulary, vocabulary], **options), seed)
        with torch.no_grad():
            theirs.final_logits_bias[:, 0] += 4
    else:
        theirs = hub_models.random_model(hub_models.config(kind, size, **options), seed)
    checkpoint = {"model": theirs.state_dict(), "settings": theirs.config.to_dict()}
    family = "marian" if kind == "marian" else hub_models.KINDS[kind][0]
    config, params = interop.load(family, checkpoint)
    first = HUB.get(kind)
    pair = ModelPair(config, interop.model_params(params), theirs, max_length=24, first=first)
    return pair, f"{kind} {options}"


def assert_searches_agree(pair, description, searches, seed):
    sources = pair.random_sources(20, seed=seed)
    for number, search in enumerate(searches):
        usual = {"beam_size": 4, "early_stopping": False, "length_penalty": 1.0}
        mean, lines = differences(pair, sources, **usual | search)
        print(description, number, f"mean length {mean:.1f}, {len(lines)} ties", *lines, sep="\n  ")
        assert len(lines) <= 1


@pytest.mark.slow_except("0-umt5", "0-t5gemma")
@pytest.mark.parametrize("kind", ["umt5", "pegasus", "madlad", "fsmt", "t5gemma"])
@pytest.mark.parametrize("seed", range(20))
def test_random_models_of_a_kind_find_the_same(kind, seed):
    assert_searches_agree(*random_hub_pair(seed, kind), SEARCHES[seed % 2 * 2 :][:1], seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(60))
def test_random_models_find_the_same_with_any_search(seed):
    assert_searches_agree(*random_hub_pair(seed), SEARCHES, seed)
