"""Traces of training steps, for Perfetto, XProf and TensorBoard."""

import contextlib
import gzip
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
from google.protobuf.empty_pb2 import Empty
from google.protobuf.unknown_fields import UnknownFieldSet

from flaxformer_mt.errors import UserError, first_line
from flaxformer_mt.runs import atomic


class Profile:
    """Traces the steps of a range, into a folder that appears once all of them have run.

    Of a run continued within the range, `steps` are those that remain. Traces are written to
    `folder`/steps_FIRST_to_LAST. Leaving the context discards a trace that is not complete.
    """

    def __init__(self, steps: range, folder: Path) -> None:
        self._steps = steps
        self._folder = folder
        self._trace = contextlib.ExitStack()
        self._has_begun = False

    @contextlib.contextmanager
    def of(
        self, step: int, paused: Callable[[], contextlib.AbstractContextManager[None]]
    ) -> Iterator[None]:
        """Traces the block if it is a step of the range.

        `paused` waits for the devices, and excludes its block from the time of the steps.
        """
        if step not in self._steps:
            yield
            return
        if not self._has_begun:
            self._has_begun = True
            path = self._folder / f"steps_{step}_to_{self._steps[-1]}"
            with paused():
                self._trace.enter_context(_traced(path))
        with jax.profiler.StepTraceAnnotation("train", step_num=step):
            yield
        if step == self._steps[-1]:
            with paused():
                self._trace.close()

    def __enter__(self) -> "Profile":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if error is None:  # Training ended early.
            kind, error = _Incomplete, _Incomplete()
        self._trace.__exit__(kind, error, traceback)


class _Incomplete(Exception):
    """Discards a trace."""


@contextlib.contextmanager
def _traced(path: Path) -> Iterator[None]:
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # Thousands of calls inside JAX, which slow the steps down.
    with (
        contextlib.suppress(_Incomplete),
        atomic.new_folder(path, replace=True) as folder,
    ):
        jax.profiler.start_trace(folder, profiler_options=options)
        try:
            yield
        finally:
            try:
                jax.profiler.stop_trace()
            except jax.errors.JaxRuntimeError as error:
                raise UserError(f"{path} cannot be written: {first_line(error)}") from error
        for trace in folder.rglob("*.trace.json.gz"):
            programs = trace.with_name(trace.name.replace(".trace.json.gz", ".xplane.pb"))
            add_module_names(trace, operation_names(programs.read_bytes()))


def add_module_names(path: Path, names: dict[tuple[str, str], str]) -> None:
    """Adds the names of modules to a trace in Chrome's format, which Perfetto reads.

    Its events are named after the operations of the compiled program, "dot.46", which becomes
    "dot.46 encoder/layers/self_attention/query/dot_general".
    """
    trace = json.loads(gzip.decompress(path.read_bytes()))
    for event in trace["traceEvents"]:
        arguments = event.get("args", {})
        name = names.get((arguments.get("hlo_module"), arguments.get("hlo_op")))
        if name:
            event["name"] = f"{event['name']} {name}"
    path.write_bytes(gzip.compress(json.dumps(trace).encode(), mtime=0))


def operation_names(trace: bytes) -> dict[tuple[str, str], str]:
    """Reads where the operations of compiled programs come from.

    Args:
      trace: an `XSpace`, which contains the programs (`xplane.proto` and `hlo.proto` of OpenXLA).

    Returns:
      By names of program and operation, the modules and the JAX primitive that it was made for.
    """
    # The numbers are those of the fields in the two files.
    names: dict[tuple[str, str], str] = {}
    for plane in _messages(trace, 1):
        if next(_messages(plane, 2)) == b"/host:metadata":
            for module in _messages(plane, 4, 2, 5, 6, 1):
                program = next(_messages(module, 1)).decode()
                for instruction in _messages(module, 3, 2):
                    operation = next(_messages(instruction, 1)).decode()
                    for name in _messages(instruction, 7, 2):
                        # Without "jit(train_step)".
                        names[program, operation] = name.decode().partition("/")[2]
    return names


def _messages(message: bytes, number: int, *inner: int) -> Iterator[bytes]:
    """Yields the values of a field of a protocol buffer that are text, bytes or messages.

    With further numbers, those of fields of these messages.
    """
    for field in UnknownFieldSet(Empty.FromString(message)):
        if field.field_number == number and isinstance(field.data, bytes):
            yield from _messages(field.data, *inner) if inner else (field.data,)
