"""Adapters of PEFT: applied as the library applies them, or refused by name; never left out."""

import copy
import json
import shutil
import warnings

import chex
import jax
import numpy as np
import pytest
import torch
from flax.traverse_util import flatten_dict

import flaxformer_mt as fmt
from flaxformer_mt.cli import main
from flaxformer_mt.errors import UserError
from flaxformer_mt.interop.formats import huggingface

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import peft

pytestmark = pytest.mark.filterwarnings("ignore")

SETTINGS = "adapter_config.json"
PATTERNS = {
    "rank_pattern": {"decoder.*q_proj": 3},
    "alpha_pattern": {"layers.1.fc2": 5, "v_proj": 1},
}
CASES = {
    "linear": ("marian", {"target_modules": ["q_proj", "v_proj"]}),
    "DoRA, rsLoRA, patterns": (
        "nllb",
        {"target_modules": ["q_proj", "fc2"], "use_dora": True, "use_rslora": True, **PATTERNS},
    ),
    "all linear": ("t5", {"target_modules": "all-linear", "fan_in_fan_out": True}),
    "whole modules and biases": (
        "mbart50",
        {"target_modules": ["fc1"], "modules_to_save": ["lm_head"], "bias": "all"},
    ),
    "output": ("nllb", {"target_modules": ["lm_head", "k_proj"]}),
    "tables": ("bart", {"target_modules": ["embed_tokens", "lm_head"], "use_dora": True}),
    "biases": ("bart", {"target_modules": ["fc1"], "bias": "lora_only", "lora_bias": True}),
}  # fmt: skip


def adapted(model, **options):
    """Returns a model with a random adapter."""
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        settings = peft.LoraConfig(
            **{"r": 2, "lora_alpha": 7, "task_type": "SEQ_2_SEQ_LM"} | options
        )
        changed = peft.get_peft_model(copy.deepcopy(model), settings)
    with torch.no_grad():
        for parameter in changed.parameters():
            if parameter.requires_grad:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return changed.eval()


def save(changed, folder, base):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        changed.peft_config["default"].base_model_name_or_path = base
        changed.save_pretrained(folder)


@pytest.mark.parametrize("name", CASES)
def test_adapters_are_merged_as_by_peft(name, saved, tmp_path):
    kind, options = CASES[name]
    folder, model, _ = saved(kind)
    changed = adapted(model, **options)
    save(changed, tmp_path / "adapter", "somebody/else")
    tokens = torch.arange(3, 13).reshape(2, 5)
    computed = changed(input_ids=tokens, decoder_input_ids=tokens).logits
    # PEFT merges what changes one of tied tables into all of them.
    for module in changed.modules():
        if isinstance(getattr(module, "base_layer", None), torch.nn.Module):
            module.base_layer.weight = copy.deepcopy(module.base_layer.weight)
    merged = changed.merge_and_unload()
    again = merged(input_ids=tokens, decoder_input_ids=tokens).logits
    torch.testing.assert_close(again, computed, rtol=0, atol=1e-5)
    shutil.copytree(folder, tmp_path / "merged")
    merged.save_pretrained(tmp_path / "merged")
    expected = fmt.load(tmp_path / "merged")
    found = fmt.load(tmp_path / "adapter", base=folder)
    assert found.notes == (f"the adapter of {tmp_path / 'adapter'} is merged into {folder}",)
    assert found.config.model == expected.config.model
    chex.assert_trees_all_close(found.params, expected.params, rtol=1e-5, atol=1e-6)
    before = jax.tree.leaves(fmt.load(folder).params)
    assert len(before) < len(jax.tree.leaves(found.params)) or any(
        (a != b).any() for a, b in zip(before, jax.tree.leaves(found.params), strict=True)
    )


def test_an_adapter_beside_its_base_is_never_left_out(saved, tmp_path, capsys):
    folder, model, _ = saved("bart")
    changed = adapted(model, target_modules=["q_proj"])
    expected = changed.state_dict()[
        "base_model.model.model.encoder.layers.0.self_attn.q_proj.lora_A.default.weight"
    ]
    shutil.copytree(folder, tmp_path / "both")
    save(changed, tmp_path / "both", str(folder))
    save(changed, tmp_path / "named", str(folder))
    merged = {name: fmt.load(tmp_path / name).params for name in ("both", "named")}
    chex.assert_trees_all_equal(merged["both"], merged["named"])
    kernel = merged["both"]["encoder"]["layers"]["self_attention"]["query"]["kernel"][0]
    plain = model.model.encoder.layers[0].self_attn.q_proj.weight.detach().numpy().T
    assert np.linalg.matrix_rank(kernel - plain, tol=1e-4) == 2 == len(expected)
    # The settings alone, or the matrices alone, are not ignored either.
    for name in (SETTINGS, "adapter_model.safetensors"):
        broken = tmp_path / f"without {name}"
        shutil.copytree(tmp_path / "both", broken)
        (broken / name).unlink()
        with pytest.raises(UserError, match=rf"no .*{name}"):
            huggingface.read(broken, family="mbart")
    matrices = tmp_path / "named" / "adapter_model.safetensors"
    assert main(["convert", "--from", "mbart", str(matrices), str(tmp_path / "a.pt")]) == 1
    assert "lora_A.weight is one of the matrices of an adapter" in capsys.readouterr().err
    run = ["convert", "--from", "mbart", "--base", str(folder), str(tmp_path / "both")]
    assert main([*run, str(tmp_path / "run")]) in (0, None)
    assert main(["convert", "--from", "mbart", "--base", str(folder), str(folder), "x"]) == 1
    assert "a base is for adapters" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type=IA3 is not supported: merge it by PEFT"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights=pissa is not supported"),
        ({"layer_replication": [[0, 2]]}, "layer_replication=.* is not supported"),
        ({"trainable_token_indices": [3]}, "trainable_token_indices=.* is not supported"),
        ({"use_unheard": True}, "use_unheard=True is not supported"),
        ({"r": 5}, r"\(16, 16\) with r=5 cannot be changed by lora_A.weight \(2, 16\)"),
        ({"alpha_pattern": {"(a+)+": 2}}, "repeated groups"),
        ({"alpha_pattern": {"(": 2}}, "alpha_pattern is damaged"),
        ({"base_model_name_or_path": "somebody/else"}, "is an adapter of somebody/else, .* --base"),
    ],
)  # fmt: skip
def test_what_cannot_be_applied_is_refused_by_name(changes, message, saved, tmp_path):
    folder, model, _ = saved("bart")
    save(adapted(model, target_modules=["q_proj"]), tmp_path, str(folder))
    path = tmp_path / SETTINGS
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(UserError, match=message) as caught:
        fmt.load(tmp_path)
    assert "\n" not in str(caught.value)


