"""Commit one stage of a transition: prepare its changes, then send them as soon as a sufficiently long window opens.

If packets are rerouted, they are moved off the old circuits after the window has opened. Otherwise, there is no journal
write, no thread switch and no device query between the opening of the window and the commands to the switches. The only
exception is the driver's own check that the switch has not changed since the stage was planned.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf

from ocs_drivers.errors import CircuitConflict, DriverError
from ocs_drivers.model import Action
from orchestrrl.core.clock import Clock
from orchestrrl.core.config.schema import FabricSettings
from orchestrrl.core.errors import OrchestrRLError
from orchestrrl.fabric.circuit_change import CircuitOperation, CircuitOutcome
from orchestrrl.fabric.circuit_executor import CircuitExecutor
from orchestrrl.fabric.packet_routing import FabricRouting
from orchestrrl.fabric.period_queue import AnnouncedPeriod
from orchestrrl.fabric.periods import CommitReport, PeriodState
from orchestrrl.fabric.switch_reader import SwitchReader
from orchestrrl.fabric.window_tracker import TrafficWatch, WindowTracker
from planner.fabric.intent import Intent, Stage
from planner.fabric.model import OcsId, Port, PortPair
from planner.fabric.transition import TransitionStage
from planner.fabric.windows import SHORT, TOO_SHORT, CommitNeed, CommitTimes, SwitchTimes, Window, may_commit
from planner.model import Act, Hold

logger = logging.getLogger(__name__)

# These end an attempt, but not the period.
RESTATED = Hold("restated", "circuits or their constraints have changed since the plan was made")
PUT_OFF = Hold("put_off", "a caller is paused for another period, which goes first")


@dataclass(frozen=True, slots=True)
class StageFailed:
    """The outcome of a stage that was not carried out completely. The caller must read the switches and plan the period
    again. `report` describes the commands that were sent; it is None if no command was sent. `suspects` contains the
    ports that may be defective."""

    code: str
    detail: str
    report: CommitReport | None = None
    suspects: frozenset[Port] = frozenset()

    @property
    def state(self) -> PeriodState:
        """The final state of the period if further attempts fail as well."""
        return PeriodState.FAILED if self.code == "switch_failed" else PeriodState.KEPT


@dataclass(frozen=True, slots=True)
class StageOrder:
    """An order to commit one stage. `intent` is the intent for which the period was planned. `usable` contains the
    site's circuits that are up before the stage. `others` contains other jobs that send over the same PoDs and must
    also pause. `objection` is called immediately before the commit, and returns a reason not to commit, or None if
    there is no objection. `begins` is called when the commit begins. `waiting` is called with the reason for waiting
    whenever that reason changes."""

    stage: TransitionStage
    intent: Intent
    period: AnnouncedPeriod
    usable: frozenset[PortPair]
    others: frozenset[str]
    objection: Callable[[], Hold | None]
    begins: Callable[[], None]
    waiting: Callable[[Hold], None]


_Timed = tuple[CircuitOutcome, SwitchTimes | None]


@dataclass(frozen=True, slots=True)
class StageCommitter:
    """Commits the stages of one site."""

    reader: SwitchReader
    circuits: CircuitExecutor
    windows: WindowTracker
    times: CommitTimes
    clock: Clock
    settings: FabricSettings
    routing: FabricRouting | None

    async def carry_out(self, order: StageOrder) -> CommitReport | Hold | StageFailed:
        """Commit the stage in one window and return a report. Return a Hold if no suitable window opened or the commit
        was not allowed, and StageFailed if the preparation or the commit failed. Raises OrchestrRLError if the journal
        cannot be written."""
        need = self._need(order.stage)
        watch = self._watch(order, need)  # first, so that agents have reported by the time everything is prepared
        operations: list[CircuitOperation] = []
        try:
            prepared = await self._prepare(order)
            if isinstance(prepared, StageFailed):
                return prepared
            operations += prepared
            window = self._boundary(order, need) if watch is None else await self._window(order, need, watch)
            if isinstance(window, Hold):
                return window
            order.begins()
            return await self._commit(order, operations, window, need, watch)
        finally:
            if watch is not None:
                watch.close()
            for operation in operations:  # has no effect on those that were begun
                self.circuits.abandon(operation, "no window opened, or the stage was cancelled")

    async def _prepare(self, order: StageOrder) -> list[CircuitOperation] | StageFailed:
        # Until the deadline, plus the time that a commit may take.
        valid_s = max(0.0, order.period.deadline_s - self.clock.now_s()) + self.settings.boundary_within_s

        async def one(switch: OcsId) -> CircuitOperation:
            change = await self.reader.change_of(switch, order.stage.remove, order.stage.add)
            return await self.circuits.prepare(switch, change, valid_s)

        made = await asyncio.gather(*map(one, sorted(order.stage.switches)), return_exceptions=True)
        wrong = [each for each in made if isinstance(each, BaseException)]
        operations = [each for each in made if isinstance(each, CircuitOperation)]
        if not wrong:
            return operations
        for operation in operations:
            self.circuits.abandon(operation, f"another switch could not be prepared: {wrong[0]}")
        for error in wrong:
            if not isinstance(error, DriverError):
                raise error
        return StageFailed("switch_refused", "; ".join(map(_line, wrong)))

    def _need(self, stage: TransitionStage) -> CommitNeed:
        need = self.times.need(stage.switches, self.settings.margin_s)
        # Without managed routing, the operator's figure bounds the time until external routing follows.
        return need if self.routing is not None else replace(need, route_s=self.settings.route_s)

    def _watch(self, order: StageOrder, need: CommitNeed) -> TrafficWatch | None:
        """Start to watch the traffic of the jobs that must pause. Return None if no job needs to be watched, because
        the jobs concerned are paused already."""
        jobs: dict[str, frozenset[int]] = {}
        if order.intent.stage is Stage.TRAIN:
            jobs[order.intent.job] = order.intent.ranks
        if order.intent.stage is Stage.TRAIN or order.period.boundary:
            jobs |= dict.fromkeys(sorted(order.others & self.windows.hosts_of_jobs().keys()), frozenset())
        return self.windows.watch(jobs, need.total_s, order.period.woken) if jobs else None

    def _boundary(self, order: StageOrder, need: CommitNeed) -> Hold | None:
        """Return the reason why the stage may not be committed at the boundary, or None if it may be committed. No rank
        sends while the caller is paused, so no window is needed."""
        now_s = self.clock.now_s()
        verdict = self._verdict(order, None, need, now_s)
        if isinstance(verdict, Hold):
            return verdict
        if now_s >= order.period.deadline_s:
            return Hold("no_window", f"the boundary ended {now_s - order.period.deadline_s:.1f} s ago")
        return order.objection()

    def _verdict(self, order: StageOrder, window: Window | Hold | None, need: CommitNeed, now_s: float) -> Act | Hold:
        boundary, most_risk = order.period.boundary, self.settings.most_risk
        return may_commit(order.intent.stage, window, need, now_s, boundary, most_risk)

    async def _window(self, order: StageOrder, need: CommitNeed, watch: TrafficWatch) -> Window | Hold:
        """Wait until a sufficiently long window opens, and return it. Return a Hold with the reason if no such window
        opens by the deadline or the commit is no longer allowed."""
        alarm = asyncio.ensure_future(self.clock.sleep(max(0.0, order.period.deadline_s - self.clock.now_s())))
        alarm.add_done_callback(lambda _: order.period.woken.set())
        last_hold: Hold | None = None
        short = False  # a window opened, but was too short
        try:
            while True:
                order.period.woken.clear()
                if objection := order.objection():
                    if objection in (RESTATED, PUT_OFF):
                        return objection
                    self._unfit(order, short)
                    return _with_last(objection, last_hold)
                window = watch.window()
                now_s = self.clock.now_s()
                verdict = self._verdict(order, window, need, now_s)
                if isinstance(verdict, Act) and (order.intent.stage is Stage.TRAIN or not alarm.done()):
                    assert isinstance(window, Window)
                    return window
                short = short or verdict.code in (TOO_SHORT, SHORT)
                if alarm.done():
                    self._unfit(order, short)
                    return Hold("no_window", f"no window opened by the deadline: {verdict.code}: {verdict.detail}")
                if isinstance(verdict, Hold) and last_hold != verdict:
                    last_hold = verdict
                    order.waiting(verdict)
                await order.period.woken.wait()  # one event for all changes: setting it resumes this loop
        finally:
            alarm.cancel()

    async def _commit(
        self,
        order: StageOrder,
        operations: Sequence[CircuitOperation],
        window: Window | None,
        need: CommitNeed,
        watch: TrafficWatch | None,
    ) -> CommitReport | StageFailed:
        commanded_s = self.clock.now_s()
        stage = order.stage
        if self.routing is not None and stage.remove:
            drained = await self._drain(order, need, window, watch)
            if isinstance(drained, StageFailed):
                return drained
            window = drained
        drained_s = self.clock.now_s()
        # Waiting for a switch's turn must not extend the commit beyond the window.
        rest_s = need.device_s + max(0.0, need.route_s - (drained_s - commanded_s))
        begin_by_s = inf if window is None else window.until_s - rest_s
        # An unexpected exception is raised only after packets are rerouted.
        outcomes: list[_Timed | BaseException] = await asyncio.gather(
            *(self._timed(operation, begin_by_s) for operation in operations), return_exceptions=True
        )
        switched_s = self.clock.now_s()
        done = not any(map(_failed, outcomes))
        routed = await self._reroute(order, done)
        usable_s = self.clock.now_s()
        route_s = usable_s - switched_s + drained_s - commanded_s
        took = tuple(
            replace(each[1], route_s=route_s) for each in outcomes if isinstance(each, tuple) and each[1] is not None
        )
        for each in took:
            self.times.measured(each)
        detail = "; ".join(filter(None, map(_failure_text, outcomes)))
        report = CommitReport(
            None if window is None else window.opened_s,
            None if window is None else window.until_s,
            need.total_s,
            commanded_s,
            usable_s,
            len(stage.remove) + len(stage.add),
            done,
            "; ".join(filter(None, (detail, routed))),
            took,
            0.0 if window is None else window.risk,
        )
        if done:
            return report
        for outcome in outcomes:  # a journal error or an unexpected exception ends the attempt
            if isinstance(outcome, BaseException) and not isinstance(outcome, DriverError):
                raise outcome
        nothing_sent = all(isinstance(each, CircuitConflict) for each in outcomes if _failed(each))
        code = "overtaken" if nothing_sent else "switch_failed"
        return StageFailed(code, detail, report, self._suspects(stage, outcomes))

    def _unfit(self, order: StageOrder, short: bool) -> None:
        if short:
            self.times.unfit(order.stage.switches)

    async def _drain(
        self, order: StageOrder, need: CommitNeed, window: Window | None, watch: TrafficWatch | None
    ) -> Window | StageFailed | None:
        """Move packets off the circuits that the stage removes, and return the window as predicted after draining (None
        if no window is needed). Return StageFailed if routers still use the circuits, or if draining took so long that
        the rest of the window is too short."""
        assert self.routing is not None
        began_s = self.clock.now_s()
        try:
            await self.routing.drain(order.stage.remove)
        except OrchestrRLError as error:
            back = await self._rerouted(order.usable)
            return StageFailed("not_drained", "; ".join(filter(None, (_line(error), back))))
        if watch is None:
            return window
        now_s = self.clock.now_s()
        rest = replace(need, route_s=max(0.0, need.route_s - (now_s - began_s)))
        left = watch.window()
        verdict = self._verdict(order, left, rest, now_s)
        if isinstance(verdict, Act):
            assert isinstance(left, Window)
            return left
        back = await self._rerouted(order.usable)
        detail = f"the window closed while packets were drained: {verdict.code}: {verdict.detail}"
        return StageFailed("window_passed", "; ".join(filter(None, (detail, back))))

    async def _reroute(self, order: StageOrder, done: bool) -> str:
        """Route packets over the circuits that are up after the stage. If `done` is False, the stage has failed, and
        the switches are read first to find these circuits. Return the routing faults as text, which is empty if there
        are none."""
        if self.routing is None:
            return ""
        stage = order.stage
        after = order.usable - set(stage.remove) | set(stage.add)
        return await self._rerouted(after if done else (await self.reader.scan()).of_site)

    async def _rerouted(self, usable: Iterable[PortPair]) -> str:
        assert self.routing is not None
        try:
            return await self.routing.reroute(usable)
        except OrchestrRLError as error:  # circuits stay as they are, and packets keep their routes
            logger.error("packets cannot be rerouted: %s", error)
            return f"packets cannot be rerouted: {_line(error)}"

    async def _timed(self, operation: CircuitOperation, begin_by_s: float) -> _Timed:
        began_s = self.clock.now_s()
        outcome = await self.circuits.commit(operation, begin_by_s)
        elapsed_s = self.clock.now_s() - began_s
        items = [item for item in outcome.items if item.commanded_s is not None]
        if not outcome.done or not any(item.action is Action.ADD for item in items):
            return outcome, None  # does not measure the time until light
        ready_s = max(item.link_up_s or item.tuned_s or item.commanded_s or 0.0 for item in items)
        commanded_s = min(item.commanded_s for item in items if item.commanded_s is not None)
        device_s = max(0.0, ready_s - commanded_s)
        return outcome, SwitchTimes(OcsId(outcome.switch), max(0.0, elapsed_s - device_s), device_s, 0.0)

    def _suspects(self, stage: TransitionStage, outcomes: Iterable[_Timed | BaseException]) -> frozenset[Port]:
        """Return the ports of circuits that should have come up but did not. These ports may be defective even if their
        switch reports no fault."""
        found: set[Port] = set()
        for each in outcomes:
            if isinstance(each, BaseException) or each[0].done:
                continue
            missed = {
                item.cross_connect
                for item in each[0].items
                if item.action is Action.ADD and not item.done and item.commanded_s is not None and item.tuned_s is None
            }
            for wanted in stage.add:
                if wanted.switch == each[0].switch and missed.intersection(self.reader.device_pairs(wanted)):
                    found.update(wanted.sides)
        return frozenset(found)


def _with_last(objection: Hold, last_hold: Hold | None) -> Hold:
    """Return the objection, with the last reason for waiting, if any, appended to its detail."""
    if last_hold is None:
        return objection
    return replace(objection, detail=f"{objection.detail}; until then: {last_hold.code}: {last_hold.detail}")


def _failed(outcome: _Timed | BaseException) -> bool:
    return isinstance(outcome, BaseException) or not outcome[0].done


def _failure_text(outcome: _Timed | BaseException) -> str:
    if isinstance(outcome, BaseException):
        return _line(outcome)
    return "" if outcome[0].done and not outcome[0].detail else f"{outcome[0].switch}: {outcome[0].detail}"


def _line(error: object) -> str:
    """Return the text of an error on one line. Drivers may list several faults, one per line."""
    return ", ".join(str(error).splitlines())
