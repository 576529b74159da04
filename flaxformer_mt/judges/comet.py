r"""COMET: an estimator on sentence vectors of XLM-R, with and without a reference, and CometKiwi.

`regression_metric` (wmt22-comet-da) encodes source, translation and reference by themselves:

.. math:: f([h; r; h \odot r; |h - r|; h \odot s; |h - s|])

`referenceless_regression_metric` has :math:`f([h; s; h \odot s; |h - s|])`, and `unified_metric`
(CometKiwi) reads all texts in one row, of which the first vector counts.

Source: Unbabel/COMET, `comet/models`, `comet/modules` and `comet/encoders`; Rei et al. 2020, 2022.
"""

import functools
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax import Array
from jaxtyping import Float, Int

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.data.tokenizers.tokenizer import Tokenizer, Tokenizers
from flaxformer_mt.errors import UserError, prefixed
from flaxformer_mt.input_files import checked, first_present, read_bytes, read_json
from flaxformer_mt.interop import checkpoint_files
from flaxformer_mt.interop.checkpoint_files import PublishedCheckpoint, Tensors
from flaxformer_mt.interop.families import xlm_roberta
from flaxformer_mt.interop.formats.marian_files import parse_yaml
from flaxformer_mt.interop.weight_maps import checkpoints
from flaxformer_mt.judges.judge import Judge, Side, Template
from flaxformer_mt.model.layers import EncoderLayer
from flaxformer_mt.model.numerics import at_least_float32
from flaxformer_mt.model.transformer import Transformer
from flaxformer_mt.trained_model import parameters_sha256

SETTINGS = "hparams.yaml"
_WEIGHTS = ("checkpoints/model.ckpt", "model.ckpt", "model.safetensors")
_ENCODER = "encoder.model."
_MIXING = "layerwise_attention."
_IGNORED = re.compile(
    r"encoder\.model\.(pooler\..*|embeddings\.(position|token_type)_ids)|hidden2tag\..*"
    r"|layerwise_attention\.dropout_(mask|fill)"
)
_ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "tanh": jnp.tanh,
    "sigmoid": jax.nn.sigmoid,
    "relu": jax.nn.relu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
}
_HEAD_WIDTH = 64
"""The width of an attention head in all published encoders."""


class _Settings(TypedDict, total=False):
    class_identifier: Literal[
        "regression_metric", "referenceless_regression_metric", "unified_metric"
    ]
    encoder_model: Literal["XLM-RoBERTa"]
    pool: Literal["avg", "max", "cls"]
    layer: Literal["mix"] | int
    sent_layer: Literal["mix"] | int
    # sparsemax_patch: the published models were trained by a version that took the softmax.
    layer_transformation: Literal["softmax", "sparsemax", "sparsemax_patch"]
    layer_norm: bool
    activations: str
    final_activation: str | None
    input_segments: list[Literal["mt", "src", "ref"]]


def layer_vectors(
    config: TransformerConfig, params: Any, rows: Int[Array, "B S"]
) -> Float[Array, "L+1 B S D"]:
    """Computes the embeddings, after their norm, and the outputs of all layers."""

    def is_kept(module: nn.Module, method: str) -> bool:
        is_layer = isinstance(module, EncoderLayer) or module.name == "embedding_norm"
        return is_layer and method == "__call__"

    _, state = Transformer(config).apply(
        {"params": params},
        rows,
        method="encode",
        capture_intermediates=is_kept,
        mutable=["intermediates"],
    )
    encoder = state["intermediates"]["encoder"]
    (embeddings,) = encoder["embedding_norm"]["__call__"]
    ((layers, _),) = encoder["layers"]["__call__"]
    return jnp.concatenate([embeddings[None], layers])


def sparsemax(x: Float[Array, "N"]) -> Float[Array, "N"]:
    """Computes the nearest point of the simplex (Martins and Astudillo 2016, algorithm 1)."""
    ordered = jnp.sort(x)[::-1]
    sums = jnp.cumsum(ordered) - 1
    counts = jnp.arange(1, len(x) + 1, dtype=x.dtype)
    support = jnp.sum(ordered * counts > sums, dtype=jnp.int32)
    return jnp.maximum(x - sums[support - 1] / support.astype(x.dtype), 0)


