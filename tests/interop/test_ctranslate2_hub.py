"""Published models go on to CTranslate2, where the scripts of its documentation run on them."""

import dataclasses
import json
import warnings

import ctranslate2
import hub_models
import pytest

from flaxformer_mt.config import DataConfig
from flaxformer_mt.data.corpora.corpus import load_corpus
from flaxformer_mt.decoding.translator import Translator
from flaxformer_mt.interop.formats import huggingface

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from flaxformer_mt.interop.formats.ctranslate2 import write

PHRASES = load_corpus(DataConfig(corpus="phrases", generated_pairs=3000), "train")
SEARCH = {
    "beam_size": 4,
    "length_penalty": 1.0,
    "length_penalty_kind": "average",
    "early_stopping": "first",
    "renormalize": True,
    "min_length": 2,
    "max_length": 24,
    "no_repeat_ngram_size": 1,
}
"""Search options with the same meaning on both sides; random models repeat themselves otherwise."""


def bundle_of(kind, folder):
    """The model of a folder, with search options that CTranslate2 has, too."""
    bundle, _ = huggingface.read(folder, family=hub_models.KINDS[kind][0])
    decode = dataclasses.replace(bundle.config.decode, bad_word_ids=(), force_end=False, **SEARCH)
    return dataclasses.replace(bundle, config=dataclasses.replace(bundle.config, decode=decode))


def by_their_script(folder, tokenizer, sentences, first):
    """Translates as CTranslate2's documentation does for NLLB and, without `first`, for T5."""
    settings = json.loads((folder / "translate_batch.json").read_text())
    translator = ctranslate2.Translator(str(folder), intra_threads=1)
    sources = [tokenizer.convert_ids_to_tokens(tokenizer.encode(text)) for text in sentences]
    prefix = None if first is None else [[first]] * len(sources)
    results = translator.translate_batch(sources, target_prefix=prefix, **settings)
    given = int(first is not None)
    tokens = [tokenizer.convert_tokens_to_ids(result.hypotheses[0][given:]) for result in results]
    return tokens, [result.scores[0] for result in results]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in hub_models.KINDS if kind != "t5gemma"])
def test_translations_are_ours(kind, tmp_path, usual_optimizations):
    _, theirs = hub_models.save(kind, [*PHRASES.sources, *PHRASES.targets], tmp_path / "hub")
    bundle = bundle_of(kind, tmp_path / "hub")
    notes = write(bundle, tmp_path / "served")
    count = 200
    sentences = list(dict.fromkeys(PHRASES.sources))[:count]
    assert len(sentences) == count
    first = hub_models.KINDS[kind][1]
    tokens, scores = by_their_script(tmp_path / "served", theirs, sentences, first)
    translator = Translator(
        bundle.config.model, bundle.params, bundle.tokenizers, bundle.config.decode
    )
    ours = [hypotheses[0] for hypotheses in translator.translate_n_best(sentences)]
    # The last rows of the embedding table have no entry in the vocabulary.
    target = bundle.tokenizers.target
    size, end, unknown = target.vocab_size, target.eos_id, target.unk_id
    kept = [
        [token if token < size else unknown for token in own.tokens if token != end] for own in ours
    ]
    kept = [tokens[first is not None :] for tokens in kept]
    same = [number for number in range(count) if kept[number] == tokens[number]]
    worst = max(abs(ours[number].score - scores[number]) for number in same)
    print(f"{kind}: {len(same)} of {count} are equal, scores within {worst:.1e}")
    assert len({tuple(each) for each in tokens}) > count // 4
    assert len(same) >= 0.995 * count
    assert worst <= 1e-4
    languages = {"nllb": "fra_Latn", "m2m100": "__fr__", "mbart50": "fr_XX"}
    told = [note for note in notes if f"begin with {languages.get(kind)}, or another" in note]
    assert len(told) == (kind in languages)
