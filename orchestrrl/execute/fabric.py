"""Bring circuits about for one communication period after the other, each change inside a safe window.

announced -> materialised (what circuits, which ports, in which stages) -> prepared (written down, all but sent) ->
committed when a window opens that covers it, verified, routed. Where none opens by the deadline, or anything is amiss
before the first command, what is up stays up. Section 5.3 and algorithm 2 of the paper. Deciding is
planner/fabric/materialize.py, transition.py and windows.py; sending is circuits.py and steering.py.
"""

import asyncio
import itertools
import logging
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from ocs_drivers.errors import DriverError
from orchestrrl.clock import Clock
from orchestrrl.errors import OrchestrRLError, Permanent, ProblemFaults
from orchestrrl.execute.circuits import CircuitExecutor, CircuitOperation, CircuitOutcome
from orchestrrl.execute.fabric_control import OperatorsWord
from orchestrrl.execute.fabric_glass import Glance, Glass
from orchestrrl.fabric_intents import intent_to_json, parse_intent
from orchestrrl.holds import HoldBook, Part
from orchestrrl.journal import Journal, Kind
from orchestrrl.periods import PERIOD, CommitReport, ControlState, FabricControl, PeriodReport, PeriodState
from planner.fabric.commit_times import CommitTimes
from planner.fabric.intent import Intent, Stage
from planner.fabric.model import Cabling, OcsId, Pair, PortPair
from planner.fabric.plan import FabricPlan, FabricState
from planner.fabric.topology import Site
from planner.fabric.transition import Transition, TransitionProblem, TransitionStage, transition
from planner.fabric.windows import CommitNeed, Window, may_commit
from planner.model import Act, Hold, Mode

logger = logging.getLogger(__name__)

REMEMBERED = 1024
ATTEMPTS = 3  # at materialising, when the world has changed between looking and acting


@dataclass(frozen=True, slots=True)
class Rules:
    """See the section `fabric` of the configuration."""

    margin_s: float = 0.005
    within_s: float = 30.0  # how long a period waits for its windows
    boundary_within_s: float = 60.0
    min_fraction: float = 0.5  # of its circuits, that an endpoint keeps at every point
    max_moves_per_stage: int = 1024
    route_s: float = 0.0  # where nobody here steers


class Watch(Protocol):
    """What is known of a job's traffic, while somebody waits for it to pause."""

    changed: asyncio.Event

    def window(self) -> Window | Hold: ...

    def close(self) -> None: ...


class Windows(Protocol):
    def watch(self, job: str, ranks: frozenset[int], need_s: float) -> Watch:
        """Of a job's traced ranks; these are among them, or there is no window."""
        ...


class Routing(Protocol):
    """Takes packets off circuits before they go, and onto those that have come."""

    async def drain(self, going: Iterable[PortPair]) -> None:
        """Raises OrchestrRLError where packets still take them."""
        ...

    async def steer(self, usable: Iterable[PortPair]) -> str:
        """What is not as it should be; empty: all is."""
        ...


_Timed = tuple[CircuitOutcome, float, float]
Materialise = Callable[[Intent, FabricState], FabricPlan | Hold]
Offload = Callable[[Callable[[], Any]], Awaitable[Any]]


async def inline(work: Callable[[], Any]) -> Any:
    return work()


class _Overtaken(Exception):
    """The world is no longer as it was when this was planned."""


@dataclass(eq=False)
class _Period:
    """One announced period under way."""

    intent: Intent
    deadline_s: float
    boundary: bool
    report: PeriodReport
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    superseded: asyncio.Event = field(default_factory=asyncio.Event)


