"""Models for CTranslate2, made by its own converter from our Hugging Face folder.

Its Marian has no padding token: decoding starts from a zero vector, and padding is left out of the
vocabulary. So the vector that decoding starts from here is added to the decoder's first position,
where nothing else ever stands, and padding becomes the last token, which the converter removes. A
log-probability there is therefore one of ours with `decode.renormalize`.
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
"""The file with keyword arguments of `ctranslate2.Translator.translate_batch`."""
VOCABULARY_MODELS = ("source.spm", "target.spm")

LONGEST_TRANSLATION = 256
"""As CTranslate2's own default: there, lengths do not go by the source's."""

# Options of the search without a counterpart, with the values that need none.
_UNKNOWN = {
    "coverage_penalty": 0.0, "min_length_factor": 0.0, "force_end": False, "beam_groups": 1,
    "sampling": False, "mbr_samples": 0, "shortlist": "",
}  # fmt: skip


def write(
    bundle: ModelBundle,
    folder: Path,
    accepted: Collection[str] = (),
    quantization: str | None = None,
) -> tuple[str, ...]:
    """Makes a folder that `ctranslate2.Translator` loads, whole or not at all.

    Beside the model it has the two SentencePiece models, and `SETTINGS`, with which CTranslate2
    searches as the run does. What it translates are SentencePiece's pieces with "</s>" after them.

    Args:
      bundle: the model.
      folder: to be made.
      accepted: see `convert`.
      quantization: one of `QUANTIZATIONS`; None = float32.

    Returns:
      What was done to the weights, and which options of the search have no place there, a line
      each.

    Raises:
      UserError: Marian computes something else, or the folder exists or cannot be written.
    """
    if quantization not in (None, *QUANTIZATIONS):
        raise UserError(f"--quantization {quantization}: choose one of {', '.join(QUANTIZATIONS)}")
    disable_progress_bar()
    # The converter reads no settings of the search: those that have no place there are no loss.
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
    """The arguments of `translate_batch` that search as the run does, as far as there are any.

    Returns:
      The arguments, and a line about each option that they cannot say.
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
        f"decode.{name}={getattr(decode, name)} has no place in CTranslate2"
        for name, neutral in _UNKNOWN.items()
        if getattr(decode, name) != neutral
    ]
    if decode.length_penalty and decode.length_penalty_kind == "gnmt":
        losses.append(
            "CTranslate2 divides scores by length**length_penalty: decode.length_penalty_kind=gnmt "
            "has no place there"
        )
    if decode.length_penalty and decode.early_stopping != "first" and decode.beam_size > 1:
        losses.append(
            "CTranslate2 stops at the first beam_size translations, or as many times that as "
            f"patience says: decode.early_stopping={decode.early_stopping} has no place there"
        )
    return settings, tuple(losses)


def _suppressed(bundle: ModelBundle) -> list[list[str]]:
    """What must not appear, in pieces. Padding is no token there."""
    decode, target = bundle.config.decode, bundle.tokenizers.target
    words = target.encode([word.strip() for word in decode.bad_words])
    ids = [[int(token) for token in phrase.split(",")] for phrase in decode.bad_word_ids]
    always = [[token] for token in forbidden_token_ids(bundle.config.model)]
    phrases = [phrase for phrase in (*words, *ids, *always) if phrase]
    pad_id = bundle.config.model.pad_id
    return [target.pieces(phrase) for phrase in phrases if pad_id not in phrase]


class _Vocabulary:
    """What the converter asks of a tokenizer. Padding is the last token, and called "<pad>"."""

    def __init__(self, tokenizer: Tokenizer, size: int, pad_id: int) -> None:
        known = range(min(size, tokenizer.vocab_size))
        pieces = dict(zip(known, tokenizer.pieces(known), strict=True))
        # Not every row of a table need be that of a piece.
        names = [pieces.get(token) or f"<unused{token}>" for token in _pad_last(size, pad_id)]
        self.tokens = [*names[:-1], "<pad>"]
        self.eos_token, self.unk_token = tokenizer.pieces([tokenizer.eos_id, tokenizer.unk_id])

    def get_vocab(self) -> dict[str, int]:
        """Ids by token."""
        return {token: number for number, token in enumerate(self.tokens)}


class _Converter(converters.TransformersConverter):
    """The converter of Hugging Face folders, for models that start decoding from any token."""

    def __init__(self, folder: Path, bundle: ModelBundle) -> None:
        super().__init__(str(folder))
        self.model = bundle.config.model
        self.tokenizers = bundle.tokenizers

    def load_model(self, *arguments: Any, **options: Any) -> Any:
        """The PyTorch model, which starts from zero, with padding last."""
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
        """The vocabulary of the source, which the converter takes for that of the target, too."""
        return self._vocabulary("source")

    def _load(self) -> Any:
        spec = super()._load()
        if self.tokenizers.joint:
            return spec
        # Of a vocabulary of another size than the source's it leaves padding where it was.
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
    """All ids, in their order but for padding."""
    return [*(token for token in range(size) if token != pad_id), pad_id]
