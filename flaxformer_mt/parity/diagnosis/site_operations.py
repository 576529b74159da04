"""The operation that computes each site of our model, from the values of earlier sites."""

from collections.abc import Callable

import numpy as np

from flaxformer_mt.model.position_biases import alibi_slopes
from flaxformer_mt.parity.diagnosis.inputs import (
    DiagnosisInputs,
    ParsedSite,
    optional_parameter,
    parameter,
    parse_site,
)
from flaxformer_mt.parity.diagnosis.operations import (
    Activation,
    AddPositions,
    BucketBias,
    Context,
    Given,
    LayerNormalization,
    LinearBias,
    LinearMap,
    Logits,
    Lookup,
    Loss,
    Operation,
    Residual,
    Rotation,
    ScoreBias,
    Scores,
    Softmax,
    token_positions,
)


class NotComputed(Exception):
    """Raised for a value that our model does not compute, such as the embeddings of bare layers."""


def operation(inputs: DiagnosisInputs, site: str) -> Operation:
    """Returns the operation of our model at a site, applied to its values at earlier sites.

    Raises `NotComputed` if it needs the input of the layers, and the model has no embeddings.
    """
    parsed = parse_site(site)
    return _OPERATIONS[parsed.part](inputs, parsed)


def stack_input(inputs: DiagnosisInputs, stack: str) -> np.ndarray:
    """Returns the input of a stack's first layer, [B, T, D], or raises `NotComputed`."""
    side = "source" if stack == "encoder" else "target"
    sites = (f"{stack}/embedding_norm", f"{side}/embedded", f"{side}/embedding")
    for site in sites:
        if site in inputs.ours:
            return inputs.ours[site]
    raise NotComputed


def sublayer_input(inputs: DiagnosisInputs, site: ParsedSite) -> np.ndarray:
    """Returns the residual stream at the input of a sub-layer, before its pre-norm, [B, T, D]."""
    attends = site.stack == "decoder" and inputs.config.has_inputs
    groups = ["self_attention", *(["cross_attention"] if attends else []), "feed_forward"]
    index = groups.index(site.group)
    if index:
        end = "norm" if inputs.config.norm_position == "post" else "sum"
        return inputs.ours[f"{site.prefix}/{groups[index - 1]}_{end}"]
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
    c = inputs.config
    layers = c.num_encoder_layers if stack == "encoder" else c.num_decoder_layers
    return layer_input(inputs, stack, layers)


def embedding_table(inputs: DiagnosisInputs, stack: str) -> np.ndarray:
    """Returns the embedding table of a stack, [V, D]."""
    own = stack == "encoder" and not inputs.config.shares_source_and_target
    return inputs.params["source_embedding/embedding" if own else "target_embedding/embedding"]


def _lookup(inputs: DiagnosisInputs, site: ParsedSite) -> Lookup:
    c = inputs.config
    return Lookup(
        table=embedding_table(inputs, site.stack),
        tokens=inputs.tokens.source if site.stack == "encoder" else inputs.tokens.target_input,
        scale=c.d_model**0.5 if c.scale_embeddings else 1.0,
        zeroed=(-1, c.pad_id) if c.zero_pad_embeddings else (-1,),
    )


def _add_positions(inputs: DiagnosisInputs, site: ParsedSite) -> AddPositions:
    c = inputs.config
    side = "source" if site.stack == "encoder" else "target"
    embedding = inputs.ours[f"{side}/embedding"]
    columns = AddPositions(
        embedding=embedding,
        positions=np.arange(embedding.shape[1])[None],
        learned=optional_parameter(inputs, f"{side}_positions/embedding"),
        layout=c.position_layout,
        exponent=c.position_exponent,
        base=c.position_base,
        offset=c.position_offset,
    )
    # Some models count real tokens instead of columns; the values tell which.
    real = inputs.real.source if site.stack == "encoder" else inputs.real.target
    found = inputs.ours[f"{side}/embedded"]
    counted = columns.but(positions=token_positions(real))
    return min(columns, counted, key=lambda added: np.abs(added.value() - found)[real].max())


def normalization(inputs: DiagnosisInputs, site: ParsedSite, x: np.ndarray) -> LayerNormalization:
    """Returns the norm at a site (sub-layer, embedding or final norm) applied to x [B, T, D]."""
    layers = "" if site.layer is None else "layers/"
    path = f"{site.stack}/{layers}{site.group}_norm"
    c = inputs.config
    scale = parameter(inputs, f"{path}/scale", site.layer)
    if c.norm_kind == "rms":
        return LayerNormalization(x, "layer_norm", c.norm_epsilon, scale, 0.0, centers=False)
    bias = parameter(inputs, f"{path}/bias", site.layer)
    return LayerNormalization(x, c.norm_kind, c.norm_epsilon, scale, bias)


def _norm(inputs: DiagnosisInputs, site: ParsedSite) -> LayerNormalization:
    if site.group == "embedding":
        side = "source" if site.stack == "encoder" else "target"
        sites = (f"{side}/embedded", f"{side}/embedding")
        x = inputs.ours[sites[0] if sites[0] in inputs.ours else sites[1]]
    elif site.group == "final":
        x = stack_output(inputs, site.stack, normalized=False)
    elif inputs.config.norm_position == "pre":
        x = sublayer_input(inputs, site)
    else:
        x = inputs.ours[f"{site.prefix}/{site.group}_sum"]
    return normalization(inputs, site, x)


