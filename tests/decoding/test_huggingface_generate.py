"""Searches with the same weights here and in `generate` of Hugging Face transformers."""

import dataclasses
import functools
import gzip
import itertools
import os
import random
import warnings
from pathlib import Path

import chex
import jax
import numpy as np
import opus_mt
import pytest
import torch
from rounding import rounding_tolerance
from toy_references import others_are_slow

from flaxformer_mt import interop
from flaxformer_mt.config import DataConfig, TransformerConfig
from flaxformer_mt.data.corpora.corpus import load_corpus
from flaxformer_mt.decoding.batching.continuous_batching import ContinuousBatcher, Request
from flaxformer_mt.interop.convert import OWN, convert
from flaxformer_mt.interop.formats import generation_config
from flaxformer_mt.model.transformer import Transformer
from flaxformer_mt.trained_model import load_run

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import hub_models
    from transformers import MarianMTModel, PreTrainedModel

BEAMS = (1, 4, 6)
EARLY_STOPPING = ("never", False, True)
PENALTIES = (0.6, 1.0, 2.0)
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


# Various widths, depths, ties and activations, with an output bias that makes translations end.
SHAPES = {
    "one layer": ({"encoder_layers": 1, "decoder_layers": 1, "d_model": 8}, 40, 4.0),
    "deep encoder": (
        {
            "encoder_layers": 3,
            "decoder_ffn_dim": 40,
            "encoder_ffn_dim": 40,
            "activation_function": "gelu",
            "init_std": 0.5,
            "scale_embedding": False,
        },
        60,
        5.5,
    ),
    "separate": (
        {
            "d_model": 32,
            "decoder_layers": 3,
            "activation_function": "relu",
            "init_std": 0.4,
            "share_encoder_decoder_embeddings": False,
            "decoder_vocab_size": 71,
            "tie_word_embeddings": False,
        },
        50,
        3.5,
    ),
}


@functools.cache
def random_pair(name):
    options, size, end_bias = SHAPES[name]
    vocabulary = {"</s>": 0, "<unk>": 1, "<pad>": size - 1}
    theirs = opus_mt.random_model(
        opus_mt.config([vocabulary, vocabulary], **{"init_std": 0.6} | options)
    )
    with torch.no_grad():
        theirs.final_logits_bias[:, 0] += end_bias
    checkpoint = {"model": theirs.state_dict(), "settings": theirs.config.to_dict()}
    config, params = interop.load("marian", checkpoint)
    return ModelPair(config, interop.model_params(params), theirs, max_length=24)


def trained_pair(run_folder, folder):
    convert(OWN, "marian", run_folder, folder)
    run = load_run(run_folder)
    return ModelPair(
        run.model, run.params, MarianMTModel.from_pretrained(folder).eval(), max_length=80
    )


def padded(sources, pad_id):
    width = max(map(len, sources))
    return np.array([[*source, *[pad_id] * (width - len(source))] for source in sources], np.int32)


