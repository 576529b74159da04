"""What a module says of its own settings, compared with the configuration of our model."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import nn

from flaxformer_mt.config import TransformerConfig

HEAD_COUNTS = ("num_heads", "n_heads", "n_head", "nhead", "head_count", "h")
HEAD_COUNTS_OF = {"tunz": ("head_size",)}
"""Further ones of a family; elsewhere the name has another meaning."""
PADDING_IDS = ("padding_idx", "pad_id", "pad_idx", "src_pad_idx", "trg_pad_idx", "pad")


class SettingDifference(NamedTuple):
    """A setting that a module has otherwise than our configuration."""

    name: str
    ours: Any
    theirs: Any
    where: str
    """Where the reference's value was found, such as "encoder.layers.0.self_attn.num_heads"."""

    def __str__(self) -> str:
        return f"{self.name} is {self.ours} here, but {self.theirs} in {self.where}"


def differing_settings(
    config: TransformerConfig, module: nn.Module, family: str
) -> tuple[SettingDifference, ...]:
    """Returns the settings that a module contradicts, if its parts have one value only."""
    names: dict[str, tuple[str, ...]] = {"num_heads": HEAD_COUNTS + HEAD_COUNTS_OF.get(family, ())}
    if config.target_vocab_size:
        names["pad_id"] = PADDING_IDS
    found = []
    for name, attributes in names.items():
        stated = dict(_stated(module, attributes))
        ours = getattr(config, name)
        if len(set(stated.values())) == 1 and ours not in stated.values():
            where, theirs = next(iter(stated.items()))
            found.append(SettingDifference(name, ours, theirs, where))
    return tuple(found)


def _stated(module: nn.Module, attributes: tuple[str, ...]) -> Iterator[tuple[str, int]]:
    for path, part in module.named_modules():
        for attribute in attributes:
            value = vars(part).get(attribute)
            if isinstance(value, int) and not isinstance(value, bool):
                yield f"{path}.{attribute}".lstrip("."), value
