"""Exports models to CTranslate2: its specification, vocabularies and search options.

`ctranslate2_spec.py` converts the weights. Vocabularies keep our ids, so that the embeddings are
those of the run. Those of published models also keep their entries, so that scripts that follow
CTranslate2's documentation work as they do on its own conversions.
"""

import dataclasses
import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flaxformer_mt import atomic
from flaxformer_mt.config import DecodeConfig, TransformerConfig
from flaxformer_mt.data.tokenizers.tokenizer import Tokenizer, Tokenizers
from flaxformer_mt.decoding.bad_phrases import bad_phrases
from flaxformer_mt.decoding.search.options import forbidden_token_ids
from flaxformer_mt.errors import UserError, requiring
from flaxformer_mt.input_files import read_json
from flaxformer_mt.interop.exports import ctranslate2_obstacle
from flaxformer_mt.interop.formats.bundle import ModelBundle, Notes
from flaxformer_mt.model.transformer import ZERO_VECTOR

with requiring("an export to CTranslate2", "'flaxformer_mt[export]'"):
    from ctranslate2 import Translator
    from ctranslate2.specs.model_spec import ACCEPTED_MODEL_TYPES as QUANTIZATIONS

    from flaxformer_mt.interop.formats.ctranslate2_spec import to_spec

SETTINGS = "translate_batch.json"
"""File with keyword arguments for `ctranslate2.Translator.translate_batch`."""
END, UNKNOWN = "</s>", "<unk>"
"""The names of the end and the unknown token, where the vocabulary is a SentencePiece model."""

LONGEST_TRANSLATION = 256
"""CTranslate2's default length limit, which does not depend on the source's length."""

# Search options without a counterpart, with the values that have no effect.
_UNSUPPORTED = {
    "coverage_penalty": 0.0, "min_length_factor": 0.0, "force_end": False, "beam_groups": 1,
    "sampling": False, "mbr_samples": 0, "shortlist": "",
}  # fmt: skip
# Search options that exclude tokens which may be probable, with the values that do not.
_EXCLUDING = {"no_repeat_ngram_size": 0, "bad_words": (), "bad_word_ids": (), "min_length": 0}


def write(
    bundle: ModelBundle,
    folder: Path,
    accepted: Collection[str] = (),
    quantization: str | None = None,
) -> Notes:
    """Writes a folder that `ctranslate2.Translator` loads, atomically.

    The folder also contains `SETTINGS`, the arguments for a search like the run's, and the two
    SentencePiece models, or the files of a published vocabulary. Inputs are lists of pieces with
    the first and the last token of sentences.

    Returns:
      The changes to the weights, and the unsupported search options, in one line each.

    Raises:
      UserError: CTranslate2's specification cannot hold the model, or the folder exists or cannot
        be written.
    """
    if quantization not in (None, *QUANTIZATIONS):
        raise UserError(f"--quantization {quantization}: choose one of {', '.join(QUANTIZATIONS)}")
    model, tokenizers = bundle.config.model, bundle.tokenizers
    obstacle = ctranslate2_obstacle(model, accepted)
    if obstacle:
        raise UserError(f"its models cannot have {obstacle}")
    positions = dataclasses.replace(model, max_length=_num_positions(bundle))
    spec = to_spec(positions, bundle.params, bundle.config.decode)
    source, target = (_tokens(bundle, side) for side in ("source", "target"))
    spec.register_source_vocabulary(source)
    spec.register_target_vocabulary(target)
    spec.config.eos_token = target[model.eos_id]
    spec.config.unk_token = target[tokenizers.target.unk_id]
    # Any token will do where decoding starts from a zero vector.
    start = model.eos_id if model.bos_id == ZERO_VECTOR else model.bos_id
    spec.config.decoder_start_token = target[start]
    spec.validate()
    spec.optimize(quantization or "float32")
    settings, losses = to_settings(bundle)
    with atomic.new_folder(folder) as partial:
        spec.save(str(partial))
        for name, content in _vocabulary_files(tokenizers).items():
            (partial / name).write_bytes(content)
        (partial / SETTINGS).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    notes: Notes = ()
    if model.norm_kind == "unbiased_std":
        notes = ("norm_kind=unbiased_std becomes layer_norm: accepted, results differ slightly",)
    return (*notes, *losses)


def log_probabilities(
    folder: Path, source: Sequence[Sequence[int]], target: Sequence[Sequence[int]]
) -> list[np.ndarray]:
    """Returns what CTranslate2 gives the tokens of each of some translations, [T].

    Sentences and translations end with the end token. UserError if the folder holds no model.
    """
    names: dict[str, list[str]] = {}
    for side in ("source", "target"):
        path = folder / f"{side}_vocabulary.json"
        path = path if path.is_file() else folder / "shared_vocabulary.json"
        names[side] = read_json(path, list[str])
    # It adds the start and the end of targets.
    scores = Translator(str(folder)).score_batch(
        [[names["source"][token] for token in row] for row in source],
        [[names["target"][token] for token in row[:-1]] for row in target],
    )
    return [np.array(score.log_probs) for score in scores]


