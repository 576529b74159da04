"""Reads and writes Hugging Face folders of Marian (OPUS-MT), mBART, T5 and others' models.

`families/` maps the weights, `hub_families.py` the settings of the model, `generation_config.py`
the search options. A run converted from such a folder keeps what only Hugging Face needs in
`ModelBundle.origin`, so that converting it back gives the same files: settings without a
counterpart here, names of omitted tensors, and computed tables.
"""

import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, TypedDict

import msgspec
import numpy as np
import safetensors.numpy

from flaxformer_mt import atomic
from flaxformer_mt.config import ExperimentConfig, TransformerConfig
from flaxformer_mt.data.tokenizers.dictionary_tokenizer import DictionaryTokenizer
from flaxformer_mt.data.tokenizers.hub_tokenizer import (
    LANGUAGE_LAST,
    LAST_LANGUAGE_REFUSED,
    HubTokenizer,
)
from flaxformer_mt.data.tokenizers.marian_tokenizer import (
    TARGET_VOCABULARY_FILE,
    TOKENIZER_CONFIG,
    VOCABULARY_FILE,
    MarianTokenizer,
    TokenizerConfig,
    read_object,
)
from flaxformer_mt.data.tokenizers.sentencepiece_tokenizer import SentencePieceTokenizer
from flaxformer_mt.data.tokenizers.tokenizer import Tokenizer, Tokenizers
from flaxformer_mt.errors import UserError
from flaxformer_mt.input_files import read_bytes, read_json
from flaxformer_mt.interop import checkpoint_files
from flaxformer_mt.interop.adaptation import adapt
from flaxformer_mt.interop.checkpoint_files import PublishedCheckpoint
from flaxformer_mt.interop.families import fsmt, marian
from flaxformer_mt.interop.formats import adapters, folders, generation_config
from flaxformer_mt.interop.formats.bundle import ModelBundle, Notes, experiment
from flaxformer_mt.interop.formats.hub_families import HUB_FAMILIES, HubFamily
from flaxformer_mt.interop.weight_maps import checkpoints
from flaxformer_mt.interop.weight_maps.adam_state import TrainingState
from flaxformer_mt.interop.weight_maps.family import Family, check_kinds
from flaxformer_mt.interop.weight_maps.mapping import CARRIED, WeightMap
from flaxformer_mt.run_layout import ORIGIN

CONFIG, GENERATION = "config.json", "generation_config.json"
_CARRIED_FILE = "carried.safetensors"
_START = "decoder_start_token_id"
# Where it is not set, decoders with settings of their own start from this.
_DECODER_START = "decoder.bos_token_id"
_NARROW = ("float16", "bfloat16")

# All but one of tied tensors are omitted; this is the one.
_WRITTEN = {"model.shared.weight", "shared.weight"}


