"""Conversion between families: the result computes the same, or the conversion is rejected."""

import dataclasses
import functools
from typing import Any

import chex
import jax
import numpy as np
import pytest
import safetensors.torch
import torch
from flax.traverse_util import flatten_dict, unflatten_dict
from rounding import rounding_tolerance
from toy_references import (
    ALL,
    DOUBLE_PROJECTION,
    ONE_VOCABULARY,
    UNSCALED_TORCH,
    VARIANTS,
    Variant,
)

from flaxformer_mt import interop, presets
from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.errors import UserError
from flaxformer_mt.interop.adaptation import adapt
from flaxformer_mt.interop.convert import OWN, convert
from flaxformer_mt.interop.families import marian_native
from flaxformer_mt.interop.formats import own_format
from flaxformer_mt.interop.weight_maps.validation import check_switches
from flaxformer_mt.model.functional import parameter_shapes
from flaxformer_mt.model.transformer import Transformer
from flaxformer_mt.parity import references

EPSILON = ("norm_epsilon",)

PRE = {"norm_position": "pre"}
OPENNMT = {"pad_id": 1, "bos_id": 2, "eos_id": 3}
RELU_MARIAN = Variant(
    "marian",
    ONE_VOCABULARY | {"pad_id": 10, "eos_id": 0, "max_length": 20, "activation": "relu"},
    {"activation": "relu"},
)
LEARNED = "position_kind=sinusoidal becomes learned: tables of "
FAIRSEQ_START = "fairseq's code starts from the end token"


@dataclasses.dataclass(frozen=True)
class Case:
    """A supported conversion."""

    source: Variant
    target: str
    notes: tuple[str, ...] = ()
    """What its notes start or end with, in order."""
    accepted: tuple[str, ...] = ()
    zeros: tuple[str, ...] = ()
    """Tensors to set to zero first, since the other family does not have them."""

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The source's weights."""
        state = self.source.build().state_dict()
        for name in self.zeros:
            state[name].zero_()
        if self.source.family == "marian":  # As in published weights: decoding starts from it.
            state["model.shared.weight"][10].zero_()
        return state


CASES = {
    "annotated to annotated_wide_heads": Case(Variant("annotated"), "annotated_wide_heads"),
    "annotated_wide_heads to annotated": Case(
        Variant("annotated_wide_heads", {"head_dim": 5, "value_dim": 5}), "annotated"
    ),
    "torch to opennmt": Case(VARIANTS["torch_pre_gelu"], "opennmt"),
    "opennmt to torch": Case(
        Variant("opennmt", OPENNMT | {"norm_epsilon": 1e-5}, {"norm_epsilon": 1e-5}),
        "torch",
        (
            "qkv_bias=False becomes True: zeros are written",
            "attention_output_bias=False becomes True: zeros are written",
            "feed_forward_bias=False becomes True: zeros are written",
        ),
    ),
    "marian to fairseq": Case(
        RELU_MARIAN,
        "fairseq",
        (LEARNED, "output_bias=True becomes False", "mask_target_padding=False", "zero_pad",
         FAIRSEQ_START),
        zeros=("final_logits_bias",),
    ),
    "tunz to fairseq": Case(
        VARIANTS["tunz"],
        "fairseq",
        ("norm_epsilon=1e-06 becomes 1e-05: accepted", LEARNED, "qkv_bias=False",
         "attention_output_bias=False", "mask_target_padding=False", FAIRSEQ_START),
        EPSILON,
    ),
    "torch without scale to opennmt": Case(
        UNSCALED_TORCH,
        "opennmt",
        ("scale_embeddings=False becomes True: multiplied by 0.25: source_embedding",),
    ),
}  # fmt: skip


def logits(family: str, config: TransformerConfig, state: dict[str, torch.Tensor]) -> np.ndarray:
    """Returns the logits of the published model."""
    # The reference of tunz always starts from a zero vector, that of torch always scales.
    if family == "tunz" or not config.scale_embeddings:
        hints = {name: getattr(config, name) for name in ("num_heads", "pad_id")}
        switches = {name: getattr(config, name) for name in interop.FAMILIES[family].open_switches}
        _, params = interop.load(family, state, **hints | switches)
        return our_logits(config, params)
    reference = references.build(family, **dataclasses.asdict(config)).eval()
    reference.load_state_dict(state)
    with torch.no_grad():
        return reference(*map(torch.tensor, sentences(config.pad_id))).numpy()


