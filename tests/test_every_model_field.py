"""Every field of the model, at values that are not its default: nothing takes them silently.

`CHANGES` has an entry for each field. A new field fails here until it has one, and then until the
parameter count, the FLOPs, every family, every format and every attention backend either handle it
or refuse it by name.
"""

import dataclasses
import functools
import types

import jax
import numpy as np
import pytest

from flaxformer_mt import interop
from flaxformer_mt.config import DecodeConfig, TransformerConfig
from flaxformer_mt.config.fields import choices_of, type_hints
from flaxformer_mt.errors import UserError
from flaxformer_mt.interop import adaptation
from flaxformer_mt.interop.formats import huggingface
from flaxformer_mt.interop.formats.bundle import ModelBundle, experiment
from flaxformer_mt.interop.formats.hub_families import HUB_FAMILIES
from flaxformer_mt.interop.weight_maps import validation
from flaxformer_mt.interop.weight_maps.mapping import by_path, model_params
from flaxformer_mt.model import attention, layers
from flaxformer_mt.model.functional import init
from flaxformer_mt.model.transformer import Transformer
from flaxformer_mt.objectives.flops import Work, training_flops

V, LENGTH = 40, 6
SIZES = {
    "source_vocab_size": V, "target_vocab_size": V, "d_model": 64, "num_heads": 4, "d_ff": 24,
    "num_encoder_layers": 2, "num_decoder_layers": 1, "max_length": 32,
}  # fmt: skip
BASE = TransformerConfig(**SIZES)

UNTIED = {"tie_embeddings": "target_output"}
SINUSOIDAL = {"position_kind": "sinusoidal"}
RELATIVE = {
    "position_kind": "t5_relative", "relative_position_buckets": 8,
    "relative_position_max_distance": 20,
}  # fmt: skip
CHANGES = {
    "source_vocab_size": [{"source_vocab_size": V + 3} | UNTIED],
    "target_vocab_size": [{"target_vocab_size": V + 5} | UNTIED],
    "d_model": [{"d_model": 128}],
    "num_heads": [{"num_heads": 2}],
    "num_kv_heads": [{"num_kv_heads": 1, "num_heads": 4}, {"num_kv_heads": 2, "num_heads": 4}],
    "head_dim": [{"head_dim": 32}],
    "value_dim": [{"value_dim": 8}],
    "d_ff": [{"d_ff": 40}],
    "num_encoder_layers": [{"num_encoder_layers": 3}],
    "num_decoder_layers": [{"num_decoder_layers": 2}],
    "has_inputs": [{"has_inputs": False}],
    "has_targets": [{"has_targets": False}],
    "dropout_rate": [{"dropout_rate": 0.25}],
    "embedding_dropout_rate": [{"embedding_dropout_rate": 0.3}],
    "attention_dropout_rate": [{"attention_dropout_rate": 0.35}],
    "activation_dropout_rate": [{"activation_dropout_rate": 0.4}],
    "norm_position": [{"norm_position": "pre"}, {"norm_position": "both"}],
    "norm_kind": [
        {"norm_kind": "unbiased_std", "norm_epsilon": 1e-6},
        {"norm_kind": "rms"},
        {"norm_kind": "rms_offset"},
    ],
    "norm_epsilon": [{"norm_epsilon": 0.01, "norm_kind": "layer_norm"}],
    "embedding_norm": [{"embedding_norm": True}],
    "embedding_bias": [{"embedding_bias": True}],
    "final_norm": [{"final_norm": True}],
    "qkv_bias": [{"qkv_bias": False}],
    "attention_output_bias": [{"attention_output_bias": False}],
    "feed_forward_bias": [{"feed_forward_bias": False}],
    "feed_forward_gate": [{"feed_forward_gate": True}],
    "output_bias": [{"output_bias": True}],
    "activation": [{"activation": "gelu"}, {"activation": "gelu_tanh"}, {"activation": "silu"}],
    "position_kind": [
        {"position_kind": "learned"},
        {"position_kind": "rotary"},
        {"position_kind": "alibi"},
        RELATIVE,
        {"position_kind": "none"},
    ],
    "position_layout": [{"position_layout": "concatenated"} | SINUSOIDAL],
    "position_exponent": [{"position_exponent": "tensor2tensor"} | SINUSOIDAL],
    "position_base": [{"position_base": 500.0} | SINUSOIDAL],
    "position_offset": [{"position_offset": 3} | SINUSOIDAL],
    "relative_position_buckets": [RELATIVE],
    "relative_position_max_distance": [RELATIVE],
    "relative_position_sharing": [{"relative_position_sharing": "layer"} | RELATIVE],
    "max_length": [{"max_length": 20, "position_kind": "learned"}],
    "attention_kind": [{"attention_kind": "sharper"}],
    "feed_forward_kind": [{"feed_forward_kind": "wider"}],
    "scale_scores": [{"scale_scores": False}],
    "attention_window": [{"attention_window": 3}],
    "query_key_norm": [{"query_key_norm": True}, {"query_key_norm": True, "norm_kind": "rms"}],
    "score_cap": [{"score_cap": 1.5}],
    "logit_cap": [{"logit_cap": 2.0}],
    "scale_embeddings": [{"scale_embeddings": False}],
    "scale_logits": [{"scale_logits": True}],
    "tie_embeddings": [
        {"tie_embeddings": "none"},
        {"tie_embeddings": "target_output"},
        {"tie_embeddings": "source_target"},
    ],
    "zero_pad_embeddings": [{"zero_pad_embeddings": True}],
    "train_pad_embedding": [{"train_pad_embedding": True}],
    "decoder_kind": [{"decoder_kind": "ssru"} | SINUSOIDAL],
    "mask_target_padding": [{"mask_target_padding": False}],
    "pad_id": [{"pad_id": 3}, {"pad_id": -1}],
    "bos_id": [{"bos_id": 4}, {"bos_id": -1}],
    "eos_id": [{"eos_id": 5}],
    "kernel_init": [{"kernel_init": "fairseq"}],
    "embedding_init": [{"embedding_init": "xavier_normal"}],
    "bias_init": [{"bias_init": "torch_default"}],
    "dtype": [{"dtype": "bfloat16"}],
    "param_dtype": [{"param_dtype": "float64"}],
    "scan_layers": [{"scan_layers": True}, {"scan_layers": False}],
    "attention_backend": [
        {"attention_backend": name} for name in ("einsum", "pallas_gpu", "pallas_tpu")
    ],
    "norm_backend": [{"norm_backend": "xla"}, {"norm_backend": "pallas_gpu"}],
    "remat": [{"remat": "projections"}, {"remat": "products"}, {"remat": "full"}],
}
"""For each field, changes of `BASE`: other values of it, with other fields that it needs."""
CASES = [(name, changes) for name, several in CHANGES.items() for changes in several]

