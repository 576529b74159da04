"""Fields that do not change what a model computes neither block nor change its export."""

import dataclasses

import pytest
from toy_references import ALL, others_are_slow

from flaxformer_mt import interop
from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.config.fields import FieldRole, choices_of, roles_of, type_hints

OF_THE_MODEL = {FieldRole.SHAPES, FieldRole.VOCABULARY, FieldRole.ARCHITECTURE}


def other_value(field):
    """A valid value that is not the default."""
    hint = type_hints(TransformerConfig)[field.name]
    if hint is bool:
        return not field.default
    if hint is float:
        return 0.25
    return next(choice for choice in choices_of(hint) if choice != field.default)


FREE = {
    field.name: other_value(field)
    for field in dataclasses.fields(TransformerConfig)
    # The data type of the parameters is that of the tensors.
    if field.name != "param_dtype" and not roles_of(field) & OF_THE_MODEL
}


@pytest.mark.slow_except("double_projection")
@pytest.mark.parametrize("name", others_are_slow())
def test_a_checkpoint_is_the_same_whatever_the_free_fields(name, tmp_path):
    variant = ALL[name]
    config, params = interop.load(variant.family, variant.build().state_dict(), **variant.hints)
    paths = [tmp_path / f"{name}.safetensors" for name in ("default", "changed")]
    for path, model in zip(paths, (config, dataclasses.replace(config, **FREE)), strict=True):
        interop.save(variant.family, model, params, path)
    assert paths[0].read_bytes() == paths[1].read_bytes()
