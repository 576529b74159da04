"""A published checkpoint: tensors, what it says of itself, and the reference with its weights."""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from flaxformer_mt import interop
from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.errors import UserError
from flaxformer_mt.interop.checkpoint_files import PublishedCheckpoint, Tensors
from flaxformer_mt.interop.formats.bundle import read_bundle
from flaxformer_mt.interop.weight_maps import checkpoints, validation
from flaxformer_mt.interop.weight_maps.mapping import WeightMap
from flaxformer_mt.parity import references
from flaxformer_mt.parity.families.model_pair import Tables
from flaxformer_mt.presets import canonical_family, check_fields

Dtype = Literal["float64", "float32"]


@dataclasses.dataclass(frozen=True)
class PublishedModel:
    """A checkpoint file, or the folder of a whole model."""

    family: interop.Family
    source: Path
    tensors: Tensors
    checkpoint: PublishedCheckpoint | None
    config: TransformerConfig | None

    def configure(self, overrides: Mapping[str, Any]) -> TransformerConfig:
        """Returns the configuration with `overrides`, which cannot be sizes."""
        with checkpoints.error_context(self.source, self.family.name):
            if self.checkpoint is not None:
                config = checkpoints.configure(self.family, self.checkpoint, dict(overrides))
            else:
                assert self.config is not None
                check_fields(overrides)
                config = dataclasses.replace(self.config, **overrides)
                validation.check_switches(self.family, config)
            weight_map = WeightMap.of_tensors(self.family, config, self.tensors)
            validation.check_tensors(weight_map, self.tensors)
        return config

    def stated(self) -> dict[str, Any]:
        """Returns the fields that the checkpoint says of itself, beside its tensors."""
        if self.config is not None:
            return dataclasses.asdict(self.config)
        assert self.checkpoint is not None
        guessed = self.family.guess(self.checkpoint)
        bare = self.family.guess(self.checkpoint._replace(settings={}))
        return {name: value for name, value in guessed.items() if bare.get(name) != value}

    def reference(self, config: TransformerConfig, dtype: Dtype, tables: Tables) -> nn.Module:
        """Returns the family's reference with these weights, in evaluation mode."""
        options = {}
        if self.family.name.startswith("annotated"):
            own = any(".src_attn." in name for name in self.tensors)
            options = {"source_attention": "src_attn" if own else "self_attn"}
        module = references.of_config(self.family.name, config, dtype, **options)
        shapes = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
        buffers = {buffer.name: buffer for buffer in self.family.buffers(config)}
        weights = {
            name: torch.from_numpy(tensor).to(getattr(torch, dtype))
            for name, tensor in self.tensors.items()
            if name not in buffers
            or (tables == "published" and buffers[name].exact and shapes.get(name) == tensor.shape)
        }
        for name, tensor in weights.items():
            if shapes.get(name, tensor.shape) != tensor.shape:
                raise UserError(
                    f"{self.source}: {name} has shape {tuple(tensor.shape)}, but {shapes[name]} in "
                    f"the reference of {self.family.name}"
                )
        missing, unexpected = module.load_state_dict(weights, strict=False)
        strangers = {*missing, *unexpected} - buffers.keys() - self.family.omitted(config)
        if strangers:
            raise UserError(
                f"{self.source}: the reference of {self.family.name} differs from it in "
                f"{', '.join(sorted(strangers))}"
            )
        return module.eval()


def read(family: str, path: str | os.PathLike[str]) -> PublishedModel:
    """Reads a checkpoint file or, for families that have them, the folder of a whole model."""
    its_map, path = interop.FAMILIES[canonical_family(family)], Path(path)
    if path.is_dir():
        bundle, _ = read_bundle(its_map.name, path, {})
        tensors = checkpoints.to_state_dict(its_map, bundle.config.model, bundle.params)
        return PublishedModel(its_map, path, tensors, None, bundle.config.model)
    with checkpoints.error_context(path, its_map.name):
        checkpoint = checkpoints.read(its_map, path)
    return PublishedModel(its_map, path, checkpoint.tensors, checkpoint, None)