class Coordinator:
    """One site's circuits. The caller keeps `run` as a task."""

    def __init__(
        self,
        site: Site,
        glass: Glass,
        circuits: CircuitExecutor,
        windows: Windows,
        word: OperatorsWord,
        holds: HoldBook,
        journal: Journal,
        clock: Clock,
        *,
        materialise: Materialise,
        mode: Callable[[], Mode],
        times: CommitTimes,
        rules: Rules | None = None,
        routing: Routing | None = None,
        offload: Offload = inline,
    ) -> None:
        self.site = site
        self.word = word
        self.times = times
        self.rules = rules or Rules()
        self.glance = Glance()  # as the switches were last seen
        self.period = ""  # whose circuits are up, as far as it is known
        self.counts: Counter[tuple[str, str]] = Counter()  # of periods that are over, by state and code
        self._glass = glass
        self._circuits = circuits
        self._windows = windows
        self._holds = holds
        self._journal = journal
        self._clock = clock
        self._materialise = materialise
        self._mode = mode
        self._routing = routing
        self._offload = offload
        self._cabling = Cabling(
            {
                **site.core_cabling.ports,
                **{id: ports for pod in site.pods for id, ports in site.agg_cabling(pod.id).ports.items()},
            }
        )
        self._intents: dict[str, Intent] = {}
        self._numbers = itertools.count(1)
        self._next: _Period | None = None
        self._now: _Period | None = None
        self._wake = asyncio.Event()
        self._over: deque[PeriodReport] = deque(maxlen=REMEMBERED)
        self._recover()

    # --- asked from outside

    def announce(
        self, period: str, intent_json: str = "", within_s: float = 0.0, *, boundary: bool = False
    ) -> "_Period":
        """A period that is about to come; the one that waits is superseded. `boundary`: the caller stands still until
        it is over, so it needs no window. Raises ProblemFaults, and Permanent for a name that nobody has given an
        intent to."""
        if within_s < 0 or within_s == float("inf"):
            raise ProblemFaults([f"within_s: must be >= 0 (0: as configured), got {within_s}"])
        intent = parse_intent(period, intent_json) if intent_json else self._known(period)
        return self.expect(intent, within_s, boundary=boundary)

    def expect(self, intent: Intent, within_s: float = 0.0, *, boundary: bool = False) -> "_Period":
        """The same, for who has an intent."""
        if self._intents.get(intent.period) != intent:
            self._write(Kind.PERIOD_INTENT, intent.period, {"intent": intent_to_json(intent)})
            self._intents[intent.period] = intent
        now_s = self._clock.now_s()
        id = f"c{self._journal.generation}-{next(self._numbers)}"
        report = PeriodReport(id, intent.period, intent.stage, PeriodState.ANNOUNCED, now_s)
        limit_s = within_s or (self.rules.boundary_within_s if boundary else self.rules.within_s)
        made = _Period(intent, now_s + limit_s, boundary, report)
        if self._next is not None:
            self._end(self._next, PeriodState.SUPERSEDED, "superseded", f"{intent.period} was announced")
        elif self._now is not None:
            self._now.superseded.set()
        self._next = made
        self._wake.set()
        return made

    async def follow(self, period: "_Period") -> AsyncIterator[PeriodReport]:
        """What becomes of it, whenever that changes; ends after the last."""
        seen: PeriodReport | None = None
        while seen is None or not seen.over:
            if period.report == seen:
                period.changed.clear()
                await period.changed.wait()
                continue
            seen = period.report
            yield seen

    async def until_over(self, period: "_Period") -> PeriodReport:
        async for report in self.follow(period):
            last = report
        return last

    def override(self, period: str, reason: str, ttl_s: float) -> FabricControl:
        """Circuits of this period from now on. Raises Permanent for one without an intent, ProblemFaults."""
        intent = self._known(period)
        control = self.word.override(period, reason, ttl_s)
        self.expect(intent)
        return control

    def mask(self, masked: Sequence[str], reason: str) -> None:
        """What is not to be used from now on; circuits go around it at once, or in the next window. Raises
        ProblemFaults."""
        self.word.mask(masked, reason)
        if self.period in self._intents:
            self.expect(self._intents[self.period])

    def times_of_switches(self) -> list[tuple[OcsId, float, int]]:
        """Of each: what its next change is expected to take in seconds, and from how many changes that is known."""
        return [
            (switch.id, self.times.need([switch.id], 0.0).total_s, self.times.samples(switch.id))
            for switch in self.site.switches
        ]

    def reports(self, limit: int) -> list[PeriodReport]:
        """Newest first: those under way, then those that are over."""
        under_way = [each.report for each in (self._next, self._now) if each is not None]
        return [*under_way, *reversed(self._over)][:limit]

    def ends(self, cross_connect: PortPair) -> Pair | None:
        """The endpoints that it joins; None: it is none of the site's."""
        return self._cabling.ends(cross_connect)

    async def look(self) -> Glance:
        self.glance = await self._glass.look()
        return self.glance

    # --- run

    async def run(self) -> None:
        """Never returns. A period that fails is told of and logged, and the next one has its turn."""
        await self.look()
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._next is not None:
                self._now, self._next = self._next, None
                try:
                    await self._bring_about(self._now)
                except OrchestrRLError as error:  # the journal's: without a record nothing is done
                    self._end(self._now, PeriodState.FAILED, "not_recorded", str(error))
                finally:
                    self._now = None

    async def _bring_about(self, period: _Period) -> None:
        for attempt in range(ATTEMPTS):
            try:
                await self._attempt(period)
                return
            except _Overtaken as overtaken:
                logger.warning("period %s: %s", period.report.period, overtaken)
                if attempt == ATTEMPTS - 1:
                    self._end(period, PeriodState.KEPT, "overtaken", str(overtaken))
            except DriverError as error:
                self._end(period, PeriodState.FAILED, "switch_failed", str(error))
                return

    async def _attempt(self, period: _Period) -> None:
        intent = self._bound(period.intent)
        if isinstance(intent, Hold):
            return self._keep(period, intent)
        glance = await self.look()
        plan = await self._offload(lambda: self._materialise(intent, self._state(glance)))
        if isinstance(plan, Hold):
            return self._keep(period, plan)
        stages = await self._stages(period, plan, glance)
        if not stages:
            self.period = intent.period
            return self._end(period, PeriodState.COMMITTED, "was_so", "its circuits were up already")
        if hold := self._restraint(intent):
            return self._keep(period, hold)
        for number, stage in enumerate(stages):
            hold = await self._carry_out(period, intent, stage)
            if hold is not None:
                rest = f"; stages {number + 1} to {len(stages)} were left undone" if number else ""
                return self._keep(period, replace(hold, detail=hold.detail + rest))
        self.period = intent.period
        return self._end(period, PeriodState.COMMITTED, "committed", "")

    async def _stages(self, period: _Period, plan: FabricPlan, glance: Glance) -> Sequence[TransitionStage]:
        problem = TransitionProblem(
            self._cabling,
            self._of_site(glance.cross_connects),
            plan.cross_connects,
            self.rules.max_moves_per_stage,
            self.rules.min_fraction,
        )
        steps: Transition = await self._offload(lambda: transition(problem))
        notes = [*plan.notes]
        if steps.dark_pairs:
            notes.append(f"dark for a moment: {', '.join(f'{a} - {b}' for a, b in steps.dark_pairs)}")
        if steps.thin_endpoints:
            notes.append(f"below {self.rules.min_fraction:.0%} for a moment: {', '.join(steps.thin_endpoints)}")
        self._tell(
            period,
            state=PeriodState.MATERIALISED,
            stages=len(steps.stages),
            moves=sum(len(stage.remove) + len(stage.add) for stage in steps.stages),
            completion_s=plan.completion_s,
            notes=tuple(notes),
        )
        return steps.stages

    async def _carry_out(self, period: _Period, intent: Intent, stage: TransitionStage) -> Hold | None:
        """One stage in one window; why not, where it is not to be. Raises _Overtaken and DriverError."""
        operations = await self._prepare(stage, period)
        sent = False
        try:
            need = self._need(stage)
            window = await self._window(period, intent, need)
            if isinstance(window, Hold):
                return window
            sent = True
            await self._commit(period, stage, operations, window, need)
            return None
        finally:
            if not sent:
                for operation in operations:
                    self._circuits.abandon(operation, "no window came, or it was called off")

    async def _prepare(self, stage: TransitionStage, period: _Period) -> list[CircuitOperation]:
        changes: dict[OcsId, tuple[list[PortPair], list[PortPair]]] = {}
        for which, pairs in enumerate((stage.remove, stage.add)):
            for pair in pairs:
                changes.setdefault(pair.switch, ([], []))[which].append(pair)
        # Until the deadline, and as long again as a commit may take.
        valid_s = max(0.0, period.deadline_s - self._clock.now_s()) + self.rules.boundary_within_s
        made: list[CircuitOperation] = []
        try:
            for switch, (remove, add) in sorted(changes.items()):
                change = await self._glass.change_of(switch, remove, add)
                made.append(await self._circuits.prepare(switch, change, valid_s))
        except DriverError as error:
            for operation in made:
                self._circuits.abandon(operation, f"another switch could not be prepared: {error}")
            raise
        return made

    async def _window(self, period: _Period, intent: Intent, need: CommitNeed) -> Window | Hold | None:
        """Wait for one that covers the need: None where none is needed, a Hold where none came."""
        if period.boundary or intent.stage is not Stage.TRAIN:
            verdict = may_commit(intent.stage, None, need, self._clock.now_s(), period.boundary)
            if isinstance(verdict, Hold):
                return verdict
            return self._restraint(intent)
        watch = self._windows.watch(intent.job, intent.ranks, need.total_s)
        alarm = asyncio.ensure_future(self._clock.sleep(max(0.0, period.deadline_s - self._clock.now_s())))
        overtaken = asyncio.ensure_future(period.superseded.wait())
        self._tell(period, state=PeriodState.WAITING)
        try:
            while True:
                watch.changed.clear()
                window = watch.window()
                verdict = may_commit(intent.stage, window, need, self._clock.now_s(), boundary=False)
                if isinstance(verdict, Act):
                    # Looked at last: an operator may have had a word meanwhile.
                    return self._restraint(intent) or window
                if (period.report.code, period.report.detail) != (verdict.code, verdict.detail):
                    period.report = replace(period.report, code=verdict.code, detail=verdict.detail)
                news = asyncio.ensure_future(watch.changed.wait())
                try:
                    await asyncio.wait({news, alarm, overtaken}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    news.cancel()
                if overtaken.done():
                    return Hold("superseded", "another period was announced before a window came")
                if alarm.done():
                    return Hold("no_window", f"none by the deadline: {verdict.code}: {verdict.detail}")
        finally:
            watch.close()
            alarm.cancel()
            overtaken.cancel()

    async def _commit(
        self,
        period: _Period,
        stage: TransitionStage,
        operations: Sequence[CircuitOperation],
        window: Window | None,
        need: CommitNeed,
    ) -> None:
        commanded_s = self._clock.now_s()
        if self._routing is not None and stage.remove:
            try:
                await self._routing.drain(stage.remove)
            except OrchestrRLError as error:
                for operation in operations:
                    self._circuits.abandon(operation, f"packets could not be taken off: {error}")
                raise _Overtaken(f"packets could not be taken off what was to go: {error}") from error
        drained_s = self._clock.now_s()
        outcomes = await asyncio.gather(*(self._timed(operation) for operation in operations), return_exceptions=True)
        detail = "; ".join(filter(None, (_amiss(outcome) for outcome in outcomes)))
        switched_s, routed = self._clock.now_s(), ""
        if self._routing is not None:
            glance = await self.look()
            routed = await self._routing.steer(self._of_site(glance.cross_connects))
        usable_s = self._clock.now_s()
        route_s = usable_s - switched_s + drained_s - commanded_s
        for outcome in outcomes:
            if isinstance(outcome, tuple) and outcome[0].done:
                self.times.measured(
                    OcsId(outcome[0].switch), control_s=outcome[2], device_s=outcome[1], route_s=route_s
                )
        moves = len(stage.remove) + len(stage.add)
        done = not any(_failed(outcome) for outcome in outcomes)
        report = CommitReport(
            None if window is None else window.opened_s,
            None if window is None else window.until_s,
            need.total_s,
            commanded_s,
            usable_s,
            moves,
            done,
            "; ".join(filter(None, (detail, routed))),
        )
        self._tell(
            period,
            state=PeriodState.COMMITTING,
            code="",
            detail=report.detail,
            stages_done=period.report.stages_done + done,
            commits=(*period.report.commits, report),
        )
        for outcome in outcomes:
            if isinstance(outcome, BaseException) and not isinstance(outcome, DriverError):
                raise outcome
        if not done:
            raise _Overtaken(f"a switch did not do as it was told: {detail}")

    async def _timed(self, operation: CircuitOperation) -> _Timed:
        """How it came out, how long the device took, and how long all the rest."""
        began_s = self._clock.now_s()
        outcome = await self._circuits.commit(operation)
        took_s = self._clock.now_s() - began_s
        items = outcome.items
        ready_s = max((item.link_up_s or item.tuned_s or item.commanded_s or 0.0 for item in items), default=0.0)
        commanded_s = min((item.commanded_s for item in items if item.commanded_s is not None), default=0.0)
        device_s = max(0.0, ready_s - commanded_s)
        return outcome, device_s, max(0.0, took_s - device_s)

    # --- what binds it

    def _bound(self, intent: Intent) -> Intent | Hold:
        """The intent that is to be met: an operator's override goes first."""
        control = self.word.control
        if control.state is ControlState.OVERRIDDEN and control.period != intent.period:
            wanted = self._intents.get(control.period)
            if wanted is None:
                return Hold("overridden", f"an operator wants {control.period}, which was never announced")
            return wanted
        return intent

    def _restraint(self, intent: Intent) -> Hold | None:
        """Why nothing is to be changed now."""
        if self._mode() is not Mode.ACT:
            return Hold("advise", "mode is advise: nothing is changed")
        if hold := self._holds.hold(Part.FABRIC):
            return hold
        if intent.stage is Stage.WEIGHT_SYNC and (hold := self._holds.hold(Part.SYNC)):
            return hold
        control = self.word.control
        if control.state is ControlState.PINNED and not control.cross_connects:
            return Hold("pinned", f"an operator pinned all circuits: {control.reason or 'no reason given'}")
        return None

    def _state(self, glance: Glance) -> FabricState:
        return FabricState(self._of_site(glance.cross_connects), glance.failures | self.word.failures, self.word.pinned)

    def _need(self, stage: TransitionStage) -> CommitNeed:
        switches = {pair.switch for pair in (*stage.remove, *stage.add)}
        need = self.times.need(switches, self.rules.margin_s)
        # Who routes by himself, as links come and go, is trusted to take no longer than the operator says.
        return need if self._routing is not None else replace(need, route_s=self.rules.route_s)

    def _of_site(self, cross_connects: Iterable[PortPair]) -> frozenset[PortPair]:
        """Between fibres of the site: what else somebody has patched is left alone."""
        return frozenset(pair for pair in cross_connects if self.ends(pair) is not None)

    def _known(self, period: str) -> Intent:
        if period not in self._intents:
            known = ", ".join(sorted(self._intents)) or "none yet"
            raise Permanent(f"period {period!r} was never announced with an intent (known: {known})")
        return self._intents[period]

    # --- told and written down

    def _keep(self, period: _Period, hold: Hold) -> None:
        state = PeriodState.SUPERSEDED if hold.code == "superseded" else PeriodState.KEPT
        self._end(period, state, hold.code, hold.detail)

    def _tell(self, period: _Period, **changes: Any) -> None:
        period.report = replace(period.report, **changes)
        period.changed.set()

    def _end(self, period: _Period, state: PeriodState, code: str, detail: str) -> None:
        told = "; ".join(filter(None, (detail, period.report.detail if state is PeriodState.COMMITTED else "")))
        self._tell(period, state=state, code=code, detail=told, ended_s=self._clock.now_s())
        self._over.append(period.report)
        self.counts[state, code] += 1
        logger.info("period %s: %s %s %s", period.report.period, state, code, told)
        try:
            self._write(Kind.PERIOD, period.report.id, PERIOD.dump_python(period.report, mode="json"))
        except OrchestrRLError as error:  # it is over all the same
            logger.error("period %s cannot be written down: %s", period.report.id, error)

    def _recover(self) -> None:
        for entry in self._journal.tail(REMEMBERED, (Kind.PERIOD_INTENT,)):
            try:
                self._intents[entry.subject] = parse_intent(entry.subject, entry.body["intent"])
            except ProblemFaults as error:
                logger.warning("the intent of %s is left out: %s", entry.subject, error)
        self._over.extend(
            PERIOD.validate_python(entry.body) for entry in self._journal.tail(REMEMBERED, (Kind.PERIOD,))
        )

    def _write(self, kind: Kind, subject: str, body: Mapping[str, Any]) -> None:
        self._journal.append(self._clock.now_s(), kind, subject, dict(body))


def _failed(outcome: _Timed | BaseException) -> bool:
    return isinstance(outcome, BaseException) or not outcome[0].done


def _amiss(outcome: _Timed | BaseException) -> str:
    if isinstance(outcome, BaseException):
        return str(outcome)
    return "" if outcome[0].done and not outcome[0].detail else f"{outcome[0].switch}: {outcome[0].detail}"
