"""Round trips of checkpoints are byte-identical, in both file formats, for every family."""

import argparse
import dataclasses
from typing import Any

import chex
import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from flax.traverse_util import flatten_dict, unflatten_dict
from toy_references import ALL, DOUBLE_PROJECTION, VARIANTS, Variant, others_are_slow

from flaxformer_mt import interop
from flaxformer_mt.errors import UserError
from flaxformer_mt.parity import references
from flaxformer_mt.presets import FAMILIES


def load(variant: Variant, source: Any):
    return interop.load(variant.family, source, **variant.hints)


def read(path) -> dict[str, np.ndarray]:
    if path.suffix == ".safetensors":
        return safetensors.numpy.load_file(path)
    return {name: tensor.numpy() for name, tensor in torch.load(path, weights_only=True).items()}


def assert_identical(tensors: dict[str, np.ndarray], state: dict[str, torch.Tensor]) -> None:
    assert tensors.keys() == state.keys()
    for name, tensor in state.items():
        expected = tensor.numpy()
        assert tensors[name].dtype == expected.dtype, name
        assert tensors[name].shape == expected.shape, name
        assert tensors[name].tobytes() == expected.tobytes(), name


@pytest.mark.parametrize("dtype", ["float32", pytest.param("float64", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", others_are_slow())
def test_reference_to_ours_and_back_is_byte_identical(name, dtype, tmp_path):
    variant = ALL[name]
    reference = variant.build(dtype)
    state = reference.state_dict()
    config, params = load(variant, state)
    assert config.param_dtype == config.dtype == dtype
    path = tmp_path / ("model.pt" if dtype == "float32" else "model.safetensors")
    interop.save(variant.family, config, params, path)
    assert_identical(read(path), state)
    again = load(variant, path)
    assert again[0] == config
    chex.assert_trees_all_equal(again[1], params)


def flat(params: Any) -> dict[str, np.ndarray]:
    return flatten_dict(interop.model_params(params), sep="/")


@pytest.mark.parametrize("name", others_are_slow())
def test_trained_parameters_are_written_even_if_the_original_is_carried(name, tmp_path):
    variant = ALL[name]
    config, params = load(variant, variant.build().state_dict())
    trained = {path: array + np.float32(0.5) for path, array in flat(params).items()}
    params = unflatten_dict(trained, sep="/") | {"carried": params.get("carried", {})}
    interop.save(variant.family, config, params, tmp_path / "model.pt")
    again, found = load(variant, tmp_path / "model.pt")
    assert again == config
    chex.assert_trees_all_equal(flat(found), trained)


@pytest.mark.parametrize("name", others_are_slow())
def test_parameters_alone_are_enough_to_write_a_reference(name, tmp_path):
    variant = ALL[name]
    reference = variant.build()
    config, params = load(variant, reference.state_dict())
    stripped = interop.model_params(params)
    assert "carried" not in stripped
    interop.save(variant.family, config, stripped, tmp_path / "model.safetensors")
    tensors = {k: torch.tensor(v) for k, v in read(tmp_path / "model.safetensors").items()}
    reference.load_state_dict(tensors, strict=True)
    chex.assert_trees_all_close(
        flat(load(variant, reference.state_dict())[1]), flat(params), rtol=0, atol=1e-7
    )


def test_what_has_no_place_in_our_model_is_carried():
    def carried(name: str) -> set[str]:
        return set(load(ALL[name], ALL[name].build().state_dict())[1].get("carried", {}))

    assert carried("jadore801120_prj_all") == set()
    assert carried("annotated_1000") <= {"src_embed.1.pe", "tgt_embed.1.pe"}
    assert "encoder.0.self_attention.attention.W_q.weight" in carried("double_projection")
    assert "decoder.layers.1.enc_dec_attention.linear_q.weight" in carried("tunz_language_model")


def test_a_folded_projection_is_its_two_maps():
    layer = references.build("double_projection", d_model=16, num_heads=4, d_ff=8).encoder[0]
    config, params = interop.load("double_projection", layer.state_dict())
    attention = layer.self_attention
    x = torch.randn(5, 16)
    with torch.no_grad():
        heads = attention.W_k(x).unflatten(-1, (4, 4))
        expected = attention.attention.W_k(heads).flatten(1).numpy()
    key = params["encoder"]["layers"]["self_attention"]["key"]
    chex.assert_trees_all_close(x.numpy() @ key["kernel"][0] + key["bias"][0], expected, atol=1e-6)
    assert (config.num_heads, config.num_encoder_layers, config.num_decoder_layers) == (4, 1, 0)


@pytest.mark.slow_except("1-encoder", "3-decoder")
@pytest.mark.parametrize("stack", ["encoder", "decoder"])
@pytest.mark.parametrize("depth", [1, 3])
def test_double_projection_layers_of_one_kind_need_no_model_around_them(stack, depth, tmp_path):
    reference = getattr(DOUBLE_PROJECTION.build(), stack)
    layers = torch.nn.ModuleList([reference[0], reference[1], reference[0]][:depth])
    state = (layers if depth > 1 else layers[0]).state_dict()
    config, params = interop.load("double_projection", state)
    assert set(params) == {stack, "carried"}
    interop.save("double_projection", config, params, tmp_path / "layers.pt")
    assert_identical(read(tmp_path / "layers.pt"), state)


def test_a_bare_torch_transformer_gives_the_stacks(tmp_path):
    state = VARIANTS["torch_post"].build().transformer.state_dict()
    config, params = interop.load("torch", state, num_heads=4)
    assert (config.source_vocab_size, config.target_vocab_size) == (0, 0)
    assert set(params) == {"encoder", "decoder"}
    interop.save("torch", config, params, tmp_path / "model.pt")
    assert_identical(read(tmp_path / "model.pt"), state)


def test_both_decoder_layouts_of_annotated_keep_their_names(tmp_path):
    shared, separate = VARIANTS["annotated_1000_shared"], VARIANTS["annotated_1000"]
    config, params = load(shared, shared.build().state_dict())
    layers = params["decoder"]["layers"]
    chex.assert_trees_all_equal(layers["cross_attention"], layers["self_attention"])

    # Separate attentions that happen to be equal stay separate ...
    reference = separate.build()
    for layer in reference.decoder.layers:
        layer.src_attn.load_state_dict(layer.self_attn.state_dict())
    config, params = load(separate, reference.state_dict())
    interop.save("annotated", config, params, tmp_path / "equal.pt")
    assert_identical(read(tmp_path / "equal.pt"), reference.state_dict())

    # ... and a shared attention whose copies were trained differently becomes separate.
    layers["cross_attention"]["query"]["bias"] += 1
    config, _ = load(shared, shared.build().state_dict())
    params = interop.model_params(params) | {"decoder": params["decoder"] | {"layers": layers}}
    interop.save("annotated", config, params, tmp_path / "apart.pt")
    assert "decoder.layers.0.src_attn.linears.0.bias" in read(tmp_path / "apart.pt")


@pytest.mark.parametrize("name", ["annotated_1000", "annotated_10000"])
def test_the_position_base_is_read_from_the_table(name):
    config, _ = load(VARIANTS[name], VARIANTS[name].build().state_dict())
    assert config.position_base == float(name.removeprefix("annotated_"))


def test_the_settings_of_a_jadore801120_checkpoint_are_read(tmp_path):
    variant = VARIANTS["jadore801120_emb_all"]
    settings = argparse.Namespace(
        n_head=4, d_k=5, d_v=3, d_model=16, d_inner_hid=24, dropout=0.3, src_pad_idx=1,
        trg_pad_idx=1, proj_share_weight=True, embs_share_weight=True, scale_emb_or_prj="emb",
    )  # fmt: skip
    checkpoint = {"epoch": 7, "settings": settings, "model": variant.build().state_dict()}
    torch.save(checkpoint, tmp_path / "model.chkpt")
    config, _ = interop.load("jadore801120", tmp_path / "model.chkpt")
    assert (config.num_heads, config.pad_id, config.dropout_rate) == (4, 1, 0.3)
    assert (config.scale_embeddings, config.scale_logits) == (True, False)
    assert config.tie_embeddings == "all"
    as_dict = checkpoint | {"settings": vars(settings)}
    assert interop.load("jadore801120", as_dict)[0] == config


@pytest.mark.parametrize("name", ["marian_all", "marian_source", "fairseq_post_shared"])
def test_what_a_writer_left_out_is_left_out_again(name, tmp_path):
    variant = ALL[name]
    state = variant.build().state_dict()
    whole_config, whole = load(variant, state)
    omitted = interop.FAMILIES[variant.family].omitted(whole_config)
    assert omitted <= state.keys()
    rest = {name: tensor for name, tensor in state.items() if name not in omitted}
    config, params = load(variant, rest)
    chex.assert_trees_all_equal(flat(params), flat(whole))
    interop.save(variant.family, config, params, tmp_path / "model.safetensors")
    assert_identical(read(tmp_path / "model.safetensors"), rest)
    # Without carried tensors, all names are written.
    interop.save(variant.family, config, interop.model_params(params), tmp_path / "whole.pt")
    assert read(tmp_path / "whole.pt").keys() == state.keys()
    # Trained parameters stay tied, and their omitted names stay omitted.
    trained = {path: array + 1 for path, array in flat(params).items()}
    params = unflatten_dict(trained, sep="/") | {"carried": params["carried"]}
    interop.save(variant.family, config, params, tmp_path / "trained.pt")
    assert read(tmp_path / "trained.pt").keys() == rest.keys()
    chex.assert_trees_all_equal(flat(load(variant, tmp_path / "trained.pt")[1]), trained)


@pytest.mark.parametrize("name", ["jadore801120_prj_all", "marian_all"])
def test_tied_tensors_that_save_model_writes_once_are_read(name, tmp_path):
    variant = ALL[name]
    module = variant.build()
    config, params = load(variant, module.state_dict())
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_model(module, str(path), {"step": "3"})
    with safetensors.safe_open(path, "np") as file:
        assert len(file.keys()) < len(module.state_dict())
        metadata = file.metadata()
    found = load(variant, path)
    assert found[0] == config
    chex.assert_trees_all_equal(found[1], params)
    # Metadata of a file that has all tensors changes nothing.
    tensors = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    metadata |= {"other": "none", next(iter(tensors)): "none", "none": "none"}
    safetensors.torch.save_file(tensors, path, metadata)
    chex.assert_trees_all_equal(load(variant, path)[1], params)


def test_tied_tensors_are_one_in_a_pytorch_file(tmp_path):
    variant = VARIANTS["jadore801120_prj_all"]
    config, params = load(variant, variant.build().state_dict())
    interop.save(variant.family, config, params, tmp_path / "model.pt")
    state = torch.load(tmp_path / "model.pt", weights_only=True)
    pointers = {
        state[name].data_ptr()
        for name in (
            "encoder.src_word_emb.weight",
            "decoder.trg_word_emb.weight",
            "trg_word_prj.weight",
        )
    }
    assert len(pointers) == 1


def test_loaded_parameters_do_not_follow_the_module_they_came_from():
    variant = VARIANTS["tunz"]
    reference = variant.build()
    _, params = load(variant, reference.state_dict())
    before = params["target_embedding"]["embedding"].copy()
    with torch.no_grad():
        reference.t_vocab_embedding.weight.zero_()
    np.testing.assert_array_equal(params["target_embedding"]["embedding"], before)


@pytest.mark.slow
def test_every_preset_has_a_reference_and_a_map():
    assert FAMILIES.keys() == interop.FAMILIES.keys()
    for family in FAMILIES:
        sizes = {"source_vocab_size": 5, "target_vocab_size": 5, "d_model": 16, "num_heads": 2}
        sizes |= {"d_ff": 8, "num_encoder_layers": 1, "num_decoder_layers": 1}
        reference = references.build(family, **sizes)
        published = FAMILIES[family](**sizes)
        config, _ = interop.load(family, reference.state_dict(), num_heads=2)
        for field in dataclasses.fields(config):
            if field.name not in (
                "source_vocab_size",
                "target_vocab_size",
                "head_dim",
                "value_dim",
            ):
                loaded, preset = getattr(config, field.name), getattr(published, field.name)
                # Without `position_base` among the sizes, table and preset must agree on it.
                assert loaded == preset, (family, field.name)
        assert (config.key_width, config.value_width) == (
            published.key_width,
            published.value_width,
        )


def test_a_table_that_t5_never_reads_is_kept(tmp_path):
    variant = VARIANTS["t5"]
    state = variant.build().state_dict()
    name = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    state[name] = torch.randn(8, 4)
    config, params = load(variant, state)
    interop.save("t5", config, params, tmp_path / "model.safetensors")
    assert_identical(read(tmp_path / "model.safetensors"), state)


def test_the_settings_of_t5_are_read():
    settings = {
        "num_heads": 4, "feed_forward_proj": "gated-silu", "layer_norm_epsilon": 1e-5,
        "relative_attention_max_distance": 7, "dropout_rate": 0.3, "pad_token_id": 0,
        "decoder_start_token_id": 0, "eos_token_id": 1,
    }  # fmt: skip
    state = VARIANTS["t5_gated"].build().state_dict()
    config, _ = interop.load("t5", {"model": state, "settings": settings})
    assert (config.activation, config.norm_epsilon) == ("silu", 1e-5)
    assert (config.relative_position_max_distance, config.attention_dropout_rate) == (7, 0.3)
    with pytest.raises(UserError, match="feed_forward_proj=relu"):
        interop.load("t5", {"model": state, "settings": settings | {"feed_forward_proj": "relu"}})


def test_the_settings_of_a_marian_model_are_read():
    settings = {
        "activation_function": "swish", "scale_embedding": False, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "pad_token_id": 10, "decoder_start_token_id": 10,
        "eos_token_id": 0, "dropout": 0.3, "max_position_embeddings": 20,
    }  # fmt: skip
    state = VARIANTS["marian_all"].build().state_dict()
    config, _ = interop.load("marian", {"model": state, "settings": settings})
    assert (config.num_heads, config.activation, config.scale_embeddings) == (4, "silu", False)
    assert (config.pad_id, config.bos_id, config.eos_id) == (10, 10, 0)
    assert (config.dropout_rate, config.max_length) == (0.3, 20)
    with pytest.raises(UserError, match="encoder has 4 heads and the decoder 8"):
        interop.load(
            "marian", {"model": state, "settings": settings | {"decoder_attention_heads": 8}}
        )
    with pytest.raises(UserError, match="cannot have activation_function=tanh"):
        interop.load(
            "marian", {"model": state, "settings": settings | {"activation_function": "tanh"}}
        )


@pytest.mark.parametrize("version", ["args", "cfg", "nested cfg"])
def test_a_fairseq_checkpoint_of_any_version_is_read(version, tmp_path):
    variant = VARIANTS["fairseq_embedding_norm_gelu_unscaled"]
    flat_options = argparse.Namespace(
        encoder_attention_heads=4, decoder_attention_heads=4, activation_fn="gelu_accurate",
        no_scale_embedding=True, dropout=0.3, encoder_normalize_before=False,
    )  # fmt: skip
    nested_options = {
        "encoder": {"attention_heads": 4, "normalize_before": False},
        "decoder": {"attention_heads": 4},
        "activation_fn": "gelu_accurate", "no_scale_embedding": True, "dropout": 0.3,
    }  # fmt: skip
    options = {
        "args": {"args": flat_options},
        "cfg": {"args": None, "cfg": {"model": flat_options, "task": {"seed": 1}}},
        "nested cfg": {"args": None, "cfg": {"model": nested_options}},
    }[version]
    # The newest versions omit `_float_tensor`.
    state = variant.build().state_dict()
    state = {key: tensor for key, tensor in state.items() if not key.endswith("_float_tensor")}
    torch.save({"model": state} | options, tmp_path / "checkpoint_best.pt")
    config, params = interop.load("fairseq", tmp_path / "checkpoint_best.pt")
    assert (config.num_heads, config.activation, config.scale_embeddings) == (4, "gelu_tanh", False)
    assert (config.norm_position, config.embedding_norm, config.dropout_rate) == ("post", True, 0.3)
    assert (config.pad_id, config.bos_id, config.position_offset) == (1, 2, 2)
    interop.save("fairseq", config, params, tmp_path / "model.pt")
    assert_identical(read(tmp_path / "model.pt"), state)


@pytest.mark.parametrize(("newer", "rate"), [(None, 0.2), (0.0, 0.2), (0.1, 0.1)])
def test_the_older_name_of_a_rate_of_fairseq_counts_without_the_newer(newer, rate):
    options = {"encoder_attention_heads": 4, "relu_dropout": 0.2}
    options |= {} if newer is None else {"activation_dropout": newer}
    state = VARIANTS["fairseq_post_shared"].build().state_dict()
    config, _ = interop.load("fairseq", {"model": state, "args": argparse.Namespace(**options)})
    assert config.activation_dropout_rate == rate


@pytest.mark.parametrize("generator", [None, torch.Generator().get_state()])
def test_the_state_of_a_random_generator_is_no_module(generator):
    state = VARIANTS["torch_post"].build().state_dict()
    config, _ = interop.load("torch", {"model": state, "generator": generator}, num_heads=4)
    assert config.num_heads == 4


def test_an_old_fairseq_checkpoint_has_its_tied_output_once(tmp_path):
    variant = VARIANTS["fairseq_post_shared"]
    state = variant.build().state_dict()
    del state["decoder.output_projection.weight"]
    config, params = load(variant, state | {"encoder.version": torch.tensor([2.0])})
    assert config.tie_embeddings == "all"
    assert params["carried"]["encoder.version"] == 2
    interop.save("fairseq", config, params, tmp_path / "model.pt")
    assert "decoder.output_projection.weight" not in read(tmp_path / "model.pt")


def test_an_opennmt_checkpoint_is_read_in_parts(tmp_path):
    variant = VARIANTS["opennmt_tied_output_gelu"]
    state = variant.build().state_dict()
    generator = {name: state.pop(f"generator.{name}") for name in ("weight", "bias")}
    options = argparse.Namespace(
        heads=4, pos_ffn_activation_fn="gelu", norm_eps=1e-5, dropout=[0.3, 0.2],
        attention_dropout=[0.1],
    )  # fmt: skip
    torch.save({"model": state, "generator": generator, "opt": options}, tmp_path / "step_9.pt")
    config, _ = interop.load("opennmt", tmp_path / "step_9.pt")
    assert (config.num_heads, config.activation, config.norm_epsilon) == (4, "gelu", 1e-5)
    assert (config.dropout_rate, config.attention_dropout_rate) == (0.2, 0.1)
    assert (config.qkv_bias, config.attention_output_bias) == (True, True)
    assert not config.feed_forward_bias
    assert (config.pad_id, config.bos_id, config.eos_id) == (1, 2, 3)
