"""Functions that a run calls after its steps."""

from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeAlias, TypeVar, overload

import numpy as np

from flaxformer_mt.errors import UserError
from flaxformer_mt.objectives.cross_entropy import Metrics
from flaxformer_mt.training.reporting.metrics import MetricValues
from flaxformer_mt.training.state import TrainState


class StepInfo(NamedTuple):
    """A run after a step, as a hook sees it."""

    step: int
    """Number of steps made."""
    state: TrainState
    """Parameters, optimizer state and moving average, on the devices. The next step reuses their
    memory: copy what you keep."""
    sums: Metrics
    """Metrics of this step, each a sum and the weight to divide it by, on the devices. To read one
    waits for the step."""
    metrics: Mapping[str, MetricValues]
    """The lines that `metrics.jsonl` gets after this step, by split: "train" every
    `train.log_every` steps, "valid" after a validation."""
    is_last: bool
    """Whether `train.num_steps` is reached."""


Hook: TypeAlias = Callable[[StepInfo], bool | None]
"""Returns True to stop the run."""

_Hook = TypeVar("_Hook", bound=Hook)


class Hooks:
    """Functions that a run calls after its steps, given as `fmt.train(hooks=...)`.

        hooks = fmt.Hooks()

        @hooks.add_hook(every=100)
        def watch(info):
            kernel = info.state.params["decoder"]["layers"]["self_attention"]["query"]["kernel"]
            print(info.step, jnp.linalg.norm(kernel))

        fmt.train("configs/quickstart.py", "runs/quickstart", hooks=hooks)

    A run calls them in the order in which they were added.
    """

    def __init__(self) -> None:
        self._hooks: list[tuple[Hook, int]] = []

    @overload
    def add_hook(self, function: _Hook, *, every: int = 1) -> _Hook: ...
    @overload
    def add_hook(self, *, every: int = 1) -> Callable[[_Hook], _Hook]: ...
    def add_hook(
        self, function: _Hook | None = None, *, every: int = 1
    ) -> _Hook | Callable[[_Hook], _Hook]:
        """Adds a function, and returns it; without one, returns a decorator that does so.

        Args:
          function: called as `function(info)` with a `StepInfo`, in every process. It returns True
            to stop the run after this step, else False or None.
          every: steps between the calls, which are after multiples of this number and after the
            last step.

        Raises:
          TypeError: `function` cannot be called.
          UserError: `every` is not at least 1.
        """
        if function is None:
            return lambda function: self.add_hook(function, every=every)
        if not callable(function):
            raise TypeError(f"a hook must be a function, not {type(function).__name__}")
        if every < 1:
            raise UserError(f"every={every}: must be at least 1")
        self._hooks.append((function, every))
        return function

    def __len__(self) -> int:
        return len(self._hooks)

    def __call__(self, info: StepInfo) -> bool:
        """Calls the functions that are due, in their order; returns whether any wants to stop."""
        results = [
            _flag(function(info))
            for function, every in self._hooks
            if info.is_last or info.step % every == 0
        ]
        return any(results)


class SavedFirst:
    """Hooks whose exceptions are kept until the run is saved, and raised by `finish`.

    Several processes have to stop after the same step: `agree` returns whether the flag of any of
    them is True, and is called every `agree_every` steps.
    """

    def __init__(self, hooks: Hooks, agree: Callable[[bool], bool], agree_every: int) -> None:
        self._hooks = hooks
        self._agree = agree
        self._agree_every = agree_every
        self._error: BaseException | None = None
        self.is_stopping = False
        """Whether a hook has ended the run."""

    def __call__(self, info: StepInfo) -> bool:
        """Calls the hooks; returns whether the run ends after this step, in all processes."""
        if self._error is None:
            try:
                self.is_stopping |= self._hooks(info)
            except BaseException as error:  # Raised again by `finish`, after the run was saved.
                self._error, self.is_stopping = error, True
        if not self._hooks or info.step % self._agree_every:
            return False
        self.is_stopping = self._agree(self.is_stopping)
        return self.is_stopping

    def finish(self) -> None:
        """Raises what a hook has raised; in other processes, that one has failed."""
        if self._hooks and self._agree(self._error is not None):
            raise self._error or UserError("a hook failed in another process")


def _flag(result: object) -> bool:
    if not isinstance(result, bool | np.bool_ | None):
        raise TypeError(
            f"a hook must return True to stop the run, or False or None, not "
            f"{type(result).__name__}"
        )
    return bool(result)
