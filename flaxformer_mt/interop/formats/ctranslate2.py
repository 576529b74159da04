"""Exports models to CTranslate2, using its own converter on our Hugging Face export.

CTranslate2's Marian models have no padding token: decoding starts from a zero vector, and the
vocabulary excludes padding. Therefore the embedding of our start token is added to the decoder's
first position, which only the start token occupies, and padding becomes the last token, which the
converter removes. Log-probabilities then equal ours with `decode.renormalize`.
"""

import dataclasses
import json
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

from flaxformer_mt.config import DecodeConfig
from flaxformer_mt.data.tokenizers.tokenizer import Tokenizer
from flaxformer_mt.decoding.search.options import forbidden_token_ids
from flaxformer_mt.errors import UserError
from flaxformer_mt.interop.formats import huggingface
from flaxformer_mt.interop.formats.bundle import ModelBundle
from flaxformer_mt.runs import atomic

try:
    import torch  # noqa: F401
    from ctranslate2 import converters
    from ctranslate2.specs.model_spec import ACCEPTED_MODEL_TYPES as QUANTIZATIONS
    from transformers.utils.logging import disable_progress_bar
except ImportError as error:
    raise UserError(
        f"CTranslate2's converter needs {error.name}: pip install 'flaxformer_mt[export]'"
    ) from error

SETTINGS = "translate_batch.json"
"""File with keyword arguments for `ctranslate2.Translator.translate_batch`."""
VOCABULARY_MODELS = ("source.spm", "target.spm")

LONGEST_TRANSLATION = 256
"""CTranslate2's default length limit, which does not depend on the source's length."""

# Search options without a counterpart, with the values that have no effect.
_UNSUPPORTED = {
    "coverage_penalty": 0.0, "min_length_factor": 0.0, "force_end": False, "beam_groups": 1,
    "sampling": False, "mbr_samples": 0, "shortlist": "",
}  # fmt: skip


def write(
    bundle: ModelBundle,
    folder: Path,
    accepted: Collection[str] = (),
    quantization: str | None = None,
) -> tuple[str, ...]:
    """Writes a folder that `ctranslate2.Translator` loads, atomically.

    The folder also contains the two SentencePiece models, and `SETTINGS`, the arguments for a
    search like the run's. Inputs are lists of SentencePiece pieces ending with "</s>".

    Args:
      bundle: the model.
      folder: the folder to create.
      accepted: see `convert`.
      quantization: one of `QUANTIZATIONS`; None = float32.

    Returns:
      The changes to the weights, and the unsupported search options, in one line each.

    Raises:
      UserError: the model is not a Marian model, or the folder exists or cannot be written.
    """
    if quantization not in (None, *QUANTIZATIONS):
        raise UserError(f"--quantization {quantization}: choose one of {', '.join(QUANTIZATIONS)}")
    disable_progress_bar()
    # The converter ignores search options, so unsupported ones must not be reported here.
    plain = dataclasses.replace(bundle.config, decode=DecodeConfig(length_penalty_kind="average"))
    with tempfile.TemporaryDirectory() as scratch, atomic.new_folder(folder) as partial:
        exported = Path(scratch, "huggingface")
        notes = huggingface.write(dataclasses.replace(bundle, config=plain), exported, accepted)
        _Converter(exported, bundle).convert(
            str(partial), quantization=quantization or "float32", force=True
        )
        for name in VOCABULARY_MODELS:
            (partial / name).write_bytes((exported / name).read_bytes())
        settings, losses = to_settings(bundle)
        (partial / SETTINGS).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    return (*notes, *losses)


