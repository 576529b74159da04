"""Which words translate which, learned from parallel text: tables for `shortlist`.

Source: Brown et al. 1993, model 1.
"""

import gzip
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from flaxformer_mt.data.tokenizers.tokenizer import Tokenizers
from flaxformer_mt.runs import atomic

LEAST_PROBABILITY = 1e-4
"""What is less probable is not written."""

MAX_PAIRS = 100_000
"""Pairs that are enough to learn from: more take longer and hardly change the best translations."""


def learn(
    sources: Sequence[Sequence[int]],
    targets: Sequence[Sequence[int]],
    iterations: int = 5,
) -> dict[tuple[int, int], float]:
    r"""Translation probabilities of tokens, by expectation maximisation.

    Every target token was written by one source token of its sentence, or by none, all equally
    probable at first:

    .. math:: p(t_j \leftarrow s_i) = \frac{p(t_j | s_i)}{\sum_k p(t_j | s_k)}

    and p(t | s) is then how often s wrote t, of all that s wrote. All sentences are held in memory,
    about 25 KB for each pair of 14 tokens.

    Args:
      sources: token ids of source sentences.
      targets: those of their translations.
      iterations: how often both steps are taken.

    Returns:
      p(target | source) of (source, target), where it is at least `LEAST_PROBABILITY`.
    """
    nobody = 1 + max((token for source in sources for token in source), default=0)
    width = 1 + max((token for target in targets for token in target), default=0)
    # One link for each target token of the corpus and each token that may have written it.
    links, owners = [], []
    num_owners = 0
    for source, target in zip(sources, targets, strict=True):
        writers = np.array([*source, nobody], np.int64)
        links.append((writers[None, :] * width + np.array(target, np.int64)[:, None]).ravel())
        owners.append(np.repeat(np.arange(len(target)) + num_owners, len(writers)))
        num_owners += len(target)
    entries, link_entries = np.unique(np.concatenate(links), return_inverse=True)
    link_owners = np.concatenate(owners)
    entry_sources = entries // width
    probabilities = np.ones(len(entries))
    for _ in range(iterations):
        weights = probabilities[link_entries]
        weights /= np.bincount(link_owners, weights)[link_owners]
        counts = np.bincount(link_entries, weights)
        probabilities = counts / np.bincount(entry_sources, counts)[entry_sources]
    kept = (probabilities >= LEAST_PROBABILITY) & (entry_sources != nobody)
    pairs = zip((entry_sources[kept]).tolist(), (entries[kept] % width).tolist(), strict=True)
    return dict(zip(pairs, probabilities[kept].tolist(), strict=True))


def write_table(
    path: str | Path, table: dict[tuple[int, int], float], tokenizers: Tokenizers
) -> None:
    """Writes "target source probability" a line, as `Shortlist.read` and Marian read it.

    Pieces with an ASCII space in them, which neither could read, are left out.

    Args:
      path: the file; compressed if it ends with ".gz".
      table: from `learn`.
      tokenizers: of the token ids.
    """
    source_pieces = tokenizers.source.pieces(range(tokenizers.source.vocab_size))
    target_pieces = tokenizers.target.pieces(range(tokenizers.target.vocab_size))
    text = "".join(
        f"{target_pieces[target]} {source_pieces[source]} {probability:.6f}\n"
        for (source, target), probability in sorted(table.items())
        if _is_one_field(source_pieces[source]) and _is_one_field(target_pieces[target])
    )
    content = text.encode()
    atomic.write_bytes(Path(path), gzip.compress(content) if str(path).endswith(".gz") else content)


def _is_one_field(piece: str) -> bool:
    return len(piece.encode().split()) == 1