def generate(pair, sources, options, batch_size=50):
    """Returns (tokens without start, score) of each hypothesis, best first, for each source."""
    found = []
    settings = pair.theirs.config
    # The cache of transformers 5 has as many layers as T5's encoder.
    has_cache = settings.model_type not in ("t5", "mt5") or (
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


def assert_logits_agree(pair):
    source = padded(pair.random_sources(6), pair.config.pad_id)
    target = padded(pair.random_sources(6, seed=1), pair.config.pad_id)
    target = np.minimum(target, pair.config.target_vocab_size - 1)
    target[:, 0] = pair.config.bos_id
    apply = jax.jit(
        Transformer(pair.config).apply, compiler_options={"xla_backend_optimization_level": 0}
    )

    @torch.no_grad()
    def their_logits(model):
        return model(
            input_ids=torch.tensor(source).long(),
            attention_mask=torch.tensor(source != pair.config.pad_id),
            decoder_input_ids=torch.tensor(target).long(),
        ).logits.numpy()

    ours = np.asarray(apply({"params": pair.params}, source, target))
    tolerance = rounding_tolerance(pair.theirs, their_logits)
    chex.assert_trees_all_close(ours, their_logits(pair.theirs), rtol=0, atol=tolerance)


@pytest.fixture(scope="module")
def trained(trained_run, tmp_path_factory):
    return trained_pair(trained_run, tmp_path_factory.mktemp("exported") / "marian")


def phrases(run_folder, count):
    corpus = load_corpus(DataConfig(corpus="phrases", generated_pairs=count), "train")
    run = load_run(run_folder)
    return [[*ids, run.model.eos_id] for ids in run.tokenizers.source.encode(corpus.sources)]


@pytest.mark.slow
@pytest.mark.parametrize("name", others_are_slow(SHAPES, ["separate"]))
def test_logits_of_random_weights(name):
    assert_logits_agree(random_pair(name))


@pytest.mark.slow
def test_logits_of_trained_weights(trained):
    assert_logits_agree(trained)


@pytest.mark.slow_except("True")
@pytest.mark.parametrize("early_stopping", EARLY_STOPPING)
def test_random_weights_find_the_same(early_stopping):
    pair = random_pair("one layer")
    sources = pair.random_sources(20)
    means = []
    for length_penalty in PENALTIES:
        mean, lines = differences(pair, sources, 4, early_stopping, length_penalty)
        assert lines == []
        means.append(mean)
    # Some translations end, and how many depends on the penalty.
    assert 2 < means[0] < means[-1] <= pair.max_length - 1


# The token that translations begin with.
HUB = {"t5": None, "flan": None, "nllb": 5, "mbart50": 6, "bart": None}


@functools.cache
def hub_pair(kind):
    theirs = hub_models.random_model(hub_models.config(kind, 40))
    checkpoint = {"model": theirs.state_dict(), "settings": theirs.config.to_dict()}
    config, params = interop.load(hub_models.KINDS[kind][0], checkpoint)
    params = interop.model_params(params)
    return ModelPair(config, params, theirs, max_length=24, first=HUB[kind])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "beam_size", "early_stopping"),
    [("nllb", 4, False), ("t5", 6, "never"), ("mbart50", 1, True)],
)
def test_models_of_the_hub_find_the_same(kind, beam_size, early_stopping):
    pair = hub_pair(kind)
    mean, lines = differences(pair, pair.random_sources(20), beam_size, early_stopping, 1.0)
    assert lines == []
    assert 2 < mean < pair.max_length - 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", HUB)
def test_models_of_the_hub_find_the_same_with_all_options(kind):
    pair = hub_pair(kind)
    sources = pair.random_sources(200, longest=20)
    for combination in itertools.product(BEAMS, EARLY_STOPPING, (0.6, 1.0)):
        mean, lines = differences(pair, sources, *combination)
        print(kind, *combination, f"mean length {mean:.1f}, {len(lines)} ties", *lines, sep="\n  ")
        assert len(lines) <= 3


SEARCHES = (
    {"beam_size": 1},
    {"beam_size": 1, "repetition_penalty": 1.4, "no_repeat_ngram_size": 3},
    {"early_stopping": "never", "length_penalty": 0.6},
    {"early_stopping": True, "length_penalty": 2.0, "min_length": 5},
    {"early_stopping": "never", "length_penalty": -1.2},
    {"early_stopping": False, "length_penalty": -0.5, "max_length": None, "max_new_tokens": 9},
    {"no_repeat_ngram_size": 2, "repetition_penalty": 1.2},
    {"suppress_tokens": [8, 12], "bad_words_ids": [[1], [0], [9, 10]], "renormalize_logits": True},
    {"beam_size": 6, "bad_words_ids": [], "early_stopping": True},
)
"""Settings of `generate`; by default a beam of 4 that stops by the heuristic."""


