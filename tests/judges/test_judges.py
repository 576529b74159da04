"""Learned metrics: the scores are those of the published programs, for texts and for token ids."""

import json

import jax
import numpy as np
import published_metrics as published
import pytest
import torch

from flaxformer_mt import interop
from flaxformer_mt.cli import main
from flaxformer_mt.config import DecodeConfig
from flaxformer_mt.decoding.sentence_decoder import Hypothesis, Sentence
from flaxformer_mt.errors import UserError
from flaxformer_mt.interop.families import xlm_roberta
from flaxformer_mt.judges.reading import metric
from flaxformer_mt.judges.selection import JudgedTranslator
from flaxformer_mt.training.sharding import make_mesh

SOURCES = ["der kleine Hund läuft", "zwei Männer reden vor einem Haus " * 6, "", "Haus"]
HYPOTHESES = ["a small dog runs", "two men are talking " * 9, "grass", "a house"]
REFERENCES = ["the small dog is running", "two men talk in front of a house", "", "the house"]
KINDS = {
    "regression": {},
    "one layer": {"layer": 2, "pool": "max", "activations": "Sigmoid"},
    "normalized": {"layer_norm": True, "layer_transformation": "sparsemax", "pool": "cls"},
    "final": {"final_activation": "Sigmoid"},
    "referenceless": {"class_identifier": "referenceless_regression_metric"},
    "unified": published.UNIFIED,
    "kiwi": published.UNIFIED | {"input_segments": ["mt", "src"]},
}


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


def comet_scores(model, tokenizer, references):
    references = [None] * len(SOURCES) if references is None else references
    with torch.no_grad():
        triples = zip(SOURCES, HYPOTHESES, references, strict=True)
        return [model(tokenizer, *texts).item() for texts in triples]


def both_forms(judge):
    return [REFERENCES] * (True in judge.forms) + [None] * (False in judge.forms)


