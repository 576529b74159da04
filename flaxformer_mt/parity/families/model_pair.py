"""Our model and a reference of its family with the same weights, and how each is run."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import Array
from torch import nn

from flaxformer_mt import interop
from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.errors import UserError
from flaxformer_mt.interop.weight_maps import checkpoints
from flaxformer_mt.interop.weight_maps.family import sinusoids
from flaxformer_mt.model.masks import causal_mask
from flaxformer_mt.model.transformer import Transformer
from flaxformer_mt.objectives.losses import label_smoothed_cross_entropy
from flaxformer_mt.parity.families.recipes import Recipe, recipe
from flaxformer_mt.parity.families.tokens import (
    Padding,
    Tokens,
    as_tokens,
    check_special_tokens,
    padding,
)
from flaxformer_mt.parity.program.equations import Equation, TracedFunction, trace
from flaxformer_mt.parity.references.losses import LOSSES
from flaxformer_mt.parity.sides import Pair
from flaxformer_mt.parity.trace.module_values import copied
from flaxformer_mt.parity.trace.sites import (
    MASKED,
    Values,
    is_scores,
    sites,
    values_of_model,
)
from flaxformer_mt.presets import canonical_family

Tables = Literal["exact", "published"]
"""Tables of positions. exact: computed in the dtype of the comparison; published: those of the
reference or, if they are not among its tensors, rounded to float32."""

Forward = Callable[[nn.Module, Tokens], torch.Tensor]


@dataclasses.dataclass(frozen=True)
class OurModel:
    """Our model as functions of the reference's tensors by name, with tied tensors given once.

    The outputs are the logits [B, T, V]; losses are per target token.
    """

    # Every convention of label smoothing; that of wide heads treats padding as a class.
    loss_families: ClassVar = tuple(name for name in LOSSES if name != "annotated_wide_heads")
    family: interop.Family
    config: TransformerConfig
    recipe: Recipe
    tables: Tables = "exact"

    def run(self, tensors: Mapping[str, Any], batch: Tokens) -> tuple[Sequence[Array], Any]:
        return self._apply(*self._parameters(tensors), batch)

    def _parameters(self, tensors: Mapping[str, Any]) -> tuple[TransformerConfig, dict[str, Any]]:
        params = interop.differentiable(self.family, self.config, tuple(tensors))(tensors)
        if self.tables == "published" and self.config.position_kind == "sinusoidal":
            return self._with_published_tables(params, tensors)
        return self.config, params

    def _apply(
        self, config: TransformerConfig, params: Any, batch: Tokens
    ) -> tuple[Sequence[Array], Any]:
        arguments: Any = {"capture_intermediates": True, "mutable": ["intermediates"]}
        inputs: tuple[Any, ...] = (batch.source if config.has_inputs else None, batch.target_input)
        if not config.target_vocab_size:
            arguments["method"], inputs = _layers_alone, (batch,)
        elif self.recipe.counts_tokens:
            real = jnp.cumsum(batch.source != config.pad_id, axis=1, dtype=jnp.int32)
            arguments["encoder_positions"] = jnp.maximum(real - 1, 0)
        logits, kept = Transformer(config).apply({"params": params}, *inputs, **arguments)
        return [logits], kept["intermediates"]

    def traced(self, tensors: Mapping[str, Any], batch: Tokens) -> tuple[TracedFunction, list[Any]]:
        """Returns the model as a traced function of its own parameters, and its arguments."""
        config, params = self._parameters(tensors)
        shapes, tree = jax.tree.flatten(jax.eval_shape(lambda *given: given, params, batch))
        return _program(self, config, tree, tuple(shapes)), jax.tree.leaves((params, batch))

    def program(self, config: TransformerConfig, params: Any, batch: Any) -> TracedFunction:
        """Traces the model, given the shapes of its parameters and of a batch."""
        function = trace(functools.partial(self._apply, config), params, (batch,), opened=True)
        numbers = dict(zip(function.output_names, function.outputs, strict=True))
        found = {}
        for site in sites(config):
            path = f"1/{site.path}/{site.call}"
            number = numbers[path] if path in numbers else numbers[f"{path}/0"]
            found[site.name] = number if site.layer is None else function.stacks[number][site.layer]
        found["logits"] = numbers["0/0"]
        return _reading_scores(function.with_sites(found, outputs=("0/0",)))

    def published_tables(self, tensors: Mapping[str, Any]) -> list[str]:
        """Returns the names of the tables of positions among the reference's tensors."""
        names = [each.name for each in self.family.buffers(self.config) if each.exact]
        # tunz stores the frequencies instead, [D / 2].
        return [name for name in names if name in tensors and tensors[name].ndim > 1]

    def _with_published_tables(
        self, params: dict[str, Any], tensors: Mapping[str, Any]
    ) -> tuple[TransformerConfig, dict[str, Any]]:
        width = self.config.d_model
        exact = sinusoids(self.config)(self.config.max_length)
        rounded = jnp.asarray(exact.astype(np.float32), jnp.dtype(self.config.param_dtype))
        names = self.published_tables(tensors)
        tables = [jnp.reshape(tensors[name], (-1, width)) for name in names] or [rounded]
        rows = min(table.shape[0] for table in tables)
        config = dataclasses.replace(
            self.config, position_kind="learned", position_offset=0, max_length=rows
        )
        positions = {
            f"{side}_positions": {"embedding": table[:rows]}
            for side, table in (("source", tables[0]), ("target", tables[-1]))
            if side == "target" or config.has_inputs
        }
        return config, params | positions

    def by_site(self, outputs: Sequence[Array], values: Any) -> Values:
        return values_of_model(self.config, values) | {"logits": np.asarray(outputs[0])}

    def loss(self, outputs: Sequence[Array], batch: Tokens, family: str = "") -> Array:
        (logits,) = outputs
        total, weight = label_smoothed_cross_entropy(
            logits,
            classes(batch, logits.shape[-1], self.config.pad_id),
            batch.target_output != self.config.pad_id,
            self.recipe.smoothing,
            (recipe(family) if family else self.recipe).convention,
            self.config.pad_id,
        )
        return total / weight


