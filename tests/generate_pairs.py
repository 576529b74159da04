"""The same model here and in Hugging Face transformers, and searches with both."""

import dataclasses
import warnings

import numpy as np
import opus_mt
import torch

from flaxformer_mt import interop
from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.decoding.batching.continuous_batching import ContinuousBatcher, Request
from flaxformer_mt.interop.formats import generation_config

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from transformers import PreTrainedModel

TIE = 1e-5
AFTER_TIE = 1e-3
"""Largest score difference of translations that differ because others tied during the search: each
side dropped another one of those, so that other hypotheses followed. Such pairs are rare."""


@dataclasses.dataclass(frozen=True)
class ModelPair:
    """The same model here and in transformers."""

    config: TransformerConfig
    params: dict
    theirs: PreTrainedModel
    max_length: int
    """Maximum length of translations, start token included."""
    first: int | None = None
    """The token that translations begin with: `forced_bos_token_id`."""

    def random_sources(self, count, longest=12, seed=0):
        draw = np.random.default_rng(seed)
        top = self.config.source_vocab_size - 1
        lengths = draw.integers(1, longest, count)
        return [[*draw.integers(3, top, n).tolist(), self.config.eos_id] for n in lengths]


def random_pair():
    """Returns a Marian model of one layer with random weights, whose translations end."""
    vocabulary = {"</s>": 0, "<unk>": 1, "<pad>": 39}
    sizes = {"encoder_layers": 1, "decoder_layers": 1, "d_model": 8, "init_std": 0.6}
    theirs = opus_mt.random_model(opus_mt.config([vocabulary, vocabulary], **sizes))
    with torch.no_grad():
        theirs.final_logits_bias[:, 0] += 4.0
    checkpoint = {"model": theirs.state_dict(), "settings": theirs.config.to_dict()}
    config, params = interop.load("marian", checkpoint)
    return ModelPair(config, interop.model_params(params), theirs, max_length=24)


def padded(sources, pad_id):
    width = max(map(len, sources))
    return np.array([[*source, *[pad_id] * (width - len(source))] for source in sources], np.int32)


def generate(pair, sources, options, batch_size=50):
    """Returns (tokens without start, score) of each hypothesis, best first, for each source."""
    found = []
    settings = pair.theirs.config
    # The cache of transformers 5 has as many layers as T5's encoder.
    has_cache = settings.model_type not in ("t5", "mt5", "umt5") or (
        settings.num_decoder_layers <= settings.num_layers
    )
    for start in range(0, len(sources), batch_size):
        rows = torch.tensor(padded(sources[start : start + batch_size], pair.config.pad_id))
        result = pair.theirs.generate(
            input_ids=rows.long(),
            attention_mask=rows != pair.config.pad_id,
            output_scores=True,
            return_dict_in_generate=True,
            use_cache=has_cache,
            **options,
        )
        sequences = [
            _until_end(row, pair.config.eos_id) for row in result.sequences[:, 1:].tolist()
        ]
        if options["num_beams"] > 1:
            scores = result.sequences_scores.tolist()
        else:
            scores = _greedy_scores(result, sequences, options["length_penalty"])
        hypotheses = list(zip(sequences, scores, strict=True))
        count = options["num_return_sequences"]
        found += [hypotheses[i : i + count] for i in range(0, len(hypotheses), count)]
    return found


def _until_end(tokens, eos_id):
    return tuple(tokens[: tokens.index(eos_id) + 1] if eos_id in tokens else tokens)


def _greedy_scores(result, sequences, length_penalty):
    # `scores` of greedy search are logits, with -inf for forbidden tokens. (The library's own
    # `compute_transition_scores` mistakes the source vocabulary for the target's.)
    gains = []
    for scores, logits, tokens in zip(
        result.scores, result.logits, result.sequences[:, 1:].T, strict=True
    ):
        # The end token that is required at the maximum length has probability 1, as in a beam.
        is_required = scores.isfinite().sum(-1) == 1
        norms = torch.where(is_required, 0.0, torch.logsumexp(logits, -1))
        gains.append(scores.gather(1, tokens[:, None])[:, 0] - norms)
    return [
        row[: len(tokens)].sum().item() / len(tokens) ** length_penalty
        for row, tokens in zip(torch.stack(gains, 1), sequences, strict=True)
    ]


def differences(pair, sources, beam_size, early_stopping, length_penalty, **others):
    """Searches on both sides and asserts that the results agree except for ties.

    Args:
      pair: the models.
      sources: token ids.
      beam_size: W.
      early_stopping: of `generate`.
      length_penalty: of `generate`.
      **others: further settings of `generate`; one without `bad_words_ids` may choose padding.

    Returns:
      The mean length of the translations, and a line for each sentence with translations that
      differ because their scores, or those of others before, tie.
    """
    options = {
        "num_beams": beam_size,
        "num_return_sequences": min(beam_size, 4),
        "early_stopping": early_stopping,
        "length_penalty": length_penalty,
        "max_length": pair.max_length,
        **others,
    }
    settings = pair.theirs.generation_config.to_dict() | options
    decode, notes = generation_config.to_decode(settings, pair.config)
    assert notes == []
    is_excluded = [pair.config.pad_id] in generation_config.excluded_phrases(settings)
    decode = dataclasses.replace(decode, allow_padding=not is_excluded)
    prefix = []
    if pair.first is not None:
        options["forced_bos_token_id"] = pair.first
        prefix = [pair.first]
    if beam_size == 1:
        options["output_logits"] = True
        del options["early_stopping"]
    options = {name: value for name, value in options.items() if value != []}
    if settings["bad_words_ids"] == []:
        pair.theirs.generation_config.bad_words_ids = None
    expected = generate(pair, sources, options)
    requests = [
        Request(source, decode.min_length, decode.max_length, prefix=prefix, certain=len(prefix))
        for source in sources
    ]
    lines, lengths = {}, []
    phrases = [[*map(int, phrase.split(","))] for phrase in decode.bad_word_ids]
    batcher = ContinuousBatcher([(pair.config, pair.params)], decode, bad_phrases=phrases)
    for index, found in batcher.decode(requests):
        ours = list(zip(found.tokens, found.scores, strict=True))
        assert len(ours) == len(expected[index]) == options["num_return_sequences"]
        for rank, ((own, score), (their, their_score)) in enumerate(
            zip(ours, expected[index], strict=True)
        ):
            lengths.append(len(own))
            # A negative penalty multiplies log-probabilities, and their rounding.
            close = (AFTER_TIE if own != their else 1e-4) * max(1, abs(score) / 4)
            assert abs(score - their_score) <= close, (index, rank, ours, expected[index])
            if own != their:
                kind = "tie" if abs(score - their_score) <= TIE else "after a tie"
                # A tie moves all that follow it.
                lines.setdefault(
                    index, f"source {index}, rank {rank}, {kind}: {own} and {their} at {score:.6f}"
                )
    return np.mean(lengths), list(lines.values())