def to_settings(bundle: ModelBundle) -> tuple[dict[str, Any], Notes]:
    """Returns the arguments of `translate_batch`, and a line about each unsupported option."""
    decode, model = bundle.config.decode, bundle.config.model
    limit, num_positions = decode.max_length or LONGEST_TRANSLATION, _num_positions(bundle)
    settings = {
        "beam_size": decode.beam_size,
        "num_hypotheses": decode.n_best,
        "length_penalty": decode.length_penalty,
        "min_decoding_length": decode.min_length,
        "max_decoding_length": min(limit, num_positions),
        "max_input_length": num_positions,
        "no_repeat_ngram_size": decode.no_repeat_ngram_size,
        "repetition_penalty": decode.repetition_penalty,
        "replace_unknowns": decode.copy_unknown,
        "suppress_sequences": _suppressed(bundle),
        "return_scores": True,
    }
    target = bundle.tokenizers.target
    language = target.entries([each for each in target.language_ids if each == target.first_id])
    notes = [
        f"translations begin with {name}, or another language, which CTranslate2 takes for each "
        f"sentence: give translate_batch target_prefix=[[{name!r}]] * len(batch), and remove it "
        "from the hypotheses"
        for name in ([decode.first_token] if decode.first_token else language)
    ]
    return settings, (*notes, *_losses(decode, model))


def _vocabulary_files(tokenizers: Tokenizers) -> Mapping[str, bytes]:
    if not tokenizers.has_sentencepiece:
        return tokenizers.files
    return {f"{side}.spm": model for side, model in tokenizers.sentencepiece_models.items()}


def _num_positions(bundle: ModelBundle) -> int:
    """Returns the length of the tables: computed positions cover all input that is not split."""
    model = bundle.config.model
    if model.longest_sentence is not None:
        return model.max_length
    return max(model.max_length, bundle.config.decode.longest_source)


def _losses(decode: DecodeConfig, model: TransformerConfig) -> list[str]:
    losses = [
        f"decode.{name}={getattr(decode, name)} is not supported by CTranslate2"
        for name, neutral in _UNSUPPORTED.items()
        if getattr(decode, name) != neutral
    ]
    if decode.length_penalty and decode.length_penalty_kind != "average":
        losses.append(
            "decode.length_penalty_kind=gnmt is not supported by CTranslate2, which divides scores "
            "by length**length_penalty"
        )
    if decode.length_penalty and decode.early_stopping != "first" and decode.beam_size > 1:
        losses.append(
            f"decode.early_stopping={decode.early_stopping} is not supported by CTranslate2, which "
            "stops after beam_size * patience finished translations"
        )
    looks_further = decode.n_best > 1 or decode.early_stopping == "first"
    if not decode.length_penalty and decode.beam_size > 1 and looks_further:
        losses.append(
            "decode.length_penalty=0.0 differs in CTranslate2, which then stops as soon as the "
            "most probable hypothesis has ended"
        )
    excluding = [name for name, value in _EXCLUDING.items() if getattr(decode, name) != value]
    if excluding and not decode.renormalize and decode.beam_size > 1:
        losses.append(
            "decode.renormalize=False is not supported by CTranslate2, which renormalizes the "
            f"probabilities after decode.{excluding[0]} excludes tokens: give the run "
            "decode.renormalize=True for the same translations"
        )
    if decode.repetition_penalty != 1 and decode.beam_size > 1:
        losses.append(
            f"decode.repetition_penalty={decode.repetition_penalty} differs in CTranslate2's beam "
            "search, which divides logits, not log-probabilities"
        )
    elif decode.repetition_penalty != 1 and model.bos_id == model.eos_id:
        losses.append(
            f"decode.repetition_penalty={decode.repetition_penalty} does not apply to the start "
            "token in CTranslate2: translations, which end with the same token, become shorter"
        )
    if decode.copy_unknown:
        losses.append(
            "decode.copy_unknown=True differs in CTranslate2, which copies a source token for each "
            "unknown one, not a word"
        )
    if decode.copy_unknown and decode.alignment_head > 0:
        losses.append(
            f"decode.alignment_head={decode.alignment_head} is not supported by CTranslate2, which "
            "copies unknown words by the mean of the first heads, this one included"
        )
    return losses


def _suppressed(bundle: ModelBundle) -> list[list[str]]:
    """Returns the pieces of phrases that must not be generated, unless they cannot be anyway."""
    model, decode = bundle.config.model, bundle.config.decode
    phrases = bad_phrases(decode, bundle.tokenizers.target, model.target_vocab_size)
    names = _tokens(bundle, "target")
    never = set(forbidden_token_ids(model, decode))
    return [[names[token] for token in phrase] for phrase in phrases if not never & set(phrase)]


def _tokens(bundle: ModelBundle, side: str) -> list[str]:
    model = bundle.config.model
    tokenizer: Tokenizer = getattr(bundle.tokenizers, side)
    size = getattr(model, f"{side}_vocab_size")
    names = dict(enumerate(tokenizer.entries(range(min(size, tokenizer.vocab_size)))))
    special = {model.eos_id: END, tokenizer.unk_id: UNKNOWN}
    if tokenizer.model is None:
        special = {token: names[token] for token in special}
    taken = set(special.values())
    tokens = []
    for token in range(size):
        # An embedding table may have more rows than there are pieces.
        name = special.get(token) or names.get(token) or ""
        if token not in special and (not name or name in taken):
            name = f"<unused{token}>"
        taken.add(name)
        tokens.append(name)
    return tokens