def read(
    folder: Path,
    overrides: Mapping[str, Any] = {},
    family: str = "marian",
    base: Path | None = None,
) -> tuple[ModelBundle, Notes]:
    """Reads a folder to which a model and its tokenizer were saved.

    Args:
      folder: the folder. That of an adapter may have a tokenizer and search options of its own.
      overrides: fields of `TransformerConfig` to replace.
      family: a key of `HUB_FAMILIES`.
      base: the folder of the model that an adapter changes, if it is not beside the adapter.

    Returns:
      The model, and a line about each unsupported setting of `generate`.

    Raises:
      UserError: a file is missing or damaged, files contradict each other, or the model is of
        another family.
    """
    given = folder
    folder, changes = adapters.chain(given, base, folders.has_weights)
    folders.require_readable(folder)
    hub = HUB_FAMILIES[family]
    settings = hub.flat(read_json(folder / CONFIG, dict[str, Any]))
    settings = generation_config.with_single_tokens(settings)
    architecture = str(settings.get("model_type"))
    if architecture not in hub.architectures:
        raise UserError(
            f"{folder / CONFIG} is of model_type={architecture}, not "
            f"{' or '.join(hub.architectures)}"
        )
    _check_precision(settings)
    check_kinds(settings, hub.kinds | generation_config.KINDS, f"{folder / CONFIG} is")
    tensors, dtype = read_tensors(folder, hub.family.ignores)
    kept = {CONFIG: read_bytes(folder / CONFIG)}
    search = settings
    path = _nearest(GENERATION, given, folder) / GENERATION
    if path.exists():
        kept[GENERATION] = read_bytes(path)
        search = generation_config.with_single_tokens(read_json(path, dict[str, Any]))
        check_kinds(search, generation_config.KINDS, f"{path} is")
    with checkpoints.error_context(given, family):
        path = _nearest(TOKENIZER_CONFIG, given, folder) / TOKENIZER_CONFIG
        tokenizers = Tokenizers.load(path.parent)
        names: TokenizerConfig = read_json(path, TokenizerConfig) if path.exists() else {}
        class_notes = _tokenizer_class(settings, names, tokenizers.target)
        known = dict(hub.defaults)
        known |= {name: value for name, value in settings.items() if value is not None}
        # Where the two files differ, `generate` follows that of its settings.
        known |= {_START: search[_START]} if search.get(_START) is not None else {}
        end = tokenizers.target.eos_id
        if generation_config.is_one_of(end, known.get("eos_token_id")):
            known["eos_token_id"] = end
        checkpoint = checkpoints.unwrapped(hub.family, PublishedCheckpoint(tensors, known))
        if changes:
            settings.pop("vocab_size", None)  # An adapter may bring larger tables.
        for adapter in changes:
            checkpoint = _with_adapter(hub.family, checkpoint, adapter, overrides)
        model, params = checkpoints.from_checkpoint(hub.family, checkpoint, dict(overrides))
        _check_sizes(settings, hub.sizes, model)
        _check_tokenizers(model, tokenizers)
        for name, values in (
            (CONFIG, settings | {_START: known.get(_START)}),
            (GENERATION, search),
        ):
            _check_special_tokens(name, values, model)
        decode, notes = generation_config.to_decode(search, model, tokenizers.target)
        notes += class_notes
    is_told = any(known.get(name) is not None for name in (_START, _DECODER_START))
    if not is_told and "bos_id" not in overrides:
        notes.append(
            f"no {_START} is set: translations start from token {model.bos_id}, those of "
            f"`generate` from bos_token_id; set {_START}, or give --set bos_id=..."
        )
    if settings.get(_START) not in (None, model.bos_id):
        notes.append(
            f"{_START} is {settings[_START]} in {CONFIG}, and {model.bos_id} in {GENERATION}: "
            f"translations start from {model.bos_id}, as those of `generate`; so does training "
            f"here, but in transformers it starts from {settings[_START]}"
        )
    if all(search.get(name) is None for name in ("max_length", "max_new_tokens")):
        notes.append(
            "no max_length is set: `generate` ends translations after 20 tokens, ours have at most "
            f"{decode.max_length_factor:g} times the source's tokens and {decode.max_length_extra} "
            "more; for the same results, set max_length"
        )
    notes += [f"the adapter of {adapter} is merged into {folder}" for adapter in changes]
    target = tokenizers.target
    if target.language_ids and target.first_id is None:
        translating = "" if decode.first_token else "to translate, give --first-token; "
        notes.append(
            f"no target language is set: {translating}to train or score, set tgt_lang in "
            f"{TOKENIZER_CONFIG} before the conversion"
        )
    carried = params.pop(CARRIED, {})
    kept[_CARRIED_FILE] = safetensors.numpy.save(carried, {"dtype": dtype})
    config = experiment(model, decode, **_data(names, tokenizers))
    notes += _allowed_padding(search, config, tokenizers)
    return ModelBundle(config, params, tokenizers, kept), tuple(notes)


