"""Our export to CTranslate2 gives the same translations and scores as our own search."""

import dataclasses
import json
import os
import warnings
from pathlib import Path

import ctranslate2
import opus_mt
import pytest
import sacrebleu
import sentencepiece

from flaxformer_mt.cli import main
from flaxformer_mt.config import DataConfig, DecodeConfig
from flaxformer_mt.data.corpora.corpus import load_corpus
from flaxformer_mt.data.corpora.text_files import read_lines
from flaxformer_mt.decoding.scoring.scorer import Scorer
from flaxformer_mt.decoding.translator import Translator
from flaxformer_mt.errors import UserError
from flaxformer_mt.interop.convert import convert
from flaxformer_mt.interop.formats import huggingface, run_folders

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
    bundle = with_decode(run_folders.read(trained_run), SAME_SEARCH)
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


def differences(bundle, folder, sources, references):
    """Compares search and scores; returns the share of identical translations, and both BLEUs."""
    translator = Translator(bundle.config, bundle.params, bundle.tokenizers)
    ours = [hypotheses[0] for hypotheses in translator.translate_n_best(sources)]
    served = Served(folder)
    theirs = served.translate(sources)
    tokenizer = bundle.tokenizers.target
    num_same = 0
    for own, (pieces, score) in zip(ours, theirs, strict=True):
        tokens = [token for token in own.tokens if token != bundle.config.model.eos_id]
        if tokenizer.pieces(tokens) == pieces:
            num_same += 1
            assert own.score == pytest.approx(score, abs=1e-4)
    scorer = Scorer(bundle.config, bundle.params, bundle.tokenizers)
    scores = scorer.stream(zip(sources, references, strict=True))
    for own, log_probs in zip(scores, served.score(sources, references), strict=True):
        assert own.token_log_probabilities == pytest.approx(log_probs, abs=1e-4)
    texts = [own.text for own in ours], [served.target.decode(pieces) for pieces, _ in theirs]
    return num_same / len(sources), *(bleu(each, references) for each in texts)


def bleu(texts, references):
    return sacrebleu.corpus_bleu(texts, [references]).score


def test_search_and_scores_are_ours(exported):
    corpus = load_corpus(DataConfig(corpus="phrases", generated_pairs=400), "valid")
    same, ours, theirs = differences(*exported, corpus.sources[:64], corpus.targets[:64])
    assert same == 1
    assert ours == theirs


@pytest.mark.slow
@pytest.mark.skipif(
    not {"FLAXFORMER_MT_RUN", "FLAXFORMER_MT_DATA"} <= set(os.environ),
    reason="set FLAXFORMER_MT_DATA to a folder with multi30k-en-de, and FLAXFORMER_MT_RUN to a run "
    "of configs/multi30k_marian_en_de.py",
)
def test_real_sentences_are_translated_and_scored_as_by_us(tmp_path):
    bundle = with_decode(run_folders.read(Path(os.environ["FLAXFORMER_MT_RUN"])), SAME_SEARCH)
    write(bundle, tmp_path / "ctranslate2")
    data = Path(os.environ["FLAXFORMER_MT_DATA"], "multi30k-en-de")
    sources, references = (read_lines(data / f"test.{code}.gz")[:500] for code in ("en", "de"))
    same, ours, theirs = differences(bundle, tmp_path / "ctranslate2", sources, references)
    assert same >= 0.995
    assert abs(ours - theirs) < 0.05


def test_published_folders_with_separate_vocabularies_go_on_to_ctranslate2(tmp_path):
    models = (
        opus_mt.train_model(texts, size)
        for texts, size in ((PHRASES.sources, 140), (PHRASES.targets, 150))
    )
    vocabularies = opus_mt.write_tokenizer(tmp_path / "published", *models, separate=True)
    config = opus_mt.config(vocabularies, share_encoder_decoder_embeddings=False)
    assert config.vocab_size != config.decoder_vocab_size
    opus_mt.random_model(config).save_pretrained(tmp_path / "published")
    bundle = huggingface.read(tmp_path / "published")[0]
    write(bundle, tmp_path / "ctranslate2")
    bundle = with_decode(bundle, SAME_SEARCH)
    sources, targets = PHRASES.sources[:20], PHRASES.targets[:20]
    scorer = Scorer(bundle.config, bundle.params, bundle.tokenizers)
    scores = Served(tmp_path / "ctranslate2").score(sources, targets)
    for own, log_probs in zip(
        scorer.stream(zip(sources, targets, strict=True)), scores, strict=True
    ):
        assert own.token_log_probabilities == pytest.approx(log_probs, abs=1e-4)


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
    # Without a length penalty all kinds of early stopping give the same results.
    free = dataclasses.replace(SAME_SEARCH, early_stopping="never", length_penalty=0.0)
    assert to_settings(with_decode(bundle, free))[1] == ()


def test_invalid_outputs_are_rejected(exported, tmp_path):
    bundle, folder = exported
    with pytest.raises(UserError, match="--quantization int3: choose one of int8"):
        write(bundle, tmp_path / "folder", quantization="int3")
    with pytest.raises(UserError, match=f"{folder} exists"):
        write(bundle, folder)
    with pytest.raises(UserError, match="--quantization is for --to ctranslate2 only"):
        convert("flaxformer_mt", "jax", folder, tmp_path / "jax", quantization="int8")
    assert not list(tmp_path.iterdir())