def to_settings(bundle: ModelBundle) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Converts search options to arguments of `translate_batch`.

    Returns:
      The arguments, and a line about each option without a counterpart.
    """
    decode, model = bundle.config.decode, bundle.config.model
    limit = decode.max_length or LONGEST_TRANSLATION
    settings = {
        "beam_size": decode.beam_size,
        "num_hypotheses": decode.n_best,
        "length_penalty": decode.length_penalty,
        "min_decoding_length": decode.min_length,
        "max_decoding_length": min(limit, model.max_length),
        "max_input_length": model.max_length,
        "no_repeat_ngram_size": decode.no_repeat_ngram_size,
        "repetition_penalty": decode.repetition_penalty,
        "replace_unknowns": decode.copy_unknown,
        "suppress_sequences": _suppressed(bundle),
        "return_scores": True,
    }
    losses = [
        f"decode.{name}={getattr(decode, name)} is not supported by CTranslate2"
        for name, neutral in _UNSUPPORTED.items()
        if getattr(decode, name) != neutral
    ]
    if decode.length_penalty and decode.length_penalty_kind == "gnmt":
        losses.append(
            "decode.length_penalty_kind=gnmt is not supported by CTranslate2, which divides scores "
            "by length**length_penalty"
        )
    if decode.length_penalty and decode.early_stopping != "first" and decode.beam_size > 1:
        losses.append(
            f"decode.early_stopping={decode.early_stopping} is not supported by CTranslate2, which "
            "stops after beam_size * patience finished translations"
        )
    return settings, tuple(losses)


def _suppressed(bundle: ModelBundle) -> list[list[str]]:
    """Returns the pieces of phrases that must not be generated, except those with padding."""
    decode, target = bundle.config.decode, bundle.tokenizers.target
    words = target.encode([word.strip() for word in decode.bad_words])
    ids = [[int(token) for token in phrase.split(",")] for phrase in decode.bad_word_ids]
    always = [[token] for token in forbidden_token_ids(bundle.config.model)]
    phrases = [phrase for phrase in (*words, *ids, *always) if phrase]
    pad_id = bundle.config.model.pad_id
    return [target.pieces(phrase) for phrase in phrases if pad_id not in phrase]


class _Vocabulary:
    """The tokenizer interface that the converter uses, with padding as the last token, "<pad>"."""

    def __init__(self, tokenizer: Tokenizer, size: int, pad_id: int) -> None:
        known = range(min(size, tokenizer.vocab_size))
        pieces = dict(zip(known, tokenizer.pieces(known), strict=True))
        # An embedding table may have more rows than there are pieces.
        names = [pieces.get(token) or f"<unused{token}>" for token in _pad_last(size, pad_id)]
        self.tokens = [*names[:-1], "<pad>"]
        self.eos_token, self.unk_token = tokenizer.pieces([tokenizer.eos_id, tokenizer.unk_id])

    def get_vocab(self) -> dict[str, int]:
        """Returns the ids by token."""
        return {token: number for number, token in enumerate(self.tokens)}


class _Converter(converters.TransformersConverter):
    """CTranslate2's converter, extended to models that start decoding from any token."""

    def __init__(self, folder: Path, bundle: ModelBundle) -> None:
        super().__init__(str(folder))
        self.model = bundle.config.model
        self.tokenizers = bundle.tokenizers

    def load_model(self, *arguments: Any, **options: Any) -> Any:
        """Returns the PyTorch model, changed to start from a zero vector, with padding last."""
        model = super().load_model(*arguments, **options)
        encoder, decoder = model.model.encoder, model.model.decoder
        start = decoder.embed_tokens.weight[self.model.bos_id] * decoder.embed_scale
        decoder.embed_positions.weight.data[0] += start
        tables = (encoder.embed_tokens, decoder.embed_tokens, model.lm_head)
        for table in {id(table.weight): table.weight for table in tables}.values():
            table.data = table.data[_pad_last(len(table), self.model.pad_id)]
        bias = model.final_logits_bias
        model.final_logits_bias = bias[:, _pad_last(bias.shape[1], self.model.pad_id)]
        return model

    def load_tokenizer(self, *arguments: Any, **options: Any) -> _Vocabulary:
        """Returns the source's vocabulary, which the converter also uses for the target."""
        return self._vocabulary("source")

    def _load(self) -> Any:
        spec = super()._load()
        if self.tokenizers.joint:
            return spec
        # The converter does not remove padding from a target vocabulary of another size.
        target = self._vocabulary("target").tokens[:-1]
        spec._vocabularies["target"] = [target]
        for layer in (spec.decoder.embeddings, spec.decoder.projection):
            layer.weight = layer.weight[: len(target)]
        spec.decoder.projection.bias = spec.decoder.projection.bias[: len(target)]
        return spec

    def _vocabulary(self, side: str) -> _Vocabulary:
        size = getattr(self.model, f"{side}_vocab_size")
        return _Vocabulary(getattr(self.tokenizers, side), size, self.model.pad_id)


def _pad_last(size: int, pad_id: int) -> list[int]:
    """Returns all ids in order, except that padding is last."""
    return [*(token for token in range(size) if token != pad_id), pad_id]
