"""Published models that a program adds: known wherever the built-in families are."""

import dataclasses
from typing import Any

from flaxformer_mt import presets
from flaxformer_mt.errors import UserError
from flaxformer_mt.interop.families import FAMILIES
from flaxformer_mt.interop.formats.bundle import OWN, READERS, WRITERS
from flaxformer_mt.interop.formats.hub_families import HUB_FAMILIES, HubFamily
from flaxformer_mt.interop.weight_maps.family import Family

REFERENCES: dict[str, Any] = {}
"""The references of registered families, by name."""

_BUILT_IN = frozenset({OWN, *FAMILIES, *presets.FAMILY_ALIASES, *READERS, *WRITERS})
_MODEL_TYPES = frozenset(kind for hub in HUB_FAMILIES.values() for kind in hub.architectures)


def register_family(
    family: Family, folders: HubFamily | None = None, reference: Any = None
) -> None:
    """Makes a published model known by its name to `load`, `convert` and `parity`.

        deep = dataclasses.replace(interop.FAMILIES["t5"], name="deep_t5", preset=presets.t5)
        architectures = {"deep_t5": "DeepT5ForConditionalGeneration"}
        folders = dataclasses.replace(interop.HUB_FAMILIES["t5"], architectures=architectures)
        fmt.register_family(deep, folders)

    Every program that uses the name registers the family first. Registering it again replaces it.

    Args:
      family: the weight map, with its preset.
      folders: the reader of `config.json` in folders of the model; its `architectures` name their
        `model_type`. None: only files of weights are read and written.
      reference: a module, or another object, with functions `build(config)` and
        `taps(config, module)` like the modules in `flaxformer_mt/parity/references`. None: `parity`
        compares modules and taps that you give.

    Raises:
      TypeError: an argument has another type.
      UserError: the name or a `model_type` belongs to a built-in family, or there is no preset.
    """
    if not isinstance(family, Family):
        raise TypeError(f"family must be a Family, not {type(family).__name__}")
    name = family.name
    if not isinstance(folders, HubFamily | None):
        raise TypeError(f"folders must be a HubFamily, not {type(folders).__name__}")
    if name in _BUILT_IN:
        raise UserError(f"{name} is a built-in family or format: give yours another name")
    if family.preset is None:
        raise UserError(f"{name} has no preset: give Family(preset=...)")
    taken = _MODEL_TYPES.intersection(folders.architectures if folders else ())
    if taken:
        raise UserError(f"{name}: model_type={min(taken)} belongs to a built-in family")
    for table in (HUB_FAMILIES, READERS, WRITERS, REFERENCES):
        table.pop(name, None)
    FAMILIES[name], presets.FAMILIES[name] = family, family.preset
    if folders is not None:
        HUB_FAMILIES[name] = dataclasses.replace(folders, family=family)
        READERS[name] = WRITERS[name] = "huggingface"
    if reference is not None:
        REFERENCES[name] = reference
