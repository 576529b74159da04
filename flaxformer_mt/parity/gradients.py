"""Locates the first difference of the gradients of our model and a reference."""

from collections.abc import Mapping

import jax

from flaxformer_mt.parity.any_model import backward
from flaxformer_mt.parity.any_model.program import Program, trace
from flaxformer_mt.parity.diagnosis.inputs import select_rows
from flaxformer_mt.parity.model_pair import ModelPair
from flaxformer_mt.parity.tokens import Padding, Tokens
from flaxformer_mt.parity.trace import Tap, Values, sites


def first_difference(
    sides: ModelPair, tokens: Tokens, real: Padding, taps: Mapping[str, Tap | str], values: Values
) -> list[str]:
    """Returns a sentence on where, backwards from the loss, the gradients begin to differ.

    Args:
      sides: both models.
      tokens: the batch.
      real: the masks of its real tokens, which are compared.
      taps: where the reference computes the sites.
      values: our values by site.

    Returns:
      One sentence; nothing if the gradients of all sites agree.
    """
    tensors = {**sides.trained(), **sides.fixed()}
    program = _program(sides, tensors, tokens)
    leaves = jax.tree.leaves((tensors, tokens))
    ours = backward.gradients_of_function(
        program, leaves, lambda logits: sides.ours.loss(logits, tokens)
    )
    theirs = backward.gradients_of_module(
        sides.module,
        taps,
        lambda: sides.loss(sides.logits(tokens), tokens),
        {site: value.shape for site, value in values.items()},
    )

    def of_real_tokens(gradients: backward.Gradients) -> backward.Gradients:
        return {site: select_rows(site, array, real) for site, array in gradients.items()}

    return backward.first_difference(
        program, of_real_tokens(ours), of_real_tokens(theirs), sides.dtype
    )


def _program(sides: ModelPair, tensors: Values, tokens: Tokens) -> Program:
    """Returns our model as a program, of which the intermediates are the sites."""

    def run(tensors, tokens):
        logits, kept = sides.ours.logits(tensors, tokens, with_intermediates=True)
        return logits, kept["intermediates"]

    program = trace(run, tensors, (tokens,), intermediates=False)
    numbers = dict(zip(program.output_names, program.outputs, strict=True))
    found = {}
    for site in sites(sides.ours.config):
        path = f"1/{site.path}/{site.call}"
        number = numbers[path] if path in numbers else numbers[f"{path}/0"]
        found[site.name] = number if site.layer is None else program.stacks[number][site.layer]
    return program.with_sites(found, outputs=("0",))
