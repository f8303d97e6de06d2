"""Export metrics of redeployments: the number of redeployments by outcome, and the duration of each kind of step."""

from collections import Counter
from collections.abc import Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily

from orchestrrl.core.metrics import labelled_counter
from orchestrrl.core.operation import OperationState, StepState
from orchestrrl.fleet.redeployment.steps import RedeploymentReport, StepKind

OUTCOMES = (OperationState.DONE, OperationState.ROLLED_BACK, OperationState.DEGRADED)


class RedeploymentMetrics:
    """Counts each redeployment once when it has ended. The counts do not decrease when old redeployments are dropped
    from the history."""

    def __init__(self) -> None:
        self._counted: set[str] = set()
        self._outcomes: Counter[OperationState] = Counter()
        self._steps: Counter[StepKind] = Counter()
        self._failed: Counter[StepKind] = Counter()
        self._elapsed_s: dict[StepKind, float] = dict.fromkeys(StepKind, 0.0)
        self._closed_s = 0.0

    def collect(self, history: Sequence[RedeploymentReport]) -> Iterator[Metric]:
        """Yield the metrics. `history` contains the reports of all stored redeployments."""
        ended = [report for report in history if report.state is not OperationState.RUNNING]
        for report in ended:
            if report.id not in self._counted:
                self._count(report)
        self._counted = {report.id for report in ended}
        help_text = "1 while a redeployment runs, otherwise 0."
        yield GaugeMetricFamily("orchestrrl_redeployment_running", help_text, float(len(ended) < len(history)))
        yield labelled_counter(
            "orchestrrl_redeployments",
            "Redeployments that have ended; rolled_back: the previous engines serve again; degraded: "
            "some of these are missing.",
            "outcome",
            [(outcome, self._outcomes[outcome]) for outcome in OUTCOMES],
        )
        help_text = "Seconds from fencing leaving engines until new ones got requests, over all redeployments."
        yield CounterMetricFamily("orchestrrl_redeployment_closed_seconds", help_text, self._closed_s)
        help_text = "Completed steps of redeployments and their seconds, by kind."
        steps = SummaryMetricFamily("orchestrrl_redeployment_step_seconds", help_text, labels=["kind"])
        for kind in StepKind:
            steps.add_metric([kind], self._steps[kind], self._elapsed_s[kind])
        yield steps
        help_text = "Steps of redeployments that failed."
        failed = [(kind, self._failed[kind]) for kind in StepKind]
        yield labelled_counter("orchestrrl_redeployment_steps_failed", help_text, "kind", failed)

    def _count(self, report: RedeploymentReport) -> None:
        self._outcomes[report.state] += 1
        self._closed_s += report.closed_s or 0.0
        for step_report in report.steps:
            if step_report.state is StepState.DONE and step_report.elapsed_s is not None:
                self._steps[step_report.step.kind] += 1
                self._elapsed_s[step_report.step.kind] += step_report.elapsed_s
            elif step_report.state is StepState.FAILED:
                self._failed[step_report.step.kind] += 1
