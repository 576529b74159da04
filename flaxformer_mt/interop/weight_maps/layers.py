"""The layers of a published model: their rules and sizes, from the names of their modules."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.errors import UserError
from flaxformer_mt.interop.checkpoint_files import PublishedCheckpoint
from flaxformer_mt.interop.weight_maps.rules import TensorRule, linear, norm

STACKS = ("encoder", "decoder")
PROJECTIONS = ("query", "key", "value", "output")


@dataclasses.dataclass(frozen=True)
class Layers:
    """The names of the layers of both stacks.

    Projections are `torch.nn.Linear`s, by default.
    """

    encoder: str
    """What the names in an encoder layer begin with: "encoder.layers.{layer}."."""
    decoder: str
    """The same in a decoder layer."""
    modules: Mapping[str, str]
    """The names of our modules in a layer, such as {"self_attention": "self_attn"}; of attention,
    whatever the names of its projections begin with."""
    encoder_modules: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Those that are named otherwise in an encoder layer."""
    projections: tuple[str, ...] = ()
    """The ends of the names of an attention's projections, in the order of `PROJECTIONS`."""
    linear: Callable[[str, str], list[TensorRule]] = linear
    """Returns the rules of a projection, given our path and its name."""
    norm: Callable[[str, str], list[TensorRule]] = norm
    """Returns the rules of a norm, given our path and its name."""
    attention: Callable[[TransformerConfig, str, str], list[TensorRule]] | None = None
    """Returns the rules of an attention whose projections are not separate modules."""

    def names(self, stack: str) -> dict[str, str]:
        """Returns the names of our modules in a layer of "encoder" or "decoder", with "{layer}"."""
        own = self.encoder_modules if stack == "encoder" else {}
        names = {**self.modules, **own}
        return {ours: getattr(self, stack) + theirs for ours, theirs in names.items()}

    def rules(self, config: TransformerConfig) -> list[TensorRule]:
        """Returns the rules of all modules in both stacks, also of those that a model lacks."""
        return [
            rule
            for stack in STACKS
            for module, theirs in self.names(stack).items()
            for rule in self._module_rules(config, f"{stack}/layers/{module}", theirs)
        ]

    def sizes(self, checkpoint: PublishedCheckpoint) -> dict[str, Any]:
        """Returns the fields that follow from the feed-forward network and the layers' numbers."""
        hidden, output = (self._first(f"feed_forward/{part}") for part in ("hidden", "output"))
        scale = self.norm("", self._first("feed_forward_norm"))[0].theirs[0]
        return {
            "d_model": checkpoint.size(
                (f"{hidden}.weight", 1), (f"{output}.weight", 0), (scale, 0)
            ),
            "d_ff": checkpoint.size(*_rows(hidden), (f"{output}.weight", 1)),
            "num_encoder_layers": checkpoint.num_layers(self.encoder.partition("{")[0]),
            "num_decoder_layers": checkpoint.num_layers(self.decoder.partition("{")[0]),
        }

    def sizes_of_model(
        self, source: Sequence[str], target: Sequence[str], free_heads: bool = False
    ) -> Callable[[PublishedCheckpoint, int], dict[str, Any]]:
        """Returns `Family.sizes` of a model: `sizes`, those of vocabularies, and of free heads.

        `source` and `target` are tensors with one row per token, of which a file may omit some.
        """

        def found(checkpoint: PublishedCheckpoint, num_heads: int) -> dict[str, Any]:
            fields = self.sizes(checkpoint)
            for side, names in (("source", source), ("target", target)):
                fields[f"{side}_vocab_size"] = checkpoint.size(*((name, 0) for name in names))
            if free_heads:
                fields["head_dim"] = self.key_width(checkpoint, num_heads)
                fields["value_dim"] = self.value_width(checkpoint, num_heads)
            return fields

        return found

    def key_width(self, checkpoint: PublishedCheckpoint, num_heads: int) -> int:
        """Returns the width of a head's queries and keys."""
        query, key, _, _ = self._first_projections()
        return head_width(checkpoint.size(*_rows(query), (f"{key}.weight", 0)), num_heads)

    def value_width(self, checkpoint: PublishedCheckpoint, num_heads: int) -> int:
        """Returns the width of a head's values."""
        *_, value, output = self._first_projections()
        return head_width(checkpoint.size(*_rows(value), (f"{output}.weight", 1)), num_heads)

    def _module_rules(self, config: TransformerConfig, ours: str, theirs: str) -> list[TensorRule]:
        if ours.endswith("norm"):
            return self.norm(ours, theirs)
        if not ours.endswith("attention"):
            return self.linear(ours, theirs)
        if self.attention is not None:
            return self.attention(config, ours, theirs)
        return [
            rule
            for part, name in zip(PROJECTIONS, self.projections, strict=True)
            for rule in self.linear(f"{ours}/{part}", theirs + name)
        ]

    def _first(self, module: str) -> str:
        return self.decoder.format(layer=0) + self.modules[module]

    def _first_projections(self) -> list[str]:
        return [self._first("self_attention") + name for name in self.projections]


def _rows(name: str) -> list[tuple[str, int]]:
    """Returns the tensors of a `torch.nn.Linear` that tell the number of its outputs."""
    return [(f"{name}.weight", 0), (f"{name}.bias", 0)]


def head_width(features: int, num_heads: int) -> int:
    """Returns the width of one of `num_heads` heads, which have to divide the features."""
    if features % num_heads:
        raise UserError(f"num_heads={num_heads} does not divide the {features} rows of the heads")
    return features // num_heads


def stack_norms(
    ours: str, theirs: str, norm: Callable[[str, str], list[TensorRule]] = norm
) -> list[TensorRule]:
    """Returns the rules of a norm below or above both stacks: "{stack}.layer_norm"."""
    return [
        rule for stack in STACKS for rule in norm(f"{stack}/{ours}", theirs.format(stack=stack))
    ]
