"""What Prometheus is told of redeployments: how many came out how, and what each kind of step takes."""

from collections import Counter
from collections.abc import Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily

from orchestrrl.core.metrics import labelled_counter
from orchestrrl.core.operation import OperationState, StepState
from orchestrrl.fleet.redeployment.steps import RedeploymentReport, StepKind

OUTCOMES = (OperationState.DONE, OperationState.ROLLED_BACK, OperationState.DEGRADED)


class RedeploymentMetrics:
    """Counts each redeployment once, when it has ended, however few of them are remembered."""

    def __init__(self) -> None:
        self._counted: set[str] = set()
        self._outcomes: Counter[OperationState] = Counter()
        self._steps: Counter[StepKind] = Counter()
        self._failed: Counter[StepKind] = Counter()
        self._elapsed_s: dict[StepKind, float] = dict.fromkeys(StepKind, 0.0)
        self._closed_s = 0.0

    def collect(self, history: Sequence[RedeploymentReport]) -> Iterator[Metric]:
        """`history`: all redeployments that are remembered."""
        ended = [report for report in history if report.state is not OperationState.RUNNING]
        for report in ended:
            if report.id not in self._counted:
                self._count(report)
        self._counted = {report.id for report in ended}
        help_text = "1 while engines are being changed."
        yield GaugeMetricFamily("orchestrrl_redeployment_running", help_text, float(len(ended) < len(history)))
        yield labelled_counter(
            "orchestrrl_redeployments",
            "Redeployments that have ended; rolled_back: the engines are those from before; degraded: "
            "some of these are missing.",
            "outcome",
            [(outcome, self._outcomes[outcome]) for outcome in OUTCOMES],
        )
        help_text = "Seconds for which requests of engines that left had none to go to, over all redeployments."
        yield CounterMetricFamily("orchestrrl_redeployment_closed_seconds", help_text, self._closed_s)
        help_text = "Steps of redeployments that were carried out, and the seconds that they took, by kind."
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
        for told in report.steps:
            if told.state is StepState.DONE and told.elapsed_s is not None:
                self._steps[told.step.kind] += 1
                self._elapsed_s[told.step.kind] += told.elapsed_s
            elif told.state is StepState.FAILED:
                self._failed[told.step.kind] += 1