NOT_COMPUTED = {
    "dropout_rate", "embedding_dropout_rate", "attention_dropout_rate", "activation_dropout_rate",
    "train_pad_embedding", "kernel_init", "embedding_init", "bias_init", "dtype", "param_dtype",
    "scan_layers", "attention_backend", "norm_backend", "remat",
}  # fmt: skip
"""Fields that do not change what a trained model computes, except for rounding."""
WITHOUT_PRODUCTS = NOT_COMPUTED | {
    "source_vocab_size", "num_heads", "norm_position", "norm_kind", "norm_epsilon",
    "embedding_norm", "embedding_bias", "final_norm", "qkv_bias", "attention_output_bias",
    "feed_forward_bias",
    "output_bias", "activation", "position_kind", "position_layout", "position_exponent",
    "position_base", "position_offset", "relative_position_buckets",
    "relative_position_max_distance", "relative_position_sharing", "max_length",
    "attention_kind", "feed_forward_kind", "attention_window", "query_key_norm", "score_cap",
    "logit_cap", "scale_scores", "scale_embeddings", "scale_logits", "tie_embeddings",
    "zero_pad_embeddings", "mask_target_padding", "pad_id", "bos_id", "eos_id",
}  # fmt: skip
"""Fields that do not change the FLOPs: more heads of a model of the same width are narrower."""
TOLD = {"num_heads", "max_length", "pad_id", "bos_id", "eos_id"}
"""Fields that a user tells `interop.load`, besides the switches of a family."""
NOT_FUSED = {
    "value_dim",
    "dtype",
    "param_dtype",
    "has_inputs",
    "has_targets",
    "attention_kind",
    "score_cap",
    "attention_window",
}
"""Fields with values that the kernels refuse, and those that do not concern them."""


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    """Registers an attention for these tests, without the caches that a replacement clears."""

    class Sharper(attention.MultiHeadAttention):
        def attend(self, query, *arguments):
            return super().attend(2 * query, *arguments)

    class Wider(layers.FeedForward):
        def __call__(self, x, *arguments):
            return super().__call__(2 * x, *arguments)

    classes = attention.ATTENTION.classes | {"sharper": Sharper}
    monkeypatch.setattr(attention.ATTENTION, "classes", classes)
    classes = layers.FEED_FORWARD.classes | {"wider": Wider}
    monkeypatch.setattr(layers.FEED_FORWARD, "classes", classes)


