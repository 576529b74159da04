"""The text of a run, from its files to tokens."""

import collections
import dataclasses
import functools
import json
from pathlib import Path

from flaxformer_mt import distributed
from flaxformer_mt.config import DataConfig, ExperimentConfig
from flaxformer_mt.config.fields import FieldRole, names_with
from flaxformer_mt.data.corpora.corpus import Corpus
from flaxformer_mt.data.corpora.shared_text import HeldOutText
from flaxformer_mt.data.dataset import Dataset, open_all, open_dataset
from flaxformer_mt.data.sanity_checks import check_languages, check_not_blank, warn_of_shared_text
from flaxformer_mt.data.stream.blocks import Curriculum
from flaxformer_mt.data.stream.token_store import make_parts
from flaxformer_mt.data.tokenizers.tokenizer import Tokenizers, tags
from flaxformer_mt.runs.manifest import made_once


@dataclasses.dataclass(frozen=True)
class RunText:
    """The text of a run, which is opened when it is first asked for.

    `cache` is the folder of what is made of it once: a vocabulary, tokens.
    """

    config: ExperimentConfig
    cache: Path

    @functools.cached_property
    def corpora(self) -> dict[str, list[Corpus]]:
        """The corpora of each role."""
        return open_all(self.config, cache_folder=self.cache)

    @functools.cached_property
    def held_out(self) -> HeldOutText:
        """The text that must not be in the training corpora."""
        corpora = [*self.corpora["valid"], *self.corpora["test"]]
        return HeldOutText.of(corpora)

    @property
    def fingerprints(self) -> dict[str, list[tuple[str, str]]]:
        """Name and fingerprint of each corpus, by role."""
        return {
            role: [(corpus.name, corpus.fingerprint) for corpus in own]
            for role, own in self.corpora.items()
        }

    def check_not_blank(self) -> None:
        """Checks that there is text on the sides that the model needs."""
        for own in self.corpora.values():
            check_not_blank(own, self.config.model.has_inputs)

    def check_languages(self) -> None:
        """Checks that both sides are in their languages, unless an option says otherwise."""
        if self.config.model.has_inputs and self.config.data.check_languages:
            corpora = self.corpora
            check_languages(corpora["train"], [*corpora["valid"], *corpora["test"]])

    def vocabularies(self, path: str = "") -> Tokenizers:
        """Loads the vocabularies, by default of `data.tokenizer_path`, or learns them.

        Another process may have learned them.
        """
        path = path or self.config.data.tokenizer_path
        corpora, has_inputs = self.corpora["train"], self.config.model.has_inputs
        data = dataclasses.replace(self.config.data, tokenizer_path=path)
        if path:
            return Tokenizers.for_run(corpora, data, has_inputs)
        key = {
            "text": [corpus.fingerprint for corpus in corpora],
            "tags": tags(data),
            "options": {
                name: getattr(data, name)
                for name in (*names_with(DataConfig, FieldRole.VOCABULARY), "normalization")
            },
            "has_inputs": has_inputs,
        }
        return made_once(
            self.cache / "vocabulary",
            origin=json.dumps(key, sort_keys=True),
            activity="learning a vocabulary",
            make=lambda partial: Tokenizers.train(corpora, data, has_inputs).save(partial),
            load=Tokenizers.load,
        )

    def with_ids(self, tokenizers: Tokenizers) -> ExperimentConfig:
        """Returns the configuration with the special tokens of the vocabularies."""
        model = tokenizers.with_ids(self.config.model)
        return dataclasses.replace(self.config, model=model)

    def tokenize_part(self, tokenizers: Tokenizers, index: int, count: int) -> None:
        """Tokenizes part `index` of `count` of the training text, for `tokenized` to join.

        Any number of processes can do so at once, on machines that share the cache.
        """
        config, corpora = self.with_ids(tokenizers), self.corpora["train"]
        make_parts(self.cache, corpora, tokenizers, config, index, count, self.held_out)

    def tokenized(
        self, tokenizers: Tokenizers, curriculum: Curriculum | None = None
    ) -> tuple[ExperimentConfig, Dataset]:
        """Tokenizes; returns the configuration with the sizes of vocabularies and rows, and data.

        Errors as of `open_dataset`.
        """
        return open_dataset(
            self.with_ids(tokenizers),
            self.corpora,
            tokenizers,
            self.cache,
            held_out=self.held_out,
            verify=distributed.is_main(),
            curriculum=curriculum,
        )

    def warn_of_shared(self, dataset: Dataset) -> None:
        """Warns of held-out text in the training corpora, whose tokens are those of `dataset`."""
        data, has_inputs = self.config.data, self.config.model.has_inputs
        encoded = dataset.training.corpora
        warn_of_shared_text(self.corpora["train"], self.held_out, data, has_inputs, encoded)

    def division(self) -> dict[str, int]:
        """Returns into how many pairs the training text is divided; {} if nothing is held out."""
        total: collections.Counter[str] = collections.Counter()
        for corpus in self.corpora["train"]:
            total.update(corpus.division() if corpus.division else {})
        return dict(total)
