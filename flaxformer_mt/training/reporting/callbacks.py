"""User callbacks that observe a run and can stop it."""

from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias

import numpy as np

from flaxformer_mt.errors import UserError
from flaxformer_mt.training.reporting.metrics import MetricValues, Writer

Callback: TypeAlias = Callable[[int, str, Mapping[str, float | int | str]], bool | None]
"""Called as `callback(step, split, metrics)` with the metrics of training (split "train", every
`train.log_every` steps) and of each validation ("valid"). The run stops if it returns True."""


class Callbacks(Writer):
    """Calls functions with the metrics of a run; a `metrics.Writer`.

    Their exceptions are kept, and raised again after the checkpoint is saved. Of several
    processes, only the first one calls the functions: `agree` returns whether the flag of any of
    them is True, and is called every `agree_every` steps.
    """

    def __init__(
        self,
        callbacks: Iterable[Callback] = (),
        agree: Callable[[bool], bool] = bool,
        agree_every: int = 1,
    ) -> None:
        if callable(callbacks) or not isinstance(callbacks, Iterable):
            raise TypeError(f"callbacks must be a list of functions, not {_kind(callbacks)}")
        self._callbacks = list(callbacks)
        for each in self._callbacks:
            if not callable(each):
                raise TypeError(f"callbacks must be functions, but one is {_kind(each)}")
        self._agree = agree
        self._agree_every = agree_every
        self._error: BaseException | None = None
        self.is_stopping = False
        """Whether one of the functions has ended the run."""

    def write(self, step: int, split: str, values: MetricValues, is_best: bool = False) -> None:
        for callback in self._callbacks:
            try:
                result = callback(step, split, dict(values))
                if not isinstance(result, bool | np.bool_ | None):
                    raise TypeError(
                        f"a callback must return True to stop the run, or False or None, not "
                        f"{_kind(result)}"
                    )
            except BaseException as error:  # Raised again by `finish`, after the run was saved.
                self._error = self._error or error
                self.is_stopping = True
            else:
                self.is_stopping |= bool(result)

    def should_stop(self, step: int) -> bool:
        """Returns whether the run ends after this step; the same in all processes."""
        if not self._callbacks or step % self._agree_every:
            return False
        self.is_stopping = self._agree(self.is_stopping)
        return self.is_stopping

    def finish(self) -> None:
        if self._callbacks and self._agree(self._error is not None):
            raise self._error or UserError("a callback failed in the first process")


def _kind(value: object) -> str:
    return type(value).__name__
