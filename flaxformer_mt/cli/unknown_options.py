"""Suggestions for unknown options: misspelled ones, and those that other programs have."""

import dataclasses
import difflib
import re
import sys
import typing
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import tyro

from flaxformer_mt.exit_codes import ExitCode


class Counterpart(NamedTuple):
    """An option of ours, and its names in fairseq, OpenNMT, JoeyNMT, Marian, Transformers, T5X."""

    option: str
    """With its group, which commands other than `train` leave out, and its value if it has one."""
    names: str
    """Separated by spaces. Those that resemble ours need no entry."""
    note: str = ""
    """What differs."""

    def within(self, known: Collection[str]) -> str:
        """Returns the option under the name that a command has for it; "" if it has none."""
        forms = (self.option, self.option.rpartition(".")[2])
        return next((form for form in forms if form.partition("=")[0] in known), "")


_PER_UPDATE = "target tokens per update of all devices, not sentences"
_DIVIDES = "it divides a batch and does not enlarge it"
_STEPS = "in steps"
COUNTERPARTS = (
    Counterpart("config", "arch gin-file c"),
    Counterpart("workdir", "output-dir save-dir model-dir save-model o"),
    Counterpart("workdir", "resume resume-from-checkpoint train-from", "a run there is continued"),
    Counterpart("train.init-from", "finetune-from-model model-name-or-path restore-file model"),
    Counterpart("data.path", "data train-file train-data train-sets trainpref dataset-name"),
    Counterpart("data.source-language", "source-lang src-lang src"),
    Counterpart("data.target-language", "target-lang tgt-lang tgt"),
    Counterpart("data.vocab-size", "dim-vocabs src-vocab-size"),
    Counterpart("data.tokenizer-path", "vocab vocabs srcdict tokenizer-name"),
    Counterpart("data.joint-vocabulary", "joined-dictionary share-vocab"),
    Counterpart("data.source-row-length", "max-source-positions max-source-length"),
    Counterpart("data.target-row-length", "max-target-positions max-target-length"),
    Counterpart("model.num-encoder-layers", "layers", "and --model.num-decoder-layers"),
    Counterpart("model.num-encoder-layers", "enc-layers enc-depth"),
    Counterpart("model.num-decoder-layers", "dec-layers dec-depth"),
    Counterpart("model.d-model", "hidden-size encoder-embed-dim dim-emb word-vec-size"),
    Counterpart("model.num-heads", "heads encoder-attention-heads transformer-heads"),
    Counterpart("model.d-ff", "encoder-ffn-embed-dim transformer-ff transformer-dim-ffn ff-size"),
    Counterpart("model.dropout-rate", "dropout transformer-dropout"),
    Counterpart("model.tie-embeddings=all", "share-all-embeddings tied-embeddings-all"),
    Counterpart("model.tie-embeddings=target_output", "share-decoder-input-output-embed"),
    Counterpart("model.norm-position=pre", "encoder-normalize-before"),
    Counterpart("model.dtype=bfloat16", "fp16 bf16 precision"),
    Counterpart("model.remat", "gradient-checkpointing checkpoint-activations"),
    Counterpart("optimizer.learning-rate", "lr learn-rate base-learning-rate"),
    Counterpart("optimizer.schedule", "lr-scheduler lr-scheduler-type decay-method scheduling"),
    Counterpart("optimizer.warmup-steps", "warmup-updates lr-warmup"),
    Counterpart("optimizer.warmup", "warmup-ratio warmup-proportion"),
    Counterpart("optimizer.kind", "optim optimizer"),
    Counterpart("optimizer.beta1", "adam-betas optimizer-params", "and --optimizer.beta2"),
    Counterpart("optimizer.epsilon", "adam-eps adam-epsilon"),
    Counterpart("optimizer.clip-norm", "max-grad-norm gradient-clip-val clip-grad-norm"),
    Counterpart("train.num-steps", "max-steps max-update train-steps after-batches updates"),
    Counterpart("train.num-steps", "epochs num-epochs num-train-epochs max-epoch", _STEPS),
    Counterpart("train.batch-tokens", "batch-size per-device-train-batch-size b", _PER_UPDATE),
    Counterpart("train.batch-tokens", "mini-batch max-tokens max-sentences", _PER_UPDATE),
    Counterpart("train.accumulation-steps", "update-freq accum-count optimizer-delay", _DIVIDES),
    Counterpart("train.accumulation-steps", "gradient-accumulation-steps", _DIVIDES),
    Counterpart("train.log-every", "log-interval logging-steps report-every disp-freq"),
    Counterpart("train.eval-every", "eval-steps valid-steps valid-freq eval-period"),
    Counterpart("train.eval-every", "validate-interval-updates validation-freq", _STEPS),
    Counterpart("train.checkpoint-every", "save-steps save-freq save-interval", _STEPS),
    Counterpart("train.checkpoint-every", "save-interval-updates save-checkpoint-steps", _STEPS),
    Counterpart("train.keep-last", "save-total-limit keep-checkpoint keep-last-epochs"),
    Counterpart("train.best-metric", "best-checkpoint-metric metric-for-best-model valid-metrics"),
    Counterpart("train.early-stopping-patience", "patience early-stopping"),
    Counterpart("train.ema-decay", "ema exponential-smoothing"),
    Counterpart("parallel.num-devices", "devices gpus world-size gpu-ranks"),
    Counterpart("parallel.tensor", "tensor-parallel-size model-parallel-size"),
    Counterpart("run", "model models path model-path model-name-or-path m"),
    Counterpart("input", "source src i"),
    Counterpart("source", "src input"),
    Counterpart("target", "tgt reference"),
    Counterpart("reference", "ref tgt target"),
    Counterpart("output", "output-file output-dir o"),
    Counterpart("decode.beam-size", "beam num-beams generation-num-beams"),
    Counterpart("decode.n-best", "nbest num-return-sequences"),
    Counterpart("decode.length-penalty", "lenpen beam-alpha alpha normalize"),
    Counterpart("decode.max-length", "max-new-tokens generation-max-length"),
    Counterpart("decode.max-length-factor", "max-len-a"),
    Counterpart("decode.max-length-extra", "max-len-b"),
    Counterpart("decode.no-repeat-ngram-size", "block-ngram-repeat"),
    Counterpart("decode.sampling", "do-sample output-sampling random-sampling"),
)