@pytest.mark.parametrize("kind", KINDS)
def test_comet_scores_as_published(kind, tmp_path, x64):
    model, tokenizer = published.save_comet(tmp_path, **KINDS[kind])
    judge = metric(tmp_path, dtype="float64")
    for references in both_forms(judge):
        expected = comet_scores(model.double(), tokenizer, references)
        found = judge.scores(SOURCES, HYPOTHESES, references)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-10)
    in_float32 = metric(tmp_path).scores(SOURCES, HYPOTHESES, references)
    np.testing.assert_allclose(in_float32, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("tied", [False, True])
def test_metricx_scores_as_published(tied, tmp_path, x64):
    model = published.in_float64(published.save_metricx(tmp_path / "metricx", tied))
    judge = metric(tmp_path / "metricx", dtype="float64")
    scores = []
    for references in (REFERENCES, None):
        texts = SOURCES, HYPOTHESES, references
        expected = published.metricx_scores(tmp_path / "metricx", model, *texts)
        np.testing.assert_allclose(judge.scores(*texts), expected, rtol=0, atol=1e-10)
        scores += expected
    assert any(0 < score < 25 for score in scores)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Toy metrics: one that needs references, one that takes or leaves them."""
    folder = tmp_path_factory.mktemp("judges")
    published.save_comet(folder / "comet")
    published.save_comet(folder / "unified", **published.UNIFIED)
    return folder


@pytest.mark.parametrize("name", ["comet", "unified"])
def test_token_ids_score_as_their_texts(name, folders):
    judge = metric(folders / name)

    def padded(texts):
        ids = judge.encode(texts)
        rows = np.full((len(ids), 70), judge.config.pad_id, np.int32)
        for row, each in zip(rows, ids, strict=True):
            row[: len(each)] = each
        return rows

    texts = (
        SOURCES[:1] + SOURCES[2:],
        HYPOTHESES[:1] + HYPOTHESES[2:],
        REFERENCES[:1] + REFERENCES[2:],
    )
    found = jax.jit(judge)(judge.params, *map(padded, texts))
    np.testing.assert_allclose(found, judge.scores(*texts), rtol=0, atol=1e-5)


def test_scores_depend_neither_on_the_batch_nor_on_devices(folders):
    judge = metric(folders / "comet")
    numbers = np.random.default_rng(0).permutation(40) % len(SOURCES)
    texts = [[side[number] for number in numbers] for side in (SOURCES, HYPOTHESES, REFERENCES)]
    alone = judge.scores(SOURCES, HYPOTHESES, REFERENCES)
    np.testing.assert_allclose(judge.scores(*texts), alone[numbers], rtol=0, atol=1e-6)
    many = judge.scores(*texts, mesh=make_mesh(), batch_size=64)
    np.testing.assert_allclose(many, alone[numbers], rtol=0, atol=1e-6)


def test_an_encoder_returns_to_hugging_face_byte_for_byte(tmp_path):
    config = published.encoder_config(30)
    model = published.randomize(published.transformers.XLMRobertaModel(config, False), 0)
    model.save_pretrained(tmp_path)
    given = (tmp_path / "model.safetensors").read_bytes()
    loaded, params = interop.load(xlm_roberta.FAMILY, tmp_path / "model.safetensors", num_heads=4)
    interop.save(xlm_roberta.FAMILY, loaded, params, tmp_path / "again.safetensors")
    assert (tmp_path / "again.safetensors").read_bytes() == given


def test_damaged_and_unknown_folders_are_refused_in_a_line(tmp_path, folders):
    with pytest.raises(UserError, match=r"holds no metric: it has no hparams\.yaml and"):
        metric(tmp_path)
    with pytest.raises(UserError, match="metric comet needs references"):
        metric(folders / "comet").scores(SOURCES, HYPOTHESES)
    with pytest.raises(UserError, match="4 hypotheses, but 1 sources"):
        metric(folders / "comet").scores(SOURCES[:1], HYPOTHESES, REFERENCES)
    published.save_comet(tmp_path / "xl", encoder_model="XLM-RoBERTa-XL")
    with pytest.raises(UserError, match="encoder_model"):
        metric(tmp_path / "xl")


def _write(path, lines):
    path.write_text("".join(f"{line}\n" for line in lines))
    return str(path)


def test_the_commands_score_as_the_function(folders, tmp_path, capsys):
    source, hypothesis, reference = SOURCES[:2], HYPOTHESES[:2], REFERENCES[:2]
    files = [
        f"--source={_write(tmp_path / 'source', source)}",
        f"--reference={_write(tmp_path / 'reference', reference)}",
    ]
    target = _write(tmp_path / "hypothesis", hypothesis)
    expected = metric(folders / "comet").scores(source, hypothesis, reference)
    main(["score", f"--metric={folders / 'comet'}", *files, f"--target={target}"])
    np.testing.assert_allclose(
        [*map(float, capsys.readouterr().out.split())], expected, rtol=0, atol=1e-6
    )
    learned = f"--metric=comet={folders / 'comet'}"
    main(["evaluate", learned, "--metric=bleu", *files, f"--hypothesis={target}"])
    found = json.loads(capsys.readouterr().out)
    assert found["comet"] == pytest.approx(expected.mean(), abs=1e-4)
    assert metric(folders / "comet").digest[:12] in found["comet_signature"]


class _Listed:
    """A translator with given lists."""

    def __init__(self, lists, **options):
        self.lists, self.decode = lists, DecodeConfig(**options)

    def stream(self, sentences, *, n_best, **options):
        for few in self.lists:
            assert len(few) <= n_best
            yield [Hypothesis(text) for text in few]


def test_candidates_are_chosen_by_quality_or_by_risk(folders):
    judge = metric(folders / "unified")
    lists = [["a dog", "a house", "a dog", "grass"], ["men talk", "two men"]]
    sources = SOURCES[:2]
    chosen = {
        criterion: [
            [(each.text, each.score) for each in few]
            for few in JudgedTranslator(
                _Listed(lists, mbr_samples=4, n_best=2), judge, criterion
            ).stream(map(Sentence, sources))
        ]
        for criterion in ("quality", "risk")
    }
    for number, (source, few) in enumerate(zip(sources, lists, strict=True)):
        quality, risk = {}, {}
        for text in few:
            (quality[text],) = judge.scores([source], [text])
            risk[text] = judge.scores([source] * len(few), [text] * len(few), few).mean()
        for name, values in (("quality", quality), ("risk", risk)):
            best = sorted(values, key=values.get, reverse=True)[:2]
            assert [text for text, _ in chosen[name][number]] == best
            for text, score in chosen[name][number]:
                assert score == pytest.approx(values[text], abs=1e-5)