def random_hub_pair(seed):
    """Returns a model of a random kind and shape, and its description."""
    draw = random.Random(seed)
    kind = draw.choice(["bart", "mbart50", "nllb", "t5", "flan", "mt5", "marian"])
    size, layers = draw.randint(30, 60), [draw.randint(1, 3) for _ in range(2)]
    width = 4 * draw.randint(2, 8)
    options = {"d_model": width}
    if kind in ("t5", "flan", "mt5"):
        options |= {
            "d_kv": draw.randint(3, 9), "d_ff": draw.randint(9, 40),
            "num_layers": layers[0], "num_decoder_layers": layers[1],
            "num_heads": draw.randint(1, 4),
            "relative_attention_num_buckets": draw.choice([4, 8, 32]),
            "relative_attention_max_distance": draw.choice([16, 20, 128]),
        }  # fmt: skip
        # Smaller distances are refused: their buckets are not defined.
        least = options["relative_attention_num_buckets"] // 2 + 1
        options["relative_attention_max_distance"] = max(
            least, options["relative_attention_max_distance"]
        )
        if kind == "t5":
            options["feed_forward_proj"] = draw.choice(["relu", "gated-silu", "gated-gelu"])
    else:
        heads, inner = draw.choice([1, 2, 4]), draw.randint(9, 40)
        options |= {
            "encoder_layers": layers[0], "decoder_layers": layers[1],
            "encoder_attention_heads": heads, "decoder_attention_heads": heads,
            "encoder_ffn_dim": inner, "decoder_ffn_dim": inner,
            "scale_embedding": draw.choice([True, False]), "init_std": draw.choice([0.3, 0.6]),
            "activation_function": draw.choice(["relu", "gelu", "swish"]),
        }  # fmt: skip
    if kind == "marian":
        vocabulary = {"</s>": 0, "<unk>": 1, "<pad>": size - 1}
        theirs = opus_mt.random_model(opus_mt.config([vocabulary, vocabulary], **options), seed)
        with torch.no_grad():
            theirs.final_logits_bias[:, 0] += 4
    else:
        theirs = hub_models.random_model(hub_models.config(kind, size, **options), seed)
    checkpoint = {"model": theirs.state_dict(), "settings": theirs.config.to_dict()}
    family = "marian" if kind == "marian" else hub_models.KINDS[kind][0]
    config, params = interop.load(family, checkpoint)
    first = HUB.get(kind)
    pair = ModelPair(config, interop.model_params(params), theirs, max_length=24, first=first)
    return pair, f"{kind} {options}"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(60))
def test_random_models_find_the_same_with_any_search(seed):
    pair, description = random_hub_pair(seed)
    sources = pair.random_sources(20, seed=seed)
    for number, search in enumerate(SEARCHES):
        usual = {"beam_size": 4, "early_stopping": False, "length_penalty": 1.0}
        mean, lines = differences(pair, sources, **usual | search)
        print(description, number, f"mean length {mean:.1f}, {len(lines)} ties", *lines, sep="\n  ")
        assert len(lines) <= 1


@pytest.mark.slow
@pytest.mark.parametrize("beam_size", [pytest.param(1, marks=pytest.mark.slow), 6])
def test_trained_weights_find_the_same(trained, trained_run, beam_size):
    sources = sorted(phrases(trained_run, 60), key=len)[:16]
    _, lines = differences(trained, sources, beam_size, "never", 1.0)
    assert lines == []


GRID = list(itertools.product(BEAMS, EARLY_STOPPING, PENALTIES))


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
def test_random_weights_find_the_same_with_all_options(name):
    pair = random_pair(name)
    sources = pair.random_sources(500, longest=20)
    for combination in GRID:
        mean, lines = differences(pair, sources, *combination)
        print(name, *combination, f"mean length {mean:.1f}, {len(lines)} ties", *lines, sep="\n  ")
        assert len(lines) <= 5


@pytest.mark.slow
def test_trained_weights_find_the_same_with_all_options(trained_run, tmp_path):
    folder = Path(os.environ.get("FLAXFORMER_MT_RUN", trained_run))
    pair = trained_pair(folder, tmp_path / "marian")
    run = load_run(folder)
    if "FLAXFORMER_MT_DATA" in os.environ:
        path = Path(os.environ["FLAXFORMER_MT_DATA"], "multi30k-en-de", "test.en.gz")
        texts = gzip.decompress(path.read_bytes()).decode().split("\n")[:500]
        sources = [[*ids, run.model.eos_id] for ids in run.tokenizers.source.encode(texts)]
    else:
        sources = phrases(folder, 500)
    for combination in GRID:
        mean, lines = differences(pair, sources, *combination)
        print(*combination, f"mean length {mean:.1f}, {len(lines)} ties", *lines, sep="\n  ")
        assert len(lines) <= 5
