"""Fields that do not change what a model computes neither block nor change its export."""

import dataclasses

import pytest
from toy_references import ALL, others_are_slow

from flaxformer_mt import interop
from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.config.fields import FieldRole, choices_of, roles_of, type_hints
from flaxformer_mt.errors import UserError
from flaxformer_mt.interop.convert import OWN, WRITERS, convert
from flaxformer_mt.interop.formats.bundle import ModelBundle

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
RUNNING = {
    field.name: other_value(field)
    for field in dataclasses.fields(TransformerConfig)
    if roles_of(field) == {FieldRole.RUNNING} or field.name == "scan_layers"
}


def test_remat_is_only_about_running():
    assert RUNNING == {"remat": "projections", "scan_layers": True}
    assert RUNNING.items() <= FREE.items()


@pytest.mark.slow_except("double_projection")
@pytest.mark.parametrize("name", others_are_slow())
def test_a_checkpoint_is_the_same_whatever_the_free_fields(name, tmp_path):
    variant = ALL[name]
    config, params = interop.load(variant.family, variant.build().state_dict(), **variant.hints)
    paths = [tmp_path / f"{name}.safetensors" for name in ("default", "changed")]
    for path, model in zip(paths, (config, dataclasses.replace(config, **FREE)), strict=True):
        interop.save(variant.family, model, params, path)
    assert paths[0].read_bytes() == paths[1].read_bytes()


@pytest.mark.slow_except("marian")
@pytest.mark.parametrize("target", WRITERS)
def test_a_run_exports_to_the_same_formats_however_it_was_computed(target, trained_run, tmp_path):
    bundle = ModelBundle.of_run(trained_run)
    model = dataclasses.replace(bundle.config.model, **RUNNING)
    config = dataclasses.replace(bundle.config, model=model)
    dataclasses.replace(bundle, config=config).write_run(tmp_path / "run")
    exported = {}
    for name, run in (("default", trained_run), ("changed", tmp_path / "run")):
        try:
            # Values of certificates differ by rounding.
            convert(OWN, target, run, tmp_path / name, certified=False)
        except UserError as error:  # Some formats need other special tokens or vocabularies.
            exported[name] = str(error).replace(str(run), "run")
            continue
        files = [path for path in (tmp_path / name).rglob("*") if path.is_file()]
        exported[name] = {path.relative_to(tmp_path / name): path.read_bytes() for path in files}
    if target == "jax":  # The compiled functions differ.
        exported = {name: files.keys() for name, files in exported.items()}
    assert exported["changed"] == exported["default"]
    possible = ("marian", "ctranslate2", "jax")
    assert isinstance(exported["default"], str) == (target not in possible)