def option_names(hints: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yields the names of the options of a command, given the types of its parameters by name.

    Groups of options whose types are annotated leave out their prefix.
    """
    for name, hint in hints.items():
        annotations = getattr(hint, "__metadata__", ())
        if name in ("return", "_") or tyro.conf.Positional in annotations:
            continue
        kind = hint.__origin__ if annotations else hint
        if dataclasses.is_dataclass(kind):
            group = prefix if annotations else f"{prefix}{name}."
            yield from option_names(typing.get_type_hints(kind), group)
        else:
            given = next(filter(None, (getattr(each, "name", None) for each in annotations)), name)
            yield f"{prefix}{given}".replace("_", "-")


def require_known(arguments: Sequence[str], known: Sequence[str], program: str) -> None:
    """Exits with `USAGE` and a line of suggestions if there are unknown options.

    Args:
      arguments: the command line.
      known: the names of all options, without "--".
      program: the program and its command, for the message.
    """
    if {"-h", "--help"} & set(arguments):
        return
    end = arguments.index("--") if "--" in arguments else len(arguments)
    options = [each.partition("=")[0] for each in arguments[:end]]
    unknown = [each for each in options if _is_option(each) and not _is_known(each, known)]
    if unknown:
        hints = (_suggestion(each, known) or f"; see {program} --help" for each in unknown)
        parts = (f"unknown option {each}{hint}" for each, hint in zip(unknown, hints, strict=True))
        print(f"{program}: error: {' '.join(parts)}", file=sys.stderr)
        raise SystemExit(ExitCode.USAGE)


def _is_option(argument: str) -> bool:
    """Returns whether tyro takes an argument for an option: not numbers, not "- a dash"."""
    is_number = argument.lower() in ("-inf", "-infinity", "-nan")
    return argument.startswith("-") and argument.lstrip("-")[:1].isalpha() and not is_number


def _is_known(option: str, known: Sequence[str]) -> bool:
    name = option.removeprefix("--").replace("_", "-")
    switched_off = re.sub(r"(^|\.)no-", r"\1", name)
    listed = re.sub(r"\.\d+\..*", "", name)  # data.train-corpora.0.path
    return option.startswith("--") and not {name, switched_off, listed}.isdisjoint(known)


def _suggestion(option: str, known: Sequence[str]) -> str:
    name = option.lstrip("-").lower().replace("_", "-")
    for counterpart in COUNTERPARTS:
        ours = counterpart.within(known)
        if ours and name in counterpart.names.split():
            note = f" ({counterpart.note})" if counterpart.note else ""
            return f"; did you mean --{ours}{note}?"
    # With or without its group; of equal names, that of the first group.
    forms = {each.rpartition(".")[2]: each for each in reversed(known)}
    forms |= {each: each for each in known}
    close = difflib.get_close_matches(name, forms, n=1)
    return f"; did you mean --{forms[close[0]]}?" if close else ""
