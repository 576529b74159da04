"""The package as scripts and notebooks use it: every public function is typed, and refuses values
of the wrong type in words."""

import inspect
import subprocess
import sys
import textwrap

import pytest

import flaxformer_mt


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
    assert [line.split(":")[1] for line in errors] == ["12", "13"], done.stdout
