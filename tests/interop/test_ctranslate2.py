"""Our export to CTranslate2 gives the same translations and scores as our own search."""

import dataclasses
import functools
import json
import warnings

import ctranslate2
import jax
import numpy as np
import opus_mt
import pytest
import sacrebleu
import sentencepiece
import talker
import torch

from flaxformer_mt.cli import main
from flaxformer_mt.config import DataConfig, DecodeConfig, TrainConfig, TransformerConfig
from flaxformer_mt.data.corpora.corpus import load_corpus
from flaxformer_mt.decoding.scoring.scorer import Scorer
from flaxformer_mt.decoding.translator import Translator
from flaxformer_mt.errors import UserError
from flaxformer_mt.interop.convert import convert
from flaxformer_mt.interop.exports import exports, summary
from flaxformer_mt.interop.formats import huggingface
from flaxformer_mt.interop.formats.bundle import ModelBundle, experiment
from flaxformer_mt.model.transformer import Transformer
from flaxformer_mt.presets import preset

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from flaxformer_mt.interop.formats.ctranslate2 import to_settings, write

PHRASES = load_corpus(DataConfig(corpus="phrases", generated_pairs=300), "train")

SAME_SEARCH = DecodeConfig(
    beam_size=4,
    length_penalty=1.0,
    length_penalty_kind="average",
    early_stopping="first",
    renormalize=True,
    max_length=64,
)
"""Search options with the same meaning on both sides."""


@pytest.fixture(scope="module")
def exported(trained_run, tmp_path_factory):
    """A trained run with `SAME_SEARCH`, and its CTranslate2 folder."""
    bundle = with_decode(ModelBundle.of_run(trained_run), SAME_SEARCH)
    folder = tmp_path_factory.mktemp("exported") / "ctranslate2"
    assert write(bundle, folder) == ()
    return bundle, folder


def with_decode(bundle, decode):
    return dataclasses.replace(bundle, config=dataclasses.replace(bundle.config, decode=decode))


class Served:
    """A CTranslate2 folder, used without anything else."""

    def __init__(self, folder):
        self.settings = json.loads((folder / "translate_batch.json").read_text())
        self.source, self.target = (
            sentencepiece.SentencePieceProcessor(model_file=str(folder / f"{side}.spm"))
            for side in ("source", "target")
        )
        self.translator = ctranslate2.Translator(str(folder), intra_threads=1)

    def translate(self, sentences):
        """Pieces and score of the best translation of each sentence."""
        results = self.translator.translate_batch(self.cut(sentences), **self.settings)
        return [(result.hypotheses[0], result.scores[0]) for result in results]

    def score(self, sources, targets):
        """The log-probability of each token of each target."""
        targets = self.target.encode(targets, out_type=str)
        results = self.translator.score_batch(self.cut(sources), targets)
        return [result.log_probs for result in results]

    def cut(self, sentences):
        return [[*pieces, "</s>"] for pieces in self.source.encode(sentences, out_type=str)]


def best(bundle, sources):
    """Returns our best hypothesis of each sentence."""
    translator = Translator(
        bundle.config.model, bundle.params, bundle.tokenizers, bundle.config.decode
    )
    return [hypotheses[0] for hypotheses in translator.translate_n_best(sources)]


def differences(bundle, folder, sources, references):
    """Compares search and scores; returns the share of identical translations, and both BLEUs."""
    ours = best(bundle, sources)
    served = Served(folder)
    theirs = served.translate(sources)
    tokenizer = bundle.tokenizers.target
    num_same = 0
    for own, (pieces, score) in zip(ours, theirs, strict=True):
        tokens = [token for token in own.tokens if token != bundle.config.model.eos_id]
        if tokenizer.pieces(tokens) == pieces:
            num_same += 1
            assert own.score == pytest.approx(score, abs=1e-4)
    scorer = Scorer(bundle.config.model, bundle.params, bundle.tokenizers, bundle.config.decode)
    scores = scorer.stream(zip(sources, references, strict=True))
    for own, log_probs in zip(scores, served.score(sources, references), strict=True):
        assert own.token_log_probabilities == pytest.approx(log_probs, abs=1e-4)
    texts = [own.text for own in ours], [served.target.decode(pieces) for pieces, _ in theirs]
    return num_same / len(sources), *(bleu(each, references) for each in texts)


def bleu(texts, references):
    return sacrebleu.corpus_bleu(texts, [references]).score