def our_logits(config: TransformerConfig, params: Any) -> np.ndarray:
    apply = jax.jit(
        Transformer(config).apply, compiler_options={"xla_backend_optimization_level": 0}
    )
    return np.asarray(apply({"params": params}, *map(np.int32, sentences(config.pad_id))))


def tolerance_of_logits(reference: torch.nn.Module, pad_id: int) -> float:
    """Returns the rounding tolerance for the logits of a published model."""
    return rounding_tolerance(
        reference, lambda module: module(*map(torch.tensor, sentences(pad_id))).detach().numpy()
    )


def sentences(pad_id: int) -> tuple[list[list[int]], list[list[int]]]:
    """Returns two sources, one right-padded, and their targets."""
    source = [[5, 3, 8, 4, 9, 6], [4, 7, 6, 8, pad_id, pad_id]]
    return source, [[4, 3, 9, 8, 7], [9, 6, 5, 4, 4]]


@pytest.mark.slow_except("marian to fairseq")
@pytest.mark.parametrize("name", CASES)
def test_the_published_model_of_the_other_family_computes_the_same(name, tmp_path):
    case = CASES[name]
    state = case.state_dict()
    torch.save(state, tmp_path / "source.pt")
    notes = convert(
        case.source.family, case.target, tmp_path / "source.pt", tmp_path / "target.safetensors",
        case.source.hints, case.accepted,
    )  # fmt: skip
    assert len(notes) == len(case.notes), notes
    for note, part in zip(notes, case.notes, strict=True):
        assert note.startswith(part) or note.endswith(part)
        assert "\n" not in note

    config, params = interop.load(case.source.family, state, **case.source.hints)
    given = interop.TrainingState(config, params, None)
    theirs = adapt(given, interop.FAMILIES[case.target], case.accepted).config
    tensors = safetensors.torch.load_file(tmp_path / "target.safetensors")
    reference = case.source.build()
    reference.load_state_dict(state)
    rounding = tolerance_of_logits(reference, config.pad_id)
    # An accepted change of epsilon changes results by more than rounding.
    chex.assert_trees_all_close(
        logits(case.target, theirs, tensors),
        logits(case.source.family, config, state),
        rtol=0,
        atol=1e-4 if case.accepted else rounding,
    )


REFUSED = {
    ("jadore801120_prj_all", "torch"): "embedding_norm=True cannot be converted to False",
    ("jadore801120_prj_all", "tunz"): "norm_position=post cannot be converted to pre",
    ("annotated_1000", "torch"): "norm_kind=unbiased_std cannot be converted to layer_norm",
    ("annotated_1000", "jadore801120"): "norm_position=pre cannot be converted to post",
    ("annotated_wide_heads", "opennmt"): "norm_kind=unbiased_std cannot be converted to layer_norm",
    ("tunz", "annotated"): "norm_kind=layer_norm cannot be converted to unbiased_std",
    ("tunz", "torch"): "position_layout=concatenated cannot be converted to interleaved",
    (
        "tunz",
        "fairseq",
    ): "norm_epsilon=1e-06 cannot be converted to 1e-05: results would differ slightly",
    ("tunz_language_model", "opennmt"): "has_inputs=False cannot be converted to True",
    ("torch_pre_gelu", "tunz"): "tunz has no tie_embeddings=none",
    ("torch_pre_gelu", "marian"): "norm_position=pre cannot be converted to post",
    ("torch_post", "marian"): "final_norm=True cannot be converted to False",
    (
        "torch_post",
        "fairseq",
    ): "output_bias=True cannot be converted to False: output/bias is not zero",
    ("marian_all", "fairseq"): "fairseq has no activation=silu",
    ("marian_none_relu_odd_width", "torch"): "position_layout=concatenated cannot be converted to",
    ("fairseq_no_positions", "marian"): "position_kind=none cannot be converted to sinusoidal",
    (
        "fairseq_post_shared",
        "marian",
    ): "position_exponent=tensor2tensor cannot be converted to paper",
    ("fairseq_learned", "opennmt"): "opennmt has no position_kind=learned",
    ("opennmt_unbiased", "annotated"): "norm_kind=layer_norm cannot be converted to unbiased_std",
    ("torch_post", "double_projection"): "final_norm=True cannot be converted to False",
    ("double_projection", "annotated"): "norm_position=post cannot be converted to pre",
    ("double_projection", "marian"): "marian needs parameter",
}


