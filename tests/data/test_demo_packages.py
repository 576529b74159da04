"""What works without num2words and Babel, which only the generated corpus needs."""

import subprocess
import sys

import pytest

from flaxformer_mt.config import CorpusConfig, DataConfig
from flaxformer_mt.data.corpora.corpus import ParallelCorpus, open_corpus
from flaxformer_mt.data.corpora.filters import script_words
from flaxformer_mt.data.sanity_checks import check_sides, cldr_profile
from flaxformer_mt.errors import UserError

SOURCES = ["the small dog runs over the green field and then it sleeps near the river"] + [
    f"there are {number} houses with the windows that somebody opened in the morning"
    for number in range(30)
]
TARGETS = ["der kleine Hund läuft über die grüne Wiese und schläft dann am Fluss"] + [
    f"dort stehen {number} Häuser, deren Fenster jemand am Morgen geöffnet hat"
    for number in range(30)
]


@pytest.fixture(autouse=True)
def _missing(monkeypatch):
    for name in ("babel", "babel.core", "num2words"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "flaxformer_mt.data.corpora.generated_phrases", raising=False)
    from flaxformer_mt.data import corpora

    monkeypatch.delattr(corpora, "generated_phrases", raising=False)
    cldr_profile.cache_clear()
    yield
    cldr_profile.cache_clear()


def test_the_generated_corpus_names_the_extra():
    corpus = CorpusConfig(kind="phrases", split="train", source_language="en", target_language="fr")
    with pytest.raises(UserError, match=r"^data\.corpus=phrases .*'flaxformer_mt\[demo\]'$"):
        open_corpus(corpus, DataConfig(), "data.")


def test_the_filter_of_scripts_names_the_extra():
    with pytest.raises(UserError, match=r"^data\.drop_wrong_script .*'flaxformer_mt\[demo\]'$"):
        script_words("de")


def test_sides_are_still_compared_with_each_other():
    languages = ("en", "de")
    straight = ParallelCorpus(SOURCES, TARGETS, "straight", languages)
    swapped = ParallelCorpus(TARGETS, SOURCES, "swapped", languages)
    check_sides([straight], [straight])
    check_sides([swapped], [])  # Needs the profiles of Babel.
    with pytest.raises(UserError, match="swapped and straight have opposite directions"):
        check_sides([straight], [swapped])


def test_the_package_imports_neither_before_it_needs_them():
    code = (
        "import sys, flaxformer_mt.experiment, flaxformer_mt.data.library;"
        "assert not {'babel', 'num2words'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
