"""The vocabularies of a run."""

import dataclasses
import itertools
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from flaxformer_mt import atomic
from flaxformer_mt.config import DataConfig, TransformerConfig, with_vocabulary_sizes
from flaxformer_mt.data.corpora.corpus import Corpus
from flaxformer_mt.data.corpora.text_files import counted
from flaxformer_mt.data.tokenizers import (
    byt5_tokenizer,
    dictionary_tokenizer,
    fsmt_tokenizer,
    hub_tokenizer,
    m2m100_tokenizer,
    marian_tokenizer,
)
from flaxformer_mt.data.tokenizers.base import Tokenizer as Tokenizer
from flaxformer_mt.data.tokenizers.sentencepiece_model import SPACE
from flaxformer_mt.data.tokenizers.sentencepiece_tokenizer import (
    SentencePieceTokenizer,
    train_sentencepiece,
)
from flaxformer_mt.errors import UserError
from flaxformer_mt.input_files import MAX_MODEL_BYTES, read_bytes
from flaxformer_mt.remote.reading import local_list
from flaxformer_mt.run_layout import TOKENIZER
from flaxformer_mt.runs import data_file
from flaxformer_mt.writing_systems import spaced_words

MAX_TRAINING_PAIRS = 1_000_000
"""Maximum number of pairs from which a vocabulary is learned. Of larger corpora, evenly spaced
pairs are used, at least half this number: more text takes longer and hardly changes the pieces."""

_Item = TypeVar("_Item")

_log = logging.getLogger(__name__)


def words(pieces: Sequence[str]) -> list[int]:
    """Returns the index of the word, from 0, that each piece belongs to.

    A piece starts a word if it starts with `SPACE` or is the first one (such as a language tag).
    """
    starts = [index == 0 or piece.startswith(SPACE) for index, piece in enumerate(pieces)]
    return [count - 1 for count in itertools.accumulate(map(int, starts))]


def words_of_tokens(texts: Sequence[str], tokenizer: Tokenizer) -> list[list[int] | None]:
    """Returns the word of each token of `tokenizer.encode(texts)`, by its index from 0.

    Words are those of the text as it is given, see `spaced_words`. A first token that the
    vocabulary adds has -1. A text has None if it is divided otherwise than its words by themselves:
    then no token belongs to one word.
    """
    words_of_texts = [*map(spaced_words, texts)]
    known = [*dict.fromkeys(itertools.chain(*words_of_texts))]
    added, *own = tokenizer.split(["", *known])
    pieces_of = {word: pieces[len(added) :] for word, pieces in zip(known, own, strict=True)}
    found: list[list[int] | None] = []
    for words_of_text, pieces in zip(words_of_texts, tokenizer.split(texts), strict=True):
        parts = [pieces_of[word] for word in words_of_text]
        numbers = [index for index, part in enumerate(parts) for _ in part]
        is_same = pieces == [*added, *itertools.chain(*parts)]
        found.append([-1] * len(added) + numbers if is_same else None)
    return found


def split_language(text: str, vocabulary: Tokenizer) -> tuple[str, str]:
    """Divides a text into the language that it names, such as "deu_Latn" or "", and the rest."""
    first, _, rest = text.strip().partition(" ")
    if vocabulary.language_ids:
        (tokens,) = vocabulary.encode_parts([first])
        if len(tokens) == 1 and tokens[0] in vocabulary.language_ids:
            return first, rest
    return "", text


_HUB = hub_tokenizer.HubTokenizer, hub_tokenizer.FILES
_MARIAN = marian_tokenizer.MarianTokenizer, marian_tokenizer.FILES
_PUBLISHED: dict[tuple[str, ...], tuple[type[Any], tuple[str, ...]]] = {
    (marian_tokenizer.VOCABULARY_FILE, "source.spm"): _MARIAN,
    (hub_tokenizer.VOCABULARY_FILE,): _HUB,
    (m2m100_tokenizer.PIECES_FILE, marian_tokenizer.VOCABULARY_FILE): (
        m2m100_tokenizer.M2M100Tokenizer,
        m2m100_tokenizer.FILES,
    ),
    **dict.fromkeys(hub_tokenizer.EARLIER, _HUB),
    (marian_tokenizer.VOCABULARY_FILE,): _MARIAN,
    dictionary_tokenizer.FILES[:2]: (
        dictionary_tokenizer.DictionaryTokenizer,
        dictionary_tokenizer.FILES,
    ),
    fsmt_tokenizer.FILES[:3]: (fsmt_tokenizer.FSMTTokenizer, fsmt_tokenizer.FILES),
    byt5_tokenizer.FILES[:1]: (byt5_tokenizer.ByT5Tokenizer, byt5_tokenizer.FILES),
}
"""The class and the files of each published vocabulary, by the files that identify it."""


def tags(config: DataConfig) -> list[str]:
    """Returns the distinct words in the tags of all corpora of a configuration."""
    corpora = (*config.train_corpora, *config.valid_corpora, *config.test_corpora)
    return list(dict.fromkeys(word for corpus in corpora for word in corpus.tag.split()))