@dataclasses.dataclass(frozen=True)
class ModelPair(Pair):
    """Our model and a PyTorch reference with the same weights."""

    ours: OurModel
    params: Mapping[str, Any]
    module: nn.Module
    forward: Forward
    dtype: str

    def fixed(self) -> dict[str, np.ndarray]:
        trained = {id(p) for p in self.module.parameters() if p.requires_grad}
        state = self.module.state_dict(keep_vars=True)
        return {name: copied(tensor) for name, tensor in state.items() if id(tensor) not in trained}

    def outputs(self, batch: Tokens) -> dict[str, torch.Tensor]:
        logits = self.forward(self.module, batch)
        rows = batch.target_output.shape
        vocabulary = self.ours.config.target_vocab_size or self.ours.config.d_model
        shapes = {(*rows, vocabulary), (math.prod(rows), vocabulary)}
        if not isinstance(logits, torch.Tensor) or tuple(logits.shape) not in shapes:
            what = tuple(logits.shape) if isinstance(logits, torch.Tensor) else type(logits)
            raise UserError(
                f"the module returns {what}, not logits {(*rows, vocabulary)}: give forward="
            )
        return {"logits": logits.reshape(*rows, vocabulary)}

    def loss(
        self, outputs: Mapping[str, torch.Tensor], batch: Tokens, family: str = ""
    ) -> torch.Tensor:
        logits, pad_id = outputs["logits"], self.ours.config.pad_id
        targets = torch.tensor(classes(batch, logits.shape[-1], pad_id)).long()
        its_loss = (recipe(family) if family else self.ours.recipe).loss
        total, count = its_loss(
            logits.flatten(0, 1), targets.flatten(), self.ours.recipe.smoothing, pad_id
        )
        return total / count

    def traced(self, batch: Tokens) -> tuple[TracedFunction, list[Any]]:
        return self.ours.traced({**self.trained(), **self.fixed()}, batch)


@functools.lru_cache(maxsize=8)
def _program(ours: OurModel, config: TransformerConfig, tree: Any, shapes: Any) -> TracedFunction:
    return ours.program(config, *jax.tree.unflatten(tree, shapes))


