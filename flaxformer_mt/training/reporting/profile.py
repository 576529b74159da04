"""Traces of training steps, for Perfetto, XProf and TensorBoard."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from flaxformer_mt import atomic
from flaxformer_mt.errors import UserError, first_line


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
