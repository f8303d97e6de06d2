"""What recent steps tell of output lengths: written down as steps end, recovered after a restart, and folded into the
forecast of the next step when somebody asks for it.

Folding takes a tenth of a second, and a second where statsmodels has still to be imported. So `step_ended` only queues
the step, from the event loop, and `expected` folds, from the thread that decides: one of each at a time.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from orchestrrl.core.journal.store import EntryKind, Journal
from planner.model import FinishedLength
from planner.workload.series import STEPS_REMEMBERED, LengthCounts, SeriesForecaster, StepForecast, StepStatistics


class StepLengths:
    def __init__(self, bin_tokens: int, max_output_tokens: int) -> None:
        self._series = SeriesForecaster(bin_tokens, max_output_tokens)
        self._waiting: deque[StepStatistics] = deque(maxlen=STEPS_REMEMBERED)

    def recover(self, journal: Journal) -> None:
        """Take up the steps that earlier generations wrote down, as far as they were counted in the same bins."""
        for entry in journal.tail(STEPS_REMEMBERED, (EntryKind.STEP_ENDED,)):
            step = journal.interpret(entry, self._written)
            if step is not None:
                self._waiting += step

    def step_ended(self, finished: Sequence[FinishedLength]) -> dict[str, Any]:
        """Queue an ended step; what the journal is to keep of it."""
        bin_tokens, max_output_tokens = self._series.bin_tokens, self._series.max_output_tokens
        step = StepStatistics.of(finished, bin_tokens, max_output_tokens)
        self._waiting.append(step)
        return {
            "bin_tokens": bin_tokens,
            "max_output_tokens": max_output_tokens,
            "all": _sparse(step.lengths),
            "tags": {tag: _sparse(counts) for tag, counts in step.tags},
        }

    def expected(self) -> StepForecast | None:
        """The forecast of the next step, or of the one that runs. None: no step has ended yet."""
        while self._waiting:
            self._series = self._series.fold(self._waiting.popleft())
        return self._series.next

    def _written(self, body: Mapping[str, Any]) -> tuple[StepStatistics, ...]:
        """None where it was counted in other bins, or not at all."""
        written = body.get("lengths")
        return (_statistics(written),) if written is not None and self._counted_alike(written) else ()

    def _counted_alike(self, written: Mapping[str, Any]) -> bool:
        bins = (self._series.bin_tokens, self._series.max_output_tokens)
        return (written["bin_tokens"], written["max_output_tokens"]) == bins


def _sparse(counts: LengthCounts) -> dict[str, Any]:
    """Most of a hundred bins are empty, and the journal is read by people too."""
    return {
        name: {str(place): round(count) for place, count in enumerate(values) if count}
        for name, values in (("ended", counts.ended), ("outlived", counts.outlived))
    }


def _statistics(written: Mapping[str, Any]) -> StepStatistics:
    bins = -(-written["max_output_tokens"] // written["bin_tokens"])

    def counts(sparse: Mapping[str, Any]) -> LengthCounts:
        ended, outlived = sparse["ended"], sparse["outlived"]
        return LengthCounts(
            tuple(float(ended.get(str(place), 0)) for place in range(bins)),
            tuple(float(outlived.get(str(place), 0)) for place in range(bins + 1)),
        )

    tags = tuple((tag, counts(sparse)) for tag, sparse in sorted(written["tags"].items()))
    return StepStatistics(written["bin_tokens"], counts(written["all"]), tags)
