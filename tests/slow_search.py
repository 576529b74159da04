"""A reference implementation of `decoding/search`: one row, one hypothesis per step, no JAX."""

import dataclasses
import itertools
import math
from typing import NamedTuple


@dataclasses.dataclass(frozen=True)
class Constraints:
    """The constraints of one row; see `SentenceConstraints`."""

    limit: int
    minimum: int = 0
    prefix: tuple[int, ...] = ()
    allowed: frozenset[int] | None = None
    certain: int = 0


class Found(NamedTuple):
    """A complete hypothesis."""

    score: float
    log_probability: float
    tokens: tuple[int, ...]


def log_sum_exp(values):
    highest = max(values)
    if highest == -math.inf:
        return -math.inf
    return highest + math.log(sum(math.exp(value - highest) for value in values))


def is_ruled_out(tokens, token, constraints, options):
    """Whether a rule forbids `token` after `tokens`."""
    grown, size = (*tokens, token), options.no_repeat_ngram_size
    earlier = [tokens[start : start + size] for start in range(len(tokens) - size + 1)]
    return (
        token in options.forbidden_ids
        or (constraints.allowed is not None and token not in constraints.allowed)
        or (size > 0 and grown[-size:] in earlier)
        or any(grown[-len(phrase) :] == phrase for phrase in options.bad_phrases)
        or (options.min_length and token == options.eos_id and len(tokens) < constraints.minimum)
    )


def penalize(score, penalty):
    return score * penalty if score < 0 else score / penalty


def token_scores(logits, tokens, constraints, options, chosen_by_others=()):
    """Returns a list of what each next token adds to the log-probability of `tokens`."""
    allowed = range(len(logits)) if constraints.allowed is None else constraints.allowed
    normalizer = log_sum_exp([logits[token] for token in allowed])
    originals = [logit - normalizer for logit in logits]
    scores = []
    for token, score in enumerate(originals):
        score -= options.diversity_penalty * chosen_by_others.count(token)
        if options.repetition_penalty is not None and token in (options.bos_id, *tokens):
            shift = normalizer if options.independent else 0.0
            score = penalize(score + shift, options.repetition_penalty) - shift
        scores.append(-math.inf if is_ruled_out(tokens, token, constraints, options) else score)
    if len(tokens) < len(constraints.prefix):
        required = constraints.prefix[len(tokens)]
        scores = [-math.inf] * len(logits)
        scores[required] = 0.0 if len(tokens) < constraints.certain else originals[required]
    if options.force_end and len(tokens) == constraints.limit - 1:
        scores = [-math.inf] * len(logits)
        scores[options.eos_id] = 0.0
    if options.renormalize:
        total = log_sum_exp(scores)
        scores = [score - total if score > -math.inf else score for score in scores]
    return scores


def penalty_of(length, options):
    base = (5 + length) / 6 if options.length_penalty_kind == "gnmt" else length
    return base**options.length_penalty


def score_of(tokens, total, options, attention_after):
    """Returns the ranking score of a hypothesis that ends now."""
    score = total / penalty_of(len(tokens), options)
    if options.coverage_penalty is not None:
        received = [attention_after(tokens[:start]) for start in range(len(tokens))]
        for one_source_token in zip(*received, strict=True):
            score += options.coverage_penalty * math.log(min(sum(one_source_token), 1.0))
    return score


def is_complete(tokens, constraints, options):
    return tokens[-1] == options.eos_id or len(tokens) == constraints.limit


def is_decided(beam, finished, size, constraints, options, attention_after):
    """Whether a beam with `finished` hypotheses, best first, stops; see `DecodeConfig`."""
    if not beam:
        return True
    if len(finished) < size:
        return False
    if options.early_stopping == "first":
        return True
    if options.early_stopping == "heuristic":
        attainable = [score_of(t, total, options, attention_after) for t, total in beam]
    else:
        attainable = [total / penalty_of(constraints.limit, options) for _, total in beam]
    return finished[-1].score >= max(attainable)


def slow_beam_search(logits_after, constraints, options, attention_after):
    """Returns the finished hypotheses that the groups keep, best first."""
    size = options.beam_size // options.beam_groups
    beams = [[((), 0.0)] for _ in range(options.beam_groups)]
    kept = [[] for _ in range(options.beam_groups)]
    for length in range(1, constraints.limit + 1):
        chosen_by_others = []
        for group, beam in enumerate(beams):
            candidates = []
            for tokens, total in beam:
                scores = token_scores(
                    logits_after(tokens), tokens, constraints, options, chosen_by_others
                )
                for token, score in enumerate(scores):
                    if score > -math.inf:
                        candidates.append(((*tokens, token), total + score))
            candidates.sort(key=lambda candidate: -candidate[1])
            for tokens, total in candidates[:size]:
                if is_complete(tokens, constraints, options):
                    score = score_of(tokens, total, options, attention_after)
                    kept[group].append(Found(score, total, tokens))
            kept[group] = sorted(kept[group], reverse=True)[:size]
            beam = [
                c for c in candidates[: 2 * size] if not is_complete(c[0], constraints, options)
            ]
            beam = beam[:size]
            if is_decided(beam, kept[group], size, constraints, options, attention_after):
                beam = []
            beams[group] = beam
            chosen_by_others += [tokens[-1] for tokens, _ in beam]
        assert all(len(tokens) == length for beam in beams for tokens, _ in beam)
    return sorted((found for group in kept for found in group), reverse=True)


def slow_greedy_search(logits_after, constraints, options, attention_after):
    """Returns a list of the hypothesis of the best tokens, empty if there is none."""
    tokens, total = (), 0.0
    while len(tokens) < constraints.limit and (not tokens or tokens[-1] != options.eos_id):
        scores = token_scores(logits_after(tokens), tokens, constraints, options)
        best = max(range(len(scores)), key=lambda token: scores[token])
        if scores[best] == -math.inf:
            return []
        tokens, total = (*tokens, best), total + scores[best]
    return [Found(score_of(tokens, total, options, attention_after), total, tokens)] * bool(tokens)


def slow_search(logits_after, constraints, options, attention_after=None):
    """Returns the `options.n_best` hypotheses of a row, best first.

    Args:
      logits_after: returns the logits, a list, of the token that follows a tuple of tokens.
      constraints: of the row.
      options: `SearchOptions` without sampling.
      attention_after: returns the attention to each source token, a list, in that step.
    """
    one_row = slow_greedy_search if options.independent else slow_beam_search
    return one_row(logits_after, constraints, options, attention_after)[: options.n_best]


def enumerate_hypotheses(logits_after, words, constraints, options):
    """Returns every hypothesis of some words that the rules allow, best first.

    Arguments as of `slow_search`.
    """
    end = (options.eos_id,)
    shorter = itertools.chain.from_iterable(
        itertools.product(words, repeat=length) for length in range(constraints.limit)
    )
    every = [(*tokens, *end) for tokens in shorter]
    if constraints.limit:
        every += itertools.product(words, repeat=constraints.limit)
    found = []
    for tokens in every:
        total = 0.0
        for length, token in enumerate(tokens):
            logits = logits_after(tokens[:length])
            total += token_scores(logits, tokens[:length], constraints, options)[token]
        if total > -math.inf:
            found.append(Found(total / penalty_of(len(tokens), options), total, tokens))
    return sorted(found, reverse=True)
