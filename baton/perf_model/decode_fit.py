"""Fits the costs of decode steps to measured ones. Torch-free.

Least squares of the relative error with exponentially decaying weights, where no cost may be negative. Until
the load has varied, costs that cannot be separated are attributed to the step itself, except for what was
measured at the start: there steps of each batch size are timed without contexts, and the fit is of how many
times longer steps are than those. And the time to read the KV of a token at the device's memory bandwidth is
the prior of its cost: without it, a worker whose load hardly varies would attribute contexts to the step, and
predict that another sequence is nearly free.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import numpy.typing as npt

from baton.perf_model.step_costs import StepCosts

# The weight of a measurement after each further one.
_DECAY = 0.98
# Units in which the variables are of the order of one, and a ridge: a small weight of the prior, for all but
# the first. Measurements of a light load, or of one that hardly varies, must not outweigh what reading a
# token's KV takes; a load that varies by a tenth does.
_SCALES = np.array([1.0, 64.0, 65_536.0])
_RIDGE = np.array([1e-9, 1e-4, 1e-3])
# Ratios of a measurement to its prediction below and above which it is an outlier, if steps were measured at
# the start: something delayed steps, or was not counted. Outliers would make a light load look as dear as a
# heavy one. Up to `_MOST_OUTLIERS` are discarded; each other measurement allows a part of one more.
_OUTLIER_BELOW, _OUTLIER_ABOVE = 0.5, 1.1
_MOST_OUTLIERS, _ONE_MORE = 8, 0.25

Floats = npt.NDArray[np.float64]


class DecodeFit:
    """Costs of decode steps as measured while a worker runs. `costs`: the best fit; before any measurement
    what was measured at the start."""

    def __init__(self, measured: StepCosts | None = None) -> None:
        """`measured`: at the start (`StepCosts.of_batches`); None: nothing."""
        self.costs = self._measured = measured or StepCosts()
        self._prior = np.array([0.0, 0.0, self.costs.decode_context_token_s]) * _SCALES
        self._squares: Floats = np.zeros((3, 3))
        self._products: Floats = np.zeros(3)
        self._outliers = 0.0

    def observe(
        self, sequences: float, context_tokens: float, seconds: float, rows: float | None = None
    ) -> None:
        """Records the mean of recent steps; `seconds` is above 0. `rows`: those of their batches, where these
        are more than their sequences."""
        rows = sequences if rows is None else rows
        predicted_s = self.costs.decode_s(sequences, context_tokens, rows)
        if self._measured.decode_context_token_s and self._is_discarded(predicted_s, seconds):
            return
        values = np.array([self._measured.times(rows), sequences, context_tokens]) / _SCALES / seconds
        self._squares = _DECAY * self._squares + np.outer(values, values)
        self._products = _DECAY * self._products + values
        self.costs = self._best_fit()

    def _is_discarded(self, predicted: float, seconds: float) -> bool:
        if _OUTLIER_BELOW * predicted <= seconds <= _OUTLIER_ABOVE * predicted:
            self._outliers = max(0.0, self._outliers - _ONE_MORE)
            return False
        self._outliers = min(self._outliers + 1, _MOST_OUTLIERS + 1)
        return self._outliers <= _MOST_OUTLIERS

    def _best_fit(self) -> StepCosts:
        fits = [self._fit(np.array((True, *kept))) for kept in product((True, False), repeat=2)]
        best = min((fit for fit in fits if fit.min() >= 0), key=self._error)
        step_s, sequence_s, context_token_s = (float(value) for value in best / _SCALES)
        factor = step_s / self._measured.decode_step_s if self._measured.decode_step_s else 1.0
        return replace(
            self._measured,
            decode_step_s=step_s,
            decode_sequence_s=sequence_s,
            decode_context_token_s=context_token_s,
            decode_curve=self._measured.decode_curve.scaled(factor),
        )

    def _fit(self, kept: npt.NDArray[np.bool_]) -> Floats:
        """Least squares with only these variables. Fitted with the first alone, the step is a mean and so
        not negative."""
        ridge = _RIDGE * self._squares[0, 0]
        squares, products = self._squares + np.diag(ridge), self._products + ridge * self._prior
        found = np.zeros(3)
        found[kept] = np.linalg.solve(squares[np.ix_(kept, kept)], products[kept])
        return found

    def _error(self, fit: Floats) -> float:
        """The squared relative error of a fit, less what all have in common."""
        penalty = float(_RIDGE @ (fit - self._prior) ** 2) * float(self._squares[0, 0])
        return float(fit @ self._squares @ fit - 2 * fit @ self._products) + penalty