@pytest.mark.parametrize(("name", "target"), REFUSED)
def test_a_switch_without_equivalent_weights_is_rejected_by_name(name, target, tmp_path):
    variant = ALL[name]
    torch.save(variant.build().state_dict(), tmp_path / "source.pt")
    with pytest.raises(UserError) as caught:
        convert(
            variant.family, target, tmp_path / "source.pt", tmp_path / "target.pt", variant.hints
        )
    assert REFUSED[name, target] in str(caught.value)
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["source.pt"]


def test_head_widths_that_the_other_family_cannot_have_are_rejected():
    variant = Variant("annotated_wide_heads", {"head_dim": 5, "value_dim": 3})
    config, params = interop.load("annotated_wide_heads", variant.build().state_dict(), num_heads=4)
    annotated = dataclasses.replace(interop.FAMILIES["annotated"], head_widths="even")
    with pytest.raises(UserError, match=r"head_dim=d_model/num_heads, which is 16/4, not 5"):
        adapt(interop.TrainingState(config, params, None), annotated)


WITHOUT_POSITIONS_OF_ATTENTION = [
    *(
        family
        for name, family in interop.FAMILIES.items()
        if name not in ("opennmt", "t5", "umt5", "t5gemma")
    ),
    marian_native.FAMILY,
]


@pytest.mark.parametrize("kind", ["rotary", "alibi", "t5_relative"])
@pytest.mark.parametrize("family", WITHOUT_POSITIONS_OF_ATTENTION)
def test_positions_of_attention_that_a_family_lacks_are_rejected_by_name(family, kind):
    published = family.configuration(target_vocab_size=11, source_vocab_size=11)
    config = dataclasses.replace(published, position_kind=kind)
    with pytest.raises(UserError, match=rf"position_kind=.*{kind}|{kind}.*position_kind"):
        check_switches(family, config)


def test_padding_that_starts_decoding_must_embed_to_zero_on_both_sides():
    state = RELU_MARIAN.build().state_dict()
    state["final_logits_bias"].zero_()
    config, params = interop.load("marian", state, **RELU_MARIAN.hints)
    with pytest.raises(UserError, match="zero_pad_embeddings=False cannot be converted to True"):
        adapt(interop.TrainingState(config, params, None), interop.FAMILIES["fairseq"])


def torch_with_ties(ties: str) -> interop.Family:
    """Returns the family `torch` with fixed ties."""
    torch_family = interop.FAMILIES["torch"]
    return dataclasses.replace(
        torch_family,
        preset=functools.partial(torch_family.configuration, tie_embeddings=ties),
        open_switches=torch_family.open_switches - {"tie_embeddings"},
    )


@pytest.mark.slow
def test_tables_are_untied_by_copies_and_tied_again_if_equal():
    state = Variant("torch", ONE_VOCABULARY | PRE).build().state_dict()
    for name in ("src_tok_emb.embedding.weight", "generator.weight"):
        state[name] = state["tgt_tok_emb.embedding.weight"]
    config, params = interop.load("torch", state, num_heads=4, **PRE)
    assert config.tie_embeddings == "all"
    untied, copies, _, notes = adapt(
        interop.TrainingState(config, params, None), torch_with_ties("none")
    )
    assert [note.split(": ")[1] for note in notes] == [
        "source_embedding/embedding is a copy of target_embedding/embedding",
        "output/kernel is a copy of target_embedding/embedding",
    ]
    chex.assert_trees_all_close(
        our_logits(untied, copies), our_logits(config, params), rtol=0, atol=1e-6
    )
    again, tied, _, _ = adapt(interop.TrainingState(untied, copies, None), torch_with_ties("all"))
    assert again == config
    chex.assert_trees_all_equal(tied, interop.model_params(params))
    copies["source_embedding"]["embedding"] = copies["source_embedding"]["embedding"] + 1
    with pytest.raises(
        UserError, match="tie_embeddings=none cannot be converted to all: source_embedding"
    ):
        adapt(interop.TrainingState(untied, copies, None), torch_with_ties("all"))