def test_every_field_has_changes():
    fields = {field.name: field for field in dataclasses.fields(TransformerConfig)}
    assert CHANGES.keys() == fields.keys()
    assert fields.keys() >= WITHOUT_PRODUCTS
    hints = type_hints(TransformerConfig)
    for name, several in CHANGES.items():
        values = {changes[name] for changes in several}
        assert not values & {fields[name].default, getattr(BASE, name)}, name
        if name.endswith(("_init", "dtype")):
            continue  # One value stands for the others.
        assert values >= set(choices_of(hints[name])) - {fields[name].default}, name


@functools.cache
def shapes_of(config):
    sizes = {
        name: max(getattr(config, name), 1) for name in ("source_vocab_size", "target_vocab_size")
    }
    config = dataclasses.replace(config, param_dtype="float32", **sizes)
    return jax.eval_shape(functools.partial(init, config), jax.random.key(0))


def random_params(config, seed=0):
    draw = np.random.default_rng(seed)

    def value(path, leaf):
        mean = 1.0 if path[-1].key == "scale" else 0.0
        deviation = 1.5 * leaf.shape[-2] ** -0.5 if path[-1].key == "kernel" else 0.3
        return draw.normal(mean, deviation, leaf.shape).astype(config.param_dtype)

    return jax.tree_util.tree_map_with_path(value, shapes_of(config))


def computed(config):
    """Returns the configuration with the same results, except for rounding."""
    fixed = {name: getattr(BASE, name) for name in NOT_COMPUTED}
    if config.position_kind != "learned":
        fixed["max_length"] = BASE.max_length
    return validation.without_groups_of_one(dataclasses.replace(config, **fixed))


def sources(config):
    """Two sentences, one of which is padded."""
    rows = np.random.default_rng(1).integers(10, V, (2, LENGTH)).astype(np.int32)
    rows[1, LENGTH - 2 :] = config.pad_id if config.pad_id >= 0 else rows[1, LENGTH - 2 :]
    return rows


def target_inputs(config):
    rows = np.random.default_rng(2).integers(10, V, (2, LENGTH)).astype(np.int32)
    rows[:, 0] = config.bos_id
    return rows


@functools.partial(jax.jit, static_argnums=0)
def _logits(config, params, source, inputs):
    source = source if config.has_inputs else None
    return Transformer(config).apply({"params": params}, source, inputs)


def logits(config, params, **fields):
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float32), model_params(params))
    model = dataclasses.replace(computed(config), **fields)
    return np.asarray(_logits(model, params, sources(config), target_inputs(config)))


def merged(base, cases, obstacle):
    """Merges changes of one base into as few accepted configurations as they need."""
    groups = []
    for _, changes in cases:
        for group in groups:
            both = group | changes
            agree = all(both[name] == value for name, value in group.items())
            if agree and not reason_against(base, both, obstacle):
                group |= changes
                break
        else:
            groups.append(dict(changes))
    configs = (dataclasses.replace(base, **group) for group in groups)
    return [*{computed(config): config for config in configs}.values()]


def reason_against(base, changes, obstacle):
    """Returns the message of a refusal, or ""."""
    try:
        return obstacle(dataclasses.replace(base, **changes)) or ""
    except UserError as error:
        return str(error)


def accepted(base, obstacle, published=TransformerConfig):
    """Returns the cases without an obstacle; the others must be refused by name.

    Args:
      base: the configuration that is changed.
      obstacle: raises a UserError, or returns "" or a text, given a changed configuration.
      published: returns the configuration with fields that follow from the changes.
    """
    found = []
    for name, changes in CASES:
        if name not in NOT_COMPUTED:
            changes = changes | implied(base, changes, published)
        reason = reason_against(base, changes, obstacle)
        if not reason:
            found.append((name, changes))
        else:
            assert any(field in reason for field in changes), (name, changes, reason)
    return found


def implied(base, changes, published):
    """Returns the fields that a family changes together with some others."""
    try:
        together = published(**SIZES | changes)
    except UserError:
        return {}
    if any(getattr(together, name) != value for name, value in changes.items()):
        return {}
    names = [field.name for field in dataclasses.fields(base)]
    return {
        name: getattr(together, name)
        for name in names
        if getattr(together, name) != getattr(base, name) and name not in SIZES
    }


@pytest.mark.slow_except(
    "num_kv_heads",
    "tie_embeddings",
    "feed_forward_gate",
    "decoder_kind",
    "value_dim",
    "has_inputs",
    "num_encoder_layers",
    "qkv_bias",
)
@pytest.mark.parametrize("name", CHANGES)
def test_parameters_and_arithmetic_are_counted(name):
    work = Work(sources=100, targets=80, source_pairs=500, target_pairs=300, cross_pairs=400)
    for changes in CHANGES[name]:
        config = dataclasses.replace(BASE, **changes)
        shapes = jax.tree.leaves(shapes_of(config))
        assert config.parameter_count == sum(leaf.size for leaf in shapes)
        needs = {key: value for key, value in changes.items() if key != name}
        without = dataclasses.replace(BASE, **needs)
        is_same = training_flops(config, work) == training_flops(without, work)
        assert is_same == (name in WITHOUT_PRODUCTS)


