"""The operation that computes each site of our model, from the values of earlier sites."""

from collections.abc import Callable

import numpy as np

from flaxformer_mt.model.position_biases import alibi_slopes
from flaxformer_mt.parity.diagnosis import operations as ops
from flaxformer_mt.parity.diagnosis.inputs import DiagnosisInputs, ParsedSite, parse_site


class NotComputed(Exception):
    """Raised for a value that is unknown, such as the embeddings of bare layers."""


def operation(inputs: DiagnosisInputs, site: str) -> ops.Operation:
    """Returns the operation of our model at a site, applied to its values at earlier sites.

    Raises `NotComputed` if it needs the input of the layers, and the model has no embeddings.
    """
    parsed = parse_site(site)
    return _OPERATIONS[parsed.part](inputs, parsed)


def recomputed(inputs: DiagnosisInputs, sites: list[str]) -> DiagnosisInputs:
    """Returns the inputs with our values of some sites computed again, each from those before."""
    for site in sites:
        inputs = inputs.with_value(site, operation(inputs, site).value())
    return inputs


def stack_input(inputs: DiagnosisInputs, stack: str, *, normalized: bool = True) -> np.ndarray:
    """Returns the input of a stack's first layer, [B, T, D], or raises `NotComputed`."""
    if normalized and f"{stack}/embedding_norm" in inputs.ours:
        return inputs.ours[f"{stack}/embedding_norm"]
    side = "source" if stack == "encoder" else "target"
    for site in (f"{side}/embedded", f"{side}/embedding"):
        if site in inputs.ours:
            return inputs.ours[site]
    raise NotComputed


def sublayer_input(inputs: DiagnosisInputs, site: ParsedSite) -> np.ndarray:
    """Returns the residual stream at the input of a sub-layer, before its pre-norm, [B, T, D]."""
    groups = inputs.sublayers(site.stack)
    index = groups.index(site.group)
    if index:
        return inputs.ours[inputs.sublayer_end(site.prefix, groups[index - 1])]
    return layer_input(inputs, site.stack, site.layer or 0)


def layer_input(inputs: DiagnosisInputs, stack: str, layer: int) -> np.ndarray:
    """Returns the input of a layer; for the index past the last layer, the output of the stack."""
    if layer:
        return inputs.ours[f"{stack}/layers/{layer - 1}"]
    return stack_input(inputs, stack)


def sublayer_operand(inputs: DiagnosisInputs, site: ParsedSite) -> np.ndarray:
    """Returns the input of a sub-layer's function, after any pre-norm, [B, T, D]."""
    if inputs.config.norm_position == "pre":
        return inputs.ours[f"{site.prefix}/{site.group}_norm"]
    return sublayer_input(inputs, site)


def stack_output(inputs: DiagnosisInputs, stack: str, *, normalized: bool = True) -> np.ndarray:
    """Returns the output of a stack, [B, T, D], with or without its final norm."""
    if normalized and f"{stack}/final_norm" in inputs.ours:
        return inputs.ours[f"{stack}/final_norm"]
    return layer_input(inputs, stack, inputs.num_layers(stack))


def embedding_table(inputs: DiagnosisInputs, stack: str) -> np.ndarray:
    """Returns the embedding table of a stack, [V, D]."""
    own = stack == "encoder" and not inputs.config.shares_source_and_target
    return inputs.params["source_embedding/embedding" if own else "target_embedding/embedding"]


def _lookup(inputs: DiagnosisInputs, site: ParsedSite) -> ops.Lookup:
    c = inputs.config
    return ops.Lookup(
        table=embedding_table(inputs, site.stack),
        tokens=inputs.tokens.source if site.stack == "encoder" else inputs.tokens.target_input,
        scale=c.d_model**0.5 if c.scale_embeddings else 1.0,
        zeroed=(-1, c.pad_id) if c.zero_pad_embeddings else (-1,),
    )


def _add_positions(inputs: DiagnosisInputs, site: ParsedSite) -> ops.AddPositions:
    c = inputs.config
    side = "source" if site.stack == "encoder" else "target"
    embedding = inputs.ours[f"{side}/embedding"]
    columns = ops.AddPositions(
        embedding=embedding,
        positions=np.arange(embedding.shape[1])[None],
        learned=inputs.parameter(f"{side}_positions/embedding"),
        layout=c.position_layout,
        exponent=c.position_exponent,
        base=c.position_base,
        offset=c.position_offset,
    )
    # Some models count real tokens instead of columns; the values tell which.
    real = inputs.real.source if site.stack == "encoder" else inputs.real.target
    found = inputs.ours[f"{side}/embedded"]
    counted = columns.but(positions=ops.token_positions(real))
    return min(columns, counted, key=lambda added: np.abs(added.value() - found)[real].max())


def normalization(
    inputs: DiagnosisInputs, site: ParsedSite, x: np.ndarray
) -> ops.LayerNormalization:
    """Returns the norm at a site (sub-layer, embedding or final norm) applied to x [B, T, D]."""
    layers = "" if site.layer is None else "layers/"
    path = f"{site.stack}/{layers}{site.group}_norm"
    scale, bias = (inputs.parameter(f"{path}/{name}", site.layer) for name in ("scale", "bias"))
    assert scale is not None
    c = inputs.config
    is_rms = c.norm_kind == "rms"
    return ops.LayerNormalization(
        x,
        kind="layer_norm" if is_rms else c.norm_kind,
        epsilon=c.norm_epsilon,
        scale=scale,
        bias=0.0 if bias is None else bias,
        centers=not is_rms,
    )


