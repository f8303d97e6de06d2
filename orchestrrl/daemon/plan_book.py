"""Store plans and their results, notify watchers of changes, and store the controls that operators set for the planner.

Plans and controls are journalled, and recovered from the journal after a restart.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import TypeAdapter

from orchestrrl.core.clock import Clock
from orchestrrl.core.errors import Permanent, ProblemFaults
from orchestrrl.core.journal.store import EntryKind, Journal
from orchestrrl.core.ttl import expiry_s, lifetime_faults
from orchestrrl.fleet.redeployment.book import RedeploymentOutcome
from orchestrrl.fleet.state import GenerationStep
from planner.admission import FREE, ControlState, OperatorControl
from planner.calibration import Calibration
from planner.model import Act, ConfigurationId, Hold, Plan, PlanId

logger = logging.getLogger(__name__)

_PLAN = TypeAdapter(Plan)
_CONTROL = TypeAdapter(OperatorControl)
_CALIBRATION = TypeAdapter(Calibration)

# Plans kept in memory; the journal has the older ones.
REMEMBERED = 256


@dataclass(frozen=True, slots=True)
class PlanEvent:
    """A change of a plan or of the operator's control. `plan` is the changed plan or, if the control was set, the
    latest plan."""

    plan: Plan | None  # None: there was no plan yet when the control was set
    control: OperatorControl


class PlanBook:
    """The recent plans, newest last, with their results, and the operator's current control."""

    def __init__(self, journal: Journal, clock: Clock) -> None:
        self._journal = journal
        self._clock = clock
        self._plans: dict[PlanId, Plan] = {}
        self._control = FREE
        self.calibration = Calibration()
        self.last_redeploy_s: float | None = None  # when the deployment last changed
        self._watchers: set[asyncio.Queue[PlanEvent | None]] = set()

    def recover(self) -> None:
        """Recover the latest plans with their results, the operator's control and the calibration from the journal."""
        for entry in self._journal.tail(REMEMBERED, (EntryKind.PLAN,)):
            if (plan := self._journal.interpret(entry, _plan_from)) is not None:
                self._plans[plan.id] = plan
        for entry in self._journal.tail(REMEMBERED, (EntryKind.PLAN_ACTED,)):
            held = self._plans.get(PlanId(entry.subject))
            if held is not None:
                done, detail = bool(entry.body.get("done")), str(entry.body.get("detail", ""))
                self._plans[held.id] = replace(held, acted=done, acted_detail=detail)
        for entry in self._journal.tail(REMEMBERED, (EntryKind.PLAN_ACTUAL,)):
            held = self._plans.get(PlanId(entry.subject))
            if held is not None:
                actual_s = self._journal.interpret(entry, lambda body: float(body["actual_makespan_s"]))
                self._plans[held.id] = replace(held, actual_makespan_s=actual_s)
        self._control = self._journal.newest(EntryKind.PLAN_CONTROL, _CONTROL.validate_python) or FREE
        calibration = self._journal.newest(EntryKind.PLAN_CALIBRATION, _CALIBRATION.validate_python)
        self.calibration = calibration or Calibration()
        self.last_redeploy_s = self._journal.newest(EntryKind.DEPLOYMENT_ENDED, lambda body: float(body["ended_s"]))

    @property
    def control(self) -> OperatorControl:
        return self._control.at(self._clock.now_s())

    @property
    def latest(self) -> Plan | None:
        return next(reversed(self._plans.values()), None)

    def get(self, plan: PlanId) -> Plan:
        """Return the plan with this id. Raises Permanent if it is not among the stored plans."""
        if plan not in self._plans:
            raise Permanent(f"plan {plan!r} does not exist or is not among the {REMEMBERED} newest plans")
        return self._plans[plan]

    def newest(self, limit: int) -> list[Plan]:
        """Return the `limit` newest plans, or all stored plans if `limit` is 0, newest first."""
        plans = list(reversed(self._plans.values()))
        return plans[:limit] if limit else plans

    def add(self, plan: Plan, inputs_digest: str) -> None:
        # Act and Hold have the same fields, so the type is stored too.
        acts = isinstance(plan.verdict, Act)
        body = {**_PLAN.dump_python(plan, mode="json"), "acts": acts, "inputs_digest": inputs_digest}
        self._journal.append(plan.created_s, EntryKind.PLAN, plan.id, body)
        self._plans[plan.id] = plan
        for old in list(self._plans)[:-REMEMBERED]:
            del self._plans[old]
        self._notify_watchers(plan)

    def acted(self, plan: PlanId, done: bool, detail: str) -> None:
        """Record the result of carrying out a plan. `done` is False if the plan had no effect. `detail` describes the
        result."""
        self._journal.append(self._clock.now_s(), EntryKind.PLAN_ACTED, plan, {"done": done, "detail": detail})
        if plan in self._plans:
            self._plans[plan] = replace(self._plans[plan], acted=done, acted_detail=detail)
            self._notify_watchers(self._plans[plan])

    def deployment_ended(self, plan: PlanId, outcome: RedeploymentOutcome) -> None:
        """Record the outcome of a redeployment. Its end starts the cooldown, even if the redeployment failed."""
        body = {"done": outcome.done, "detail": outcome.detail, "ended_s": outcome.ended_s}
        self._journal.append(self._clock.now_s(), EntryKind.DEPLOYMENT_ENDED, plan, body)
        self.last_redeploy_s = outcome.ended_s
        if plan:
            self.acted(plan, outcome.done, outcome.detail)

    def step_ended(
        self, step: GenerationStep, still_s: Callable[[float, float], float] = lambda from_s, to_s: 0.0
    ) -> None:
        """Record the actual makespan of each plan of the step. This is the time in seconds from the plan's creation to
        the step's end, excluding pauses of the fleet, which plans do not predict. `still_s(from_s, to_s)` returns the
        time in seconds for which the fleet was paused in an interval."""
        assert step.ended_s is not None
        ended_s = step.ended_s
        outcomes = [
            (plan, ended_s - plan.created_s - still_s(plan.created_s, ended_s))
            for plan in self._plans.values()
            if plan.actual_makespan_s is None and step.started_s <= plan.created_s <= ended_s
        ]
        for plan, actual_s in outcomes:
            body = {"actual_makespan_s": actual_s, "predicted_makespan_s": plan.predicted_s}
            self._journal.append(ended_s, EntryKind.PLAN_ACTUAL, plan.id, body)
            self._plans[plan.id] = replace(plan, actual_makespan_s=actual_s)
            self._notify_watchers(self._plans[plan.id])
        self._calibrate(ended_s, outcomes)

    def _calibrate(self, ended_s: float, plans: Sequence[tuple[Plan, float]]) -> None:
        """Update the calibration of predictions. `plans` has the plans of the ended step with their actual makespans in
        seconds. A prediction is valid until a later plan is carried out, so plans before the last plan that was carried
        out are skipped."""
        last_act = max((place for place, (plan, _) in enumerate(plans) if plan.acted), default=0)
        outcomes = [
            (plan.predicted_s / plan.correction, actual_s)
            for plan, actual_s in plans[last_act:]
            if plan.predicted_s is not None
        ]
        after = self.calibration.after(outcomes)
        if after != self.calibration:
            self.calibration = after
            self._journal.append(ended_s, EntryKind.PLAN_CALIBRATION, "", _CALIBRATION.dump_python(after, mode="json"))

    def override(
        self, configuration: ConfigurationId, known: Collection[ConfigurationId], reason: str, ttl_s: float
    ) -> OperatorControl:
        """Restrict the planner to one configuration for `ttl_s` seconds or, if `ttl_s` is 0, until `release` is called.
        Raises ProblemFaults if the configuration is not in `known` or `ttl_s` is invalid."""
        faults = lifetime_faults(ttl_s)
        if configuration not in known:
            listing = ", ".join(sorted(known)) or "none; add it to fleet.configurations"
            faults.append(f"configuration: is not a known configuration (known: {listing}), got {configuration!r}")
        if faults:
            raise ProblemFaults(faults)
        now_s = self._clock.now_s()
        return self._set(
            OperatorControl(ControlState.OVERRIDDEN, configuration, reason, expiry_s(now_s, ttl_s), since_s=now_s)
        )

    def pin(self, reason: str, ttl_s: float) -> OperatorControl:
        """Keep the present deployment for `ttl_s` seconds or, if `ttl_s` is 0, until `release` is called. Raises
        ProblemFaults if `ttl_s` is invalid."""
        if faults := lifetime_faults(ttl_s):
            raise ProblemFaults(faults)
        return self._set(OperatorControl(ControlState.PINNED, None, reason, expiry_s(self._clock.now_s(), ttl_s)))

    def release(self, reason: str) -> OperatorControl:
        return self._set(OperatorControl(reason=reason))

    async def watch(self) -> AsyncIterator[PlanEvent]:
        """Yield the latest plan, if any, then an event for each change of a plan or of the operator's control, until
        the plan book is closed."""
        queue: asyncio.Queue[PlanEvent | None] = asyncio.Queue()
        if self.latest is not None:
            queue.put_nowait(PlanEvent(self.latest, self.control))
        self._watchers.add(queue)
        try:
            while (event := await queue.get()) is not None:
                yield event
        finally:
            self._watchers.discard(queue)

    def close(self) -> None:
        """End the iterators of all watchers."""
        for queue in self._watchers:
            queue.put_nowait(None)

    def _set(self, control: OperatorControl) -> OperatorControl:
        body = _CONTROL.dump_python(control, mode="json")
        self._journal.append(self._clock.now_s(), EntryKind.PLAN_CONTROL, control.state, body)
        self._control = control
        self._notify_watchers(self.latest)
        return control

    def _notify_watchers(self, plan: Plan | None) -> None:
        for queue in self._watchers:
            queue.put_nowait(PlanEvent(plan, self.control))


def _plan_from(body: Mapping[str, Any]) -> Plan:
    plan = _PLAN.validate_python(body)
    verdict = Act if body.get("acts", False) else Hold
    return replace(plan, verdict=verdict(plan.verdict.code, plan.verdict.detail))
