"""What works without num2words and Babel, which only the generated corpus needs."""

import sys

import pytest

from flaxformer_mt.config import CorpusConfig, DataConfig
from flaxformer_mt.data.corpora.corpus import ParallelCorpus, open_corpus
from flaxformer_mt.data.corpora.filters import script_words
from flaxformer_mt.data.corpora.languages import _library
from flaxformer_mt.data.sanity_checks import check_languages
from flaxformer_mt.errors import UserError


@pytest.fixture(autouse=True)
def _missing(monkeypatch):
    for name in ("babel", "babel.core", "num2words", "py3langid", "py3langid.langid"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "flaxformer_mt.data.corpora.generated_phrases", raising=False)
    from flaxformer_mt.data import corpora

    monkeypatch.delattr(corpora, "generated_phrases", raising=False)
    _library.cache_clear()
    yield
    _library.cache_clear()


def test_the_generated_corpus_names_the_extra():
    corpus = CorpusConfig(kind="phrases", split="train", source_language="en", target_language="fr")
    with pytest.raises(UserError, match=r"^data\.corpus=phrases .*'flaxformer_mt\[demo\]'$"):
        open_corpus(corpus, DataConfig(), "data.")


def test_the_filter_of_scripts_names_the_extra():
    with pytest.raises(UserError, match=r"^data\.drop_wrong_script .*'flaxformer_mt\[demo\]'$"):
        script_words("de")


def test_languages_are_not_checked_without_the_package(caplog):
    words = [f"{chr(97 + n % 26) * 9} {chr(97 + n // 26) * 9}" for n in range(500)]
    check_languages([ParallelCorpus(words, words, "one", ("en", "de"))], [])
    assert "not checked, for lack of a package: pip install" in caplog.text