def _reading_scores(function: TracedFunction) -> TracedFunction:
    """Makes the softmax read the masked scores that are a site, which it masks by itself."""
    makers = {n: equation for equation in function.equations for n in equation.outputs}
    scores = {makers[n].inputs[-1]: n for site, n in function.sites.items() if is_scores(site)}

    def read(equation: Equation) -> Equation:
        number = scores.get(equation.inputs[-1]) if equation.name == "select_n" else None
        if number is None or number in equation.outputs:
            return equation
        return Equation("mask", {}, (number,), equation.outputs, _hidden)

    return dataclasses.replace(function, equations=[read(each) for each in function.equations])


def _hidden(scores: Any) -> list[Array]:
    return [jnp.where(scores <= MASKED, -jnp.inf, scores)]


def model_pair(
    family: str | interop.Family,
    module: nn.Module,
    overrides: Mapping[str, Any],
    forward: Forward | None = None,
    its_recipe: Recipe | None = None,
    tables: Tables = "exact",
) -> ModelPair:
    """Pairs a reference with our model, which gets its weights; arguments as for `compare`."""
    config, params = interop.load(family, module.state_dict(), **overrides)
    check_special_tokens(config)
    if isinstance(family, str):
        family = interop.FAMILIES[canonical_family(family)]
    checkpoints.check_module(family, config, module.state_dict(keep_vars=True))
    bare = not config.target_vocab_size
    default: Forward = functools.partial(_on_vectors, config) if bare else _on_tokens
    ours = OurModel(family, config, its_recipe or recipe(family.name), tables)
    return ModelPair(ours, params, module, forward or default, config.param_dtype)


def real_tokens(models: ModelPair, batch: Any) -> tuple[Tokens, Padding]:
    """Returns a batch as `Tokens`, and the masks of its real tokens."""
    config = models.ours.config
    tokens = as_tokens(batch, config)
    return tokens, padding(tokens, config.pad_id)


def classes(tokens: Tokens, vocabulary: int, pad_id: int) -> np.ndarray:
    """Returns the target classes, [B, T]; the D outputs of bare layers serve as logits."""
    # Tokens of a vocabulary larger than D share classes, but none shares that of padding.
    found = tokens.target_output % vocabulary
    shared = (found == pad_id) & (tokens.target_output != pad_id)
    return (found + shared.astype(found.dtype)) % vocabulary


def _on_tokens(module: nn.Module, tokens: Tokens) -> torch.Tensor:
    source, target = (torch.tensor(array).long() for array in tokens[:2])
    return module(source, target)


# Bare layers have no embeddings: every token is replaced by a fixed random vector.


def _vectors(d_model: int) -> np.ndarray:
    """Returns the vectors of bare layers, [D, D]; the row of a token is its id modulo D."""
    return np.random.default_rng(0).normal(size=(d_model, d_model))


def _on_vectors(config: TransformerConfig, module: nn.Module, tokens: Tokens) -> torch.Tensor:
    table = torch.tensor(_vectors(config.d_model), dtype=getattr(torch, config.dtype))
    source, target = (table[array % config.d_model] for array in tokens[:2])
    visible = torch.tensor(tokens.source != config.pad_id)
    causal = torch.ones(target.shape[1], target.shape[1], dtype=torch.bool).tril()
    if not isinstance(module, nn.Transformer):
        return module(source, target, visible[:, None], causal[None])
    if not module.batch_first:
        source, target = source.transpose(0, 1), target.transpose(0, 1)
    hidden = {"src_key_padding_mask": ~visible, "memory_key_padding_mask": ~visible}
    output = module(source, target, tgt_mask=~causal, **hidden)
    return output if module.batch_first else output.transpose(0, 1)


def _layers_alone(model: Transformer, tokens: Tokens) -> Array:
    c = model.config
    table = jnp.asarray(_vectors(c.d_model), jnp.dtype(c.dtype))
    source, target = (table[array % c.d_model] for array in tokens[:2])
    source_mask = jnp.asarray(tokens.source != c.pad_id)[:, None, None]
    encoded, _ = model.encoder(source, source_mask)
    target_mask = causal_mask(tokens.target_input.shape[1])
    return model.decoder(target, encoded, target_mask, source_mask)[0]
