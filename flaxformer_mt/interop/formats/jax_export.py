"""Exports models as serialized JAX functions and an array file, for servers that only have JAX.

`jax.export` writes traced functions as StableHLO, with symbolic batch size, length and beam size,
for CPU, CUDA and TPU. Neither this package nor Flax is needed to run them. `server.py`, which is
written to the same folder, is an example of how to translate with them.

JAX reads exported functions of versions up to half a year older. The folder therefore keeps all
that is needed to export the model again: the parameters, and in `recipe` the configuration and the
vocabularies, as in a run folder.
"""

import dataclasses
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import Array, export

import flaxformer_mt
from flaxformer_mt import atomic
from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.data.tokenizers.marian_tokenizer import CLEANED, MarianTokenizer
from flaxformer_mt.data.tokenizers.sentencepiece_model import SPACE
from flaxformer_mt.data.tokenizers.tokenizer import Tokenizer, read_tokenizers
from flaxformer_mt.decoding.search.options import forbidden_token_ids
from flaxformer_mt.errors import UserError, prefixed, requiring
from flaxformer_mt.interop import array_files
from flaxformer_mt.interop.formats.bundle import ModelBundle, Notes
from flaxformer_mt.interop.weight_maps.mapping import by_path, model_params
from flaxformer_mt.interop.weight_maps.validation import check_params
from flaxformer_mt.model.cache import Cache, reorder_cache
from flaxformer_mt.model.transformer import Transformer
from flaxformer_mt.runs.data_file import TOKENIZER
from flaxformer_mt.runs.folder import read_config, read_origin, write_run

PARAMETERS, METADATA, RECIPE = "parameters.npz", "metadata.json", "recipe"
PLATFORMS = ("cpu", "cuda", "tpu")
SERVER = Path(__file__).with_name("jax_server.py")

SIGNATURES = {
    "encode": "(parameters, source int32 [b, s], room bool [w, p]) -> cache",
    "step": (
        "(parameters, tokens int32 [b, w], cache, positions int32 [b]) -> (logits [b, w, v], cache)"
    ),
    "reorder": "(cache, parents int32 [b, w]) -> cache",
}
"""The exported functions, for b sentences of s tokens with w hypotheses of at most p tokens each.
`parameters` is a dict of arrays, `cache` a tuple of arrays; only the shape of `room` is used."""


