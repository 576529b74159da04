"""Known causes on hand-made inputs: those that rarely show in comparisons of whole models."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.model.positions import sinusoidal_table
from flaxformer_mt.parity.diagnosis.first_cause import diagnose
from flaxformer_mt.parity.diagnosis.inputs import Diagnosis, DiagnosisInputs
from flaxformer_mt.parity.references.losses import LOSSES
from flaxformer_mt.parity.tokens import Padding, Tokens

CONFIG = TransformerConfig(
    source_vocab_size=11,
    target_vocab_size=11,
    d_model=12,
    num_heads=2,
    d_ff=16,
    num_encoder_layers=1,
    num_decoder_layers=2,
    tie_embeddings="none",
    norm_position="pre",
    final_norm=True,
)
SOURCE = np.array([[5, 3, 8, 2], [4, 2, 0, 0], [9, 3, 2, 0]])
TARGET_INPUT = np.array([[1, 4, 9, 3], [1, 6, 0, 0], [1, 3, 7, 0]])
TARGET_OUTPUT = np.array([[4, 9, 3, 2], [6, 2, 0, 0], [3, 7, 2, 0]])
LEFT_PADDED = np.array([[5, 3, 8, 2], [0, 0, 4, 2], [0, 9, 3, 2]])


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


PARAMS = {
    "source_embedding/embedding": random(11, 12, seed=1),
    "target_embedding/embedding": random(11, 12, seed=2),
    "output/kernel": random(12, 11, seed=3),
}


def diagnosis_inputs(
    site: str, ours: dict[str, np.ndarray], theirs: np.ndarray | None = None, **changes: Any
) -> DiagnosisInputs:
    """Inputs in which the reference has our values, except for `theirs` at `site`."""
    source = changes.pop("source", SOURCE)
    config = dataclasses.replace(CONFIG, **changes.pop("config", {}))
    return DiagnosisInputs(
        site=site,
        config=config,
        params=PARAMS | changes.pop("params", {}),
        tokens=Tokens(source, TARGET_INPUT, TARGET_OUTPUT),
        real=Padding(source != 0, TARGET_OUTPUT != 0),
        ours=ours,
        theirs={} if theirs is None else ours | {site: theirs},
        tolerance=1e-10,
        loss=changes.pop("loss", 0.0),
        convention="others",
        smoothing=0.1,
        untested={},
    )


def check(found: Diagnosis | None, cause: str, says: str = "") -> None:
    assert found is not None
    assert found.cause == cause, found
    assert says in found.explanation
    assert found.residual <= 1e-10


# Embeddings and positions


def looked_up(theirs: np.ndarray, side: str = "source", **changes: Any) -> Diagnosis | None:
    tokens = SOURCE if side == "source" else TARGET_INPUT
    ours = PARAMS[f"{side}_embedding/embedding"][tokens] * 12**0.5
    return diagnose(
        diagnosis_inputs(f"{side}/embedding", {f"{side}/embedding": ours}, theirs, **changes)
    )


def test_source_tokens_looked_up_in_the_target_embedding():
    theirs = PARAMS["target_embedding/embedding"][SOURCE] * 12**0.5
    check(looked_up(theirs), "wrong embedding table", "in the target embedding")


def test_tokens_looked_up_in_the_matrix_of_the_output():
    theirs = PARAMS["output/kernel"].T[TARGET_INPUT] * 12**0.5
    check(looked_up(theirs, "target"), "wrong embedding table", "in the output matrix")


def test_a_token_that_embeds_to_the_zero_vector():
    """PyTorch's `padding_idx`, set to the wrong id."""
    table = np.where(np.arange(11)[:, None] == 3, 0, PARAMS["source_embedding/embedding"])
    check(looked_up(table[SOURCE] * 12**0.5), "zeroed tokens", "the tokens (3,)")


def test_a_decoder_that_reads_its_targets():
    theirs = PARAMS["target_embedding/embedding"][TARGET_OUTPUT] * 12**0.5
    check(looked_up(theirs, "target"), "shifted tokens", "the targets to be predicted")


def test_a_decoder_that_starts_from_zeros():
    theirs = PARAMS["target_embedding/embedding"][np.roll(TARGET_INPUT, 1, axis=1)] * 12**0.5
    theirs[:, 0] = 0
    check(looked_up(theirs, "target"), "shifted tokens", "after a zero vector")


