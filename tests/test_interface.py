"""The package as scripts and notebooks use it: every public function is typed, and refuses values
of the wrong type in words."""

import ast
import dataclasses
import inspect
import re
import subprocess
import sys
import textwrap
import typing

import pytest
from documentation.pages import ROOT

import flaxformer_mt
import flaxformer_mt as fmt
from flaxformer_mt.evaluation import MetricFunction
from flaxformer_mt.plotting.history import Axis


def public_functions():
    for name in flaxformer_mt.__all__:
        value = getattr(flaxformer_mt, name)
        if inspect.isclass(value) and value.__module__.startswith("flaxformer_mt"):
            for key, member in vars(value).items():
                function = getattr(member, "__func__", getattr(member, "fget", member))
                is_own = getattr(function, "__module__", "").startswith("flaxformer_mt")
                if not key.startswith("_") and inspect.isfunction(function) and is_own:
                    yield f"{name}.{key}", function
        elif inspect.isfunction(value):
            yield name, value


FUNCTIONS = dict(public_functions())


@pytest.mark.parametrize("name", FUNCTIONS)
def test_public_functions_are_typed_and_documented(name):
    function = FUNCTIONS[name]
    assert inspect.getdoc(function), name
    signature = inspect.signature(function)
    assert signature.return_annotation is not inspect.Signature.empty, name
    parameters = [
        each for each in signature.parameters.values() if each.name not in ("self", "cls")
    ]
    untyped = [each.name for each in parameters if each.annotation is inspect.Parameter.empty]
    assert not untyped, f"{name}: {untyped}"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda fmt, run: fmt.train(5, "x"),
            "config must be an ExperimentConfig or a path, not int",
        ),
        (lambda fmt, run: fmt.train(run.config, None), "workdir must be a path, not NoneType"),
        (lambda fmt, run: fmt.train(run.config, "x", hooks=print), "hooks must be fmt.Hooks, not"),
        (lambda fmt, run: fmt.load("x", family=1), "family must be a string, not int"),
        (lambda fmt, run: fmt.Translator.from_run(3), "folders must be a list of paths, not int"),
        (lambda fmt, run: run.model(1.5), 'checkpoint must be "best", "last" or a step, not float'),
        (lambda fmt, run: run.evaluate("a", ["b"]), "sources must be a list of strings, not a"),
        (
            lambda fmt, run: run.fine_tuning_config(train={"num_step": 5}),
            "train has no field num_step; did you mean num_steps?",
        ),
        (lambda fmt, run: fmt.ExperimentConfig(model=5), "model=5: must be a TransformerConfig"),
    ],
)
def test_wrong_types_are_errors_in_words(trained_run, tmp_path, monkeypatch, call, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TypeError) as caught:
        call(flaxformer_mt, flaxformer_mt.Run(trained_run))
    assert message in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_types_of_the_package_are_seen_by_mypy(tmp_path):
    """The package has the marker py.typed, so that types reach programs that use it."""
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent(
            """
            import flaxformer_mt as fmt

            hooks = fmt.Hooks()

            @hooks.add_hook(every=5)
            def watch(info: fmt.StepInfo) -> bool:
                return info.step > 5

            run = fmt.train("config.py", "runs/a", hooks=hooks)
            text: str = run.translator().translate("one")
            texts: list[str] = fmt.load("opus").translate(["one"])
            steps: list[int] = [each.step for each in run.checkpoints]
            run.plot(["loss"], x="hours").save("curves.png")
            fmt.Run(5)
            run.plot(x="days")
            """
        )
    )
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", str(program)],
        capture_output=True,
        text=True,
        check=False,
    )
    errors = [line for line in done.stdout.splitlines() if ": error: " in line]
    assert [line.split(":")[1] for line in errors] == ["15", "16"], done.stdout


TYPES = re.findall(r"^### (\w+)$", (ROOT / "docs/reference-types.md").read_text("utf-8"), re.M)
"""Types that others return or take: not all that they name themselves is public."""


def types_in(hint):
    """The classes of the package that a type consists of."""
    if isinstance(hint, list | tuple):
        hints = hint
    else:
        hints = [*typing.get_args(hint), typing.get_origin(hint)]
        if inspect.isclass(hint) and hint.__module__.startswith("flaxformer_mt"):
            yield hint
    for each in filter(None, hints):
        yield from types_in(each)


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name.split(".")[0] not in TYPES])
def test_types_of_public_signatures_are_public(name):
    function = FUNCTIONS[name]
    public = {each: getattr(flaxformer_mt, each) for each in flaxformer_mt.__all__}
    # Some types are imported for type checkers alone.
    names = {**public, "MetricFunction": MetricFunction, "Axis": Axis}
    hints = typing.get_type_hints(function, {**names, **function.__globals__})
    private = {each for hint in hints.values() for each in types_in(hint)} - {*public.values()}
    assert not private


@pytest.mark.parametrize("name", FUNCTIONS)
def test_public_functions_name_their_arguments(name):
    for each in inspect.signature(FUNCTIONS[name]).parameters.values():
        assert each.kind is not each.VAR_KEYWORD or each.annotation is not typing.Any


@pytest.mark.parametrize(
    ("options", "config", "own"),
    [
        (fmt.DecodeOptions, fmt.DecodeConfig, {"beam_size", "n_best"}),
        (fmt.PackingOptions, fmt.DataConfig, None),
        (fmt.VocabularyOptions, fmt.DataConfig, None),
    ],
)
def test_options_are_fields_of_the_configuration(options, config, own):
    fields = typing.get_type_hints(config)
    found = typing.get_type_hints(options)
    for name, hint in found.items():
        assert hint in (fields[name], fields[name] | None)
    if own is not None:
        assert {each.name for each in dataclasses.fields(config)} - own == {*found}


def test_options_without_an_effect_are_refused():
    pairs = [("a dog", "ein Hund")] * 20
    with pytest.raises(TypeError, match="there is no option hold_out"):
        fmt.packed(pairs, None, None, rows=1, length=8, hold_out=5)
    with pytest.raises(TypeError, match="there is no option tokeniser; did you mean tokenizer"):
        fmt.train_tokenizers(pairs, tokeniser="word")


def test_messages_of_functions_name_arguments_rather_than_options():
    """Scripts have no command line. "(--option)" after the argument is for both."""
    commands_only = ("cli/", "parity/", "interop/", "serving/", "decoding/line_format.py")
    options = re.compile(
        r"--(workdir|publish|coordinator|num-processes|process-id|cluster|accept-changes|"
        r"checkpoint|output|run|(model|data|train|optimizer|decode|parallel)\.)"
    )
    package, found = ROOT / "flaxformer_mt", []
    for path in package.rglob("*.py"):
        name = path.relative_to(package).as_posix()
        tree = ast.parse(path.read_text())
        docs = {
            node.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in docs:
                text = re.sub(r"\(--[\w-]+\)|(flaxformer-mt|train\.py) .*|--run-", "", node.value)
                found += [(name, text)] * bool(options.search(text))
    assert not [each for each in found if not each[0].startswith(commands_only)]