def write(
    bundle: ModelBundle, folder: Path, accepted: Collection[str] = (), family: str = "marian"
) -> Notes:
    """Writes a folder that transformers loads, atomically.

    Returns the changes to the weights, and the unsupported search options, in one line each;
    UserError if the model cannot be converted to the family's mathematics.
    """
    hub = HUB_FAMILIES[family]
    model, params = bundle.config.model, bundle.params
    notes: Notes = ()
    kept = bundle.origin if _CARRIED_FILE in bundle.origin else {}
    if not kept:
        given = TrainingState(model, params, None)
        model, params, _, notes = adapt(given, hub.family, accepted)
        # Hugging Face's start token is configurable, so a difference needs no note.
        notes = tuple(note for note in notes if not note.startswith("decoding starts from"))
    if min(model.bos_id, model.pad_id) < 0:
        raise UserError(
            f"bos_id={model.bos_id} and pad_id={model.pad_id} cannot be written: {family} "
            "needs a start token and a padding token"
        )
    carried, dtype = _carried(kept, model, hub)
    tensors = checkpoints.to_state_dict(hub.family, model, params | {CARRIED: carried})
    tokenizer = _tokenizer_files(bundle, family)
    stored, old = (read_object(kept, name, ORIGIN) for name in (CONFIG, GENERATION))
    if not old:  # Older versions store the settings of `generate` in config.json.
        old = {name: stored[name] for name in stored.keys() & generation_config.FIELDS}
    search, losses = generation_config.from_decode(
        bundle.config.decode, model, old, bundle.tokenizers.target
    )
    with atomic.new_folder(folder) as partial:
        for name, content in tokenizer.items():
            (partial / name).write_bytes(content)
        written = _narrowed(tensors, dtype)
        settings = _settings(hub, model, hub.flat(stored), old) | _dtype(stored, written)
        _write_json(partial / CONFIG, hub.nested(settings), kept)
        _write_json(partial / GENERATION, search, kept)
        checkpoint_files.write(partial / "model.safetensors", written)
    return (*notes, *losses, *_allowed_padding(search, bundle.config, bundle.tokenizers))


# Reading.


def _check_precision(settings: Mapping[str, Any]) -> None:
    quantized = settings.get("quantization_config")
    if isinstance(quantized, Mapping):
        bits = next((b for b in (4, 8) if quantized.get(f"load_in_{b}bit")), quantized.get("bits"))
        raise UserError(
            f"its weights are quantized by {quantized.get('quant_method')}"
            f"{f' to {bits} bits' if bits else ''}: {checkpoint_files.ORIGINAL}"
        )


def read_tensors(folder: Path, ignores: Callable[[Any], bool]) -> tuple[dict[str, np.ndarray], str]:
    """Returns all tensors, narrow ones as float32, and the dtype that most of them had."""
    for name in folders.WEIGHTS:
        if (folder / name).exists():
            return checkpoint_files.read_widened([folder / name], ignores)
        if (folder / (name + folders.INDEX)).exists():
            return checkpoint_files.read_widened(_shards(folder / (name + folders.INDEX)), ignores)
    raise UserError(f"{folder} has no {' and no '.join(folders.WEIGHTS)}")


def _nearest(name: str, folder: Path, base: Path) -> Path:
    """Returns the folder of an adapter if it has a file of this name, otherwise its base's."""
    return folder if (folder / name).exists() else base


def _with_adapter(
    family: Family, checkpoint: PublishedCheckpoint, folder: Path, overrides: Mapping[str, Any]
) -> PublishedCheckpoint:
    config = checkpoints.configure(family, checkpoint, dict(overrides))
    applied = WeightMap.of_tensors(family, config, checkpoint.tensors).applications()
    ties = [each.theirs for each in applied if each.rule.tied]
    tensors = adapters.merged(folder, checkpoint.tensors, ties, family.base)
    return checkpoint._replace(tensors=tensors)


class _Index(TypedDict):
    weight_map: Annotated[dict[str, str], msgspec.Meta(min_length=1)]


def _shards(index: Path) -> list[Path]:
    content: _Index = read_json(index, _Index)
    names = sorted({*content["weight_map"].values()})
    for name in names:
        if not name or Path(name).name != name:
            raise UserError(f"{index} is damaged: {name!r} is not a file in its folder")
    return [index.with_name(name) for name in names]


def _tokenizer_class(
    settings: Mapping[str, Any], names: Mapping[str, Any], target: Tokenizer
) -> list[str]:
    """Returns a note if the vocabulary is not read as the class that its settings name.

    UserError if transformers takes another class, as nothing names one.
    """
    given = names.get("tokenizer_class")
    if isinstance(target, HubTokenizer):
        implied = "MBartTokenizer" if settings["model_type"] == "mbart" else None
        implied = settings.get("tokenizer_class", implied)
        if given is None and implied in LANGUAGE_LAST:
            raise UserError(
                f"no tokenizer_class is set, so that transformers takes {implied}: "
                f"{LAST_LANGUAGE_REFUSED}; of mBART-50, set MBart50Tokenizer in {TOKENIZER_CONFIG}"
            )
        return [target.note] if target.note else []
    ours = type(target).__name__
    if given is None or given.removesuffix("Fast") == ours:
        return []
    return [f"tokenizer_class={given} is not that of its files: they are read as {ours}"]