def test_an_adapter_of_another_model_is_refused(saved, tmp_path):
    save(adapted(saved("t5")[1], target_modules=["q"]), tmp_path, "")
    with pytest.raises(UserError, match=r"its base has no tensor .*: it is an adapter of another"):
        fmt.load(tmp_path, base=saved("bart")[0])


def test_more_tokens_with_an_adapter(saved, tmp_path):
    """A vocabulary that was extended for the adapter lies beside it, with larger tables."""
    folder, model, theirs = saved("t5")
    larger = copy.deepcopy(model)
    tokenizer = copy.deepcopy(theirs)
    tokenizer.add_tokens(["<2ty>"])
    larger.resize_token_embeddings(model.config.vocab_size + 8)
    options = {"target_modules": ["q"], "modules_to_save": ["embed_tokens", "lm_head"]}
    changed = adapted(larger, **options)
    for name in ("encoder.embed_tokens", "decoder.embed_tokens", "lm_head"):
        module = changed.get_submodule(f"base_model.model.{name}.modules_to_save.default")
        module.weight.data = changed.base_model.model.shared.weight.detach().clone()
    save(changed, tmp_path, str(folder))
    tokenizer.save_pretrained(tmp_path)
    found = fmt.load(tmp_path)
    assert found.config.model.target_vocab_size == model.config.vocab_size + 8
    (tokens,) = found.tokenizers.source.encode(["<2ty> two"])
    assert tokens[0] == tokenizer.convert_tokens_to_ids("<2ty>")


@pytest.mark.parametrize("kind", ["marian", "bart", "nllb", "flan"])
def test_peft_loads_what_is_written(kind, saved, tmp_path):
    folder, model, _ = saved(kind)
    base = fmt.load(folder)
    draw = np.random.default_rng(0)
    adapters, expected = {}, flatten_dict(base.params, sep="/")
    for path in [path for path in expected if path.endswith(("query/kernel", "hidden/kernel"))]:
        layers, inputs, outputs = expected[path].shape
        a, b = draw.normal(size=(layers, inputs, 3)), draw.normal(size=(layers, 3, outputs))
        adapters[path] = {"a": np.float32(a), "b": np.float32(b)}
        expected[path] = expected[path] + 12 / 3 * adapters[path]["a"] @ adapters[path]["b"]
    fmt.save_adapter(tmp_path / "adapter", base, adapters, alpha=12)
    changed = peft.PeftModel.from_pretrained(copy.deepcopy(model), tmp_path / "adapter")
    shutil.copytree(folder, tmp_path / "merged")
    changed.merge_and_unload().save_pretrained(tmp_path / "merged")
    for name in ("merged", "adapter"):
        found = flatten_dict(fmt.load(tmp_path / name).params, sep="/")
        chex.assert_trees_all_close(found, expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(UserError, match="exists"):
        fmt.save_adapter(tmp_path / "adapter", base, adapters, alpha=12)


def test_adapters_that_peft_cannot_have_are_refused(saved, tmp_path):
    base = fmt.load(saved("bart")[0])
    pair = {"a": np.ones((2, 16, 3)), "b": np.ones((2, 3, 16))}
    query = "encoder/layers/self_attention/query/kernel"
    wider = {"a": np.ones((2, 24, 4)), "b": np.ones((2, 4, 16))}
    table = {"a": np.ones((base.config.model.target_vocab_size, 3)), "b": np.ones((3, 16))}
    for adapters, message in (
        ({"encoder/layers/nothing/kernel": pair}, "nothing/kernel is no parameter of mbart"),
        ({"target_embedding/embedding": table}, "is not one matrix of mbart"),
        ({query: pair, "encoder/layers/feed_forward/output/kernel": wider}, r"the ranks \[3, 4\]"),
    ):
        with pytest.raises(UserError, match=message):
            fmt.save_adapter(tmp_path / "adapter", base, adapters, alpha=1)
    with pytest.raises(UserError, match="not of opennmt: convert the model to one of marian"):
        fmt.save_adapter(tmp_path / "adapter", base, {query: pair}, alpha=1, family="opennmt")
    assert not [*tmp_path.iterdir()]
