"""Lexical shortlists: restrict the target vocabulary to likely translations of the source.

Their tables are learned from parallel text by `learn`, or those of Marian.

Sources: Brown et al. 1993, model 1; Marian, `src/data/shortlist.cpp`, whose text and binary files
are read.
"""

import dataclasses
import functools
import gzip
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

import numpy as np

from flaxformer_mt.config.fields import MAX_INTEGER
from flaxformer_mt.data.tokenizers.sentencepiece_model import SPACE
from flaxformer_mt.data.tokenizers.tokenizer import Tokenizer, Tokenizers
from flaxformer_mt.errors import UserError, prefixed
from flaxformer_mt.input_files import MAX_MODEL_BYTES, decompressed, read_bytes
from flaxformer_mt.runs import atomic

_MAGIC = struct.pack("<Q", 0xF11A48D5013417F5)
_HEADER = struct.Struct("<6Q")  # Magic, checksum, first, best, number of offsets, of tokens.
_MAX_PROBABILITY = 1.001
"""Rounded probabilities may exceed 1."""


@dataclasses.dataclass(frozen=True)
class Shortlist:
    """The candidate translations of each source token."""

    offsets: np.ndarray
    """int64 [source vocabulary + 1]: token s has translations[offsets[s] : offsets[s + 1]]."""
    translations: np.ndarray
    """int32, target tokens."""
    always: np.ndarray
    """int32, target tokens that are allowed for every sentence, end token included."""
    joint: bool
    """Whether source and target share one vocabulary, so that source tokens may be copied."""

    @classmethod
    def read(cls, path: str | Path, tokenizers: Tokenizers, first: int, best: int) -> Self:
        """Reads a lexical table.

        The text format has lines of "target source probability", as written by `fast_align` and
        Marian's scripts. Lines with NULL, and entries outside the vocabulary, are ignored. If any
        entry contains the SentencePiece space symbol, the entries are pieces; otherwise they are
        words, and each piece of a word gets all pieces of its translations.

        The binary format is Marian's (`lex.s2t.bin` beside a model for browsers). It contains its
        own `first` and `best`, which override the arguments: the number of target tokens, from id
        0, that are always allowed, and of translations kept per source token, by probability.
        Either format may be compressed with gzip.

        Raises:
          UserError: the file is missing or damaged, or was made for another vocabulary.
        """
        try:
            with prefixed("decode.shortlist="):
                content = decompressed(read_bytes(path, MAX_MODEL_BYTES), MAX_MODEL_BYTES)
            if content.startswith(_MAGIC):
                first, offsets, translations = _parse_binary(content)
            else:
                offsets, translations = _parse_text(content, tokenizers, best)
        except ValueError as error:
            raise UserError(f"decode.shortlist={path}: {error}") from error
        source_size, target_size = tokenizers.source.vocab_size, tokenizers.target.vocab_size
        if len(offsets) != source_size + 1 or translations.max(initial=0) >= target_size:
            raise UserError(
                f"decode.shortlist={path} was made for another vocabulary: it has "
                f"{len(offsets) - 1} source tokens, the model {source_size}"
            )
        if not len(translations):
            raise UserError(f"decode.shortlist={path} has no translation of any source token")
        always = {*range(min(first, target_size)), tokenizers.target.eos_id}
        # Published vocabularies are read by a tokenizer for each side.
        joint = tokenizers.joint or (
            source_size == target_size
            and tokenizers.source.pieces(range(source_size))
            == tokenizers.target.pieces(range(target_size))
        )
        return cls(offsets, translations, np.array(sorted(always), np.int32), joint)

    def allowed(self, source_tokens: Sequence[int], also: Sequence[int] = ()) -> np.ndarray:
        """Returns the sorted tokens that are allowed in a translation, and those in `also`."""
        sources = np.unique(np.array(source_tokens, np.int32))
        found = [self.translations[self.offsets[s] : self.offsets[s + 1]] for s in sources]
        copied = sources if self.joint else sources[:0]
        return np.unique(np.concatenate([self.always, copied, np.array(also, np.int32), *found]))


def _parse_binary(content: bytes) -> tuple[int, np.ndarray, np.ndarray]:
    if len(content) < _HEADER.size:
        raise ValueError("the file is truncated")
    _, checksum, first, _, num_offsets, num_tokens = _HEADER.unpack_from(content)
    if len(content) != _HEADER.size + 8 * num_offsets + 4 * num_tokens:
        raise ValueError("the size of the file does not match its header")
    if _checksum(content) != checksum:
        raise ValueError("the file is damaged: its checksum is wrong")
    offsets = np.frombuffer(content, "<u8", num_offsets, _HEADER.size).astype(np.int64)
    tokens = np.frombuffer(content, "<u4", num_tokens, _HEADER.size + 8 * num_offsets)
    if not len(offsets) or offsets[-1] != num_tokens or (np.diff(offsets, prepend=0) < 0).any():
        raise ValueError("the file is damaged: its offsets do not fit its tokens")
    # Ids that exceed int32 belong to another vocabulary.
    return first, offsets, np.minimum(tokens, MAX_INTEGER).astype(np.int32)