def _check_special_tokens(name: str, values: Mapping[str, Any], model: TransformerConfig) -> None:
    rows = model.target_vocab_size
    for key, ours in (
        ("pad_token_id", model.pad_id),
        ("eos_token_id", model.eos_id),
        ("decoder_start_token_id", model.bos_id),
    ):
        given = values.get(key)
        tokens: list[Any] = given if isinstance(given, list) else [given]
        if given is None:
            continue
        if not all(0 <= token < rows for token in tokens):
            raise UserError(
                f"its {name} has {key}={given!r}: there are embeddings of {rows} tokens"
            )
        if ours not in tokens:
            raise UserError(f"its {name} has {key}={given!r}, but the model has {ours}")


def _allowed_padding(
    search: Mapping[str, Any], config: ExperimentConfig, tokenizers: Tokenizers
) -> list[str]:
    """Returns a note if `generate` may choose the padding token, but our search does not."""
    target, padding = tokenizers.target, config.model.pad_id
    is_excluded = [padding] in map(list, generation_config.excluded_phrases(search))
    if config.decode.allow_padding or is_excluded:
        return []
    piece = target.hidden.get(padding) if isinstance(target, MarianTokenizer) else None
    hidden = "" if piece is None else f", which is the target's {piece!r}"
    return [
        f"its generation settings allow the padding token {padding}{hidden}: our search and other "
        "exports never choose it, unless you set decode.allow_padding=True"
    ]


def _check_sizes(
    settings: Mapping[str, Any], sizes: Mapping[str, str], model: TransformerConfig
) -> None:
    for theirs, ours in sizes.items():
        given, actual = settings.get(theirs), getattr(model, ours)
        if given not in (None, actual):
            raise UserError(f"its {CONFIG} has {theirs}={given!r}, but its tensors have {actual}")


def _check_tokenizers(model: TransformerConfig, tokenizers: Tokenizers) -> None:
    for side in ("source", "target"):
        tokenizer, rows = getattr(tokenizers, side), getattr(model, f"{side}_vocab_size")
        if tokenizer.vocab_size > rows:
            missing = tokenizer.pieces(range(rows, tokenizer.vocab_size))
            raise UserError(
                f"its {side} vocabulary has ids up to {tokenizer.vocab_size - 1}, but there are "
                f"embeddings of {rows} tokens, and none of {missing[0]!r}: add them in "
                "transformers, model.resize_token_embeddings(len(tokenizer)), and save the model"
            )
        for name in ("pad_id", "eos_id"):
            ours, theirs = getattr(model, name), getattr(tokenizer, name)
            if ours != theirs:
                raise UserError(
                    f"its {side} vocabulary does not match its {CONFIG}: {name} is {theirs} in "
                    f"the vocabulary, and {ours} in {CONFIG}"
                )


def _data(names: Mapping[str, Any], tokenizers: Tokenizers) -> dict[str, Any]:
    keys = {"source": ("source_lang", "src_lang"), "target": ("target_lang", "tgt_lang")}
    both = names.get("langs") or (None, None)
    languages = dict(zip(("source_language", "target_language"), both, strict=True))
    languages = {name: code for name, code in languages.items() if code is not None}
    languages |= {
        f"{side}_language": names[key]
        for side, named in keys.items()
        for key in named
        if names.get(key) is not None
    }
    return languages | {
        "vocab_size": max(tokenizers.source.vocab_size, tokenizers.target.vocab_size),
        "joint_vocabulary": not names.get("separate_vocabs", "langs" in names),
    }


# Writing.


def _carried(
    kept: Mapping[str, bytes], model: TransformerConfig, hub: HubFamily
) -> tuple[dict[str, np.ndarray], str]:
    """Returns the tensors to write as they were read, empty if to be left out, and the dtype."""
    if _CARRIED_FILE in kept:
        content = kept[_CARRIED_FILE]
        # The library reads the metadata of files only.
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        return safetensors.numpy.load(content), header["__metadata__"]["dtype"]
    # Hugging Face omits computed tables and all but one of tied tensors.
    omitted = hub.family.omitted(model) - _WRITTEN
    # transformers 5 ties all tables or none, but for Marian's target and output.
    is_marian = hub.family is marian.FAMILY
    if model.tie_embeddings not in ("all", "target_output" if is_marian else "all"):
        omitted -= {marian.SOURCE, marian.TARGET, marian.OUTPUT, fsmt.OUTPUT}
    if not model.shares_source_and_target:
        omitted |= hub.family.omitted(model) & {marian.SHARED}
    empty = np.empty(0, model.param_dtype)
    return dict.fromkeys(sorted(omitted), empty), model.param_dtype


