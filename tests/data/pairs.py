"""Synthetic encoded corpora, and the pairs contained in batches."""

from flaxformer_mt.data.stream.encoded_corpus import CorpusReport, EncodedCorpus, SideReport
from flaxformer_mt.data.stream.packing import Sentences


def encoded(sources, targets, **fields):
    sides = (
        None if sources is None else Sentences.from_lists(sources),
        Sentences.from_lists(targets),
    )
    reports = (side and SideReport(len(side.tokens), 0.0, 0, 0, 0) for side in sides)
    report = CorpusReport(len(targets), {}, *reports)
    return EncodedCorpus(*sides, name="made up", report=report, **fields)


def pairs_of_lengths(lengths, first=10, **fields):
    """Returns pairs of a repeated source token and the repeated token plus 10,000, ended by 2."""
    return encoded(
        [[first + i] * (source - 1) + [2] for i, (source, _) in enumerate(lengths)],
        [[10_000 + first + i] * (target - 1) + [2] for i, (_, target) in enumerate(lengths)],
        **fields,
    )


def pairs_in(batch):
    """Returns the pairs (source tokens, target tokens) of a batch, in order."""
    return [
        (
            tuple(
                batch.encoder_input_tokens[row][batch.encoder_segment_ids[row] == number].tolist()
            ),
            tuple(
                batch.decoder_target_tokens[row][batch.decoder_segment_ids[row] == number].tolist()
            ),
        )
        for row in range(len(batch.decoder_segment_ids))
        for number in range(1, batch.decoder_segment_ids[row].max() + 1)
    ]


def all_pairs(corpus):
    return [
        (tuple(corpus.sources[i].tolist()), tuple(corpus.targets[i].tolist()))
        for i in range(len(corpus.targets))
    ]