def positioned(
    positions: np.ndarray, expected: np.ndarray, source: np.ndarray = SOURCE, **changes: Any
) -> Diagnosis | None:
    embedding = random(3, 4, 12)
    ours = {"source/embedding": embedding, "source/embedded": embedding + positions}
    return diagnose(
        diagnosis_inputs("source/embedded", ours, embedding + expected, source=source, **changes)
    )


def test_positions_that_are_counted_over_real_tokens():
    table = sinusoidal_table(4, 12)
    counted = np.maximum(np.cumsum(LEFT_PADDED != 0, axis=1) - 1, 0)
    found = positioned(table, table[counted], LEFT_PADDED)
    check(found, "position counting", "count real tokens only")


def test_positions_that_are_counted_over_columns_where_ours_are_not():
    table = sinusoidal_table(4, 12)
    counted = np.maximum(np.cumsum(LEFT_PADDED != 0, axis=1) - 1, 0)
    found = positioned(table[counted], table, LEFT_PADDED)
    check(found, "position counting", "count columns, padding included")


def test_learned_positions_with_an_offset():
    table = random(9, 12, seed=5)
    params = {"source_positions/embedding": table}
    learned = {"position_kind": "learned", "max_length": 9}
    found = positioned(table[:4], table[2:6], params=params, config=learned)
    check(found, "position offset", "is 2, ours 0")


def test_two_switches_at_once():
    expected = sinusoidal_table(4, 12, layout="concatenated", exponent="tensor2tensor")
    found = positioned(sinusoidal_table(4, 12), expected)
    check(found, "sine layout and sine exponent", "is concatenated, ours interleaved; ")


def test_what_stands_at_padding_does_not_matter():
    table = sinusoidal_table(4, 12)
    expected = np.where((SOURCE != 0)[..., None], 0, 1e6 * random(3, 4, 12))
    check(positioned(table, expected), "positions missing")


# Norms


def normalized(
    theirs: Callable[[torch.Tensor], torch.Tensor], mean: float = 0.0
) -> Diagnosis | None:
    """Diagnoses a norm of [3, 4, 12] without scale and bias, whose inputs have this mean."""
    x = torch.tensor(random(3, 4, 12, seed=30) + mean)
    ours = F.layer_norm(x, x.shape[-1:], eps=CONFIG.norm_epsilon).numpy()
    values = {"encoder/layers/0": x.numpy(), "encoder/final_norm": ours}
    path = "encoder/final_norm"
    params = {f"{path}/scale": np.ones(12), f"{path}/bias": np.zeros(12)}
    found = theirs(x).numpy()
    config = {"dtype": "float64"}
    return diagnose(diagnosis_inputs(path, values, found, params=params, config=config))


def with_float32_statistics(x: torch.Tensor) -> torch.Tensor:
    narrow = x.float()
    variance = narrow.var(-1, keepdim=True, correction=0) + CONFIG.norm_epsilon
    return (x - narrow.mean(-1, keepdim=True)) / variance.sqrt()


@pytest.mark.parametrize("mean", [0.0, 1e3])
def test_statistics_in_float32(mean):
    check(normalized(with_float32_statistics, mean), "float32 norm", "the statistics of")


def test_a_norm_in_float32():
    def narrow(x):
        return F.layer_norm(x.float(), x.shape[-1:], eps=CONFIG.norm_epsilon).double()

    check(normalized(narrow), "float32 norm", "its norm in float32")


def test_what_looks_like_float32_and_is_not():
    def with_another_epsilon(x):
        return F.layer_norm(x, x.shape[-1:], eps=CONFIG.norm_epsilon + 1e-7)

    def scaled(x):
        return F.layer_norm(x, x.shape[-1:], eps=CONFIG.norm_epsilon) * (1 + 1e-5)

    check(normalized(with_another_epsilon), "norm epsilon")
    assert normalized(scaled) is None


# Attention


