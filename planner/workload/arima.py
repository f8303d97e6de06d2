"""ARIMA on the few directions in which the length histograms of recent steps move together. Pure.

A histogram of a hundred bins moves in few ways: as tasks come and go, whole ranges of lengths rise and fall together.
Bins are scaled so that sampling noise is alike in all (correspondence analysis), steps are smoothed over time so that
noise does not pass for movement, and the leading directions are kept as components. What lies outside of them is left
to an average.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

MIN_STEPS = 10  # a shorter history has no movement to tell from noise
MAX_COMPONENTS = 2  # more follow noise: measured with `orchestrrl bench --only forecast`
SMOOTHING_STEPS = 4.0  # standard deviation of the kernel over time
# Level with noise (an average), with a slope that follows it, with one that dies out; and a level that stays.
ORDERS = ((0, 1, 1), (0, 2, 2), (1, 1, 1), (0, 0, 0))
BURNT_STEPS = 2  # left out of every likelihood, so that orders with unequal differencing compare on the same steps
# How far the average is moved towards where the components are expected. Half of the way is the mean of two forecasts
# whose errors differ, and measured better than the whole.
AHEAD_SHARE = 0.5
ASTRAY = 4.0  # mean squared forecast error by the variance that the fit gave it

Shares = NDArray[np.float64]  # [bin] or [step, bin]


class NotForecast(Exception):
    """ARIMA has no forecast, and why."""


@dataclass(frozen=True, slots=True)
class LengthComponent:
    """One forecast component: the direction's coordinate in the next step, in units of the noise of one request."""

    order: tuple[int, int, int]
    mean: float
    std: float  # of the step's own coordinate, sampling noise included


@dataclass(frozen=True, slots=True)
class FittedArima:
    """The order and parameters that one component was fitted with. `scale` is what its values were divided by."""

    order: tuple[int, int, int]
    parameters: tuple[float, ...]
    scale: float
    aicc: float  # Akaike's information criterion, corrected for short series

    def forecast(self, values: NDArray[np.float64]) -> tuple[float, float]:
        """Mean and standard deviation of the value after `values`."""
        found = _arima(values / self.scale, self.order).filter(np.array(self.parameters)).get_forecast(1)
        mean, std = float(found.predicted_mean[0]), float(found.se_mean[0])
        if not np.isfinite(mean) or not np.isfinite(std):
            raise NotForecast(f"order {self.order} forecasts {mean}")
        return mean * self.scale, std * self.scale


@dataclass(frozen=True, slots=True, eq=False)
class LengthComponents:
    """Directions, and a model of the movement along each."""

    centre: Shares  # [bin]
    bin_scale: Shares  # [bin], square root of the share
    directions: NDArray[np.float64]  # [bin, component], of unit length
    models: tuple[FittedArima, ...]

    def coordinates(self, history: Shares) -> NDArray[np.float64]:
        """[step, component], or [component] of a single step."""
        projected: NDArray[np.float64] = ((history - self.centre) / self.bin_scale) @ self.directions
        return projected

    def forecast(self, history: Shares, average: Shares) -> tuple[Shares, tuple[LengthComponent, ...]]:
        """The next step: `average`, moved along the components towards where they are expected."""
        values = self.coordinates(history)
        found = [model.forecast(values[:, place]) for place, model in enumerate(self.models)]
        ahead = np.array([mean for mean, _ in found]) - self.coordinates(average)
        shares = np.maximum(average + AHEAD_SHARE * self.bin_scale * (self.directions @ ahead), 0.0)
        told = tuple(LengthComponent(model.order, *at) for model, at in zip(self.models, found, strict=True))
        return shares / shares.sum(), told

    def astray(self, history: Shares, steps: int) -> bool:
        """Whether the last `steps` forecasts missed by far more than the models say that they do."""
        if steps < 2:
            return False
        values = self.coordinates(history)
        squares = []
        for place, model in enumerate(self.models):
            filtered = _arima(values[:, place] / model.scale, model.order).filter(np.array(model.parameters))
            squares += (filtered.standardized_forecasts_error[0, -steps:] ** 2).tolist()
        return float(np.mean(squares)) > ASTRAY


def fit_components(history: Shares, requests: float) -> LengthComponents:
    """Components of `history` [step, bin] with steps of about `requests`. Raises NotForecast."""
    steps = len(history)
    if steps < MIN_STEPS:
        raise NotForecast(f"{steps} steps are fewer than {MIN_STEPS}")
    centre = history.mean(axis=0)
    bin_scale = np.sqrt(centre + 0.5 / requests)
    steps_apart = np.subtract.outer(np.arange(steps), np.arange(steps))
    kernel = np.exp(-0.5 * (steps_apart / SMOOTHING_STEPS) ** 2)
    smooth = (kernel / kernel.sum(axis=1, keepdims=True)) @ history
    _, strengths, directions = np.linalg.svd((smooth - smooth.mean(axis=0)) / bin_scale, full_matrices=False)
    used = [place for place in range(min(MAX_COMPONENTS, len(strengths))) if strengths[place] > 1e-9]
    if not used:
        raise NotForecast(f"{steps} steps do not differ")
    # Signs are free; the largest entry is made positive, so that the same history gives the same components.
    chosen = directions[used]
    chosen = chosen * np.sign(chosen[np.arange(len(used)), np.abs(chosen).argmax(axis=1)])[:, None]
    found = LengthComponents(centre, bin_scale, chosen.T, ())
    values = found.coordinates(history)
    return LengthComponents(
        centre, bin_scale, chosen.T, tuple(choose_order(values[:, place]) for place in range(len(used)))
    )


def choose_order(values: NDArray[np.float64], orders: Sequence[tuple[int, int, int]] = ORDERS) -> FittedArima:
    """The order with the least AICc. Raises NotForecast where none can be fitted."""
    scale = float(values.std())
    if not np.isfinite(scale) or scale <= 0:
        raise NotForecast(f"a component's standard deviation is {scale}")
    faults, best = [], None
    for order in orders:
        try:
            model = _fit(values, order, scale)
        except (ValueError, np.linalg.LinAlgError) as error:
            faults.append(f"order {order}: {error}")
            continue
        if best is None or model.aicc < best.aicc:
            best = model
    if best is None:
        raise NotForecast("; ".join(faults))
    return best


def _fit(values: NDArray[np.float64], order: tuple[int, int, int], scale: float) -> FittedArima:
    model = _arima(values / scale, order)
    parameters, seen = len(model.param_names), len(values) - BURNT_STEPS
    if seen <= parameters + 1:
        raise ValueError(f"{len(values)} values are too few for {parameters} parameters")
    # Zeros to begin with, the variance apart: what statsmodels would begin with warns where it has to give up.
    start = np.zeros(parameters)
    start[-1] = 1.0
    found = model.fit(start_params=start, cov_type="none", method_kwargs={"warn_convergence": False})
    aicc = -2.0 * found.llf + 2.0 * parameters * seen / (seen - parameters - 1)
    if not np.isfinite(aicc):
        raise ValueError(f"likelihood is {found.llf}")
    return FittedArima(order, tuple(found.params.tolist()), scale, float(aicc))


def _arima(values: NDArray[np.float64], order: tuple[int, int, int]) -> Any:
    # Imported late: it takes a second, and most commands never forecast.
    from statsmodels.tsa.arima.model import ARIMA

    model = ARIMA(values, order=order, trend="n" if order[1] else "c")
    model.ssm.loglikelihood_burn = BURNT_STEPS
    return model