@pytest.mark.slow
def test_search_and_scores_are_ours(exported):
    corpus = load_corpus(DataConfig(corpus="phrases", generated_pairs=400), "valid")
    same, ours, theirs = differences(*exported, corpus.sources[:64], corpus.targets[:64])
    assert same == 1
    assert ours == theirs


def write_separate_tokenizers(folder):
    """Returns the vocabularies, and the configuration of a model."""
    models = (
        opus_mt.train_model(texts, size)
        for texts, size in ((PHRASES.sources, 140), (PHRASES.targets, 150))
    )
    vocabularies = opus_mt.write_tokenizer(folder, *models, separate=True)
    return vocabularies, opus_mt.config(vocabularies, share_encoder_decoder_embeddings=False)


TINY = {
    "d_model": 16,
    "num_heads": 2,
    "d_ff": 24,
    "num_encoder_layers": 2,
    "num_decoder_layers": 2,
    "max_length": 64,
}
ARRANGEMENTS = {
    "pre-norm, separate tables": {
        "norm_position": "pre",
        "final_norm": True,
        "activation": "gelu",
        "output_bias": True,
        "tie_embeddings": "none",
        "norm_epsilon": 1e-3,
    },
    "post-norm with final norms, without biases": {
        "final_norm": True,
        "embedding_norm": True,
        "activation": "silu",
        "scale_logits": True,
        "output_bias": True,
        "qkv_bias": False,
        "attention_output_bias": False,
        "feed_forward_bias": False,
        "position_layout": "concatenated",
        "position_exponent": "tensor2tensor",
    },
    "rotary, narrow values, from a zero vector": {
        "norm_position": "pre",
        "activation": "gelu_tanh",
        "position_kind": "rotary",
        "head_dim": 10,
        "value_dim": 6,
        "bos_id": -1,
        "scale_embeddings": False,
    },
    "relative bias, narrow keys, root-mean-square norms, gate": {
        "norm_position": "pre",
        "final_norm": True,
        "norm_kind": "rms",
        "feed_forward_gate": True,
        "scale_scores": False,
        "position_kind": "t5_relative",
        "relative_position_buckets": 8,
        "relative_position_max_distance": 12,
        "head_dim": 4,
        "value_dim": 10,
    },
    "alibi": {"position_kind": "alibi", "num_heads": 4},
    "grouped queries, narrow values": {"num_heads": 4, "num_kv_heads": 2, "value_dim": 3},
    "unbiased standard deviation": {"norm_kind": "unbiased_std"},
}


def random_bundle(model, tokenizers=None, seed=0):
    """A model with random parameters, norms and biases included, and a vocabulary."""
    tokenizers = tokenizers or talker.make_talker().tokenizers
    sizes = tokenizers.source.vocab_size, tokenizers.target.vocab_size
    model = dataclasses.replace(
        model, source_vocab_size=sizes[0], target_vocab_size=sizes[1], dtype="float32"
    )
    tokens = np.ones((1, 1), np.int32)
    shapes = jax.eval_shape(Transformer(model).init, jax.random.key(0), tokens, tokens)["params"]
    draw = np.random.default_rng(seed)

    def value(path, leaf):
        mean, deviation = (1.0, 0.2) if path[-1].key == "scale" else (0.0, 0.3)
        if path[-1].key == "kernel":
            deviation = 1.5 * leaf.shape[-2] ** -0.5
        elif path[-1].key == "embedding":
            deviation = 2 * leaf.shape[-1] ** -0.5
        return draw.normal(mean, deviation, leaf.shape).astype(np.float32)

    params = jax.tree_util.tree_map_with_path(value, shapes)
    config = dataclasses.replace(experiment(model, SAME_SEARCH), data=talker.DATA)
    return ModelBundle(config, params, tokenizers)


@functools.partial(jax.jit, static_argnames="model")
def log_probabilities(params, sources, inputs, *, model):
    logits = Transformer(model).apply({"params": params}, sources, inputs)
    never = [token for token in {model.pad_id, model.bos_id} if token >= 0]
    return jax.nn.log_softmax(logits.at[..., np.array(never)].set(-np.inf))