def attention() -> dict[str, np.ndarray]:
    """Our values around the cross-attention of decoder layer 0, [3, 4, ...]."""
    weights = torch.tensor(random(3, 2, 4, 4, seed=6)).masked_fill(
        torch.tensor(SOURCE == 0)[:, None, None], -torch.inf
    )
    prefix = "decoder/layers/0/cross_attention"
    return {
        "source/embedded": random(3, 4, 12, seed=11),
        "encoder/layers/0": random(3, 4, 12, seed=7),
        "encoder/final_norm": random(3, 4, 12, seed=8),
        "decoder/layers/0/cross_attention_norm": random(3, 4, 12, seed=9),
        f"{prefix}/key": random(3, 4, 12, seed=9),
        f"{prefix}/value": random(3, 4, 12, seed=10),
        f"{prefix}/weights": F.softmax(weights, -1).numpy(),
    }


def context(weights: np.ndarray, values: np.ndarray) -> np.ndarray:
    """By its definition, head by head."""
    heads = [
        np.einsum("bts,bsu->btu", weights[:, head], values[..., 6 * head : 6 * head + 6])
        for head in range(2)
    ]
    return np.concatenate(heads, axis=-1)


CONTEXT = "decoder/layers/0/cross_attention/context"


def summed_up(weights: np.ndarray | None = None, values: np.ndarray | None = None) -> Any:
    ours = attention()
    own_weights, own_values = (
        ours["decoder/layers/0/cross_attention/weights"],
        ours["decoder/layers/0/cross_attention/value"],
    )
    theirs = context(
        own_weights if weights is None else weights, own_values if values is None else values
    )
    ours[CONTEXT] = context(own_weights, own_values)
    return diagnose(diagnosis_inputs(CONTEXT, ours, theirs))


def own_weights() -> np.ndarray:
    return attention()["decoder/layers/0/cross_attention/weights"]


def test_heads_that_share_the_average_of_their_weights():
    average = np.broadcast_to(own_weights().mean(axis=1, keepdims=True), (3, 2, 4, 4))
    check(summed_up(average), "averaged weights")


def test_weights_that_are_transposed():
    check(summed_up(own_weights().swapaxes(2, 3)), "transposed weights")


def test_keys_that_are_summed_up():
    check(summed_up(values=attention()["decoder/layers/0/cross_attention/key"]), "keys for values")


def test_dropout_of_attention_weights():
    dropped = np.random.default_rng(0).random((3, 2, 4, 4)) < 0.2
    check(summed_up(np.where(dropped, 0, own_weights() / 0.8)), "dropout", "at a rate of 0.2")


@pytest.mark.parametrize(
    ("source", "cause", "says"),
    [
        ("decoder/layers/0/cross_attention_norm", "attends to the decoder", "the decoder itself"),
        ("source/embedded", "attends to the embeddings", "the input of the encoder"),
        ("encoder/layers/0", "final norm missing", "before its final norm"),
    ],
)
def test_cross_attention_that_attends_to_something_else(source, cause, says):
    kernel = random(2, 12, 12, seed=4)
    ours, site = attention(), "decoder/layers/0/cross_attention/key"
    ours[site] = ours["encoder/final_norm"] @ kernel[0]
    params = {"decoder/layers/cross_attention/key/kernel": kernel}
    found = diagnose(diagnosis_inputs(site, ours, ours[source] @ kernel[0], params=params))
    check(found, cause, says)


@pytest.mark.parametrize(
    ("site", "layer", "cause"),
    [("query", 0, "wrong projection"), ("key", 1, "wrong layer"), ("key", 0, None)],
)
def test_whose_weights_are_used(site, layer, cause):
    kernels = {name: random(2, 12, 12, seed=20 + i) for i, name in enumerate(("query", "key"))}
    group = "decoder/layers/{}/cross_attention"
    params = {f"{group.format('')}/{n}/kernel".replace("//", "/"): k for n, k in kernels.items()}
    ours, key = attention(), f"{group.format(0)}/key"
    ours[key] = ours["encoder/final_norm"] @ kernels["key"][0]
    theirs = ours["encoder/final_norm"] @ kernels[site][layer]
    if cause is None:
        theirs = np.sin(theirs)
        assert diagnose(diagnosis_inputs(key, ours, theirs, params=params)) is None
    else:
        check(diagnose(diagnosis_inputs(key, ours, theirs, params=params)), cause)


