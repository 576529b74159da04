"""The direction of imports (docs/architecture.md), read from the source."""

import ast
import graphlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "flaxformer_mt"

# What each package may import from the package, besides itself.
LEAVES = {
    "accelerators",
    "atomic",
    "errors",
    "exit_codes",
    "input_files",
    "memory_limits",
    "remote.reading",
    "run_layout",
    "standard_output",
    "urls",
    "writing_systems",
}
ALLOWED = {
    "accelerators": set(),
    "atomic": {"errors", "urls"},
    "run_layout": set(),
    "errors": set(),
    "exit_codes": set(),
    "input_files": {"errors", "remote.reading"},
    "urls": {"errors"},
    "remote": {"atomic", "errors", "run_layout", "runtime", "standard_output", "urls"},
    "memory_limits": {"errors"},
    "writing_systems": set(),
    "config": LEAVES,
    "distributed": LEAVES,
    "cluster_checks": {"distributed"} | LEAVES,
    "interruption": LEAVES,
    "run_reader": {
        "config",
        "data",
        "runs",
        "decoding",
        "evaluation",
        "plotting",
        "trained_model",
    }
    | LEAVES,
    "loading": {
        "config",
        "data.tokenizers",
        "decoding",
        "interop",
        "model.functional",
        "plotting",
        "presets",
        "run_reader",
        "runs",
        "trained_model",
    }
    | LEAVES,
    "objectives": {"config", "model", "data.stream"} | LEAVES,
    "experiment": {
        "config",
        "distributed",
        "interruption",
        "model",
        "objectives",
        "data",
        "runs",
        "training",
        "decoding",
        "evaluation",
        "interop.exports",
        "remote",
        "run_reader",
    }
    | LEAVES,
    "standard_output": set(),
    "runs": {"config", "distributed", "model"} | LEAVES,
    "trained_model": {"config", "data.tokenizers", "distributed", "model", "runs"} | LEAVES,
    "presets": {"config"} | LEAVES,
    "model": {"config"} | LEAVES,
    "data": {
        "config",
        "distributed",
        "runs.data_file",
        "runs.states",
        "runs.manifest",
    }
    | LEAVES,
    "training": {
        "config",
        "model",
        "objectives",
        "data",
        "runs",
        "interruption",
        "trained_model",
    }
    | LEAVES,
    "decoding": {
        "config",
        "model",
        "data.tokenizers",
        "runtime",
        "runs",
        "trained_model",
        "training.sharding",
    }
    | LEAVES,
    "evaluation": {"config", "decoding"} | LEAVES,
    "judges": {"config", "data.tokenizers", "decoding", "interop", "model", "trained_model"}
    | LEAVES,
    "interop": {"config", "model", "runs", "presets"} | LEAVES,
    "parity": {
        "config",
        "model",
        "presets",
        "interop",
        "objectives.losses",
        "training.optimizer",
        "plotting.drawing",
    }
    | LEAVES,
    "serving": {"run_reader", "runs"} | LEAVES,
    "plotting": {"config", "decoding.attention_weights", "runs"} | LEAVES,
}
# Modules that handle whole models, with vocabulary and search options, need more than weight maps.
WHOLE_MODELS = ALLOWED["interop"] | {
    "data.tokenizers",
    "decoding.bad_phrases",
    "decoding.search.options",
    "runs",
    "trained_model",
}
ALLOWED |= dict.fromkeys(
    (
        "interop.convert",
        "interop.formats",
        "interop.vocabulary",
    ),
    WHOLE_MODELS,
)
# Where a heavy or optional package may be imported at all.
ONLY_IN = {
    "torch": {"interop", "parity"},
    "transformers": {"parity.references", "data.tokenizers.hub_tokenizer"},
    "matplotlib": {"parity.reports.plots", "plotting"},
    "pandas": {"run_reader"},
    "orbax": {"runs.checkpoint", "distributed"},
    "sacrebleu": {"evaluation"},
    "sentencepiece": {"data.tokenizers", "interop.formats.jax_server"},
    "ctranslate2": {"interop.formats.ctranslate2", "interop.formats.ctranslate2_spec"},
    "tokenizers": {"data.tokenizers.hub_tokenizer"},
    "subword_nmt": {
        "data.tokenizers.dictionary_tokenizer",
        "data.tokenizers.fsmt_tokenizer",
    },
    "num2words": {"data.corpora.generated_phrases"},
    "babel": {
        "data.corpora.generated_phrases",
        "data.corpora.filters",
        "data.corpora.languages",
    },
    "py3langid": {"data.corpora.languages"},
    "datasets": {"data.corpora.arrow_reader"},
    "numba": {"data.machine_code"},
    "pyarrow": {"data.corpora.arrow_reader"},
    "tensorflow_datasets": {"data.corpora.tfds_reader"},
    "array_record": {"data.corpora.tfds_reader"},
    "tensorboardX": {"training.reporting.trackers"},
    "wandb": {"training.reporting.trackers"},
    "mlflow": {"training.reporting.trackers"},
    "trackio": {"training.reporting.trackers"},
    "tyro": {"cli"},
    "starlette": {"serving.http"},
    "uvicorn": {"serving.http"},
}