def assert_scores_are_ours(bundle, folder, sources, targets):
    """Compares the log-probabilities of all target tokens, in one whole pass."""
    model = bundle.config.model
    ids = [
        [[*sentence, model.eos_id] for sentence in tokenizer.encode(texts)]
        for tokenizer, texts in (
            (bundle.tokenizers.source, sources),
            (bundle.tokenizers.target, targets),
        )
    ]
    rows = [np.full((len(sources), 40), model.pad_id, np.int32) for _ in range(2)]
    for array, sentences in zip(rows, ids, strict=True):
        for row, sentence in zip(array, sentences, strict=True):
            row[: len(sentence)] = sentence
    inputs = np.concatenate([np.full((len(targets), 1), model.bos_id), rows[1][:, :-1]], axis=1)
    ours = np.asarray(
        log_probabilities(bundle.params, rows[0], inputs.astype(np.int32), model=model)
    )
    theirs = Served(folder).score(sources, targets)
    for number, (tokens, scores) in enumerate(zip(ids[1], theirs, strict=True)):
        own = ours[number, np.arange(len(tokens)), tokens]
        np.testing.assert_allclose(own, scores, atol=1e-4, rtol=0)


@pytest.mark.slow_except("rotary, narrow values, from a zero vector")
@pytest.mark.parametrize("name", ARRANGEMENTS)
def test_every_arrangement_has_our_scores(name, tmp_path):
    bundle = random_bundle(TransformerConfig(**TINY | ARRANGEMENTS[name]))
    write(bundle, tmp_path / "served", ("norm_epsilon",))
    sources, targets = (talker.sentences(12, seed, longest=5) for seed in (5, 6))
    assert_scores_are_ours(bundle, tmp_path / "served", sources, targets)


def test_what_the_specification_cannot_hold_is_refused(tmp_path):
    for fields, reason in (
        ({"decoder_kind": "ssru"}, "decoder_kind=ssru"),
        ({"has_inputs": False}, "has_inputs=False"),
        ({"norm_kind": "unbiased_std"}, "give --accept norm_epsilon"),
        (
            {"position_kind": "t5_relative", "relative_position_sharing": "layer"},
            "relative_position_sharing=layer: its layers share one bias",
        ),
    ):
        bundle = random_bundle(TransformerConfig(**TINY))
        model = dataclasses.replace(bundle.config.model, **fields)
        config = dataclasses.replace(bundle.config, model=model, train=TrainConfig())
        with pytest.raises(UserError, match=f"its models cannot have .*{reason}"):
            write(dataclasses.replace(bundle, config=config), tmp_path / "served")
    assert not list(tmp_path.iterdir())


def test_exports_are_known_from_the_configuration():
    sizes = {"source_vocab_size": 90, "target_vocab_size": 90}
    plain = TransformerConfig(norm_position="pre", final_norm=True, **sizes)
    assert summary(plain) == "ctranslate2, jax; not marian, marian-native"
    assert exports(plain)["marian"].startswith("norm_position=pre cannot be converted to post")
    assert exports(plain)["marian-native"] == "pad_id=0, not -1"
    marian = preset("marian", **sizes)
    assert [name for name, obstacle in exports(marian).items() if not obstacle] == [
        "ctranslate2", "jax", "marian",
    ]  # fmt: skip
    assert exports(preset("marian", tie_embeddings="none", **sizes))["marian"] == ""
    student = dataclasses.replace(
        preset("marian", **sizes), decoder_kind="ssru", pad_id=-1, bos_id=-1, norm_epsilon=1e-6,
        position_exponent="tensor2tensor",
    )  # fmt: skip
    assert exports(student)["marian-native"] == ""
    assert exports(student)["ctranslate2"] == "decoder_kind=ssru"
    assert exports(dataclasses.replace(plain, has_inputs=False))["jax"] == "has_inputs=False"


@pytest.mark.slow
def test_source_padding_that_is_a_target_piece_is_never_chosen(tmp_path):
    vocabularies, config = write_separate_tokenizers(tmp_path / "published")
    padding = config.pad_token_id
    assert padding < config.decoder_vocab_size - 1
    published = opus_mt.random_model(config)
    published.final_logits_bias[0, padding] = 60.0  # The most probable token by far.
    published.generation_config.bad_words_ids = None
    published.save_pretrained(tmp_path / "published")
    bundle, notes = huggingface.read(tmp_path / "published")
    name = next(piece for piece, id in vocabularies[1].items() if id == padding)
    assert notes == (
        f"its generation settings allow the padding token {padding}, which is the target's "
        f"{name!r}: our search and other exports never choose it, unless you set "
        "decode.allow_padding=True",
    )
    # Written back as published, it allows it; with other settings, it does not.
    assert huggingface.write(bundle, tmp_path / "unchanged") == notes
    bundle = with_decode(bundle, dataclasses.replace(SAME_SEARCH, max_length=8))
    assert huggingface.write(bundle, tmp_path / "changed") == ()
    write(bundle, tmp_path / "served")
    sources = PHRASES.sources[:4]
    ours = best(bundle, sources)
    changed = type(published).from_pretrained(tmp_path / "changed")
    end = bundle.config.model.eos_id
    for own, source in zip(ours, bundle.tokenizers.source.encode(sources), strict=True):
        (output,) = changed.generate(torch.tensor([[*source, end]])).tolist()
        kept = [[i for i in ids if i not in (padding, end)] for ids in (output[1:], own.tokens)]
        assert kept[0] == kept[1]
    theirs = Served(tmp_path / "served").translate(sources)
    for own, (pieces, score) in zip(ours, theirs, strict=True):
        assert padding not in own.tokens
        assert own.score == pytest.approx(score, abs=1e-4)
        assert name not in pieces