def linear_map(inputs: DiagnosisInputs, site: ParsedSite, x: np.ndarray) -> LinearMap:
    """Returns the linear map at a site of an attention or feed-forward sub-layer, applied to x."""
    kernel = parameter(inputs, f"{site.path}/kernel", site.layer)
    return LinearMap(x, kernel, optional_parameter(inputs, f"{site.path}/bias", site.layer))


def _from_operand(inputs: DiagnosisInputs, site: ParsedSite) -> LinearMap:
    return linear_map(inputs, site, sublayer_operand(inputs, site))


def _from_attended(inputs: DiagnosisInputs, site: ParsedSite) -> LinearMap:
    if site.group == "cross_attention":
        return linear_map(inputs, site, stack_output(inputs, "encoder"))
    return _from_operand(inputs, site)


def _output(inputs: DiagnosisInputs, site: ParsedSite) -> LinearMap:
    before = "activated" if site.group == "feed_forward" else "context"
    return linear_map(inputs, site, inputs.ours[f"{site.prefix}/{site.group}/{before}"])


def _scores(inputs: DiagnosisInputs, site: ParsedSite) -> Scores:
    c, prefix = inputs.config, f"{site.prefix}/{site.group}"
    query, key = inputs.ours[f"{prefix}/query"], inputs.ours[f"{prefix}/key"]
    everything = np.ones((query.shape[1], key.shape[1]), bool)
    of_target = site.stack == "decoder" and site.group == "self_attention"
    if not of_target:
        padding = inputs.real.source
    elif c.mask_target_padding and c.target_vocab_size:
        padding = inputs.tokens.target_input != c.pad_id
    else:
        padding = np.ones_like(inputs.real.target)
    attends_to_itself = site.group == "self_attention"
    return Scores(
        query=query,
        key=key,
        num_heads=c.num_heads,
        kv_heads=c.kv_heads,
        scale=c.key_width**-0.5 if c.scale_scores else 1.0,
        padding=padding[:, None, None],
        causal=np.tril(everything) if of_target else everything,
        rotation=_rotation(inputs) if attends_to_itself else None,
        bias=_score_bias(inputs, site) if attends_to_itself else None,
    )


def _rotation(inputs: DiagnosisInputs) -> Rotation | None:
    c = inputs.config
    return Rotation(c.position_layout, c.position_base) if c.position_kind == "rotary" else None


def _score_bias(inputs: DiagnosisInputs, site: ParsedSite) -> ScoreBias | None:
    c = inputs.config
    if c.position_kind == "alibi":
        return LinearBias(alibi_slopes(c.num_heads))
    if c.position_kind != "t5_relative":
        return None
    if c.relative_position_sharing == "stack":
        table = parameter(inputs, f"{site.stack}/position_bias/embedding")
    else:
        path = f"{site.stack}/layers/position_bias/embedding"
        table = parameter(inputs, path, site.layer)
    return BucketBias(table, site.stack == "encoder", c.relative_position_max_distance)


def _softmax(inputs: DiagnosisInputs, site: ParsedSite) -> Softmax:
    return Softmax(inputs.ours[f"{site.prefix}/{site.group}/scores"])


def _context(inputs: DiagnosisInputs, site: ParsedSite) -> Context:
    prefix = f"{site.prefix}/{site.group}"
    return Context(
        inputs.ours[f"{prefix}/weights"],
        inputs.ours[f"{prefix}/value"],
        inputs.config.num_heads,
        inputs.config.kv_heads,
    )


def _activation(inputs: DiagnosisInputs, site: ParsedSite) -> Activation:
    hidden = inputs.ours[f"{site.prefix}/{site.group}/hidden"]
    gate = inputs.ours.get(f"{site.prefix}/{site.group}/gate")
    return Activation(hidden, inputs.config.activation, gate)


def _residual(inputs: DiagnosisInputs, site: ParsedSite) -> Residual:
    output = inputs.ours[f"{site.prefix}/{site.group}/output"]
    return Residual(sublayer_input(inputs, site), output)


def _layer(inputs: DiagnosisInputs, site: ParsedSite) -> Given:
    end = "norm" if inputs.config.norm_position == "post" else "sum"
    return Given(inputs.ours[f"{site.prefix}/feed_forward_{end}"])


def _logits(inputs: DiagnosisInputs, site: ParsedSite) -> Operation:
    c = inputs.config
    x = stack_output(inputs, "decoder")
    if not c.target_vocab_size:
        return Given(x)
    if c.shares_target_and_output:
        kernel = embedding_table(inputs, "decoder").T
    else:
        kernel = inputs.params["output/kernel"]
    scale = c.d_model**-0.5 if c.scale_logits else 1.0
    return Logits(x, kernel, optional_parameter(inputs, "output/bias"), scale)


def _loss(inputs: DiagnosisInputs, site: ParsedSite) -> Loss:
    return Loss(
        logits=inputs.ours["logits"],
        targets=inputs.tokens.target_output.astype(np.int64),
        convention=inputs.convention,
        smoothing=inputs.smoothing,
        pad_id=inputs.config.pad_id,
    )


_OPERATIONS: dict[str, Callable[[DiagnosisInputs, ParsedSite], Operation]] = {
    "embedding": _lookup,
    "embedded": _add_positions,
    "norm": _norm,
    "query": _from_operand,
    "key": _from_attended,
    "value": _from_attended,
    "scores": _scores,
    "weights": _softmax,
    "context": _context,
    "hidden": _from_operand,
    "gate": _from_operand,
    "activated": _activation,
    "output": _output,
    "sum": _residual,
    "layer": _layer,
    "logits": _logits,
    "loss": _loss,
}