def write(bundle: ModelBundle, folder: Path, accepted: Collection[str] = ()) -> Notes:
    """Writes a folder that can be used without this package, atomically.

    It contains the functions of `SIGNATURES`, the parameters (.npz), the SentencePiece models,
    `metadata.json` with vocabularies, special tokens and versions, `server.py`, and `recipe`, for
    `read`. UserError if the model has no encoder, or flatbuffers is not installed.
    """
    with requiring("jax.export", "'flaxformer_mt[export]'", "flatbuffers"):
        import flatbuffers  # noqa: F401
    model, params = bundle.config.model, model_params(bundle.params)
    if not model.has_inputs:
        raise UserError("model.has_inputs=False: a language model has no source to encode")
    models = bundle.tokenizers.sentencepiece_models
    with atomic.new_folder(folder) as partial:
        for name, exported in export_functions(model, params).items():
            (partial / f"{name}.jax").write_bytes(exported.serialize())
        np.savez(partial / PARAMETERS, **by_path(params))  # type: ignore[arg-type]
        for side, content in models.items():
            (partial / f"{side}.spm").write_bytes(content)
        (partial / METADATA).write_text(
            json.dumps(metadata(bundle), indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
        )
        (partial / "server.py").write_bytes(SERVER.read_bytes())
        tokenizers = bundle.tokenizers
        fingerprints = {TOKENIZER: tokenizers.fingerprints}
        write_run(partial / RECIPE, bundle.config, tokenizers.files, fingerprints, bundle.origin)
    return ()


def read(folder: Path, overrides: Mapping[str, Any] = {}) -> tuple[ModelBundle, Notes]:
    """Reads the model of a folder that `write` wrote, with any version of JAX.

    The exported functions are not read. UserError if it is not such a folder, or is damaged; or if
    there are overrides.
    """
    if not (folder / METADATA).is_file():
        raise UserError(f"{folder} is not a folder of --to jax: it has no {METADATA}")
    if overrides:
        raise UserError(f"{folder} contains {next(iter(overrides))}: fields cannot be overridden")
    config, tokenizers = read_config(folder / RECIPE), read_tokenizers(folder / RECIPE)
    with prefixed(f"{folder / PARAMETERS}: "):
        arrays = array_files.read(folder / PARAMETERS)
        check_params(config.model, arrays)
    params = unflatten_dict(arrays, sep="/")
    return ModelBundle(config, params, tokenizers, read_origin(folder / RECIPE)), ()


def export_functions(model: TransformerConfig, params: Any) -> dict[str, export.Exported]:
    """Exports the functions of `SIGNATURES`, by name, for parameters of these shapes."""
    # The file is for all platforms, and for lengths that are not known yet.
    transformer = Transformer(dataclasses.replace(model, attention_backend="einsum"))
    flat = {
        path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        for path, leaf in flatten_dict(params, sep="/").items()
    }

    def variables(parameters: dict[str, Array]) -> dict[str, Any]:
        return {"params": unflatten_dict(parameters, sep="/")}

    def start(parameters: dict[str, Array], source: Array, room: Array) -> Cache:
        encoded: Any = transformer.apply(variables(parameters), source, method="encode")
        cache: Any = transformer.apply(
            variables(parameters), encoded, source, *room.shape, method="init_cache"
        )
        return cache

    b, s, w, p = export.symbolic_shape(
        "b, s, w, p", constraints=[f"s <= {model.max_length}", f"p <= {model.max_length}"]
    )
    source = jax.ShapeDtypeStruct((b, s), jnp.int32)
    tokens = jax.ShapeDtypeStruct((b, w), jnp.int32)
    positions = jax.ShapeDtypeStruct((b,), jnp.int32)
    room = jax.ShapeDtypeStruct((w, p), jnp.bool_)
    cache, cache_structure = jax.tree.flatten(jax.eval_shape(start, flat, source, room))

    def encode(parameters, source, room):
        return tuple(jax.tree.leaves(start(parameters, source, room)))

    def step(parameters, tokens, cache, positions):
        logits, after = transformer.apply(
            variables(parameters),
            tokens,
            jax.tree.unflatten(cache_structure, cache),
            positions,
            method="decode_step",
        )
        return logits, tuple(jax.tree.leaves(after))

    def reorder(cache, parents):
        before = jax.tree.unflatten(cache_structure, cache)
        return tuple(jax.tree.leaves(reorder_cache(before, parents)))

    def exported(function, *arguments) -> export.Exported:
        return export.export(jax.jit(function), platforms=PLATFORMS)(*arguments)

    return {
        "encode": exported(encode, flat, source, room),
        "step": exported(step, flat, tokens, tuple(cache), positions),
        "reorder": exported(reorder, tuple(cache), tokens),
    }


def metadata(bundle: ModelBundle) -> dict[str, Any]:
    """Returns what a server needs besides the functions, as JSON values."""
    model, decode = bundle.config.model, bundle.config.decode
    source, target = bundle.tokenizers.source, bundle.tokenizers.target
    return {
        "functions": SIGNATURES,
        "platforms": PLATFORMS,
        "jax_version": jax.__version__,
        "flaxformer_mt_version": flaxformer_mt.__version__,
        "longest": model.max_length,
        "pad_id": model.pad_id,
        "bos_id": model.bos_id,
        "eos_id": model.eos_id,
        "unk_id": {"source": source.unk_id, "target": target.unk_id},
        "never_chosen": forbidden_token_ids(model, decode),
        "max_length": decode.max_length,
        "max_length_factor": decode.max_length_factor,
        "max_length_extra": decode.max_length_extra,
        # Codes of vocabularies that are learned here are pieces like others.
        "has_codes": isinstance(source, MarianTokenizer),
        "pieces": {"source": _pieces(source), "target": _pieces(target)},
        "decoding": _decoding(target),
    }


def _decoding(target: Tokenizer) -> dict[str, Any]:
    if isinstance(target, MarianTokenizer):
        return {
            "model": target.decoder_file,
            "omitted": sorted(target.special_ids),
            # Pieces that the model does not know keep their symbol of a space.
            "space": SPACE,
            "cleaned": CLEANED if target.cleans_up else [],
        }
    omitted = sorted({target.pad_id, target.bos_id, target.eos_id} - {-1})
    return {"model": "target.spm", "omitted": omitted, "space": None, "cleaned": []}


def _pieces(tokenizer: Tokenizer) -> list[str]:
    return tokenizer.pieces(range(tokenizer.vocab_size))