# The output


def logits_of(theirs: np.ndarray, ours: np.ndarray, **changes: Any) -> Diagnosis | None:
    values = {"decoder/layers/1": random(3, 4, 12, seed=12), "decoder/final_norm": ours}
    values["logits"] = ours @ PARAMS["output/kernel"]
    return diagnose(diagnosis_inputs("logits", values, theirs, **changes))


def test_an_output_that_is_tied_to_the_wrong_table():
    x = random(3, 4, 12)
    found = logits_of(x @ PARAMS["source_embedding/embedding"].T, x)
    check(found, "wrong output table", "is the source embedding")


def test_logits_without_the_final_norm():
    theirs = random(3, 4, 12, seed=12) @ PARAMS["output/kernel"]
    check(logits_of(theirs, random(3, 4, 12)), "final norm missing", "last layer")


def test_an_output_bias_that_ours_lacks():
    x, bias = random(3, 4, 12), random(11, seed=13)
    found = logits_of(x @ PARAMS["output/kernel"] + bias, x)
    check(found, "bias added", "a bias that ours lacks")


def test_a_value_that_is_not_a_number_has_no_cause():
    assert logits_of(np.full((3, 4, 11), np.nan), random(3, 4, 12)) is None


# The loss

LOGITS = random(3, 4, 11, seed=14)


def by_row(name: str, smoothing: float, pad_id: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """A published loss and its number of tokens, of each sentence."""
    pairs = [
        LOSSES[name](torch.tensor(z), torch.tensor(y), smoothing, pad_id)
        for z, y in zip(LOGITS, TARGET_OUTPUT, strict=True)
    ]
    sums, counts = np.array([[float(loss), float(count)] for loss, count in pairs]).T
    return sums, counts


def lost(loss: float) -> Diagnosis | None:
    return diagnose(diagnosis_inputs("loss", {"logits": LOGITS}, loss=loss))


@pytest.mark.parametrize(
    ("name", "convention"),
    [
        ("torch", "uniform"),
        ("tunz", "others_kl"),
        ("annotated", "non_pad_kl"),
        ("annotated_wide_heads", "annotated_wide_heads"),
    ],
)
def test_another_convention_of_label_smoothing(name, convention):
    sums, counts = by_row(name, 0.1)
    found = lost(sums.sum() / counts.sum())
    check(found, "label-smoothing convention", f"{convention} in place of others")


def test_fairseq_smooths_as_jadore801120():
    ours, theirs = (by_row(name, 0.1)[0] for name in ("jadore801120", "fairseq"))
    np.testing.assert_allclose(ours, theirs, rtol=1e-12)


def test_another_amount_of_smoothing():
    sums, counts = by_row("jadore801120", 0.0)
    check(lost(sums.sum() / counts.sum()), "smoothing amount", "0 in place of 0.1")


def test_padding_that_is_counted():
    sums, counts = by_row("jadore801120", 0.1, pad_id=-100)
    check(lost(sums.sum() / counts.sum()), "padding in the loss", "padding counted")


def test_other_means():
    sums, counts = by_row("jadore801120", 0.1)
    means = {
        "sum over tokens": sums.sum(),
        "sum over tokens, divided by sentences": sums.mean(),
        "mean over sentences of their means": (sums / counts).mean(),
        "sum over tokens, divided by tokens and padding": sums.sum() / 12,
    }
    for name, loss in means.items():
        check(lost(loss), "loss reduction", f"{name} in place of mean over tokens")


def test_logits_compared_with_inputs():
    one_hot = np.eye(11)[TARGET_INPUT]
    log_p = F.log_softmax(torch.tensor(LOGITS), -1).numpy()
    losses = -((0.9 * one_hot + 0.01 * (1 - one_hot)) * log_p).sum(-1)[TARGET_INPUT != 0]
    check(lost(losses.mean()), "shifted targets")


def test_a_loss_that_nothing_explains():
    assert lost(3.14159265) is None


@pytest.mark.parametrize("site", ["gradient/encoder.weight", "steps/loss", "loss/tunz"])
def test_what_follows_from_the_loss_has_no_cause_of_its_own(site):
    assert diagnose(diagnosis_inputs(site, {"logits": LOGITS})) is None