def module_name(path):
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


def imported_modules(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            for alias in node.names:
                # A name that is imported from a package may be one of its modules.
                full_name = f"{node.module}.{alias.name}"
                yield full_name if full_name in MODULE_NAMES else node.module


MODULE_NAMES = {
    f"flaxformer_mt.{'.'.join(path.relative_to(PACKAGE).with_suffix('').parts)}".removesuffix(
        ".__init__"
    )
    for path in PACKAGE.rglob("*.py")
}


def is_within(module, packages):
    return any(module == name or module.startswith(f"{name}.") for name in packages)


MODULES = {
    module_name(path): path
    for path in sorted(PACKAGE.rglob("*.py"))
    if path.parent != PACKAGE or path.name != "__init__.py"
}


def _allowed(name):
    """What the module, or the nearest package around it that the table names, may import."""
    parts = name.split(".")
    names = (".".join(parts[:size]) for size in range(len(parts), 0, -1))
    return next(ALLOWED[name] for name in names if name in ALLOWED)


@pytest.mark.parametrize("name", MODULES)
def test_arrows_point_one_way(name):
    package = name.split(".")[0]
    entry = package in ("cli", "__main__")
    for module in imported_modules(MODULES[name]):
        if module.startswith("flaxformer_mt."):
            inside = module.removeprefix("flaxformer_mt.")
            allowed = entry or is_within(inside, _allowed(name) | {package})
            assert allowed, f"{name} must not import {module}"
        top = module.split(".")[0]
        if top in ONLY_IN:
            assert is_within(name, ONLY_IN[top]), f"{name} must not import {top}"


def test_the_documentation_has_the_same_table():
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w.]+)` \| ((?:`[\w.]+`(?:, )?)+) \|$", text, re.MULTILINE)
    documented = {name: set(re.findall(r"[\w.]+", names)) for name, names in rows}
    # The modules that all may import are in a sentence, not in the table.
    table = {name: names - LEAVES for name, names in ALLOWED.items()}
    assert documented == {name: names for name, names in table.items() if names}


def test_nothing_imports_the_entry_points():
    paths = [*PACKAGE.rglob("*.py"), *(ROOT / "configs").glob("*.py")]
    for path in paths:
        if path.parent != PACKAGE / "cli" and path.name != "__main__.py":
            for module in imported_modules(path):
                assert not is_within(module, {"train", "flaxformer_mt.cli"}), path


def imported_files(path):
    """The modules of the package that a file imports anywhere, functions included."""
    modules = {f"flaxformer_mt.{name}" for name in MODULES} | {"flaxformer_mt"}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module in modules:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in modules else node.module for name in names)


def test_no_circle_of_files():
    graph = {f"flaxformer_mt.{name}": {*imported_files(path)} for name, path in MODULES.items()}
    graph["flaxformer_mt"] = {*imported_files(PACKAGE / "__init__.pyi")}
    assert sum(map(len, graph.values())) > 100
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(f"a circle of imports: {' -> '.join(error.args[1])}")
