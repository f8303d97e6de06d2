"""Correct predicted decoding times by the running error of earlier plans. Has no side effects."""

from collections.abc import Iterable
from dataclasses import dataclass

WEIGHT = 0.3  # of the latest step in the running figures
STEPS_NEEDED = 3  # before predictions are corrected
MOST = 2.0  # limit of the correction factor, up or down: beyond it the profile is wrong and should be measured


@dataclass(frozen=True, slots=True)
class Calibration:
    """Running averages of prediction errors over steps.

    Within a step, the weight of a plan is the actual time from the plan to the end of the step. The last plans of a
    step therefore have little weight.
    """

    steps: int = 0
    error: float | None = None  # mean |predicted - actual| / actual
    bias: float | None = None  # mean (predicted - actual) / actual: > 0 where steps end sooner than predicted

    def after(self, outcomes: Iterable[tuple[float, float]]) -> "Calibration":
        """Return a copy that includes the plans of one step, given as pairs of predicted and actual times in seconds.
        The predicted times must be uncorrected."""
        pairs = [(predicted_s, actual_s) for predicted_s, actual_s in outcomes if actual_s > 0]
        if not pairs:
            return self
        actual_s = sum(actual for _, actual in pairs)
        error = sum(abs(predicted - actual) for predicted, actual in pairs) / actual_s
        bias = sum(predicted - actual for predicted, actual in pairs) / actual_s
        return Calibration(self.steps + 1, _mixed(self.error, error), _mixed(self.bias, bias))

    @property
    def correction(self) -> float:
        """The factor by which predicted decoding times are multiplied. Redeployment and migration costs are not
        corrected."""
        if self.bias is None or self.steps < STEPS_NEEDED:
            return 1.0
        return min(MOST, max(1 / MOST, 1 / max(1 + self.bias, 1e-9)))


def _mixed(before: float | None, latest: float) -> float:
    return latest if before is None else (1 - WEIGHT) * before + WEIGHT * latest