def test_weights_can_be_quantized(trained_run, exported, tmp_path, capsys):
    code = main(
        ["convert", "--from", "flaxformer_mt", "--to", "ctranslate2", "--quantization", "int8",
         str(trained_run), str(tmp_path / "int8")]
    )  # fmt: skip
    assert code == 0
    assert "decode.length_penalty_kind=gnmt is not supported" in capsys.readouterr().err
    quantised, whole = ((f / "model.bin").stat().st_size for f in (tmp_path / "int8", exported[1]))
    assert quantised < 0.6 * whole  # Biases, norms and positions stay as they are.
    ((pieces, _),) = Served(tmp_path / "int8").translate(["twelve"])
    assert pieces


def test_unsupported_options_are_reported(exported):
    bundle, _ = exported
    vocabulary = bundle.tokenizers.target
    assert to_settings(bundle)[1] == ()
    told = with_decode(
        bundle,
        dataclasses.replace(
            SAME_SEARCH, early_stopping="never", coverage_penalty=0.2, bad_words=("zwölf",)
        ),
    )
    settings, losses = to_settings(told)
    assert settings["suppress_sequences"] == vocabulary.split(["zwölf"])
    assert losses[0] == "decode.coverage_penalty=0.2 is not supported by CTranslate2"
    assert "decode.early_stopping=never is not supported" in losses[1]
    # CTranslate2 renormalizes after tokens are excluded.
    apart = dataclasses.replace(SAME_SEARCH, no_repeat_ngram_size=2)
    assert to_settings(with_decode(bundle, apart))[1] == ()
    apart = dataclasses.replace(apart, renormalize=False, repetition_penalty=1.2)
    losses = to_settings(with_decode(bundle, apart))[1]
    assert losses[0].startswith("decode.renormalize=False is not supported by CTranslate2")
    assert losses[1].startswith("decode.repetition_penalty=1.2 differs in CTranslate2's beam")
    alone = dataclasses.replace(SAME_SEARCH, beam_size=1, n_best=1, repetition_penalty=1.2)
    greedy = with_decode(bundle, alone)
    assert to_settings(greedy)[1] == ()
    model = dataclasses.replace(bundle.config.model, bos_id=bundle.config.model.eos_id)
    config = dataclasses.replace(greedy.config, model=model)
    (loss,) = to_settings(dataclasses.replace(greedy, config=config))[1]
    assert loss.startswith("decode.repetition_penalty=1.2 does not apply to the start token")
    # Without a length penalty, the best translation is found when it is the most probable one.
    free = dataclasses.replace(SAME_SEARCH, early_stopping="never", length_penalty=0.0, n_best=1)
    assert to_settings(with_decode(bundle, free))[1] == ()
    for changes in ({"n_best": 2}, {"early_stopping": "first"}):
        (loss,) = to_settings(with_decode(bundle, dataclasses.replace(free, **changes)))[1]
        assert loss.startswith("decode.length_penalty=0.0 differs in CTranslate2")
    copying = dataclasses.replace(SAME_SEARCH, copy_unknown=True)
    (loss,) = to_settings(with_decode(bundle, copying))[1]
    assert loss.startswith("decode.copy_unknown=True differs in CTranslate2")


def test_invalid_outputs_are_rejected(exported, tmp_path):
    bundle, folder = exported
    with pytest.raises(UserError, match="--quantization int3: choose one of int8"):
        write(bundle, tmp_path / "folder", quantization="int3")
    with pytest.raises(UserError, match=f"{folder} exists"):
        write(bundle, folder)
    with pytest.raises(UserError, match="--quantization is for --to ctranslate2 only"):
        convert("flaxformer_mt", "jax", folder, tmp_path / "jax", quantization="int8")
    assert not list(tmp_path.iterdir())