def evenly(items: Iterable[_Item], limit: int) -> list[_Item]:
    """Takes evenly spaced items in one pass: all if at most `limit`, else at least half of it."""
    taken: list[_Item] = []
    distance = 1
    for number, item in enumerate(items):
        if number % distance == 0:
            taken.append(item)
            if len(taken) > limit:
                del taken[1::2]
                distance *= 2
    return taken


@dataclasses.dataclass(frozen=True)
class Tokenizers:
    """The vocabularies of a model; a joint vocabulary is the same object for both sides."""

    source: Tokenizer
    target: Tokenizer

    @classmethod
    def for_run(
        cls, corpora: Sequence[Corpus], config: DataConfig, has_inputs: bool = True
    ) -> "Tokenizers":
        """Loads the vocabularies from `data.tokenizer_path`, or learns them if it is empty.

        Raises:
          UserError: a file is missing or damaged, there is no text, or a tag is unknown.
        """
        if not config.tokenizer_path:
            return cls.train(corpora, config, has_inputs)
        given = config.tokenizer_path
        tokenizers = cls._of_path(given)
        for name in ("pad_id", "eos_id"):
            ids = [getattr(side, name) for side in (tokenizers.source, tokenizers.target)]
            if ids[0] != ids[1]:
                raise UserError(
                    f"the vocabularies of data.tokenizer_path={given} have {name}={ids[0]} and "
                    f"{name}={ids[1]}: train both with the same options of spm_train"
                )
        if tokenizers.target.eos_id < 0:
            raise UserError(
                f"the vocabulary of data.tokenizer_path={given} has no end token: train it without "
                "--eos_id=-1"
            )
        tokenizers._check_pieces("the tag", tokenizers.source, tags(config), given)
        for side in (tokenizers.source, tokenizers.target):
            tokenizers._check_pieces("data.keep_whole:", side, config.keep_whole, given)
        return tokenizers

    @staticmethod
    def _check_pieces(what: str, side: Tokenizer, words: Sequence[str], path: str) -> None:
        for word, tokens in zip(words, side.encode_parts(words), strict=True):
            if side.unk_id in tokens:
                raise UserError(
                    f"{what} {word} is unknown in the vocabulary of data.tokenizer_path={path}, "
                    "and would not be seen by the model: use another one, or another vocabulary"
                )
            pieces = [piece.removeprefix(SPACE) for piece in side.pieces(tokens)]
            if "".join(pieces) not in pieces:
                _log.warning(
                    "%s %s is %d pieces in the vocabulary of data.tokenizer_path=%s",
                    what,
                    word,
                    len(tokens),
                    path,
                )

    @classmethod
    def _of_path(cls, path: str) -> "Tokenizers":
        """Loads a run folder, a folder for `load`, or one or two SentencePiece models."""
        path = local_list(path)
        data_file.check_vocabulary(path)
        given = Path(path)
        if given.is_dir():
            folder = given / "tokenizer" if (given / "tokenizer").is_dir() else given
            files = [*folder.glob("*.model"), *folder.glob("*.spm")]
            if len(files) != 1 or _is_published(folder):
                return cls.load(folder)
        else:
            files = [given] if given.exists() else [Path(name) for name in path.split(",")]
        if len(files) > 2 or not all(file.exists() for file in files):
            raise UserError(
                f"data.tokenizer_path={path}: there is no such file or folder: name a "
                "SentencePiece model, one for each side (en.model,de.model), or a run folder"
            )
        models = [_read_model(file) for file in dict.fromkeys(files)]
        return cls(models[0], models[-1])

    @classmethod
    def train(
        cls, corpora: Sequence[Corpus], config: DataConfig, has_inputs: bool = True
    ) -> "Tokenizers":
        """Learns a joint vocabulary or two separate ones, according to `config.joint_vocabulary`.

        A language model (`has_inputs` is False) has a single vocabulary, learned from its targets.
        """
        read = corpora if config.tokenizer != "bytes" else ()  # They are learned from no text.
        stream = itertools.chain.from_iterable(corpus.pairs() for corpus in read)
        pairs = evenly(counted(stream, "reading text for a vocabulary"), MAX_TRAINING_PAIRS)
        sources, targets = [source for source, _ in pairs], [target for _, target in pairs]
        if has_inputs and not config.joint_vocabulary:
            return cls(
                train_sentencepiece(sources, config, tags(config)),
                train_sentencepiece(targets, config),
            )
        if has_inputs:
            joint = train_sentencepiece([*sources, *targets], config, tags(config))
        else:
            joint = train_sentencepiece(targets, config)
        return cls(joint, joint)

    @property
    def joint(self) -> bool:
        """Whether source and target share a vocabulary."""
        return self.source is self.target

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of `TransformerConfig` that follow from the vocabularies."""
        target = self.target
        fields: dict[str, Any] = {
            "source_vocab_size": self.source.vocab_size,
            "target_vocab_size": target.vocab_size,
            "pad_id": target.pad_id,
            "bos_id": target.bos_id,
            "eos_id": target.eos_id,
        }
        if self.source.fingerprint != target.fingerprint:
            fields["tie_embeddings"] = "target_output"  # The sides cannot share a table.
        return fields

    def with_sizes(self, model: TransformerConfig) -> TransformerConfig:
        """Returns a model with the sizes of the vocabularies, where it leaves them open."""
        return with_vocabulary_sizes(model, self.source.vocab_size, self.target.vocab_size)

    def with_ids(self, model: TransformerConfig) -> TransformerConfig:
        """Returns a model with the special tokens of the vocabularies, where it has the defaults.

        A model whose decoding starts from its padding or its end token keeps doing so.
        """
        own = self.target
        ids = {
            name: getattr(own, name)
            for name in ("pad_id", "bos_id", "eos_id")
            if getattr(model, name) == getattr(TransformerConfig, name)
        }
        if (model.pad_id, model.eos_id) == (own.pad_id, own.eos_id) and own.files:
            # Published models may start decoding from another token than their vocabulary says.
            return model
        for name in ("pad_id", "eos_id"):
            if model.bos_id == getattr(model, name):
                ids["bos_id"] = ids.get(name, model.bos_id)
        return dataclasses.replace(model, **ids)

    @property
    def fingerprints(self) -> dict[str, str]:
        """The fingerprints of the vocabularies of both sides."""
        return {"source": self.source.fingerprint, "target": self.target.fingerprint}

    def describe(self) -> str:
        """Returns the sizes of the vocabularies in words."""
        source, target = self.source.vocab_size, self.target.vocab_size
        if self.source.fingerprint == self.target.fingerprint:
            return f"{target:,} pieces for both sides"
        return f"{source:,} source and {target:,} target pieces"

    def save(self, folder: str | Path) -> None:
        """Writes the vocabularies to a folder, for `load`."""
        atomic.make_folder(Path(folder))
        for name, content in self.files.items():
            atomic.write_bytes(Path(folder, name), content)

    @property
    def files(self) -> Mapping[str, bytes]:
        """The files that `save` writes, by name."""
        if self.source.files:
            return self.source.files  # The same files define both sides.
        models = self.sentencepiece_models
        if self.joint:
            return {"joint.model": models["source"]}
        return {f"{side}.model": model for side, model in models.items()}

    @property
    def has_sentencepiece(self) -> bool:
        """Whether there are `sentencepiece_models`."""
        return self.source.model is not None

    @property
    def sentencepiece_models(self) -> Mapping[str, bytes]:
        """The SentencePiece model of each side; raises `UserError` if there is none."""
        if self.source.model is None or self.target.model is None:
            raise UserError("its vocabulary is not one SentencePiece model per side")
        return {"source": self.source.model, "target": self.target.model}

    @classmethod
    def load(cls, folder: str | Path) -> "Tokenizers":
        """Loads `joint.model`, `source.model` and `target.model`, or a published vocabulary.

        Raises:
          UserError: a file is missing or damaged.
        """
        for names, (kind, known) in _PUBLISHED.items():
            if _has(folder, names):
                paths = {name: Path(folder, name) for name in known}
                files = {
                    name: read_bytes(path, MAX_MODEL_BYTES)
                    for name, path in paths.items()
                    if path.exists()
                }
                whole: Mapping[str, bytes] = files
                if kind is hub_tokenizer.HubTokenizer:
                    whole = hub_tokenizer.completed(files, str(folder))
                return cls(kind(whole, "source", str(folder)), kind(whole, "target", str(folder)))
        joint_path = Path(folder, "joint.model")
        if joint_path.exists():
            joint = _read_model(joint_path)
            return cls(joint, joint)
        return cls(
            _read_model(Path(folder, "source.model")), _read_model(Path(folder, "target.model"))
        )


def read_tokenizers(folder: str | Path) -> Tokenizers:
    """Reads the vocabularies of a run; `UserError` if a file is missing or not that of the run."""
    data_file.check_files(folder)
    path = Path(folder, TOKENIZER)
    tokenizers = Tokenizers.load(path)
    recorded = data_file.read(folder).get(data_file.TOKENIZER)
    if recorded is not None and recorded != tokenizers.fingerprints:
        raise UserError(f"{path} is not the vocabulary that the run was started with: restore it")
    return tokenizers


def _has(folder: str | Path, names: Sequence[str]) -> bool:
    return all(Path(folder, name).exists() for name in names)


def _is_published(folder: Path) -> bool:
    return any(_has(folder, names) for names in _PUBLISHED)


def _read_model(path: Path) -> SentencePieceTokenizer:
    if not path.exists():
        raise UserError(f"the tokenizer {path} is missing")
    return SentencePieceTokenizer(read_bytes(path, MAX_MODEL_BYTES), str(path))