@pytest.mark.slow
def test_a_scale_of_logits_is_multiplied_into_an_untied_output():
    state = VARIANTS["torch_pre_gelu"].build().state_dict()
    config, params = interop.load("torch", state, **VARIANTS["torch_pre_gelu"].hints)
    scaled = dataclasses.replace(config, scale_logits=True)
    plain, multiplied, _, notes = adapt(
        interop.TrainingState(scaled, params, None), interop.FAMILIES["torch"]
    )
    assert plain == config
    assert "multiplied by 0.25: output/kernel, output/bias" in notes[0]
    chex.assert_trees_all_close(
        our_logits(plain, multiplied), our_logits(scaled, params), rtol=0, atol=1e-6
    )


def test_no_scale_is_multiplied_into_a_table_that_is_used_twice():
    variant = VARIANTS["jadore801120_prj_all"]
    config, params = interop.load("jadore801120", variant.build().state_dict(), **variant.hints)
    fairseq = dataclasses.replace(interop.FAMILIES["fairseq"], head_widths="free")
    with pytest.raises(
        UserError, match="scale_logits=True cannot be converted to False: the table is both"
    ):
        adapt(interop.TrainingState(config, params, None), fairseq, EPSILON)


@pytest.mark.slow
def test_only_a_key_bias_may_be_lost():
    biases = OPENNMT | {"qkv_bias": True, "feed_forward_bias": True}
    reference = Variant("opennmt", biases).build()
    config, params = interop.load("opennmt", reference.state_dict(), num_heads=4)
    rounding = tolerance_of_logits(reference, config.pad_id)
    unbiased = dataclasses.replace(
        interop.FAMILIES["opennmt"],
        open_switches=interop.FAMILIES["opennmt"].open_switches
        - {"qkv_bias", "attention_output_bias", "feed_forward_bias"},
    )
    with pytest.raises(
        UserError, match=r"qkv_bias=True cannot be converted to False: .*/query/bias is not"
    ):
        adapt(interop.TrainingState(config, params, None), unbiased)
    flat = flatten_dict(params, sep="/")
    for path, array in flat.items():
        if path.startswith(("encoder", "decoder")) and path.endswith("/bias"):
            array[...] = array if "/key/" in path or "norm/" in path else 0
    less, fewer, _, notes = adapt(interop.TrainingState(config, params, None), unbiased)
    assert len(notes) == 3
    assert not any("key/bias" in path for path in flatten_dict(fewer, sep="/"))
    chex.assert_trees_all_close(
        our_logits(less, fewer), our_logits(config, params), rtol=0, atol=rounding
    )


def test_layers_without_embeddings_are_converted_as_they_are(tmp_path):
    state = DOUBLE_PROJECTION.build().state_dict()
    source, target = tmp_path / "layers.pt", tmp_path / "torch.pt"
    torch.save(state, source)
    assert convert("double_projection", "torch", source, target) == ()
    _, expected = interop.load("double_projection", state)
    config, params = interop.load("torch", target, num_heads=4, final_norm=False)
    assert config.target_vocab_size == 0
    chex.assert_trees_all_equal(params, interop.model_params(expected))


def test_our_own_file_may_name_the_family_of_its_tensors_by_an_alias(tmp_path):
    variant = VARIANTS["annotated_wide_heads"]
    source, own = tmp_path / "source.pt", tmp_path / "own.safetensors"
    torch.save(variant.build().state_dict(), source)
    convert("annotated_wide_heads", OWN, source, own, variant.hints)
    metadata = safetensors.safe_open(own, framework="np").metadata() | {"origin": "questions"}
    safetensors.torch.save_file(safetensors.torch.load_file(own), own, metadata)
    assert own_format.read(own, {})[1] == "annotated_wide_heads"


@pytest.mark.slow
def test_positions_of_self_attention_belong_to_layers_alone():
    """Without embeddings other position kinds mean nothing, but rotations are part of a layer."""
    config = presets.double_projection(d_model=8, num_heads=2, d_ff=8)
    rotary = dataclasses.replace(config, position_kind="rotary")
    params = unflatten_dict(
        {path: np.zeros(shape, "float32") for path, shape in parameter_shapes(rotary).items()},
        sep="/",
    )
    family = interop.FAMILIES["double_projection"]
    sinusoidal = dataclasses.replace(config, position_kind="sinusoidal")
    assert adapt(interop.TrainingState(sinusoidal, params, None), family)
    with pytest.raises(UserError, match="position_kind=rotary cannot be converted to none"):
        adapt(interop.TrainingState(rotary, params, None), family)