def _norm(inputs: DiagnosisInputs, site: ParsedSite) -> ops.LayerNormalization:
    if site.group == "embedding":
        x = stack_input(inputs, site.stack, normalized=False)
    elif site.group == "final":
        x = stack_output(inputs, site.stack, normalized=False)
    elif inputs.config.norm_position == "pre":
        x = sublayer_input(inputs, site)
    else:
        x = inputs.ours[f"{site.prefix}/{site.group}_sum"]
    return normalization(inputs, site, x)


def linear_map(inputs: DiagnosisInputs, site: ParsedSite, x: np.ndarray) -> ops.LinearMap:
    """Returns the linear map at a site of an attention or feed-forward sub-layer, applied to x."""
    kernel = inputs.params[f"{site.path}/kernel"][site.layer]
    return ops.LinearMap(x, kernel, inputs.parameter(f"{site.path}/bias", site.layer))


def _projection(inputs: DiagnosisInputs, site: ParsedSite) -> ops.LinearMap:
    if site.reads_the_encoder:
        return linear_map(inputs, site, stack_output(inputs, "encoder"))
    return linear_map(inputs, site, sublayer_operand(inputs, site))


def _output(inputs: DiagnosisInputs, site: ParsedSite) -> ops.LinearMap:
    before = "activated" if site.group == "feed_forward" else "context"
    return linear_map(inputs, site, inputs.beside(site, before))


def _scores(inputs: DiagnosisInputs, site: ParsedSite) -> ops.Scores:
    c = inputs.config
    query, key = inputs.beside(site, "query"), inputs.beside(site, "key")
    everything = np.ones((query.shape[1], key.shape[1]), bool)
    attends_to_itself = site.group == "self_attention"
    of_target = site.stack == "decoder" and attends_to_itself
    if not of_target:
        padding = inputs.real.source
    elif c.mask_target_padding and c.target_vocab_size:
        padding = inputs.tokens.target_input != c.pad_id
    else:
        padding = np.ones_like(inputs.real.target)
    rotates = attends_to_itself and c.position_kind == "rotary"
    return ops.Scores(
        query=query,
        key=key,
        num_heads=c.num_heads,
        kv_heads=c.kv_heads,
        scale=c.key_width**-0.5 if c.scale_scores else 1.0,
        padding=padding[:, None, None],
        causal=np.tril(everything) if of_target else everything,
        rotation=ops.Rotation(c.position_layout, c.position_base) if rotates else None,
        bias=_score_bias(inputs, site) if attends_to_itself else None,
    )


def _score_bias(
    inputs: DiagnosisInputs, site: ParsedSite
) -> ops.LinearBias | ops.BucketBias | None:
    c = inputs.config
    if c.position_kind == "alibi":
        return ops.LinearBias(alibi_slopes(c.num_heads))
    if c.position_kind != "t5_relative":
        return None
    if c.relative_position_sharing == "stack":
        table = inputs.params[f"{site.stack}/position_bias/embedding"]
    else:
        table = inputs.params[f"{site.stack}/layers/position_bias/embedding"][site.layer]
    return ops.BucketBias(table, site.stack == "encoder", c.relative_position_max_distance)


def _softmax(inputs: DiagnosisInputs, site: ParsedSite) -> ops.Softmax:
    return ops.Softmax(inputs.beside(site, "scores"))


def _context(inputs: DiagnosisInputs, site: ParsedSite) -> ops.Context:
    weights, values = inputs.beside(site, "weights"), inputs.beside(site, "value")
    return ops.Context(weights, values, inputs.config.num_heads, inputs.config.kv_heads)


def _activation(inputs: DiagnosisInputs, site: ParsedSite) -> ops.Activation:
    gate = inputs.ours.get(f"{site.prefix}/{site.group}/gate")
    return ops.Activation(inputs.beside(site, "hidden"), inputs.config.activation, gate)


def _residual(inputs: DiagnosisInputs, site: ParsedSite) -> ops.Residual:
    return ops.Residual(sublayer_input(inputs, site), inputs.beside(site, "output"))


def _layer(inputs: DiagnosisInputs, site: ParsedSite) -> ops.Given:
    return ops.Given(inputs.ours[inputs.sublayer_end(site.prefix, "feed_forward")])


def _logits(inputs: DiagnosisInputs, site: ParsedSite) -> ops.Operation:
    c = inputs.config
    x = stack_output(inputs, "decoder")
    if not c.target_vocab_size:
        return ops.Given(x)
    if c.shares_target_and_output:
        kernel = embedding_table(inputs, "decoder").T
    else:
        kernel = inputs.params["output/kernel"]
    scale = c.d_model**-0.5 if c.scale_logits else 1.0
    return ops.Logits(x, kernel, inputs.parameter("output/bias"), scale)


def _loss(inputs: DiagnosisInputs, site: ParsedSite) -> ops.Loss:
    return ops.Loss(
        logits=inputs.ours["logits"],
        targets=inputs.tokens.target_output.astype(np.int64),
        convention=inputs.convention,
        smoothing=inputs.smoothing,
        pad_id=inputs.config.pad_id,
    )


_OPERATIONS: dict[str, Callable[[DiagnosisInputs, ParsedSite], ops.Operation]] = {
    "embedding": _lookup,
    "embedded": _add_positions,
    "norm": _norm,
    "query": _projection,
    "key": _projection,
    "value": _projection,
    "scores": _scores,
    "weights": _softmax,
    "context": _context,
    "hidden": _projection,
    "gate": _projection,
    "activated": _activation,
    "output": _output,
    "sum": _residual,
    "layer": _layer,
    "logits": _logits,
    "loss": _loss,
}
