"""The Transformer: architecture, initial values and numerical precision."""

import dataclasses
from typing import Literal

from flaxformer_mt.config import relations
from flaxformer_mt.config.fields import (
    MAX_LAYERS,
    MAX_LENGTH,
    MAX_VOCABULARY,
    MAX_WIDTH,
    Checked,
    FieldRole,
    option,
)
from flaxformer_mt.memory_limits import host_memory, require_memory

DOT_PRODUCT = "dot_product"
"""The `attention_kind` of the paper."""
DENSE = "dense"
"""The `feed_forward_kind` of the paper."""


@dataclasses.dataclass(frozen=True, repr=False)
class TransformerConfig(Checked):
    """The encoder-decoder Transformer (Vaswani et al. 2017) and its published variants.

    The defaults are the paper's base model as its text describes it: post-norm, interleaved
    sinusoids, one embedding table shared by source, target and output.
    """

    source_vocab_size: int = option(0, FieldRole.SHAPES, lowest=0, limit=MAX_VOCABULARY)
    """V of the source: its vocabulary size; 0 = that of the run's tokenizer."""
    target_vocab_size: int = option(0, FieldRole.SHAPES, lowest=0, limit=MAX_VOCABULARY)
    """V of the target: its vocabulary size and the width of the logits; 0 = that of the run's
    tokenizer."""
    d_model: int = option(512, FieldRole.SHAPES, lowest=1, limit=MAX_WIDTH)
    """D: width of the embeddings and of every layer's input and output."""
    num_heads: int = option(8, FieldRole.SHAPES, lowest=1, limit=MAX_WIDTH)
    """H: number of attention heads."""
    num_kv_heads: int = option(
        0, FieldRole.SHAPES, FieldRole.ARCHITECTURE, lowest=0, limit=MAX_WIDTH
    )
    """G: number of heads of keys and values, which divides H; 0 = num_heads. Query head h attends
    to keys and values of head h // (H / G) (grouped queries; Ainslie et al. 2023)."""
    head_dim: int = option(0, FieldRole.SHAPES, lowest=0, limit=MAX_WIDTH)
    """K: width of each head's queries and keys; 0 = d_model / num_heads. H * K may differ from
    D."""
    value_dim: int = option(0, FieldRole.SHAPES, lowest=0, limit=MAX_WIDTH)
    """U: width of each head's values; 0 = head_dim."""
    d_ff: int = option(2048, FieldRole.SHAPES, lowest=1, limit=MAX_WIDTH)
    """F: hidden width of the feed-forward network."""
    num_encoder_layers: int = option(6, FieldRole.SHAPES, lowest=0, limit=MAX_LAYERS)
    """Number of encoder layers."""
    num_decoder_layers: int = option(6, FieldRole.SHAPES, lowest=0, limit=MAX_LAYERS)
    """Number of decoder layers."""
    has_inputs: bool = option(True, FieldRole.ARCHITECTURE, FieldRole.TOKENS)
    """Whether the model has a source: False is a decoder-only language model, without encoder and
    cross-attention."""
    has_targets: bool = option(True, FieldRole.ARCHITECTURE)
    """Whether the model has a target: False is an encoder alone, such as XLM-R, without decoder and
    output. It embeds text, and cannot be trained to translate."""

    dropout_rate: float = option(0.1, FieldRole.TRAINING, lowest=0, highest=0.99)
    """Dropout rate of each sub-layer's output, before it is added to the residual."""
    embedding_dropout_rate: float = option(
        -1.0, FieldRole.TRAINING, lowest=0, highest=0.99, also=-1
    )
    """Dropout rate of the embeddings after positions are added; -1 = dropout_rate."""
    attention_dropout_rate: float = option(0.0, FieldRole.TRAINING, lowest=0, highest=0.99)
    """Dropout rate of the attention weights."""
    activation_dropout_rate: float = option(0.0, FieldRole.TRAINING, lowest=0, highest=0.99)
    """Dropout rate inside the feed-forward network, after the activation."""

    norm_position: Literal["post", "pre", "both"] = option("post", FieldRole.ARCHITECTURE)
    """post: norm(x + f(x)), as in the paper; pre: x + f(norm(x)); both: x + norm(f(norm(x))), with
    two norms (Gemma 2)."""
    norm_kind: Literal["layer_norm", "unbiased_std", "rms", "rms_offset"] = option(
        "layer_norm", FieldRole.ARCHITECTURE
    )
    """layer_norm: divides by sqrt(biased variance + epsilon); unbiased_std: divides by (standard
    deviation with n - 1) + epsilon; rms: divides by sqrt(mean square + epsilon), without
    subtracting the mean or adding a bias (Zhang and Sennrich 2019); rms_offset: the same, then
    multiplies by 1 + scale instead of scale (Gemma)."""
    norm_epsilon: float = option(1e-6, FieldRole.ARCHITECTURE, lowest=0, limit=1)
    """Epsilon of the norms."""
    embedding_norm: bool = option(False, FieldRole.ARCHITECTURE)
    """Another norm after the embeddings, their positions and their dropout."""
    embedding_bias: bool = option(False, FieldRole.SHAPES, FieldRole.ARCHITECTURE)
    """A learned vector that is added to all embeddings: the one token type of RoBERTa and XLM-R."""
    final_norm: bool = option(False, FieldRole.ARCHITECTURE)
    """A norm after the last layer of each stack (pre-norm models need it)."""

    qkv_bias: bool = option(True, FieldRole.ARCHITECTURE)
    """Biases in the query, key and value projections."""
    attention_output_bias: bool = option(True, FieldRole.ARCHITECTURE)
    """Bias in the output projection of attention."""
    feed_forward_bias: bool = option(True, FieldRole.ARCHITECTURE)
    """Biases in the feed-forward network."""
    feed_forward_gate: bool = option(False, FieldRole.ARCHITECTURE)
    """Multiply the activations of the feed-forward network by another linear map of its input
    (Shazeer 2020)."""
    output_bias: bool = option(False, FieldRole.ARCHITECTURE)
    """Bias of the logits."""
    activation: Literal["relu", "gelu", "gelu_tanh", "silu"] = option(
        "relu", FieldRole.ARCHITECTURE
    )
    """Activation of the feed-forward network: gelu is exact (error function), gelu_tanh its
    approximation."""

    position_kind: Literal["sinusoidal", "learned", "rotary", "alibi", "t5_relative", "none"] = (
        option("sinusoidal", FieldRole.ARCHITECTURE)
    )
    """How positions are encoded. sinusoidal, learned: by a vector added to each embedding; rotary:
    by rotating the queries and keys of self-attention (Su et al. 2021); alibi: by a bias of its
    scores, linear in the distance (Press et al. 2022); t5_relative: by a learned bias of its scores
    for each bucket of distances (Raffel et al. 2020); none: not at all."""
    position_layout: Literal["interleaved", "concatenated"] = option(
        "interleaved", FieldRole.ARCHITECTURE
    )
    """Order of the sinusoids. interleaved: sin, cos, sin, cos ...; concatenated: all sines, then
    all cosines. The pairs of features that rotary rotates: 2j and 2j + 1, or j and j + K/2."""
    position_exponent: Literal["paper", "tensor2tensor"] = option("paper", FieldRole.ARCHITECTURE)
    """Frequency j of the sinusoids: base**(-2j/D) in the paper, base**(-j/(D/2-1)) in
    tensor2tensor. (rotary: always base**(-2j/K).)"""
    position_base: float = option(10000.0, FieldRole.ARCHITECTURE, above=1)
    """Base of the frequencies of the sinusoids, or of the rotations."""
    position_offset: int = option(0, FieldRole.ARCHITECTURE, lowest=0, limit=MAX_LENGTH)
    """Position of the first token of a sentence (sinusoidal, learned)."""
    relative_position_buckets: int = option(
        32, FieldRole.SHAPES, FieldRole.ARCHITECTURE, lowest=4, limit=512
    )
    """Number of buckets of t5_relative, even."""
    relative_position_max_distance: int = option(128, FieldRole.ARCHITECTURE, lowest=3, limit=2**14)
    """The distance from which on all distances are in the last bucket of t5_relative."""
    relative_position_sharing: Literal["stack", "layer"] = option("stack", FieldRole.ARCHITECTURE)
    """Which layers share the learned bias of t5_relative. stack: all layers of the encoder, and all
    of the decoder, as in T5; layer: each has its own, as in OpenNMT-py."""
    max_length: int = option(1024, FieldRole.SHAPES, lowest=1, limit=MAX_LENGTH)
    """Positions of a learned table, and so the length of the longest sentence (the table has
    position_offset rows more). Other position kinds have no limit on sentences."""

    attention_kind: str = option(DOT_PRODUCT, FieldRole.ARCHITECTURE)
    """How queries attend to keys: dot_product, or the name of your own class that
    flaxformer_mt.register_attention has registered, with options if it has some: sharp(factor=3.0)
    (docs/python.md)."""
    feed_forward_kind: str = option(DENSE, FieldRole.SHAPES, FieldRole.ARCHITECTURE)
    """What follows attention in each layer: dense, the feed-forward network of the paper, or your
    own class that flaxformer_mt.register_feed_forward has registered, such as moe(experts=8)."""
    scale_scores: bool = option(True, FieldRole.ARCHITECTURE)
    """Divide the scores of attention by sqrt(K). Without it, as in T5, the initial values of the
    query projection are divided by sqrt(K) instead."""
    attention_window: int = option(0, FieldRole.ARCHITECTURE, lowest=0, limit=MAX_LENGTH)
    """w: in every second layer of a stack, from the first on, self-attention sees only tokens that
    are near: in the encoder at most w away, in the decoder the last w, the query's own token
    included (Gemma 2); 0 = all tokens in every layer."""
    query_key_norm: bool = option(False, FieldRole.SHAPES, FieldRole.ARCHITECTURE)
    """Normalize the queries and the keys of each head, with a norm of norm_kind whose scale [K] the
    heads share, before rotary rotates them (Henry et al. 2020; Dehghani et al. 2023)."""
    score_cap: float = option(0.0, FieldRole.ARCHITECTURE, lowest=0)
    """c: replace each scaled score s of attention by c * tanh(s / c), before biases are added; 0 =
    no cap (Gemma 2: 50)."""
    logit_cap: float = option(0.0, FieldRole.ARCHITECTURE, lowest=0)
    """c: replace each logit z by c * tanh(z / c); 0 = no cap (Gemma 2: 30)."""
    scale_embeddings: bool = option(True, FieldRole.ARCHITECTURE)
    """Multiply embeddings by sqrt(D)."""
    scale_logits: bool = option(False, FieldRole.ARCHITECTURE)
    """Multiply logits by 1 / sqrt(D)."""
    tie_embeddings: Literal["none", "target_output", "source_target", "all"] = option(
        "all", FieldRole.ARCHITECTURE
    )
    """Which of source embedding, target embedding and output projection share one table."""
    zero_pad_embeddings: bool = option(False, FieldRole.ARCHITECTURE)
    """Embed the padding token as the zero vector, regardless of its row in the table."""
    train_pad_embedding: bool = option(False, FieldRole.ARCHITECTURE)
    """Where padding starts decoding, train its embedding through the lookup, as T5 does. False is
    PyTorch's `padding_idx`."""
    decoder_kind: Literal["attention", "ssru"] = option("attention", FieldRole.ARCHITECTURE)
    """What connects a decoder layer to the previous target tokens: self-attention, or a simpler
    recurrent unit (SSRU; Kim et al. 2019), as in the small models that run in browsers."""
    mask_target_padding: bool = option(True, FieldRole.ARCHITECTURE)
    """Mask target padding in the decoder's self-attention (otherwise only future tokens), unless
    decoding starts from padding."""

    pad_id: int = option(0, FieldRole.VOCABULARY, lowest=-1, limit=MAX_VOCABULARY)
    """Token id of padding; -1 if the vocabulary has none."""
    bos_id: int = option(1, FieldRole.VOCABULARY, lowest=-1, limit=MAX_VOCABULARY)
    """Token id that decoding starts from; -1 is embedded as the zero vector."""
    eos_id: int = option(2, FieldRole.VOCABULARY, lowest=0, limit=MAX_VOCABULARY)
    """Token id that ends a sentence."""

    kernel_init: Literal[
        "xavier_uniform", "xavier_normal", "torch_default", "normal", "torch_transformer", "fairseq"
    ] = option("xavier_uniform", FieldRole.INITIALIZATION)
    """Initial values of matrices. torch_default: uniform within +-1/sqrt(fan_in); normal: with
    standard deviation 1/sqrt(fan_in); torch_transformer: xavier_uniform, but divided by sqrt(2) for
    queries, keys and values; fairseq: the same, but torch_default in the feed-forward network and
    normal in an untied output."""
    embedding_init: Literal["normal", "standard_normal", "xavier_uniform", "xavier_normal"] = (
        option("normal", FieldRole.INITIALIZATION)
    )
    """Initial values of embeddings; normal has standard deviation 1/sqrt(D), standard_normal 1."""
    bias_init: Literal["zeros", "torch_default", "torch_transformer", "fairseq"] = option(
        "zeros", FieldRole.INITIALIZATION
    )
    """Initial values of biases. torch_default: uniform within +-1/sqrt(fan_in); torch_transformer:
    the same, but zeros in attention; fairseq: the same, but zeros in the outputs of attention and
    of the model."""

    dtype: Literal["float32", "bfloat16", "float64"] = option("float32", FieldRole.NUMERICS)
    """Data type of the computation. Softmax, norms and losses use at least float32."""
    param_dtype: Literal["float32", "float64"] = option("float32", FieldRole.NUMERICS)
    """Data type of the parameters."""
    scan_layers: Literal["auto", True, False] = option("auto", FieldRole.NUMERICS)
    """Run each stack as one compiled loop over its layers, which compiles faster; False unrolls it,
    so that nothing is copied into and out of the loop. auto: loops on CPUs, no loops elsewhere. The
    parameters are the same."""
    attention_backend: Literal["auto", "einsum", "pallas_gpu", "pallas_tpu"] = option(
        "auto", FieldRole.NUMERICS
    )
    """How attention is computed in whole passes. einsum: by XLA, with its weights in memory;
    pallas_gpu, pallas_tpu: in one kernel that never writes them (the one for TPUs is interpreted on
    CPUs, for tests); auto: the kernel of the platform if it supports the case, else einsum."""
    norm_backend: Literal["auto", "xla", "pallas_gpu"] = option("auto", FieldRole.NUMERICS)
    """How training computes norm(x + dropout(f(x))). xla: by XLA's fusions; pallas_gpu: in one
    kernel, which draws dropout's random numbers again in the backward pass instead of storing a
    mask; auto: the kernel on NVIDIA GPUs of the Hopper generation if it supports the case, else
    xla."""
    remat: Literal["none", "projections", "products", "full"] = option("none", FieldRole.RUNNING)
    """Which activations of a layer are computed again in the backward pass instead of stored, with
    the same results. none; projections: the queries, keys and values of self-attention that one
    product computes (attention_backend=pallas_gpu); products: all but the products of matrices and
    the attention, for little time; full: all, with the least memory and a third more
    computation."""

    _prefix = "model."
    _relations = relations.MODEL

    def _check(self) -> None:
        super()._check()
        # The table of sinusoids is computed in float64.
        is_computed = self.position_kind == "sinusoidal"
        require_memory(
            8 * self.max_length * self.d_model * is_computed,
            host_memory(),
            f"the positions of model.max_length={self.max_length} and model.d_model={self.d_model} "
            "take",
        )

    @property
    def is_dot_product(self) -> bool:
        """Whether attention is that of the paper, not one of `register_attention`."""
        return self.attention_kind == DOT_PRODUCT

    @property
    def parameter_count(self) -> int:
        """The number of scalars in all parameters; vocabulary sizes of 0 count as 0.

        Registered classes of layers count as the built-in ones.
        """
        width, has_inputs = self.d_model, self.has_inputs
        per_feature = 2 if self.norm_has_bias else 1
        norm = width * per_feature
        of_sublayer = norm * (2 if self.norm_position == "both" else 1)
        queries, keys = (heads * self.key_width for heads in (self.num_heads, self.kv_heads))
        contexts, values = (heads * self.value_width for heads in (self.num_heads, self.kv_heads))
        attention = sum(_dense(width, x, self.qkv_bias) for x in (queries, keys, values))
        attention += _dense(contexts, width, self.attention_output_bias)
        if self.query_key_norm:
            attention += 2 * self.key_width * per_feature
        feed_forward = _dense(width, self.d_ff, self.feed_forward_bias)
        feed_forward *= 1 + self.feed_forward_gate
        feed_forward += _dense(self.d_ff, width, self.feed_forward_bias)
        recurrence = _dense(width, width, False) + _dense(width, width, True)

        encoder_layer = attention + feed_forward + 2 * of_sublayer
        decoder_layer = feed_forward + (recurrence if self.decoder_kind == "ssru" else attention)
        decoder_layer += 2 * of_sublayer + (attention + of_sublayer if has_inputs else 0)
        stacks = [(self.num_decoder_layers, decoder_layer)] if self.has_targets else []
        if has_inputs:
            stacks.append((self.num_encoder_layers, encoder_layer))
        total = sum(layers * layer for layers, layer in stacks)
        total += len(stacks) * norm * (self.embedding_norm + self.final_norm)
        if self.position_kind == "t5_relative":
            is_shared = self.relative_position_sharing == "stack"
            tables = sum(1 if is_shared else layers for layers, _ in stacks)
            total += tables * self.relative_position_buckets * self.num_heads
        if self.position_kind == "learned":
            total += len(stacks) * (self.max_length + self.position_offset) * width

        total += len(stacks) * width * self.embedding_bias
        if has_inputs and not self.shares_source_and_target:
            total += self.source_vocab_size * width
        if not self.has_targets:
            return total
        total += self.target_vocab_size * width
        if not self.shares_target_and_output:
            total += self.target_vocab_size * width
        return total + self.target_vocab_size * self.output_bias

    @property
    def norm_has_bias(self) -> bool:
        """Whether norms subtract the mean and add a bias."""
        return self.norm_kind in ("layer_norm", "unbiased_std")

    @property
    def kv_heads(self) -> int:
        """G, with its default resolved."""
        return self.num_kv_heads or self.num_heads

    @property
    def key_width(self) -> int:
        """K, with its default resolved."""
        return self.head_dim or self.d_model // self.num_heads

    @property
    def value_width(self) -> int:
        """U, with its default resolved."""
        return self.value_dim or self.key_width

    @property
    def embedding_dropout(self) -> float:
        """`embedding_dropout_rate`, with its default resolved."""
        rate = self.embedding_dropout_rate
        return self.dropout_rate if rate < 0 else rate

    @property
    def longest_sentence(self) -> int | None:
        """Maximum number of tokens of a sentence that the model supports; None = any."""
        return self.max_length if self.position_kind == "learned" else None

    @property
    def shares_source_and_target(self) -> bool:
        """Whether source and target embeddings are one table."""
        return (
            self.has_inputs and self.has_targets and self.tie_embeddings in ("source_target", "all")
        )

    @property
    def shares_target_and_output(self) -> bool:
        """Whether the output projection is the transposed target embedding."""
        return self.has_targets and self.tie_embeddings in ("target_output", "all")


def _dense(inputs: int, outputs: int, has_bias: bool) -> int:
    return inputs * outputs + outputs * has_bias


def with_vocabulary_sizes(model: TransformerConfig, source: int, target: int) -> TransformerConfig:
    """Returns the model with the vocabulary sizes that are still 0 replaced by these."""
    return dataclasses.replace(
        model,
        source_vocab_size=model.source_vocab_size or source,
        target_vocab_size=model.target_vocab_size or target,
    )
