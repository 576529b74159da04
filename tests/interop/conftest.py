"""Folders of the Hub, which several files of tests read."""

import functools

import hub_models
import opus_mt
import pytest

from flaxformer_mt.config import DataConfig
from flaxformer_mt.data.corpora.corpus import load_corpus


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    """Returns the folder of a kind, its model and its tokenizer; copy a folder to change it."""
    root = tmp_path_factory.mktemp("hub")
    corpus = load_corpus(DataConfig(corpus="phrases", generated_pairs=300), "train")
    texts = [*corpus.sources, *corpus.targets]

    @functools.cache
    def make(kind):
        if kind != "marian":
            return root / kind, *hub_models.save(kind, texts, root / kind)
        pieces = opus_mt.train_model(texts, 150)
        config = opus_mt.config(opus_mt.write_tokenizer(root / kind, pieces, pieces))
        model = opus_mt.random_model(config)
        model.generation_config.max_length = 24
        model.save_pretrained(root / kind)
        return root / kind, model, None

    return make