def _checksum(content: bytes) -> int:
    """Computes Marian's `hashMem` of everything that follows the checksum in the header.

    It processes words of 8 bytes and therefore skips the last token of an odd number of them.
    """
    words = np.frombuffer(content, "<u8", (len(content) - 16) // 8, 16)
    seed = 0
    for word in words.tolist():
        seed ^= (word + 0x9E3779B9 + (seed << 6) + (seed >> 2)) & 0xFFFFFFFFFFFFFFFF
    return seed


def _parse_text(content: bytes, tokenizers: Tokenizers, best: int) -> tuple[np.ndarray, np.ndarray]:
    are_pieces = SPACE.encode() in content
    to_source = _token_finder(tokenizers.source, are_pieces)
    to_target = _token_finder(tokenizers.target, are_pieces)
    sources, targets, probabilities = [], [], []
    for number, line in enumerate(content.splitlines(), 1):
        try:
            # Bytes are split at ASCII spaces only; other spaces can be pieces.
            target, source, probability = (field.decode() for field in line.split())
            value = float(probability)
        except ValueError as error:
            shown = line[:80].decode(errors="replace")
            raise ValueError(
                f'line {number} is not "target source probability": {shown}'
            ) from error
        if not 0 <= value <= _MAX_PROBABILITY:
            raise ValueError(f"line {number}: {probability[:80]} is not a probability")
        if value > 0 and "NULL" not in (source, target):
            for source_token in to_source(source):
                for target_token in to_target(target):
                    sources.append(source_token)
                    targets.append(target_token)
                    probabilities.append(value)
    return best_translations(
        np.array(sources, np.int64),
        np.array(targets, np.int32),
        np.array(probabilities),
        tokenizers.source.vocab_size,
        best,
    )


def _token_finder(tokenizer: Tokenizer, are_pieces: bool) -> Callable[[str], Sequence[int]]:
    if not are_pieces:
        return functools.cache(lambda word: tokenizer.encode_parts([word])[0])
    pieces = tokenizer.pieces(range(tokenizer.vocab_size))
    ids = {piece: (token,) for token, piece in enumerate(pieces)}
    return lambda piece: ids.get(piece, ())


def best_translations(
    sources: np.ndarray,
    targets: np.ndarray,
    probabilities: np.ndarray,
    source_size: int,
    best: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the `offsets` and `translations` of a `Shortlist` with the best translations.

    The table has N entries: int64 source tokens, int32 target tokens, float64 probabilities. Of
    duplicate entries the highest counts; in a tie, the smallest ids are kept.
    """
    order = np.lexsort((-probabilities, targets, sources))
    sources, targets, probabilities = sources[order], targets[order], probabilities[order]
    is_new = (np.diff(sources, prepend=-1) != 0) | (np.diff(targets, prepend=-1) != 0)
    sources, targets, probabilities = sources[is_new], targets[is_new], probabilities[is_new]
    order = np.lexsort((targets, -probabilities, sources))
    sources, targets = sources[order], targets[order]
    rank = np.arange(len(sources)) - np.searchsorted(sources, sources)
    sources, targets = sources[rank < best], targets[rank < best]
    return np.searchsorted(sources, np.arange(source_size + 1)), targets


MIN_PROBABILITY = 1e-4
"""Less probable entries are not written."""

MAX_PAIRS = 100_000
"""Default number of pairs to learn from: more hardly change the best translations."""


def learn(
    sources: Sequence[Sequence[int]],
    targets: Sequence[Sequence[int]],
    iterations: int = 5,
) -> dict[tuple[int, int], float]:
    r"""Estimates translation probabilities of tokens by expectation maximization.

    Every target token is generated by one source token of its sentence, or by the empty word, all
    equally probable initially. The expectation step computes

    .. math:: p(t_j \leftarrow s_i) = \frac{p(t_j | s_i)}{\sum_k p(t_j | s_k)}

    and the maximization step sets p(t | s) to the expected fraction of t among the tokens that s
    generates. All sentences are held in memory, about 25 KB per pair of 14 tokens. Returns
    p(target | source) by (source, target), if it is at least `MIN_PROBABILITY`.
    """
    empty_word = 1 + max((token for source in sources for token in source), default=0)
    width = 1 + max((token for target in targets for token in target), default=0)
    # One link for each target token of the corpus and each token that may have generated it.
    links, target_indices = [], []
    num_targets = 0
    for source, target in zip(sources, targets, strict=True):
        generators = np.array([*source, empty_word], np.int64)
        links.append((generators[None, :] * width + np.array(target, np.int64)[:, None]).ravel())
        target_indices.append(np.repeat(np.arange(len(target)) + num_targets, len(generators)))
        num_targets += len(target)
    entries, link_entries = np.unique(np.concatenate(links), return_inverse=True)
    link_targets = np.concatenate(target_indices)
    entry_sources = entries // width
    probabilities = np.ones(len(entries))
    for _ in range(iterations):
        weights = probabilities[link_entries]
        weights /= np.bincount(link_targets, weights)[link_targets]
        counts = np.bincount(link_entries, weights)
        probabilities = counts / np.bincount(entry_sources, counts)[entry_sources]
    kept = (probabilities >= MIN_PROBABILITY) & (entry_sources != empty_word)
    pairs = zip((entry_sources[kept]).tolist(), (entries[kept] % width).tolist(), strict=True)
    return dict(zip(pairs, probabilities[kept].tolist(), strict=True))


def write_table(
    path: str | Path, table: dict[tuple[int, int], float], tokenizers: Tokenizers
) -> None:
    """Writes lines of "target source probability", which `Shortlist.read` and Marian read.

    Pieces with ASCII white space, which neither could read, are skipped; ".gz" is compressed.
    """
    source_pieces = tokenizers.source.pieces(range(tokenizers.source.vocab_size))
    target_pieces = tokenizers.target.pieces(range(tokenizers.target.vocab_size))
    text = "".join(
        f"{target_pieces[target]} {source_pieces[source]} {probability:.6f}\n"
        for (source, target), probability in sorted(table.items())
        if _is_one_field(source_pieces[source]) and _is_one_field(target_pieces[target])
    )
    content = text.encode()
    if str(path).endswith(".gz"):
        content = gzip.compress(content, mtime=0)
    atomic.write_bytes(Path(path), content)


def _is_one_field(piece: str) -> bool:
    return piece.encode().split() == [piece.encode()]
