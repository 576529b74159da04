"""Which values of fields do not go together: one table for each class of a configuration.

A row is a test, which is true of values that do not go together, and the message. `{d_model}` in a
message stands for the field and its value, as in "model.d_model=512"; a message that needs more is
a function of the configuration.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any, TypeAlias

from flaxformer_mt.config.fields import MAX_PARAMETERS, Relation, shown

Test: TypeAlias = Callable[[Any], Any]


def _unless(is_needed: Test, names: Iterable[str], reason: str) -> list[Relation]:
    """Fields that must have their defaults unless something is true."""

    def changed(name: str) -> Test:
        return lambda c: not is_needed(c) and getattr(c, name) != getattr(type(c), name)

    def message(name: str) -> Callable[[Any], str]:
        return lambda c: (
            f"decode.{name}={getattr(c, name)} {reason}; its default is {getattr(type(c), name)}"
        )

    return [(changed(name), message(name)) for name in names]


MODEL: tuple[Relation, ...] = (
    (
        lambda c: not c.has_inputs and not c.has_targets,
        "{has_inputs} and {has_targets}: a model has a source, a target or both",
    ),
    (
        lambda c: not c.head_dim and c.d_model % c.num_heads,
        "{d_model} is not a multiple of {num_heads}: change one or set model.head_dim",
    ),
    (lambda c: c.num_heads % c.kv_heads, "{num_kv_heads} does not divide {num_heads}: change one"),
    (
        lambda c: c.shares_source_and_target and c.source_vocab_size != c.target_vocab_size,
        "{tie_embeddings} needs one vocabulary, but {source_vocab_size} and {target_vocab_size}",
    ),
    (
        lambda c: c.norm_kind == "unbiased_std" and c.d_model == 1,
        "{norm_kind} needs model.d_model > 1",
    ),
    (
        lambda c: c.norm_kind == "unbiased_std" and c.query_key_norm and c.key_width == 1,
        "{norm_kind} needs model.head_dim > 1 with {query_key_norm}",
    ),
    (
        lambda c: c.score_cap and c.attention_backend not in ("auto", "einsum"),
        "{attention_backend} does not cap scores, as {score_cap} asks: use auto or einsum",
    ),
    (
        lambda c: c.attention_window and c.attention_backend not in ("auto", "einsum"),
        "{attention_backend} has no windows, as {attention_window} asks: use auto or einsum",
    ),
    (
        lambda c: not c.is_dot_product and c.attention_backend not in ("auto", "einsum"),
        "{attention_backend} computes dot products only, not {attention_kind}: use auto or einsum",
    ),
    (
        lambda c: c.norm_position != "post" and c.norm_backend == "pallas_gpu",
        "{norm_backend} computes norm(x + f(x)), which a model with {norm_position} does not have: "
        "use auto or xla",
    ),
    (
        lambda c: c.position_kind == "rotary" and c.key_width % 2,
        lambda c: (
            f"model.position_kind={c.position_kind} rotates pairs of features, but a head has "
            f"{c.key_width}: model.head_dim must be even"
        ),
    ),
    (
        lambda c: c.position_kind == "t5_relative" and c.relative_position_buckets % 2,
        "{relative_position_buckets} must be even",
    ),
    (
        lambda c: (
            c.position_kind == "t5_relative"
            and c.relative_position_max_distance <= c.relative_position_buckets // 2
        ),
        "{relative_position_max_distance} must be more than half of {relative_position_buckets}",
    ),
    (
        lambda c: (
            c.decoder_kind == "ssru" and c.position_kind in ("rotary", "alibi", "t5_relative")
        ),
        "{position_kind} acts in self-attention, which a decoder with {decoder_kind} does not have",
    ),
    (
        lambda c: c.decoder_kind == "ssru" and c.attention_window,
        "{attention_window} is for self-attention, which a decoder with {decoder_kind} does not "
        "have",
    ),
    (
        lambda c: c.parameter_count > MAX_PARAMETERS,
        lambda c: (
            f"this model has {c.parameter_count:,} parameters, more than {MAX_PARAMETERS:,}: "
            "reduce model.d_model, model.d_ff, model.num_encoder_layers, model.num_decoder_layers "
            "or the vocabulary"
        ),
    ),
)

COLUMNS: tuple[Relation, ...] = (
    (lambda c: "0" in c.columns, "{columns}: columns are numbered from 1"),
    (
        lambda c: (
            c.columns and (len(set(c.columns)) != 2 or len(c.columns) != 2 or "" in c.columns)
        ),
        "{columns}: must be two columns, the source and the target, such as 1 2",
    ),
)


def _can_be_whole(text: str) -> bool:
    is_special = text in ("<pad>", "<s>", "</s>", "<unk>") or re.fullmatch("<0x[0-9A-F]{2}>", text)
    return not is_special and text.split() == [text] and not {"\u2581", "\u2585"} & set(text)


CORPUS: tuple[Relation, ...] = (
    *COLUMNS,
    (
        lambda c: not c.tag.isprintable() or not all(map(_can_be_whole, c.tag.split())),
        "{tag}: must be words between spaces, without other white space, \u2581 and the special "
        "tokens of a vocabulary",
    ),
)


def _held_out_elsewhere(config: Any) -> str:
    """The message about pairs to hold out of corpora that are not trained on, or ""."""
    for name in ("valid_corpora", "test_corpora"):
        for number, corpus in enumerate(getattr(config, name)):
            if corpus.hold_out >= 0:
                return (
                    f"data.{name}.{number}.hold_out={corpus.hold_out} has no effect: pairs are "
                    "held out of training corpora"
                )
    return ""


_PAIR_COLUMN = re.compile(r"(?!(source|target)=)[^\W\d]\w*=.+")

DATA: tuple[Relation, ...] = (
    *COLUMNS,
    (
        lambda c: (
            len(c.columns_of_pairs) < len(c.pair_columns)
            or not all(map(_PAIR_COLUMN.fullmatch, c.pair_columns))
        ),
        "{pair_columns}: must be NAME=COLUMN, with other names than source and target: weight=3",
    ),
    (
        lambda c: c.subword_sampling and not c.learns_subwords,
        "{subword_sampling} needs data.tokenizer=bpe or unigram",
    ),
    (
        lambda c: c.keep_whole and not c.splits_words,
        "{keep_whole} has no effect with data.tokenizer=word, whose words are one token each",
    ),
    (
        lambda c: not all(map(_can_be_whole, c.keep_whole)),
        "{keep_whole}: must be texts without spaces, and not the special tokens of a vocabulary, "
        "<pad> <s> </s> <unk> and <0x00> to <0xFF>",
    ),
    (
        lambda c: c.curriculum and c.workers > 0,
        "{workers} cannot call {curriculum}, a function of your program: leave workers out",
    ),
    (
        lambda c: not c.bucket_lengths or [*c.bucket_lengths] != sorted({*c.bucket_lengths}),
        "{bucket_lengths} must be in increasing order",
    ),
    (
        lambda c: (
            c.is_generated and not c.train_corpora and c.path and not c.path.startswith("tfds:")
        ),
        "{path} has no effect, since {corpus} is generated: set data.corpus=text for a file or a "
        "folder of text",
    ),
    (
        lambda c: c.alignments and (c.train_corpora or c.is_generated),
        "{alignments} are of one corpus of files: leave out data.train_corpora, and generated "
        "corpora",
    ),
    (_held_out_elsewhere, _held_out_elsewhere),
    (
        lambda c: (
            c.hold_out
            and c.train_corpora
            and not any(each.shares_hold_out for each in c.train_corpora)
        ),
        "{hold_out} has no effect: each of data.train_corpora has a tag, or a hold_out of its own: "
        "give hold_out to those that the pairs are to be from, and leave this one out",
    ),
    (
        lambda c: c.holds_out and not c.held_out_roles,
        "{hold_out} has no effect: data.valid_corpora are the development set, and "
        "data.test_corpora or data.test_split='' the test set",
    ),
)

OPTIMIZER: tuple[Relation, ...] = (
    (
        lambda c: c.warmup and c.warmup_steps != type(c).warmup_steps,
        "{warmup} and {warmup_steps} say the same: leave one of them out",
    ),
    (
        lambda c: c.weight_decay and c.kind not in ("adamw", "muon"),
        "{weight_decay} needs optimizer.kind=adamw or muon, not {kind}",
    ),
)

TRAIN: tuple[Relation, ...] = (
    (lambda c: c.r_drop and c.teacher, "{r_drop} cannot be used with train.teacher: set it to 0"),
    (
        lambda c: c.guided_alignment_weight and c.r_drop,
        "{guided_alignment_weight} cannot be used with train.r_drop: set it to 0",
    ),
    (
        lambda c: c.guided_alignment_weight and c.teacher,
        "{guided_alignment_weight} cannot be used with train.teacher: set it to 0",
    ),
    (
        lambda c: c.init_optimizer and not c.init_from,
        "{init_optimizer} needs train.init_from, the run that has the optimizer",
    ),
    (
        lambda c: c.profile_steps and not c.profiled_steps,
        lambda c: (
            f"train.profile_steps={shown(c.profile_steps)}: must be A:B, the numbers of the first "
            "and the last step, such as 100:104"
        ),
    ),
)

_OWN_AXIS = re.compile(r"[^\W\d]\w*=[1-9][0-9]{0,5}")

PARALLEL: tuple[Relation, ...] = (
    (
        lambda c: c.strategy != "mesh" and max(c.fsdp, c.tensor) > 1,
        "{strategy} cannot shard parameters: set parallel.fsdp and parallel.tensor to 1, or "
        "parallel.strategy=mesh",
    ),
    *(
        (
            lambda c, name=name: c.strategy != "mesh" and getattr(c, name),
            f"{{strategy}} cannot shard parameters: omit parallel.{name}, or set "
            "parallel.strategy=mesh",
        )
        for name in ("axes", "sharding_rules", "activations")
    ),
    (
        lambda c: (
            not all(map(_OWN_AXIS.fullmatch, c.axes))
            or len({"data", "fsdp", "tensor", *c.own_axes}) < 3 + len(c.axes)
        ),
        "{axes}: must be NAME=SIZE, with other names than data, fsdp and tensor: experts=4",
    ),
)

SAMPLING_FIELDS = ("temperature", "top_k", "top_p", "min_p", "epsilon_cutoff")
"""Fields that have an effect only where translations are sampled."""
# Of a token id: Python does not read integers of thousands of digits.
_TOKEN = "[0-9]{1,10}"


def _malformed(phrases: Sequence[str]) -> list[str]:
    return [
        phrase
        for phrase in phrases
        if not all(re.fullmatch(_TOKEN, token.strip()) for token in phrase.split(","))
    ]


DECODE: tuple[Relation, ...] = (
    (lambda c: not c.samples and c.n_best > c.beam_size, "{n_best} is more than {beam_size}"),
    (lambda c: 0 < c.mbr_samples < c.n_best, "{n_best} is more than {mbr_samples}"),
    (lambda c: c.beam_size % c.beam_groups, "{beam_size} is not a multiple of {beam_groups}"),
    (
        lambda c: c.diversity_penalty and c.beam_groups == 1,
        "decode.diversity_penalty needs decode.beam_groups of 2 or more",
    ),
    (
        lambda c: c.sampling and c.mbr_samples,
        "decode.sampling and {mbr_samples} exclude each other: decode.mbr_samples alone samples as "
        "well, decode.mbr_samples=0 returns the samples",
    ),
    *_unless(lambda c: not c.samples, ["beam_groups"], "is for beam search, not for sampling"),
    *_unless(lambda c: c.samples, SAMPLING_FIELDS, "needs decode.sampling or decode.mbr_samples"),
    (
        lambda c: 0 < c.max_length <= c.min_length,
        "{min_length} leaves no room for the end token within {max_length}",
    ),
    (
        lambda c: not c.max_length and c.min_length_factor > c.max_length_factor,
        "{min_length_factor} is more than {max_length_factor}",
    ),
    *_unless(
        lambda c: c.shortlist, ["shortlist_first", "shortlist_best"], "needs decode.shortlist"
    ),
    (
        lambda c: not all(word.strip() for word in c.bad_words),
        "decode.bad_words has an empty word: leave it out",
    ),
    (
        lambda c: _malformed(c.bad_word_ids),
        lambda c: (
            f'decode.bad_word_ids: "{_shortened(_malformed(c.bad_word_ids)[0])}" must be '
            'comma-separated token ids, such as "17,4"'
        ),
    ),
)


def _shortened(phrase: str) -> str:
    return phrase if len(phrase) <= 40 else f"{phrase[:40]}..."


def _row_length(config: Any) -> str:
    field = "target_row_length" if config.data.batching == "packed" else "bucket_lengths[-1]"
    return f"data.{field}={config.data.row_lengths[1]}"


def _of_translation(name: str) -> Relation:
    """A metric of validations that a language model does not have."""
    return (
        lambda c: not c.model.has_inputs and getattr(c.train, name) in ("bleu", "chrf"),
        f"{{train.{name}}} is for translation models, and {{model.has_inputs}}",
    )


EXPERIMENT: tuple[Relation, ...] = (
    (
        lambda c: not c.model.has_targets,
        "{model.has_targets}: a run trains a model that has targets",
    ),
    # Checkpoints cannot hold the parameters of no layers.
    (
        lambda c: not c.model.num_decoder_layers,
        "{model.num_decoder_layers}: must be at least 1 in a run",
    ),
    (
        lambda c: c.model.has_inputs and not c.model.num_encoder_layers,
        "{model.num_encoder_layers}: must be at least 1 in a run",
    ),
    (
        lambda c: not c.model.has_inputs and c.train.teacher_forced_metrics,
        "train.teacher_forced_metrics are for translation models, and {model.has_inputs}",
    ),
    _of_translation("best_metric"),
    _of_translation("early_stopping_metric"),
    (
        lambda c: c.train.label_smoothing_convention == "non_pad_kl" and c.model.pad_id < 0,
        "{train.label_smoothing_convention} needs a padding token, and {model.pad_id}: use "
        "others_kl",
    ),
    (
        lambda c: c.train.guided_alignment_weight and not c.data.alignments,
        "{train.guided_alignment_weight} needs data.alignments, a file of links",
    ),
    (
        lambda c: (
            c.train.guided_alignment_weight
            and not (
                -c.model.num_decoder_layers
                <= c.train.guided_alignment_layer
                < c.model.num_decoder_layers
            )
        ),
        lambda c: (
            f"train.guided_alignment_layer={c.train.guided_alignment_layer}: the decoder has "
            f"{c.model.num_decoder_layers} layers, counted from 0, or from the last as -1"
        ),
    ),
    *(
        (
            lambda c, name=name: getattr(c.model, name) % c.parallel.tensor,
            lambda c, name=name: (
                f"model.{name}={getattr(c.model, name)} cannot be divided evenly among "
                f"{c.parallel.tensor} devices of the mesh axis tensor: choose a divisor"
            ),
        )
        for name in ("num_heads", "num_kv_heads")
    ),
    (
        lambda c: c.train.batch_tokens % c.data.row_lengths[1],
        lambda c: (
            f"train.batch_tokens={c.train.batch_tokens} is not a multiple of {_row_length(c)}"
        ),
    ),
)

_DROPOUT_RATES = (
    "dropout_rate",
    "embedding_dropout",
    "attention_dropout_rate",
    "activation_dropout_rate",
)

ROWS: tuple[Relation, ...] = (
    (
        lambda c: 0 < (c.model.longest_sentence or 0) < max(c.data.row_lengths),
        lambda c: (
            "training rows of {} source and {} target tokens are longer than the model's table of "
            "learned positions, model.max_length={}: set data.source_row_length and "
            "data.target_row_length (or data.bucket_lengths), or raise model.max_length"
        ).format(*c.data.row_lengths, c.model.longest_sentence),
    ),
)
"""Of batches: rows that the model cannot take."""

EFFECTS: tuple[Relation, ...] = (
    *ROWS,
    (
        lambda c: c.data.subword_sampling and not c.model.has_inputs,
        "{data.subword_sampling} has no effect: a language model has no sources to segment",
    ),
    *(
        (
            lambda c, name=name: not c.model.has_inputs and attrgetter(name)(c),
            f"{name} has no effect: a language model has no sources",
        )
        for name in ("data.max_length_ratio", "data.drop_identical", "train.watch")
    ),
    (
        lambda c: (
            c.data.alignments
            and not c.train.guided_alignment_weight
            and c.train.objective == type(c.train).objective
        ),
        "{data.alignments} has no effect: set train.guided_alignment_weight, or give an objective "
        "that reads Batch.alignment",
    ),
    (
        lambda c: (
            c.optimizer.total_steps and not c.optimizer.schedule_has_end and not c.optimizer.warmup
        ),
        "{optimizer.total_steps} has no effect with {optimizer.schedule}: it is the length of "
        "schedules that have an end, and what optimizer.warmup is a share of",
    ),
    (
        lambda c: c.train.r_drop and not any(getattr(c.model, rate) for rate in _DROPOUT_RATES),
        "{train.r_drop} has no effect without dropout: set model.dropout_rate, or train.r_drop=0",
    ),
)
"""Of a new run: options that others make ineffective, and rows that the model cannot take."""
