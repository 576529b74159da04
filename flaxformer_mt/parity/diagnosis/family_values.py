"""Our model as the equations of `site_operations`, whose values become the reference's."""

import numpy as np

from flaxformer_mt.parity.diagnosis.diagnose import Diagnosis, diagnose, in_float64
from flaxformer_mt.parity.diagnosis.inputs import DiagnosisInputs, with_values
from flaxformer_mt.parity.diagnosis.site_operations import NotComputed, operation


class FamilyValues:
    """The values of our model, see `findings.Model`."""

    def __init__(self, inputs: DiagnosisInputs) -> None:
        self._inputs = in_float64(inputs)

    def predict(self, site: str) -> np.ndarray | None:
        """Computes the value of a site; None for what bare layers get."""
        try:
            return operation(self._inputs, site).value()
        except NotComputed:
            return None

    def explain(self, site: str, expected: np.ndarray) -> Diagnosis | None:
        """Returns the known cause of a difference."""
        return diagnose(self._inputs._replace(site=site))

    def set(self, site: str, predicted: np.ndarray, expected: np.ndarray | None) -> None:
        """Sets the value of a site."""
        value = predicted if expected is None else np.asarray(expected, np.float64)
        self._inputs = with_values(self._inputs, {site: value})