def _narrowed(tensors: Mapping[str, np.ndarray], dtype: str) -> Mapping[str, np.ndarray]:
    """Returns the tensors in the dtype they were read in, if that changes no value."""
    narrow = {name: tensor.astype(dtype) for name, tensor in tensors.items()}
    fits = all(np.array_equal(narrow[name], tensor) for name, tensor in tensors.items())
    return narrow if fits else tensors


def _dtype(kept: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Returns the entry of `config.json` in whose dtype transformers loads, if tensors are wider.

    transformers 5 calls it "dtype", earlier versions "torch_dtype".
    """
    wide = {tensor.dtype.name for tensor in tensors.values()} == {"float32"}
    return {
        name: "float32"
        for name in ("dtype", "torch_dtype")
        if wide and str(kept.get(name)).removeprefix("torch.") in _NARROW
    }


def _settings(
    hub: HubFamily, model: TransformerConfig, kept: Mapping[str, Any], search: Mapping[str, Any]
) -> dict[str, Any]:
    model_type = str(kept.get("model_type", hub.model_type(model)))
    architectures = [hub.architectures[model_type]]
    values = {"architectures": architectures, "model_type": model_type}
    values |= hub.settings(model, kept)
    if not kept:
        return values | hub.new(model)
    implied = {**hub.defaults, "decoder_vocab_size": kept.get("vocab_size")}
    implied |= {"num_decoder_layers": kept.get("num_layers"), _START: kept.get(_DECODER_START)}
    implied |= generation_config.with_single_tokens(kept)
    changed = {name: v for name, v in values.items() if name not in implied or implied[name] != v}
    if generation_config.is_one_of(model.eos_id, kept.get("eos_token_id")):
        del changed["eos_token_id"]
    if search.get(_START) == model.bos_id:
        changed.pop(_START, None)
    return dict(kept) | changed


def _tokenizer_files(bundle: ModelBundle, family: str) -> Mapping[str, bytes]:
    source, target = bundle.tokenizers.source, bundle.tokenizers.target
    if not isinstance(source, SentencePieceTokenizer):
        is_marian = type(source) is MarianTokenizer
        if is_marian != (family == "marian") or isinstance(source, DictionaryTokenizer):
            raise UserError(f"its vocabulary is not one of {family}'s")
        return source.files
    if family != "marian":
        raise UserError(
            f"its vocabulary was learned here: only models that came with one are written as "
            f"{family}; --to marian writes this one"
        )
    assert isinstance(target, SentencePieceTokenizer)
    joint = bundle.tokenizers.joint
    vocabularies = {VOCABULARY_FILE: source}
    if not joint:
        vocabularies[TARGET_VOCABULARY_FILE] = target
    special = {
        f"{name}_token": source.pieces([getattr(source, f"{name}_id")])[0]
        for name in ("eos", "unk", "pad")
    }
    settings = special | {
        "tokenizer_class": "MarianTokenizer",
        "source_lang": bundle.config.data.source_language,
        "target_lang": bundle.config.data.target_language,
        "separate_vocabs": not joint,
        "model_max_length": bundle.config.model.max_length,
        "clean_up_tokenization_spaces": False,
        # A literal "</s>" in a text is text, as in the run.
        "split_special_tokens": True,
    }
    return {
        "source.spm": source.model,
        "target.spm": target.model,
        **{name: to_json(_ids(own)) for name, own in vocabularies.items()},
        TOKENIZER_CONFIG: to_json(settings),
    }


def _ids(tokenizer: SentencePieceTokenizer) -> dict[str, int]:
    pieces = tokenizer.entries(range(tokenizer.vocab_size))
    return {piece: number for number, piece in enumerate(pieces)}


def to_json(values: Mapping[str, Any]) -> bytes:
    """Returns the bytes of a JSON file as the Hub's are written."""
    return (json.dumps(values, indent=2, ensure_ascii=False) + "\n").encode()


def _write_json(path: Path, values: Mapping[str, Any], kept: Mapping[str, bytes]) -> None:
    """Writes a JSON file, with the bytes of the published one if it has the same content."""
    name = path.name
    same = name in kept and read_object(kept, name, ORIGIN) == values
    path.write_bytes(kept[name] if same else to_json(values))
