"""Rules, samplers and searches compared with those of transformers, on random scores."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from slow_search import Constraints
from toy_search import BOS, EOS, PAD, SPECIAL, B, P, V, batched, find, random_world
from transformers.generation import logits_process
from transformers.modeling_outputs import CausalLMOutput

from flaxformer_mt.decoding.search import sampling, token_scores
from flaxformer_mt.decoding.search.options import SearchOptions

WIDTH, LENGTH, VOCABULARY = 8, 9, 6
POSITION = 7  # 7 of the 9 tokens are defined.
PHRASES = ((3, 4), (5, 5), (4, 3, 5), (0, 1), (2, 2))


def random_scores(seed):
    random = np.random.default_rng(seed)
    tokens = random.integers(0, VOCABULARY, (1, WIDTH, LENGTH)).astype(np.int32)
    scores = random.normal(size=(1, WIDTH, VOCABULARY)).astype(np.float32) * 3
    return tokens, scores


def theirs(processor, tokens, scores, position=POSITION):
    found = processor(torch.from_numpy(tokens[0, :, :position]).long(), torch.from_numpy(scores[0]))
    return found.numpy()[None]


RULES = {
    "repetition penalty": (
        lambda scores, tokens, positions: token_scores.penalize_repetition(
            scores, tokens, positions, 1.7, bos_id=-1
        ),
        logits_process.RepetitionPenaltyLogitsProcessor(1.7),
    ),
    **{
        f"no {size}-gram twice": (
            functools.partial(token_scores.forbid_repeated_ngrams, size=size),
            logits_process.NoRepeatNGramLogitsProcessor(size),
        )
        for size in (1, 2, 3)
    },
    "bad phrases": (
        functools.partial(token_scores.forbid_phrases, phrases=PHRASES),
        logits_process.NoBadWordsLogitsProcessor([list(phrase) for phrase in PHRASES], EOS),
    ),
    "minimum": (
        lambda scores, tokens, positions: token_scores.forbid_early_end(
            scores, positions, jnp.array([8]), EOS
        ),
        logits_process.MinNewTokensLengthLogitsProcessor(0, 8, EOS),
    ),
    "required end": (
        lambda scores, tokens, positions: token_scores.require_end(
            scores, jnp.zeros((1, WIDTH, 1)), positions, jnp.array([8]), EOS
        ),
        logits_process.ForcedEOSTokenLogitsProcessor(8, EOS),
    ),
}


@pytest.mark.parametrize("name", RULES)
def test_rules_agree(name):
    rule, processor = RULES[name]
    ours = jax.jit(rule)
    for seed in range(5):
        tokens, scores = random_scores(seed)
        np.testing.assert_allclose(
            ours(scores, tokens, np.array([POSITION])),
            theirs(processor, tokens, scores),
            rtol=1e-6,
        )


SAMPLERS = {
    "top_k": (
        lambda logits: sampling.keep_top_k(logits, 3),
        logits_process.TopKLogitsWarper(3),
    ),
    "top_p": (
        lambda logits: sampling.keep_top_p(logits, 0.7),
        logits_process.TopPLogitsWarper(0.7),
    ),
    "min_p": (
        lambda logits: sampling.keep_min_p(logits, 0.2),
        logits_process.MinPLogitsWarper(0.2),
    ),
    "epsilon": (
        lambda logits: sampling.keep_above_epsilon(logits, 0.15),
        logits_process.EpsilonLogitsWarper(0.15),
    ),
    "temperature and all others": (
        lambda logits: sampling.filter_logits(
            logits,
            SearchOptions(
                1, 2, 0, temperature=1.5, top_k=5, top_p=0.9, min_p=0.05, epsilon_cutoff=0.1
            ),
        ),
        logits_process.LogitsProcessorList(
            [
                logits_process.TemperatureLogitsWarper(1.5),
                logits_process.TopKLogitsWarper(5),
                logits_process.TopPLogitsWarper(0.9),
                logits_process.MinPLogitsWarper(0.05),
                logits_process.EpsilonLogitsWarper(0.1),
            ]
        ),
    ),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_samplers_agree(name):
    sampler, warper = SAMPLERS[name]
    ours = jax.jit(sampler)
    for seed in range(5):
        tokens, scores = random_scores(seed)
        scores[0, :, 1] = -np.inf
        np.testing.assert_allclose(ours(scores), theirs(warper, tokens, scores), rtol=1e-6)


class ToyModel(transformers.PreTrainedModel, transformers.GenerationMixin):
    """A language model whose logits are looked up in a row of `random_world`."""

    def __init__(self, table):
        super().__init__(transformers.PreTrainedConfig(vocab_size=V))
        self.table = torch.nn.Parameter(torch.from_numpy(table))

    def forward(self, input_ids, **_):
        node = torch.zeros(len(input_ids), dtype=torch.long)
        for token in input_ids[:, 1:].T:
            node = node * V + token + 1
        return CausalLMOutput(logits=self.table[node][:, None])


def generate(table, options, constraints):
    """Returns the hypotheses of transformers and their scores, NaN for greedy search."""
    model = ToyModel(table)
    found = model.generate(
        torch.tensor([[options.bos_id]]),
        transformers.GenerationConfig(
            num_beams=options.beam_size,
            num_return_sequences=options.n_best,
            length_penalty=options.length_penalty,
            early_stopping={"never": "never", "heuristic": False, "first": True}[
                options.early_stopping
            ]
            if options.beam_size > 1
            else None,
            max_new_tokens=constraints.limit,
            min_new_tokens=constraints.minimum,
            bad_words_ids=[[PAD], [BOS], *map(list, options.bad_phrases)],
            no_repeat_ngram_size=options.no_repeat_ngram_size,
            repetition_penalty=options.repetition_penalty,
            renormalize_logits=options.renormalize,
            forced_eos_token_id=EOS if options.force_end else None,
            use_cache=False,
            return_dict_in_generate=True,
            output_scores=True,
            pad_token_id=PAD,
            bos_token_id=options.bos_id,
            eos_token_id=EOS,
        ),
        attention_mask=torch.ones((1, 1), dtype=torch.long),
    )
    sequences = [until_end(tokens) for tokens in found.sequences[:, 1:].tolist()]
    scores = found.get("sequences_scores", torch.full((len(sequences),), torch.nan))
    return sequences, scores.numpy()


def until_end(tokens):
    return tokens[: tokens.index(EOS) + 1] if EOS in tokens else tokens


PLAIN = SearchOptions(
    **SPECIAL, beam_size=3, n_best=3, length_penalty_kind="average", min_length=True
)
RULES_OF_GENERATE = dataclasses.replace(
    PLAIN,
    early_stopping="heuristic",
    repetition_penalty=1.3,
    no_repeat_ngram_size=2,
    bad_phrases=((3, 4), (5, 5), (4, 3, 5)),
    force_end=True,
    renormalize=True,
)


def test_searches_agree():
    for seed, (alpha, end, minimum) in enumerate(
        [(1.0, 0.0, 0), (0.0, 1.0, 0), (2.0, 2.0, 1), (0.6, 1.0, 2), (2.0, 3.0, 0), (1.0, 2.0, 0)]
    ):
        options = dataclasses.replace(RULES_OF_GENERATE, length_penalty=alpha)
        world, constraints = random_world(seed, end), Constraints(P, minimum)
        result = jax.device_get(find(world, batched([constraints] * B), options))
        for row in range(B):
            tokens, scores = generate(world[0][row], options, constraints)
            lengths = result.lengths[row].tolist()
            ours = [t[:n].tolist() for t, n in zip(result.tokens[row], lengths, strict=True)]
            assert ours == tokens
            np.testing.assert_allclose(result.scores[row], scores, atol=1e-5)
