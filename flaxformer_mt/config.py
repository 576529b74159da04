"""Every static fact of an experiment, as frozen, validated dataclasses.

A field names the mathematics ("pre"), never the project that it came from; `presets.py` says which
published model has which values. Each field's docstring is its `--help` text.
"""

import dataclasses
import json
import types
import typing
from typing import Any, Literal, TypeAlias

from flaxformer_mt.errors import UserError


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise UserError(message)


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
            _require(
                self.d_model % self.num_heads == 0,
                f"model.d_model={self.d_model} is not a multiple of model.num_heads="
                f"{self.num_heads}: change one or set model.head_dim",
            )
        for name in ("d_model", "num_heads", "d_ff", "max_length"):
            _require(getattr(self, name) > 0, f"model.{name} must be positive")
        for name in ("head_dim", "value_dim", "num_encoder_layers", "num_decoder_layers"):
            _require(getattr(self, name) >= 0, f"model.{name} must not be negative")
        for name in ("dropout_rate", "attention_dropout_rate", "activation_dropout_rate"):
            _require(0 <= getattr(self, name) < 1, f"model.{name} must be in [0, 1)")
        _require(
            self.tie_embeddings not in ("source_target", "all")
            or not self.has_inputs
            or self.source_vocab_size == self.target_vocab_size,
            f"model.tie_embeddings={self.tie_embeddings} needs one vocabulary, but "
            f"model.source_vocab_size={self.source_vocab_size} and "
            f"model.target_vocab_size={self.target_vocab_size}",
        )
        _require(
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


CorpusKind: TypeAlias = Literal["text", "tsv", "phrases", "reverse", "tfds"]
"""Where pairs are read from; the help of `DataConfig.corpus` explains each."""


@dataclasses.dataclass(frozen=True)
class CorpusConfig:
    """One of several corpora that are read together; what is left empty is as in `data`."""

    kind: CorpusKind | Literal[""] = ""
    """As data.corpus."""
    path: str = ""
    """As data.path."""
    split: str = ""
    """As data.train_split, data.valid_split or data.test_split."""
    source_language: str = ""
    """As data.source_language."""
    target_language: str = ""
    """As data.target_language."""
    tag: str = ""
    """Put before every source sentence: "<2de>" names the target language, "<bt>" a back-translated
    source, "<news>" a domain. Several are parted by spaces; each is one piece of the vocabulary."""
    weight: float = 1.0
    """How often its pairs are seen, in proportion to those of the other corpora; see
    data.mixture_temperature."""

    def __post_init__(self) -> None:
        _require(self.weight > 0, "a corpus' weight must be positive")


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Where sentence pairs come from and how they become rows of tokens."""

    corpus: CorpusKind = "text"
    """text: SPLIT.LANGUAGE or SPLIT.LANGUAGE.gz in data.path, one sentence a line; tsv: SPLIT.tsv
    or SPLIT.tsv.gz in data.path, source and target parted by a tab; phrases: generated numbers,
    dates, times, units, currencies and lists; reverse: generated digit strings, to be reversed;
    tfds: the TensorFlow Datasets builder that data.path names."""
    path: str = ""
    """Folder of the corpus (text, tsv); name of a TensorFlow Datasets builder, or the folder in
    which it was prepared (tfds). "tfds:NAME" is a builder whatever data.corpus says."""
    source_language: str = "en"
    """Language translated from: the file ending of text, the locale of phrases."""
    target_language: str = "de"
    """Language translated into."""
    train_split: str = "train"
    """Name of the split to train on. Of files it may be several names and patterns, parted by
    commas: "europarl,news-*"."""
    valid_split: str = "valid"
    """Name of the split that steers training (best checkpoint)."""
    test_split: str = "test"
    """Name of the split that is only measured at the end."""
    generated_pairs: int = 20000
    """Training pairs of a generated corpus; valid and test get 500 each."""
    generator_seed: int = 0
    """Seed of a generated corpus."""
    train_corpora: tuple[CorpusConfig, ...] = ()
    """Corpora to train on together; none = the one that the fields above describe."""
    valid_corpora: tuple[CorpusConfig, ...] = ()
    """Corpora to validate on together; none = the one that the fields above describe."""
    test_corpora: tuple[CorpusConfig, ...] = ()
    """Corpora to test on together; none = the one that the fields above describe."""
    mixture_temperature: float = 1.0
    """t: a corpus of n pairs is seen in proportion to weight * n**(1/t). 1 takes every pair of all
    corpora equally often; more favours small corpora; 1e9 makes all equal."""

    max_length_ratio: float = 0.0
    """Drop training pairs of which one side has more than this times the words of the other; 0 =
    keep."""
    max_words: int = 0
    """Drop training pairs with more words than this on a side; 0 = keep."""
    drop_identical: bool = False
    """Drop training pairs whose two sides are the same text."""
    drop_duplicates: bool = False
    """Drop training pairs that were seen before, in this corpus or an earlier one."""
    drop_wrong_script: bool = False
    """Drop training pairs of which a side is mostly not in the script of its language."""
    max_unknown_rate: float = 0.1
    """Refuse a corpus of whose tokens a larger share is unknown."""

    tokenizer: Literal["bpe", "unigram"] = "bpe"
    """SentencePiece model, trained on the training split on first use."""
    vocab_size: int = 10000
    """Pieces to learn (of each language, unless joint_vocabulary). Small corpora get fewer."""
    joint_vocabulary: bool = True
    """One vocabulary for both languages."""
    byte_fallback: bool = True
    """Spell characters outside the vocabulary as bytes instead of <unk>."""
    character_coverage: float = 1.0
    """Share of the corpus' characters that get a piece of their own."""
    tokenizer_path: str = ""
    """Run folder, or its folder `tokenizer`, whose vocabulary is used instead of learning one."""
    subword_sampling: float = 0.0
    """Split sources anew each time they are seen. bpe: the probability with which a merge is left
    out (BPE-dropout; 0.1 is usual); unigram: the exponent of a split's probability (subword
    regularisation; 0.1 is usual, 1 varies least). 0 = always the best split."""

    batching: Literal["packed", "buckets"] = "packed"
    """packed: several pairs in a row, one shape; buckets: one pair in a row, a shape for each of
    data.bucket_lengths. Validation always packs."""
    bucket_lengths: tuple[int, ...] = (16, 32, 64)
    """Row lengths of buckets, of source and target; the longest takes the place of
    data.source_row_length and data.target_row_length. A batch has the more rows the shorter they
    are."""
    source_row_length: int = 0
    """S: tokens in a packed source row; also the longest source sentence, end token included.
    0 = as many as fill as well as the target rows do."""
    target_row_length: int = 64
    """T: tokens in a packed target row; also the longest target sentence, end token included."""
    long_sentences: Literal["drop", "truncate", "error"] = "drop"
    """What happens to training pairs longer than a row; the count is reported."""

    def __post_init__(self) -> None:
        _require(
            self.source_row_length == 0 or self.source_row_length > 1,
            "data.source_row_length must be at least 2, or 0",
        )
        _require(self.target_row_length > 1, "data.target_row_length must be at least 2")
        _require(self.mixture_temperature > 0, "data.mixture_temperature must be positive")
        for name in ("max_length_ratio", "max_words"):
            _require(getattr(self, name) >= 0, f"data.{name} must not be negative")
        for name in ("max_unknown_rate", "subword_sampling"):
            _require(0 <= getattr(self, name) <= 1, f"data.{name} must be in [0, 1]")
        _require(
            bool(self.bucket_lengths)
            and self.bucket_lengths[0] > 1
            and list(self.bucket_lengths) == sorted(set(self.bucket_lengths)),
            "data.bucket_lengths must be rising and at least 2",
        )
        _require(self.vocab_size > 0, "data.vocab_size must be positive")
        _require(self.generated_pairs > 0, "data.generated_pairs must be positive")
        _require(
            0.98 <= self.character_coverage <= 1,
            "data.character_coverage must be in [0.98, 1], as SentencePiece wants it",
        )

    @property
    def row_lengths(self) -> tuple[int, int]:
        """S and T: tokens in the longest source row and in the longest target row."""
        if self.batching == "buckets":
            return self.bucket_lengths[-1], self.bucket_lengths[-1]
        return self.source_row_length, self.target_row_length


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """Adam and its learning rate."""

    kind: Literal["adam", "adamw"] = "adam"
    """adamw adds decoupled weight decay."""
    learning_rate: float = 1e-3
    """Peak rate of constant, inverse_square_root and one_cycle; factor of noam and
    tensor2tensor."""
    schedule: Literal["constant", "inverse_square_root", "noam", "tensor2tensor", "one_cycle"] = (
        "inverse_square_root"
    )
    """inverse_square_root: linear to the peak at w, then peak * sqrt(w/t); noam: factor * D^-0.5 *
    min(t^-0.5, t * w^-1.5); tensor2tensor: factor * D^-0.5 * min(1, t/w) * max(t, w)^-0.5;
    one_cycle: cosine up to the peak and down to nearly 0 at total_steps."""
    warmup_steps: int = 4000
    """w: steps over which the rate rises."""
    total_steps: int = 0
    """Length of a one_cycle schedule; 0 = train.num_steps."""
    beta1: float = 0.9
    """Decay of Adam's first moment."""
    beta2: float = 0.98
    """Decay of Adam's second moment."""
    epsilon: float = 1e-9
    """Added outside the root."""
    weight_decay: float = 0.0
    """Decoupled weight decay of adamw."""
    clip_norm: float = 0.0
    """Scale gradients down to this global norm; 0 = never."""

    def __post_init__(self) -> None:
        _require(self.learning_rate > 0, "optimizer.learning_rate must be positive")
        _require(self.warmup_steps >= 0, "optimizer.warmup_steps must not be negative")
        _require(
            self.weight_decay == 0 or self.kind == "adamw",
            "optimizer.weight_decay needs optimizer.kind=adamw",
        )


ValidationMetric: TypeAlias = Literal[
    "loss", "cross_entropy", "perplexity", "accuracy", "bleu", "chrf"
]
"""A figure of a validation; of the first three less is better, of the others more."""


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """How long, on how much at a time, and what is measured on the way."""

    num_steps: int = 100_000
    """Optimizer steps in all; a run may be continued with more."""
    batch_tokens: int = 4096
    """Target tokens in a batch, padding included; source rows are as many as target rows."""
    accumulation_steps: int = 1
    """Parts in which a batch is computed, one after the other, to save memory."""
    label_smoothing: float = 0.1
    """e: probability taken from the right token."""
    label_smoothing_convention: Literal["uniform", "others", "others_kl", "non_pad_kl"] = "uniform"
    """Who gets e, and what is reported. uniform: all V tokens, e/V each (PyTorch, OpenNMT, Marian);
    others: all but the right one, e/(V-1) each (fairseq, jadore801120); others_kl: the same, less
    that distribution's entropy (tensor2tensor, tunz); non_pad_kl: e/(V-2), padding gets none, less
    the entropy (The Annotated Transformer)."""
    seed: int = 0
    """Initial parameters, dropout and the order of the data follow from it."""
    log_every: int = 50
    """Steps between lines of training figures."""
    eval_every: int = 1000
    """Steps between validations (loss, accuracy, BLEU and chrF of beam search)."""
    eval_sentences: int = 500
    """Validation sentences that are translated for BLEU and chrF; 0 = all."""
    checkpoint_every: int = 1000
    """Steps between checkpoints."""
    keep_last: int = 2
    """Checkpoints kept because they are the newest."""
    keep_best: int = 1
    """Checkpoints kept because they are the best by best_metric."""
    best_metric: ValidationMetric = "loss"
    """Validation figure that ranks checkpoints."""
    early_stopping_patience: int = 0
    """Stop after this many validations in a row that did not improve; 0 = never."""
    early_stopping_metric: ValidationMetric = "loss"
    """Validation figure that must improve."""
    early_stopping_min_delta: float = 0.0
    """What counts as an improvement: more than this."""
    ema_decay: float = 0.0
    """d: validate and translate with an exponential moving average of the parameters, average = d
    * average + (1 - d) * parameters after each step; 0 = with the parameters themselves."""
    r_drop: float = 0.0
    """alpha of R-Drop (Liang et al. 2021): each batch is computed twice, with different dropout,
    and the two predictions are drawn together; 0 = off, 5 is usual for translation."""
    max_skipped_steps: int = 10
    """A step whose loss or gradient is not finite changes nothing; after this many in a row the
    run stops at its last checkpoint."""
    init_from: str = ""
    """Start from these parameters: a run folder (its best checkpoint, and its vocabulary), or a
    .safetensors file made by `flaxformer-mt convert --to flaxformer_mt`."""
    freeze: tuple[str, ...] = ()
    """Regular expressions; parameters whose path one of them matches are not trained: "encoder/",
    "embedding"."""
    show_translations: int = 5
    """Test translations printed at the end."""

    def __post_init__(self) -> None:
        for name in (
            "num_steps", "batch_tokens", "accumulation_steps", "log_every", "eval_every",
            "checkpoint_every", "keep_last",
        ):  # fmt: skip
            _require(getattr(self, name) > 0, f"train.{name} must be positive")
        for name in (
            "eval_sentences", "keep_best", "show_translations", "early_stopping_patience",
            "early_stopping_min_delta", "r_drop",
        ):  # fmt: skip
            _require(getattr(self, name) >= 0, f"train.{name} must not be negative")
        _require(0 <= self.label_smoothing < 1, "train.label_smoothing must be in [0, 1)")
        _require(0 <= self.ema_decay < 1, "train.ema_decay must be in [0, 1)")
        _require(self.max_skipped_steps > 0, "train.max_skipped_steps must be positive")


@dataclasses.dataclass(frozen=True)
class ParallelConfig:
    """How a batch is spread over devices."""

    strategy: Literal["mesh", "pmap"] = "mesh"
    """mesh: jit over a device mesh; pmap: one program per device, plain data parallelism."""
    num_devices: int = 0
    """Devices to use, of all processes together; 0 = all. Those that fsdp and tensor leave over
    are the mesh's axis data, along which rows are shared out."""
    fsdp: int = 1
    """Size of the axis along which rows are shared out, too, and parameters and optimizer state are
    cut, to be gathered when they are needed (fully sharded data parallelism, ZeRO)."""
    tensor: int = 1
    """Size of the axis along which matrices are cut and each device computes with its part
    (tensor parallelism, Megatron)."""
    sharding_rules: tuple[tuple[str, str], ...] = ()
    """Rules that go before the built-in ones: a regular expression for parameter paths, and the
    mesh axes of the last dimensions, parted by commas ("fsdp,tensor", "-" for none)."""

    def __post_init__(self) -> None:
        _require(self.num_devices >= 0, "parallel.num_devices must not be negative")
        for name in ("fsdp", "tensor"):
            _require(getattr(self, name) > 0, f"parallel.{name} must be positive")
        _require(
            self.strategy == "mesh" or self.fsdp == self.tensor == 1,
            "parallel.strategy=pmap cannot cut parameters: set parallel.fsdp and parallel.tensor "
            "to 1, or parallel.strategy=mesh",
        )


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
    """How translations are searched for, and which may be found."""

    beam_size: int = 4
    """W: hypotheses followed per sentence; 1 = greedy."""
    n_best: int = 1
    """Translations returned per sentence; of a beam search at most beam_size."""
    length_penalty: float = 0.6
    """alpha of what divides a hypothesis' log-probability; more favours longer translations, 0 =
    nothing divides it."""
    length_penalty_kind: Literal["gnmt", "average"] = "gnmt"
    """gnmt: ((5 + length) / 6)**alpha (Wu et al. 2016); average: length**alpha (Hugging Face,
    CTranslate2, fairseq). The length includes the end token."""
    coverage_penalty: float = 0.0
    """beta of the reward for attending to every source token (Wu et al. 2016, equation 14): beta *
    sum over source tokens of log(min(attention received, 1)); 0 = none."""
    early_stopping: Literal["never", "heuristic", "first"] = "never"
    """When a beam search ends, given beam_size complete hypotheses. never: when no unfinished one
    can become better; heuristic: when none would be better if it ended now; first: at once.
    (Hugging Face's early_stopping="never", False and True.)"""
    min_length: int = 0
    """A translation has at least this many tokens, the end token not counted ..."""
    min_length_factor: float = 0.0
    """... and at least this many per source token."""
    max_length: int = 0
    """A translation has at most this many tokens, end token included; 0 = as the next two say."""
    max_length_factor: float = 1.5
    """A translation may have this many tokens per source token ..."""
    max_length_extra: int = 20
    """... plus this many."""
    force_end: bool = False
    """Make the last token that the length allows the end token, instead of leaving the translation
    without one."""
    no_repeat_ngram_size: int = 0
    """No sequence of this many tokens appears twice; 0 = any may."""
    repetition_penalty: float = 1.0
    """Divides the scores of tokens that the translation already has (Keskar et al. 2019); 1 =
    none."""
    bad_words: tuple[str, ...] = ()
    """Words and phrases that must not appear, each written as inside a sentence."""
    bad_word_ids: tuple[str, ...] = ()
    """The same as token ids, those of one phrase parted by commas: "17,4"."""
    renormalize: bool = False
    """After tokens were ruled out, divide the probabilities of the others by their sum."""
    beam_groups: int = 1
    """Diverse beam search (Vijayakumar et al. 2018): beam_size hypotheses in so many groups, which
    avoid each other's tokens."""
    diversity_penalty: float = 0.0
    """Taken from a token's log-probability for each hypothesis of an earlier group that chose it at
    the same position."""
    sampling: bool = False
    """Draw n_best translations at random instead of searching for the best."""
    temperature: float = 1.0
    """Divides the logits before sampling: below 1 more probable tokens, above 1 more varied."""
    top_k: int = 0
    """Sample among this many most probable tokens; 0 = all."""
    top_p: float = 1.0
    """Sample among the most probable tokens that together have this probability (Holtzman et al.
    2020)."""
    min_p: float = 0.0
    """Sample among tokens of at least this share of the highest probability."""
    epsilon_cutoff: float = 0.0
    """Sample among tokens of at least this probability (Hewitt et al. 2022)."""
    seed: int = 0
    """Of sampling. What is drawn for a sentence follows from the seed and the sentence alone."""
    mbr_samples: int = 0
    """Minimum Bayes risk (Eikema and Aziz 2020): draw this many translations and return those that
    are most like all others by chrF; 0 = search instead."""
    ensemble: Literal["log", "probability"] = "log"
    """What several models agree on: the mean of their log-probabilities, or the logarithm of the
    mean of their probabilities."""
    shortlist: str = ""
    """File of a lexical table, "target source probability" a line, or Marian's binary one: only
    translations of the source's tokens, and frequent tokens, can be chosen."""
    shortlist_first: int = 100
    """Tokens of the vocabulary, from the first on, that are always in the shortlist; a binary table
    says itself how many."""
    shortlist_best: int = 100
    """Translations of each source token that are in the shortlist; a binary table has so many as
    were written."""
    copy_unknown: bool = False
    """Write in the place of an unknown token the source word that it attends to most."""
    alignment_layer: int = -1
    """Decoder layer whose attention aligns source and target, from 0; negative from the last."""
    alignment_head: int = -1
    """Head whose attention aligns, from 0; -1 = the mean of all."""
    max_source_length: int = 0
    """Longer input, in tokens, is split at sentence borders, and its translations are joined; 0 =
    512, or what the model has positions for."""
    batch_tokens: int = 1024
    """Source tokens decoded at a time with a beam of 4, padding included (with a smaller beam, more
    sentences); an accelerator is faster with more."""

    def __post_init__(self) -> None:
        for name in ("beam_size", "n_best", "batch_tokens", "beam_groups", "shortlist_best"):
            _require(getattr(self, name) > 0, f"decode.{name} must be positive")
        for name in (
            "length_penalty", "coverage_penalty", "min_length", "min_length_factor", "max_length",
            "max_length_factor", "no_repeat_ngram_size", "diversity_penalty", "top_k", "min_p",
            "epsilon_cutoff", "seed", "mbr_samples", "shortlist_first", "max_source_length",
        ):  # fmt: skip
            _require(getattr(self, name) >= 0, f"decode.{name} must not be negative")
        _require(self.max_length_extra >= 1, "decode.max_length_extra must be positive")
        _require(self.repetition_penalty > 0, "decode.repetition_penalty must be positive")
        _require(self.temperature > 0, "decode.temperature must be positive")
        _require(0 < self.top_p <= 1, "decode.top_p must be in (0, 1]")
        for name in ("min_p", "epsilon_cutoff"):
            _require(getattr(self, name) < 1, f"decode.{name} must be below 1")
        _require(
            self.samples or self.n_best <= self.beam_size,
            f"decode.n_best={self.n_best} is more than decode.beam_size={self.beam_size}",
        )
        _require(
            not self.mbr_samples or self.n_best <= self.mbr_samples,
            f"decode.n_best={self.n_best} is more than decode.mbr_samples={self.mbr_samples}",
        )
        _require(
            self.beam_size % self.beam_groups == 0,
            f"decode.beam_size={self.beam_size} is not a multiple of decode.beam_groups="
            f"{self.beam_groups}",
        )
        _require(
            self.diversity_penalty == 0 or self.beam_groups > 1,
            "decode.diversity_penalty needs decode.beam_groups of 2 or more",
        )
        _require(self.max_source_length != 1, "decode.max_source_length must be at least 2, or 0")
        for phrase in self.bad_word_ids:
            _require(
                all(token.strip().isdecimal() for token in phrase.split(",")),
                f'decode.bad_word_ids: "{phrase}" is no list of token ids, such as "17,4"',
            )

    @property
    def samples(self) -> bool:
        """Whether translations are drawn at random."""
        return self.sampling or self.mbr_samples > 0


@dataclasses.dataclass(frozen=True)
class ExperimentConfig:
    """One experiment: all that `train.py` needs besides a folder to write to."""

    model: TransformerConfig = dataclasses.field(default_factory=TransformerConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)
    parallel: ParallelConfig = dataclasses.field(default_factory=ParallelConfig)
    decode: DecodeConfig = dataclasses.field(default_factory=DecodeConfig)

    def __post_init__(self) -> None:
        field = "target_row_length" if self.data.batching == "packed" else "bucket_lengths[-1]"
        _, row_length = self.data.row_lengths
        _require(
            self.train.batch_tokens % row_length == 0,
            f"train.batch_tokens={self.train.batch_tokens} is not a multiple of "
            f"data.{field}={row_length}",
        )

    @property
    def rows_per_batch(self) -> int:
        """B: rows in a training batch of the longest rows."""
        return self.train.batch_tokens // self.data.row_lengths[1]


# A run may be continued with other values of these: no parameter depends on them.
RESUMABLE_FIELDS = (
    "data.path", "train.num_steps", "train.log_every", "train.eval_every", "train.eval_sentences",
    "train.checkpoint_every", "train.keep_last", "train.keep_best", "train.show_translations",
    "train.early_stopping_patience", "train.max_skipped_steps", "train.init_from", "model.remat",
    "parallel.strategy", "parallel.num_devices", "parallel.fsdp", "parallel.tensor",
    "parallel.sharding_rules",
    *(f"decode.{field.name}" for field in dataclasses.fields(DecodeConfig)),
)  # fmt: skip


def to_dict(config: Any) -> dict[str, Any]:
    """The configuration as nested dicts of JSON values."""
    return dataclasses.asdict(config)


def from_dict(values: dict[str, Any], kind: type = ExperimentConfig, prefix: str = "") -> Any:
    """The inverse of `to_dict`.

    Raises:
      UserError: a field is unknown, or its value has the wrong type.
    """
    hints = typing.get_type_hints(kind)
    unknown = sorted(set(values) - set(hints))
    if unknown:
        raise UserError(f"unknown configuration field {prefix}{unknown[0]}")
    return kind(
        **{name: _typed(value, hints[name], f"{prefix}{name}") for name, value in values.items()}
    )


def _typed(value: Any, hint: Any, name: str) -> Any:
    """The value of the field `name`, made of JSON values, as the type that `hint` wants."""
    if dataclasses.is_dataclass(hint):
        _require(isinstance(value, dict), f"configuration field {name} is no group")
        return from_dict(value, typing.cast(type, hint), f"{name}.")
    if typing.get_origin(hint) is tuple:
        _require(isinstance(value, list | tuple), f"configuration field {name} is no list")
        kinds = typing.get_args(hint)
        if kinds[-1] is Ellipsis:
            kinds = kinds[:1] * len(value)
        _require(len(value) == len(kinds), f"configuration field {name} needs {len(kinds)} values")
        return tuple(
            _typed(item, kind, f"{name}.{number}")
            for number, (item, kind) in enumerate(zip(value, kinds, strict=True))
        )
    choices = _choices(hint)
    if choices:
        valid = value in choices
    elif hint is float:
        valid = isinstance(value, int | float) and not isinstance(value, bool)
    else:
        valid = type(value) is hint
    _require(valid, f"configuration field {name} cannot be {value!r}")
    return value


def _choices(hint: Any) -> tuple[Any, ...]:
    """The values that a Literal, or a union of some, allows; none for other types."""
    if typing.get_origin(hint) is typing.Union or isinstance(hint, types.UnionType):
        return tuple(choice for part in typing.get_args(hint) for choice in _choices(part))
    return typing.get_args(hint) if typing.get_origin(hint) is Literal else ()


def to_json(config: ExperimentConfig) -> str:
    """The configuration as the text of a run folder's `config.json`."""
    return json.dumps(to_dict(config), indent=2) + "\n"


def from_json(text: str) -> ExperimentConfig:
    """The inverse of `to_json`.

    Raises:
      UserError: the text is no JSON object, or does not describe an experiment.
    """
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"not a configuration: {error}") from error
    _require(isinstance(values, dict), "not a configuration: no JSON object")
    _require(
        "model_type" not in values,
        "a model of Hugging Face: make a run of its folder with `flaxformer-mt convert --from "
        "marian FOLDER RUN`",
    )
    return from_dict(values)


def differences(stored: ExperimentConfig, given: ExperimentConfig) -> list[str]:
    """The fields that forbid continuing a run of `stored` with `given`.

    Returns:
      One string a field, "model.d_model: 128 in the run, 256 now".
    """
    resumable = set(RESUMABLE_FIELDS)
    if stored.optimizer.schedule == "one_cycle" and not stored.optimizer.total_steps:
        resumable.remove("train.num_steps")  # The rate of every step depends on it.
    ours, theirs = _without_paths(to_dict(stored)), _without_paths(to_dict(given))
    return [
        f"{group}.{name}: {value} in the run, {theirs[group][name]} now"
        for group, values in ours.items()
        for name, value in values.items()
        if value != theirs[group][name] and f"{group}.{name}" not in resumable
    ]


def _without_paths(values: dict[str, Any]) -> dict[str, Any]:
    """The experiment without the places of its corpora, which may have moved."""
    for corpora in ("train_corpora", "valid_corpora", "test_corpora"):
        for corpus in values["data"][corpora]:
            del corpus["path"]
    return values
