"""The Transformer: architecture, initial values and numerical precision."""

import dataclasses
from typing import Literal

from flaxformer_mt.config.fields import require


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    """The encoder-decoder Transformer (Vaswani et al. 2017) and its published variants.

    The defaults are the base model of the paper, in the arrangement of its text: post-norm,
    interleaved sinusoids, one embedding table shared by source, target and output.
    """

    source_vocab_size: int = 0
    """V of the source; 0 = as many as the run's tokenizer has."""
    target_vocab_size: int = 0
    """V of the target and of the logits; 0 = as many as the run's tokenizer has."""
    d_model: int = 512
    """D: width of embeddings, of every layer's input and of its output."""
    num_heads: int = 8
    """H: attention heads."""
    head_dim: int = 0
    """K: width of one head's queries and keys; 0 = d_model / num_heads. H*K need not be D."""
    value_dim: int = 0
    """U: width of one head's values; 0 = head_dim."""
    d_ff: int = 2048
    """F: hidden width of the feed-forward network."""
    num_encoder_layers: int = 6
    """L of the encoder."""
    num_decoder_layers: int = 6
    """L of the decoder."""
    has_inputs: bool = True
    """False: a decoder-only language model, without encoder and cross-attention."""

    dropout_rate: float = 0.1
    """Dropout of each sub-layer's output before it is added to the residual."""
    embedding_dropout_rate: float = -1.0
    """Dropout of the embeddings after positions are added; -1 = dropout_rate."""
    attention_dropout_rate: float = 0.0
    """Dropout of the attention weights."""
    activation_dropout_rate: float = 0.0
    """Dropout inside the feed-forward network, after the activation."""

    norm_position: Literal["post", "pre"] = "post"
    """post: norm(x + f(x)), as in the paper; pre: x + f(norm(x))."""
    norm_kind: Literal["layer_norm", "unbiased_std"] = "layer_norm"
    """layer_norm: biased variance, epsilon inside the root; unbiased_std: standard deviation with
    n - 1, epsilon added to it outside the root."""
    norm_epsilon: float = 1e-6
    """The small number that keeps the normalisation finite."""
    embedding_norm: bool = False
    """One more norm after embedding, positions and dropout."""
    final_norm: bool = False
    """A norm after the last layer of each stack (pre-norm models need it)."""

    qkv_bias: bool = True
    """Biases in the query, key and value projections."""
    attention_output_bias: bool = True
    """Bias in the projection that joins the heads."""
    feed_forward_bias: bool = True
    """Biases in the feed-forward network."""
    output_bias: bool = False
    """Bias of the logits."""
    activation: Literal["relu", "gelu", "gelu_tanh", "silu"] = "relu"
    """gelu is the exact one (error function), gelu_tanh its approximation."""

    position_kind: Literal["sinusoidal", "learned", "none"] = "sinusoidal"
    """What is added to the embeddings to say where a token stands."""
    position_layout: Literal["interleaved", "concatenated"] = "interleaved"
    """interleaved: sin, cos, sin, cos ...; concatenated: all sines, then all cosines."""
    position_exponent: Literal["paper", "tensor2tensor"] = "paper"
    """Frequency j is base**(-2j/D) in the paper, base**(-j/(D/2-1)) in tensor2tensor."""
    position_base: float = 10000.0
    """The base of the frequencies."""
    position_offset: int = 0
    """The position of a sentence's first token."""
    max_length: int = 1024
    """Rows of a learned position table: the longest sentence that it can hold. Sinusoids have no
    limit."""

    scale_embeddings: bool = True
    """Multiply embeddings by sqrt(D)."""
    scale_logits: bool = False
    """Multiply logits by 1 / sqrt(D)."""
    tie_embeddings: Literal["none", "target_output", "source_target", "all"] = "all"
    """Which of source embedding, target embedding and output projection are one table."""
    zero_pad_embeddings: bool = False
    """Embed the padding token to the zero vector, whatever the table says."""
    decoder_kind: Literal["attention", "ssru"] = "attention"
    """How a decoder layer knows the earlier target tokens: by self-attention, or by a simple
    recurrent unit (SSRU; Kim et al. 2019), as in the small models that run in browsers."""
    mask_target_padding: bool = True
    """Hide target padding from the decoder's self-attention (else it is causal only)."""

    pad_id: int = 0
    """Token that fills rows; -1 if the vocabulary has none for that."""
    bos_id: int = 1
    """Token that starts decoding; -1 embeds to the zero vector."""
    eos_id: int = 2
    """Token that ends a sentence."""

    kernel_init: Literal["xavier_uniform", "xavier_normal", "torch_default"] = "xavier_uniform"
    """Initial matrices; torch_default is uniform in +-1/sqrt(fan_in)."""
    embedding_init: Literal["normal", "xavier_uniform", "xavier_normal"] = "normal"
    """Initial embeddings; normal has standard deviation 1/sqrt(D)."""
    bias_init: Literal["zeros", "torch_default"] = "zeros"
    """Initial biases; torch_default is uniform in +-1/sqrt(fan_in)."""

    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """What the layers compute in. Softmax, norms and losses never go below float32."""
    param_dtype: Literal["float32", "float64"] = "float32"
    """What the parameters are stored in."""
    scan_layers: bool = True
    """Run each stack as one compiled loop over its layers (compiles faster); False unrolls it.
    The parameters are the same."""
    remat: bool = False
    """Compute a layer's inside again in the backward pass instead of keeping it: less memory, a
    third more work. The results are the same."""

    def __post_init__(self) -> None:
        if not self.head_dim:
            require(
                self.d_model % self.num_heads == 0,
                f"model.d_model={self.d_model} is not a multiple of model.num_heads="
                f"{self.num_heads}: change one or set model.head_dim",
            )
        for name in ("d_model", "num_heads", "d_ff", "max_length"):
            require(getattr(self, name) > 0, f"model.{name} must be positive")
        for name in ("head_dim", "value_dim", "num_encoder_layers", "num_decoder_layers"):
            require(getattr(self, name) >= 0, f"model.{name} must not be negative")
        for name in ("dropout_rate", "attention_dropout_rate", "activation_dropout_rate"):
            require(0 <= getattr(self, name) < 1, f"model.{name} must be in [0, 1)")
        require(
            self.tie_embeddings not in ("source_target", "all")
            or not self.has_inputs
            or self.source_vocab_size == self.target_vocab_size,
            f"model.tie_embeddings={self.tie_embeddings} needs one vocabulary, but "
            f"model.source_vocab_size={self.source_vocab_size} and "
            f"model.target_vocab_size={self.target_vocab_size}",
        )
        require(
            self.norm_kind == "layer_norm" or self.d_model > 1,
            "model.norm_kind=unbiased_std needs model.d_model > 1",
        )

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
    def shares_source_and_target(self) -> bool:
        """Whether source and target embeddings are one table."""
        return self.has_inputs and self.tie_embeddings in ("source_target", "all")

    @property
    def shares_target_and_output(self) -> bool:
        """Whether the output projection is the target embedding, transposed."""
        return self.tie_embeddings in ("target_output", "all")


def with_vocabulary_sizes(model: TransformerConfig, source: int, target: int) -> TransformerConfig:
    """The model with the vocabulary sizes that were left open (0) filled in."""
    return dataclasses.replace(
        model,
        source_vocab_size=model.source_vocab_size or source,
        target_vocab_size=model.target_vocab_size or target,
    )