def _normalized(
    vectors: Float[Array, "L B S D"], is_token: Float[Array, "B S 1"]
) -> Float[Array, "L B S D"]:
    """Normalizes each layer over all numbers of a row, as `LayerwiseAttention` does."""
    count = is_token.sum((1, 2), keepdims=True) * float(vectors.shape[-1])
    mean = (vectors * is_token).sum((2, 3), keepdims=True) / count
    squares = jnp.square((vectors * is_token - mean) * is_token)
    variance = squares.sum((2, 3), keepdims=True) / count
    return (vectors - mean) / jnp.sqrt(variance + 1e-12)


def sentence_vectors(
    config: TransformerConfig, params: Any, rows: Int[Array, "B S"], settings: tuple[Any, ...]
) -> Float[Array, "B D"]:
    """Computes a vector for each row: a mixture of layers, then a pool over tokens."""
    layer, transformation, has_norm, pool = settings
    vectors = layer_vectors(config, params["encoder"], rows)
    vectors = vectors.astype(at_least_float32(vectors.dtype))
    is_token = (rows != config.pad_id)[..., None].astype(vectors.dtype)
    if layer == "mix":
        mixture = jax.tree.map(lambda leaf: leaf.astype(vectors.dtype), params["mixture"])
        shares = sparsemax if transformation == "sparsemax" else jax.nn.softmax
        vectors = _normalized(vectors, is_token) if has_norm else vectors
        x = mixture["scale"] * jnp.einsum("l,lbsd->bsd", shares(mixture["weights"]), vectors)
    else:
        x = vectors[layer]
    if pool == "cls":
        return x[:, 0]
    if pool == "max":
        return jnp.where(is_token > 0, x, -jnp.inf).max(axis=1)
    return (x * is_token).sum(axis=1) / is_token.sum(axis=1)


def estimate(
    params: Any, x: Float[Array, "B N"], activation: str, final: str | None
) -> Float[Array, "B"]:
    """Applies the estimator, linear maps with an activation between them."""
    layers = jax.tree.map(lambda leaf: leaf.astype(x.dtype), params["estimator"])
    *hidden, last = layers.values()
    for layer in hidden:
        x = _ACTIVATIONS[activation](x @ layer["kernel"] + layer["bias"])
    x = x @ last["kernel"] + last["bias"]
    return (_ACTIVATIONS[final](x) if final else x)[:, 0]


def _of_vectors(
    params: Any, *vectors: Float[Array, "B D"], activations: tuple[str, str | None]
) -> Float[Array, "B"]:
    """Scores a translation from the vectors of source, translation and perhaps reference."""
    source, hypothesis, *reference = vectors
    with_source = [hypothesis * source, jnp.abs(hypothesis - source)]
    if not reference:
        features = [hypothesis, source, *with_source]
    else:
        (other,) = reference
        with_other = [hypothesis * other, jnp.abs(hypothesis - other)]
        features = [hypothesis, other, *with_other, *with_source]
    return estimate(params, jnp.concatenate(features, axis=1), *activations)


def _of_rows(
    params: Any, *vectors: Float[Array, "B D"], activations: tuple[str, str | None]
) -> Float[Array, "B"]:
    """Scores a translation by the mean over its rows."""
    scores = [estimate(params, each, *activations) for each in vectors]
    return jnp.stack(scores).mean(axis=0)


def read(folder: Path, dtype: str) -> Judge:
    """Reads a folder with `hparams.yaml`, a checkpoint and the vocabulary of the encoder.

    Errors are those of `metric`.
    """
    label = folder / SETTINGS
    with prefixed(f"{label}: "):
        given = parse_yaml(read_bytes(label))
    known = {name: given[name] for name in _Settings.__annotations__ if name in given}
    settings: _Settings = checked(known, f"{label} is", _Settings)
    for name in ("class_identifier", "encoder_model"):
        if name not in settings:
            raise UserError(f"{label} has no {name}: it is not that of COMET")
    tensors = _tensors(folder)
    config, encoder = _encoder(folder, tensors, dtype)
    with prefixed(f"{folder}: "):
        params = {"encoder": encoder, **_heads(tensors, config)}
    is_unified = settings["class_identifier"] == "unified_metric"
    layer = settings.get("sent_layer" if is_unified else "layer", "mix")
    if layer == "mix" and "mixture" not in params:
        raise UserError(
            f"{label} has layer=mix, but the weights have no {_MIXING}scalar_parameters"
        )
    transformation = settings.get("layer_transformation", "sparsemax" if is_unified else "softmax")
    pool = "cls" if is_unified else settings.get("pool", "avg")
    activations = (
        _activation(label, settings, "activations") or "tanh",
        _activation(label, settings, "final_activation"),
    )
    tokenizer = Tokenizers.load(folder).source
    limit = config.max_length
    return Judge(
        name="cometkiwi" if is_unified else "comet",
        config=config,
        params=params,
        tokenizer=tokenizer,
        forms=_forms(settings, tokenizer),
        features=functools.partial(
            sentence_vectors,
            settings=(layer, transformation, settings.get("layer_norm", True), pool),
        ),
        head=functools.partial(_of_rows if is_unified else _of_vectors, activations=activations),
        longest_text=limit - 4,  # `max_positions` - 2, of which two are the first and last token.
        longest_row=limit,
        lower_is_better=False,
        digest=parameters_sha256(params),
    )


