"""How long a decode step takes, by its sequences and their contexts. Torch-free.

A step reads the weights once, which takes the same for few sequences as for many; each sequence adds a little
arithmetic, and each token of context its KV. So seconds are linear in these:

    seconds = step_s + sequences * sequence_s + context tokens * context_token_s

The three are fitted to what was measured while the worker runs, recent measurements first: least squares
of the relative error with exponentially decaying weights, where none may be negative. Until the load has
varied, costs that cannot be separated are attributed to the step itself, but for what was measured at the
start.

That is (`StepCurve`) what each batch takes without contexts: a GPU's steps are of padded batches, so they
take longer by jumps; step_s is of one sequence, and with more it is as many times longer as the curve says.
And the time to read the KV of a token at the device's memory bandwidth, the prior of context_token_s: without
it, a worker whose load hardly varies would attribute contexts to the step, and predict that another sequence
is nearly free.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

# The weight of a measurement after each further one.
_DECAY = 0.98
# Units in which the variables are of the order of one, and a ridge: a small weight of the prior, for all but
# the first. Measurements of a light load, or of one that hardly varies, must not outweigh what reading a
# token's KV takes; a load that varies by a tenth does.
_SCALES = np.array([1.0, 64.0, 65_536.0])
_RIDGE = np.array([1e-9, 1e-4, 1e-3])
# A batch is padded as if up to so many more sequences were admitted before it runs.
_MORE = 2
# Where steps were measured at the start, measurements that are so many times shorter or longer than predicted
# are outliers: something delayed steps, or was not counted. They would make a light load look as dear as a
# heavy one. Up to so many are discarded; each other measurement allows a part of one more.
_OUTLIER_BELOW, _OUTLIER_ABOVE = 0.5, 1.1
_MOST_OUTLIERS, _ONE_MORE = 8, 0.25

Floats = npt.NDArray[np.float64]


class StepCurve(NamedTuple):
    """Seconds of a step of so many sequences without contexts: linear between these numbers, which ascend.
    Without any measured, steps take as long with any number. `context_token_s`: seconds to read the KV of a
    token; 0 where that was not measured."""

    sequences: tuple[float, ...] = (1.0,)
    seconds: tuple[float, ...] = (0.0,)
    context_token_s: float = 0.0

    @classmethod
    def of_batches(
        cls, batches: Sequence[int], seconds: Sequence[float], context_token_s: float = 0.0
    ) -> Self:
        """`seconds` of steps that are padded to `batches` sequences, ascending; one that takes less than a
        smaller one counts as that. Where few places of a batch are left, a step may be padded to the next
        size already, for sequences that are admitted before it runs: there the curve begins to rise."""
        xs, ys, before = [1.0], [seconds[0]], 0
        for batch, took in zip(batches, np.maximum.accumulate(seconds), strict=True):
            more = min(_MORE, (batch - before) / 2)
            if ys[-1] < took:
                xs.append(before + 1.0)
                ys.append(float(took))
            if batch - more > xs[-1]:
                xs.append(batch - more)
                ys.append(float(took))
            before = batch
        return cls(tuple(xs), tuple(ys), context_token_s)

    @property
    def first_s(self) -> float:
        """With one sequence; 0 where nothing was measured."""
        return self.seconds[0]

    def times(self, sequences: float) -> float:
        """How many times longer a step is than with one sequence."""
        if not self.first_s:
            return 1.0
        return float(np.interp(sequences, self.sequences, self.seconds)) / self.first_s


NO_CURVE = StepCurve()


class DecodeRates(NamedTuple):
    """Seconds of a step, which `curve` makes longer, and in addition for each of its sequences and for each
    token of their contexts."""

    step_s: float = 0.0
    sequence_s: float = 0.0
    context_token_s: float = 0.0
    curve: StepCurve = NO_CURVE

    def seconds(self, sequences: float, context_tokens: float) -> float:
        """Predicted seconds of a step; 0 before any was measured."""
        step_s = self.step_s * self.curve.times(sequences)
        return step_s + sequences * self.sequence_s + context_tokens * self.context_token_s


class DecodeCost:
    """Fits `DecodeRates` to measured steps."""

    def __init__(self, curve: StepCurve = NO_CURVE) -> None:
        self._curve = curve
        self._prior = np.array([0.0, 0.0, curve.context_token_s]) * _SCALES
        self._squares: Floats = np.zeros((3, 3))
        self._products: Floats = np.zeros(3)
        self._outliers = 0.0
        self._rates = DecodeRates(curve.first_s, 0.0, curve.context_token_s, curve)

    def observe(self, sequences: float, context_tokens: float, seconds: float) -> None:
        """Records the mean of recent steps; `seconds` is above 0."""
        if self._curve.context_token_s and self._is_discarded(sequences, context_tokens, seconds):
            return
        values = np.array([self._curve.times(sequences), sequences, context_tokens]) / _SCALES / seconds
        self._squares = _DECAY * self._squares + np.outer(values, values)
        self._products = _DECAY * self._products + values
        self._rates = self._best_fit()

    def rates(self) -> DecodeRates:
        """The best fit; before any measurement what was measured at the start."""
        return self._rates

    def _is_discarded(self, sequences: float, context_tokens: float, seconds: float) -> bool:
        predicted = self._rates.seconds(sequences, context_tokens)
        if _OUTLIER_BELOW * predicted <= seconds <= _OUTLIER_ABOVE * predicted:
            self._outliers = max(0.0, self._outliers - _ONE_MORE)
            return False
        self._outliers = min(self._outliers + 1, _MOST_OUTLIERS + 1)
        return self._outliers <= _MOST_OUTLIERS

    def _best_fit(self) -> DecodeRates:
        fits = [self._fit(np.array((True, *kept))) for kept in product((True, False), repeat=2)]
        best = min((fit for fit in fits if fit.min() >= 0), key=self._error)
        step_s, sequence_s, context_token_s = (float(value) for value in best / _SCALES)
        return DecodeRates(step_s, sequence_s, context_token_s, self._curve)

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
