"""Forecast length histograms with ARIMA, along the few directions in which their bins move together. Has no side
effects.

A histogram of a hundred bins has few directions of movement: as tasks come and go, whole ranges of lengths rise and
fall together. Bins are scaled so that sampling noise is equal in all bins (correspondence analysis). Steps are smoothed
over time, so that noise is not interpreted as movement, and the leading directions are kept as components. In all other
directions, the forecast is an average.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

MIN_STEPS = 10  # movement cannot be distinguished from noise in a shorter history
MAX_COMPONENTS = 2  # more would follow noise: measured with `orchestrrl bench --only forecast`
SMOOTHING_STEPS = 4.0  # standard deviation of the kernel over time
# Exponential smoothing of the level, with a linear trend, with a damped trend; and a constant level.
ORDERS = ((0, 1, 1), (0, 2, 2), (1, 1, 1), (0, 0, 0))
BURNT_STEPS = 2  # excluded from every likelihood, so that orders with different differencing use the same steps
# Share of the way from the average to the components' forecast. Half of the way is the mean of two forecasts with
# different errors, and was measured to be better than the whole way.
AHEAD_SHARE = 0.5
ASTRAY = 4.0  # ratio of mean squared forecast error to fitted variance above which a fit has failed

Shares = NDArray[np.float64]  # [bin] or [step, bin]


class NotForecast(Exception):
    """Raised if ARIMA cannot make a forecast; the message is the reason."""


@dataclass(frozen=True, slots=True)
class LengthComponent:
    """The forecast of one component's coordinate in the next step, in units of the sampling noise of one request."""

    order: tuple[int, int, int]
    mean: float
    std: float  # of the step's coordinate, sampling noise included


@dataclass(frozen=True, slots=True)
class FittedArima:
    """The order and the parameters of the ARIMA model of one component. The component's values were divided by
    `scale`."""

    order: tuple[int, int, int]
    parameters: tuple[float, ...]
    scale: float
    aicc: float  # Akaike's information criterion, corrected for short series

    def forecast(self, values: NDArray[np.float64]) -> tuple[float, float]:
        """Return the forecast mean and standard deviation of the value after `values`. Raises NotForecast if either is
        not finite."""
        found = _arima(values / self.scale, self.order).filter(np.array(self.parameters)).get_forecast(1)
        mean, std = float(found.predicted_mean[0]), float(found.se_mean[0])
        if not np.isfinite(mean) or not np.isfinite(std):
            raise NotForecast(
                f"the forecast of order {self.order} must be finite, got mean {mean} and standard deviation {std}"
            )
        return mean * self.scale, std * self.scale


@dataclass(frozen=True, slots=True, eq=False)
class LengthComponents:
    """The directions in which length histograms move, with a fitted model for each direction."""

    centre: Shares  # [bin]
    bin_scale: Shares  # [bin], square root of the share
    directions: NDArray[np.float64]  # [bin, component], of unit length
    models: tuple[FittedArima, ...]

    def coordinates(self, history: Shares) -> NDArray[np.float64]:
        """Return the coordinates of `history` as an array indexed by step and component, or only by component if
        `history` is a single step."""
        projected: NDArray[np.float64] = ((history - self.centre) / self.bin_scale) @ self.directions
        return projected

    def forecast(self, history: Shares, average: Shares) -> tuple[Shares, tuple[LengthComponent, ...]]:
        """Return the forecast shares of the next step, and the forecast of each component.

        The shares are `average`, moved part of the way along the components towards their forecasts.
        """
        values = self.coordinates(history)
        found = [model.forecast(values[:, place]) for place, model in enumerate(self.models)]
        ahead = np.array([mean for mean, _ in found]) - self.coordinates(average)
        shares = np.maximum(average + AHEAD_SHARE * self.bin_scale * (self.directions @ ahead), 0.0)
        forecasts = tuple(LengthComponent(model.order, *at) for model, at in zip(self.models, found, strict=True))
        return shares / shares.sum(), forecasts

    def astray(self, history: Shares, steps: int) -> bool:
        """Return whether the mean squared error of the last `steps` forecasts was far larger than the models'
        variances."""
        if steps < 2:
            return False
        values = self.coordinates(history)
        squares = []
        for place, model in enumerate(self.models):
            filtered = _arima(values[:, place] / model.scale, model.order).filter(np.array(model.parameters))
            squares += (filtered.standardized_forecasts_error[0, -steps:] ** 2).tolist()
        return float(np.mean(squares)) > ASTRAY


def fit_components(history: Shares, requests: float) -> LengthComponents:
    """Return the components of `history`, an array indexed by step and bin. Each step has about `requests` requests.

    Raises NotForecast if there are too few steps, all steps are equal, or a component has no model.
    """
    steps = len(history)
    if steps < MIN_STEPS:
        raise NotForecast(f"a forecast requires at least {MIN_STEPS} steps, got {steps}")
    centre = history.mean(axis=0)
    bin_scale = np.sqrt(centre + 0.5 / requests)
    steps_apart = np.subtract.outer(np.arange(steps), np.arange(steps))
    kernel = np.exp(-0.5 * (steps_apart / SMOOTHING_STEPS) ** 2)
    smooth = (kernel / kernel.sum(axis=1, keepdims=True)) @ history
    _, strengths, directions = np.linalg.svd((smooth - smooth.mean(axis=0)) / bin_scale, full_matrices=False)
    used = [place for place in range(min(MAX_COMPONENTS, len(strengths))) if strengths[place] > 1e-9]
    if not used:
        raise NotForecast(f"a forecast requires steps that differ, but all {steps} steps are equal")
    # Signs are arbitrary; the largest entry is made positive, so that results are reproducible.
    chosen = directions[used]
    chosen = chosen * np.sign(chosen[np.arange(len(used)), np.abs(chosen).argmax(axis=1)])[:, None]
    found = LengthComponents(centre, bin_scale, chosen.T, ())
    values = found.coordinates(history)
    return LengthComponents(
        centre, bin_scale, chosen.T, tuple(choose_order(values[:, place]) for place in range(len(used)))
    )


def choose_order(values: NDArray[np.float64], orders: Sequence[tuple[int, int, int]] = ORDERS) -> FittedArima:
    """Return the fitted model with the lowest corrected Akaike information criterion. Raises NotForecast if `values`
    are constant or no order can be fitted."""
    scale = float(values.std())
    if not np.isfinite(scale) or scale <= 0:
        raise NotForecast(f"the standard deviation of a component must be finite and > 0, got {scale}")
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
        raise ValueError(
            f"a model with {parameters} parameters requires at least {parameters + BURNT_STEPS + 2} values,"
            f" got {len(values)}"
        )
    # Start at zeros, with a variance of 1: the estimate of statsmodels logs warnings when it fails.
    start = np.zeros(parameters)
    start[-1] = 1.0
    found = model.fit(start_params=start, cov_type="none", method_kwargs={"warn_convergence": False})
    aicc = -2.0 * found.llf + 2.0 * parameters * seen / (seen - parameters - 1)
    if not np.isfinite(aicc):
        raise ValueError(f"the log-likelihood must be finite, got {found.llf}")
    return FittedArima(order, tuple(found.params.tolist()), scale, float(aicc))


def _arima(values: NDArray[np.float64], order: tuple[int, int, int]) -> Any:
    # Imported here because it takes a second and most commands never forecast.
    from statsmodels.tsa.arima.model import ARIMA

    model = ARIMA(values, order=order, trend="n" if order[1] else "c")
    model.ssm.loglikelihood_burn = BURNT_STEPS
    return model