def _activation(label: Path, settings: Mapping[str, Any], name: str) -> str | None:
    value = settings.get(name)
    if value is None:
        return None
    if value.lower() not in _ACTIVATIONS:
        raise UserError(f"{label} has {name}={value}: known are {', '.join(_ACTIVATIONS)}")
    return str(value.lower())


def _forms(settings: _Settings, tokenizer: Tokenizer) -> dict[bool, tuple[Template, ...]]:
    first = tokenizer.bos_id if tokenizer.first_id is None else tokenizer.first_id
    start, end = (first,), (tokenizer.eos_id,)
    kind = settings["class_identifier"]
    if kind == "regression_metric":
        return {True: tuple((start, side, end) for side in Side)}
    if kind == "referenceless_regression_metric":
        return {False: tuple((start, side, end) for side in (Side.SOURCE, Side.HYPOTHESIS))}

    def row(*sides: Side) -> Template:
        others = (part for side in sides for part in (end, end, side))
        return (start, Side.HYPOTHESIS, *others, end)

    segments = settings.get("input_segments", ["mt", "src", "ref"])
    with_source, with_reference = row(Side.SOURCE), row(Side.REFERENCE)
    if "src" not in segments:
        return {True: (with_reference,)}
    if "ref" not in segments:
        return {False: (with_source,)}
    whole = row(Side.SOURCE, Side.REFERENCE)
    return {False: (with_source,), True: (with_source, with_reference, whole)}


def _tensors(folder: Path) -> Tensors:
    path = first_present(folder, _WEIGHTS)
    with prefixed(f"{path}: "):
        tensors = checkpoint_files.read(path, lambda name: bool(_IGNORED.fullmatch(str(name))))
    return tensors.tensors


def _encoder(folder: Path, tensors: Tensors, dtype: str) -> tuple[TransformerConfig, Any]:
    own = {
        name.removeprefix(_ENCODER): tensor
        for name, tensor in tensors.items()
        if name.startswith(_ENCODER)
    }
    path, settings = folder / "config.json", {}
    if path.exists():
        settings = read_json(path, dict[str, Any])
    checkpoint = PublishedCheckpoint(own, settings)
    with checkpoints.error_context(folder, "xlm_roberta"):
        width = checkpoint.size(("embeddings.LayerNorm.weight", 0))
        fields = {} if "num_attention_heads" in settings else {"num_heads": width // _HEAD_WIDTH}
        return checkpoints.from_checkpoint(
            xlm_roberta.FAMILY, checkpoint, {**fields, "dtype": dtype}
        )


def _heads(tensors: Tensors, config: TransformerConfig) -> dict[str, Any]:
    """Returns the parameters of the mixture of layers, if there is one, and of the estimator."""
    found: dict[str, Any] = {}
    names = [
        f"{_MIXING}scalar_parameters.{index}" for index in range(config.num_encoder_layers + 1)
    ]
    if names[0] in tensors:
        missing = [name for name in (*names, f"{_MIXING}gamma") if name not in tensors]
        if missing:
            raise UserError(f"tensor {missing[0]} is missing")
        weights = np.concatenate([tensors[name] for name in names])
        found["mixture"] = {"weights": weights, "scale": tensors[f"{_MIXING}gamma"]}
    numbers = sorted(
        int(match[1])
        for name in tensors
        if (match := re.fullmatch(r"estimator\.ff\.(\d+)\.weight", name))
    )
    if not numbers:
        raise UserError("tensor estimator.ff.0.weight is missing")
    found["estimator"] = {
        f"layer_{index}": {
            "kernel": tensors[f"estimator.ff.{number}.weight"].T,
            "bias": tensors[f"estimator.ff.{number}.bias"],
        }
        for index, number in enumerate(numbers)
    }
    return found