@pytest.mark.slow
@pytest.mark.parametrize("name", interop.FAMILIES)
def test_families_refuse_or_keep_every_field(name, tmp_path):
    family = interop.FAMILIES[name]
    sizes = SIZES
    if name == "double_projection":  # Layers only.
        sizes = SIZES | {"source_vocab_size": 0, "target_vocab_size": 0}
    base = family.configuration(**sizes)

    def obstacle(config):
        validation.check_switches(family, config)
        validation.check_ids(config)

    cases = accepted(base, obstacle, family.configuration)
    for number, config in enumerate(merged(base, cases, obstacle)):
        params = random_params(config)
        if not config.target_vocab_size:
            params = {stack: params[stack] for stack in ("encoder", "decoder")}
        path = tmp_path / f"{number}.safetensors"
        interop.save(family, config, params, path)
        told = {field: getattr(config, field) for field in TOLD | family.open_switches}
        again, loaded = interop.load(family, path, **told)
        ours, theirs = by_path(params), by_path(loaded)
        assert ours.keys() == theirs.keys()
        assert all(np.array_equal(ours[path], theirs[path]) for path in ours)
        if computed(again) != computed(config):
            np.testing.assert_array_equal(logits(again, loaded), logits(config, params))


def bundle_of(config, tokenizers):
    model = experiment(config, DecodeConfig())
    return ModelBundle(model, random_params(config), tokenizers)


def assert_format_keeps(family, obstacle, write, read, tokenizers, tmp_path):
    """Checks a format that can be read again."""
    base = family.configuration(**SIZES)
    cases = accepted(base, obstacle, family.configuration)
    number = 0
    while cases:
        (config, *_) = merged(base, cases, obstacle)
        group = [
            (name, changes)
            for name, changes in cases
            if all(getattr(config, field) == value for field, value in changes.items())
        ]
        bundle, folder = bundle_of(config, tokenizers(config)), tmp_path / str(number)
        try:
            write(bundle, folder)
        except UserError as error:  # Its weights have no equivalent.
            named = [case for case in group if any(field in str(error) for field in case[1])]
            assert named, error  # noqa: PT017
            cases = [case for case in cases if case not in named]
            continue
        again, _ = read(folder)
        ours, theirs = (logits(each.config.model, each.params) for each in (bundle, again))
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-5)
        cases = [case for case in cases if case not in group]
        number += 1
    assert number


@pytest.mark.slow
@pytest.mark.parametrize("name", HUB_FAMILIES)
def test_hugging_face_refuses_or_keeps_every_field(name, tmp_path, monkeypatch):
    family = HUB_FAMILIES[name].family
    monkeypatch.setattr(huggingface, "_tokenizer_files", lambda bundle, family: {})

    def stub(pad_id, eos_id):
        side = types.SimpleNamespace(
            pad_id=pad_id, eos_id=eos_id, vocab_size=V, language_ids=(), first_id=None, hidden={}
        )
        return types.SimpleNamespace(source=side, target=side)

    def stored(folder):
        settings = huggingface.read_json(folder / "config.json")
        return stub(settings["pad_token_id"], settings["eos_token_id"])

    monkeypatch.setattr(huggingface, "Tokenizers", types.SimpleNamespace(load=stored))

    def obstacle(config):
        if min(config.bos_id, config.pad_id) < 0:
            return "bos_id and pad_id"
        return adaptation.check_adaptable(config, family)

    assert_format_keeps(
        family,
        obstacle,
        functools.partial(huggingface.write, family=name),
        functools.partial(huggingface.read, family=name),
        lambda config: stub(config.pad_id, config.eos_id),
        tmp_path,
    )


@pytest.mark.slow
@pytest.mark.usefixtures("gpu_kernels_by_einsum")
@pytest.mark.parametrize("backend", ["pallas_gpu", "pallas_tpu"])
def test_every_backend_equals_einsum(backend):
    cases = [
        case for case in CASES if case[0] not in NOT_FUSED | {"attention_backend", "norm_backend"}
    ]
    for config in merged(BASE, cases, lambda config: ""):
        params = random_params(config)
        ours, expected = (
            logits(config, params, attention_backend=name) for name in (backend, "einsum")
        )
        np.testing.assert_allclose(ours, expected, rtol=5e-5, atol=5e-5)
