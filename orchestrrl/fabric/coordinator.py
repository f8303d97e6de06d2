"""Change circuits for successive communication periods. Each change happens inside a safe window.

A period is first announced, then materialised (its circuits, ports and stages are chosen) and prepared (journalled, so
that it is ready to send). It is committed when a window opens that is long enough for the change, and finally verified
and routed. If no window opens by the deadline, or a fault appears before the first command, the existing circuits stay
up. Periods of several jobs may wait at the same time. After one period has changed circuits, the other periods are
planned again. This module implements section 5.3 and algorithm 2 of the paper. planner/fabric/materialize.py,
transition.py and windows.py make the decisions. stage_commit.py, circuit_executor.py and rerouting.py send the changes.
"""

import asyncio
import itertools
import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from math import inf

from orchestrrl.core.clock import Clock, stop, until_set
from orchestrrl.core.config.schema import FabricSettings
from orchestrrl.core.errors import OrchestrRLError, ProblemFaults, few
from orchestrrl.core.journal.store import Journal
from orchestrrl.core.offload import Offload, inline
from orchestrrl.core.operator_pauses import PauseRegistry, PauseScope
from orchestrrl.core.ttl import MOST_S
from orchestrrl.fabric.circuit_executor import CircuitExecutor
from orchestrrl.fabric.intents import parse_intent
from orchestrrl.fabric.operator_overrides import OperatorOverrides
from orchestrrl.fabric.packet_routing import FabricRouting
from orchestrrl.fabric.period_book import PeriodBook
from orchestrrl.fabric.period_queue import AnnouncedPeriod, CircuitTurn, PeriodQueue, lane_of
from orchestrrl.fabric.periods import CommitReport, FabricControl, OverrideState, PeriodReport, PeriodState
from orchestrrl.fabric.shared_pods import neighbours, unannounced
from orchestrrl.fabric.stage_commit import PUT_OFF, RESTATED, StageCommitter, StageFailed, StageOrder
from orchestrrl.fabric.switch_reader import SiteReading, SwitchReader
from orchestrrl.fabric.window_tracker import WindowTracker
from planner.fabric.intent import Intent, Stage
from planner.fabric.model import OcsId, Pair, Port, PortPair
from planner.fabric.plan import FabricFailures, FabricPlan, FabricState
from planner.fabric.topology import Site
from planner.fabric.transition import Transition, TransitionProblem, TransitionStage, transition
from planner.fabric.windows import CommitTimes
from planner.model import Hold, Mode

logger = logging.getLogger(__name__)

ATTEMPTS = 3  # to materialise a period whose plan became outdated before it was carried out
POLL_EVERY_S = 10.0  # of the switches, while idle
POLL_AGAIN_S = 0.2  # after the last scan, if a switch has sent an event since: more may follow
SUSPECT_S = 60.0  # how long a port is avoided after a circuit failed there, even if its switch reports it as usable
LISTED = 8

Materialise = Callable[[Intent, FabricState], FabricPlan | Hold]
_Basis = tuple[object, int]  # the constraints when it was planned, and the number of circuit changes by then


class CircuitCoordinator:
    """Manages the circuits of one site. The caller runs `run` as a task."""

    def __init__(
        self,
        site: Site,
        reader: SwitchReader,
        circuits: CircuitExecutor,
        windows: WindowTracker,
        pause_registry: PauseRegistry,
        journal: Journal,
        clock: Clock,
        *,
        materialise: Materialise,
        mode: Callable[[], Mode],
        times: CommitTimes,
        settings: FabricSettings,
        routing: FabricRouting | None = None,
        offload: Offload = inline,
    ) -> None:
        self.site = site
        self.overrides = OperatorOverrides(site, journal, clock, self._wake)
        self.times = times
        self._settings = settings
        self.site_reading = SiteReading()  # the last reading of the switches, with the changes made since
        self.defects = 0  # internal errors caught while running
        self.period = ""  # the period whose circuits came up last, or empty if unknown
        self._reader = reader
        self._pause_registry = pause_registry
        self._clock = clock
        self._materialise = materialise
        self._mode = mode
        self._windows = windows
        self._routing = routing
        self._offload = offload
        self._generation = journal.generation
        self._numbers = itertools.count(1)
        self._book = PeriodBook(journal)
        self.counts = self._book.counts  # of periods that ended since the start, by state and code
        self._queue = PeriodQueue()
        self._active: dict[AnnouncedPeriod, asyncio.Task[None]] = {}
        self._circuits = CircuitTurn()
        self._planning = asyncio.Lock()
        self._up: dict[tuple[str, Stage], str] = {}  # names of the periods whose circuits are up
        self._left: frozenset[PortPair] = frozenset()  # the circuits that were up at the last check
        self._handled_failures = FabricFailures()  # the failures at the last check
        self._scanned_s = -inf
        self._has_switch_news = False  # a switch has sent an event
        self._failed_anew = 0  # how often new failures appeared while periods were waiting
        self._suspects: dict[Port, float] = {}  # by port: the time until which it is avoided
        self._committer = StageCommitter(reader, circuits, windows, times, clock, settings, routing)
        self._recover()

    # --- called from outside

    def announce(
        self, period: str, intent_json: str = "", within_s: float = 0.0, *, boundary: bool = False, job: str = ""
    ) -> AnnouncedPeriod:
        """Queue a period that is about to begin. It supersedes the waiting period of its lane (job and kind of
        traffic). `within_s` limits the wait for a window, in seconds. If it is 0, the configured limit is used. If
        `boundary` is True, the caller pauses until the period is over, so no window is needed, except for circuits of
        training. `job` is the job's name, if the intent has none. Raises ProblemFaults for invalid arguments. Raises
        Permanent if no intent is given and none, or more than one, is known for the period."""
        faults = []
        if not 0 <= within_s <= MOST_S:
            faults.append(f"within_s: must be >= 0 and <= {MOST_S:.0f} (0: as configured), got {within_s}")
        try:
            intent = parse_intent(period, intent_json, job) if intent_json else self._book.intent(period, job)
        except ProblemFaults as error:
            raise ProblemFaults([*faults, *error.faults]) from None
        if faults:
            raise ProblemFaults(faults)
        return self.expect(intent, within_s, boundary=boundary)

    def expect(self, intent: Intent, within_s: float = 0.0, *, boundary: bool = False) -> AnnouncedPeriod:
        """Queue a period with the given intent. See `announce` for the other arguments."""
        now_s = self._clock.now_s()
        self._book.record(intent, now_s)
        id = f"c{self._generation}-{next(self._numbers)}"
        report = PeriodReport(id, intent.period, intent.stage, PeriodState.ANNOUNCED, now_s, job=intent.job)
        limit_s = within_s or (self._settings.boundary_within_s if boundary else self._settings.within_s)
        made = AnnouncedPeriod(intent, now_s + limit_s, boundary, report)
        superseded = Hold("superseded", f"{intent.period} was announced")
        if (before := self._queue.put(made)) is not None:
            self._end(before, PeriodState.SUPERSEDED, superseded.code, superseded.detail)
        for each in self._active:
            if each.lane == made.lane:
                each.call_off(superseded)
            elif boundary:
                each.woken.set()
        return made

    def withdraw(self, period: AnnouncedPeriod, why: str) -> None:
        """Withdraw a period. Its stages that have not begun are dropped. The call has no effect if the period is
        over."""
        hold = Hold("withdrawn", why)
        if self._queue.remove(period):
            self._keep(period, hold)
        elif not period.report.over:
            period.call_off(hold)

    async def until_over(self, period: AnnouncedPeriod) -> PeriodReport:
        async for report in period.follow():
            last = report
        return last

    def override(self, period: str, reason: str, ttl_s: float, job: str = "") -> FabricControl:
        """Use the circuits of this period, instead of those of other periods in its lane (job and kind of traffic),
        until the override ends. Raises Permanent if no intent, or more than one, is known for the period. Raises
        ProblemFaults if `ttl_s` is invalid."""
        intent = self._book.intent(period, job)
        control = self.overrides.override(period, reason, ttl_s, intent.job)
        self.expect(intent)
        return control

    def mask(self, masked: Sequence[str], reason: str) -> None:
        """Exclude these components of the site from use. They replace the components that were excluded before.
        Circuits on excluded components are moved in the next window. Raises ProblemFaults if a component is not part of
        the site."""
        self.overrides.mask(masked, reason)
        self._reallocate()

    def times_of_switches(self) -> list[tuple[OcsId, float, int]]:
        """Return, for each switch, the expected duration in seconds of its next change and the number of samples used
        for the estimate."""
        return [
            (switch.id, self.times.need([switch.id], 0.0).total_s, self.times.samples(switch.id))
            for switch in self.site.switches
        ]

    def reports(self, limit: int) -> list[PeriodReport]:
        """Return at most `limit` reports. The reports of active and waiting periods precede those of finished periods.
        Each of the two groups is sorted newest first."""
        coming = (*self.active, *self._queue)
        return [*(each.report for each in reversed(coming)), *reversed(self._book.over)][:limit]

    @property
    def active(self) -> tuple[AnnouncedPeriod, ...]:
        """The periods that are being carried out or wait for a window."""
        return tuple(each for each in self._active if not each.report.over)

    @property
    def up(self) -> dict[tuple[str, Stage], str]:
        """The name of the last period whose circuits came up, for each job and stage, sorted by the time at which the
        circuits came up."""
        return dict(self._up)

    def traced_on(self, hosts: Collection[str]) -> frozenset[str]:
        """Return the traced jobs that have ranks on any of these hosts."""
        return frozenset(
            job for job, theirs in self._windows.hosts_of_jobs().items() if not set(hosts).isdisjoint(theirs)
        )

    @property
    def sync_is_up(self) -> bool:
        """True if the circuits of the generating PoDs were last changed for a weight sync."""
        stages = [stage for _, stage in self._up if stage is not Stage.TRAIN]
        return bool(stages) and stages[-1] is Stage.WEIGHT_SYNC

    async def scan(self) -> SiteReading:
        self.site_reading = await self._reader.scan()
        self._scanned_s = self._clock.now_s()
        return self.site_reading

    def poll_soon(self) -> None:
        """Poll the switches soon, without waiting for the next periodic poll. This method is called when a switch has
        sent an event."""
        self._has_switch_news = True
        self._queue.news.set()

    # --- run

    async def run(self) -> None:
        """Process periods until cancelled. The failure of a period is reported and logged, and does not affect other
        periods."""
        has_looked = False
        try:
            while True:
                try:
                    if not has_looked:
                        await self.scan()
                        self._left, self._handled_failures = self.site_reading.of_site, self.site_reading.failures
                        has_looked = True
                    period = await self._next()
                    self._active[period] = asyncio.ensure_future(self._safely(period))
                except Exception:
                    # An internal error, or one driver's, must not stop the loop: running periods continue.
                    self.defects += 1
                    logger.exception("the switches could not be polled")
                    await self._clock.sleep(POLL_EVERY_S)
        finally:
            await stop(*self._active.values())
            for period in [*self._queue, *self._active]:
                self._queue.remove(period)
                if not period.report.over:
                    self._keep(period, Hold("stopped", "the daemon is stopping"))
            self._active.clear()

    async def _next(self) -> AnnouncedPeriod:
        """Wait for the next period that may start, and return it. Poll the switches periodically during the wait."""
        while True:
            self._queue.news.clear()
            for period in [each for each, task in self._active.items() if task.done()]:
                self._active.pop(period).result()
            if (next_one := self._queue.take(self._active)) is not None:
                return next_one
            due_s = self._scanned_s + (POLL_AGAIN_S if self._has_switch_news else POLL_EVERY_S)
            may_look = not self._active or (self._has_switch_news and self._circuits.by is None)
            if may_look and self._clock.now_s() >= due_s:
                await (self._poll_waiting() if self._active else self._replace_lost())
                continue
            pause_s = due_s - self._clock.now_s() if may_look else inf
            await until_set(self._clock, self._queue.news, min(pause_s, POLL_EVERY_S), *self._active.values())

    async def _poll_waiting(self) -> None:
        """Scan the switches while periods wait for windows, so that new failures are found before a window opens."""
        self._has_switch_news = False
        before, changes = self.site_reading.failures, self._circuits.changes
        site_reading = await self._reader.scan()
        self._scanned_s = self._clock.now_s()
        if self._circuits.as_at(changes) and site_reading.failures != before and self.site_reading.failures == before:
            self._failed_anew += 1
            self._wake()

    async def _replace_lost(self) -> None:
        """Scan the switches, and request replacements for circuits that have gone down or have a failed port."""
        self._has_switch_news = False
        site_reading = await self.scan()
        if site_reading.unread:
            return  # its circuits are unknown
        failed = site_reading.failures.ports - self._handled_failures.ports
        self._handled_failures = site_reading.failures
        lost = {pair for pair in self._left if pair not in site_reading.of_site or not failed.isdisjoint(pair.sides)}
        self._left = site_reading.of_site
        if lost:
            logger.warning("lost: %s", _listed(lost))
            try:
                self._reallocate()
            except OrchestrRLError as error:  # the next announcement requests them
                logger.error("replacements for lost circuits cannot be requested: %s", error)

    async def _safely(self, period: AnnouncedPeriod) -> None:
        try:
            await self._bring_about(period)
        except OrchestrRLError as error:  # from the journal: nothing is done without a record
            self._end(period, PeriodState.FAILED, "not_recorded", str(error))
        except Exception as error:
            # An internal error in one plan must not stop all circuit changes.
            logger.exception("period %s", period.report.period)
            self._end(period, PeriodState.FAILED, "internal", f"{type(error).__name__}: {error}")

    async def _bring_about(self, period: AnnouncedPeriod) -> None:
        failures = 0
        while (outcome := await self._attempt(period)) is not None:
            if isinstance(outcome, StageFailed):
                logger.warning("period %s: %s: %s", period.report.period, outcome.code, outcome.detail)
                failures += 1
                if failures == ATTEMPTS:
                    self._end(period, outcome.state, outcome.code, outcome.detail)
                    break
            elif outcome.code != RESTATED.code:
                if outcome.code != PUT_OFF.code:
                    self._keep(period, outcome)
                elif not self._queue.put_back(period):
                    self._keep(period, Hold("superseded", "a newer period was announced"))
                break

    async def _attempt(self, period: AnnouncedPeriod) -> Hold | StageFailed | None:
        """Plan and commit the period once. Return None if its circuits are up and the period is therefore over.
        Otherwise, return the reason why the circuits are not up."""
        constraints = self._constraints
        intent = self._bound(period.intent)
        if isinstance(intent, Hold):
            return intent
        async with self._planning:
            changes = await self._circuits.at_rest()
            site_reading = await self.scan()
            plan = await self._offload(lambda: self._materialise(intent, self._state(site_reading)))
            stages = () if isinstance(plan, Hold) else await self._stages(period, plan, site_reading)
        if not self._circuits.as_at(changes):
            return RESTATED
        if isinstance(plan, Hold):
            in_the_way = "".join(f"; {note}" for note in self._not_ours(site_reading))
            return replace(plan, detail=plan.detail + in_the_way)
        if not stages:
            self._committed(period, intent, "was_so", "its circuits were up already")
            return None
        if hold := self._restraint(intent):
            return hold
        await self._think_ahead(site_reading, stages)
        for number, stage in enumerate(stages):
            outcome = await self._carry_out(period, intent, stage, (constraints, changes + number), plan)
            if isinstance(outcome, Hold) and number:
                rest = f"; stages {number + 1} to {len(stages)} were left undone"
                return replace(outcome, detail=outcome.detail + rest)
            if outcome is not None:
                return outcome
        self._committed(period, intent, "committed", "")
        return None

    async def _think_ahead(self, site_reading: SiteReading, stages: Sequence[TransitionStage]) -> None:
        if self._routing is not None:
            try:
                await self._routing.prepare(site_reading.of_site, stages)
            except OrchestrRLError as error:  # routes are then computed within the window
                logger.warning("routes could not be prepared: %s", error)

    async def _stages(
        self, period: AnnouncedPeriod, plan: FabricPlan, site_reading: SiteReading
    ) -> Sequence[TransitionStage]:
        problem = TransitionProblem(
            self.site.cabling,
            site_reading.of_site,
            self._reader.of_site(plan.cross_connects) | site_reading.foreign,  # circuits that must not be taken down
            self._settings.max_moves_per_stage,
            self._settings.min_fraction,
        )
        steps: Transition = await self._offload(lambda: transition(problem))
        removed = [pair for stage in steps.stages for pair in stage.remove]
        added = [pair for stage in steps.stages for pair in stage.add]
        notes = [*plan.notes, *self._not_ours(site_reading)]
        if steps.dark_pairs:
            notes.append(f"briefly without light: {', '.join(f'{a} - {b}' for a, b in steps.dark_pairs)}")
        if steps.thin_endpoints:
            notes.append(
                f"briefly below {self._settings.min_fraction:.0%} of their bandwidth: {', '.join(steps.thin_endpoints)}"
            )
        if self._mode() is not Mode.ACT and steps.stages:
            notes.append(f"would remove {_listed(removed) or 'nothing'}, and add {_listed(added) or 'nothing'}")
        before = period.report
        period.update(
            state=PeriodState.MATERIALISED,
            stages=before.stages_done + len(steps.stages),
            moves=sum(commit.moves for commit in before.commits) + len(removed) + len(added),
            completion_s=plan.completion_s,
            # Notes from before the first commit are kept.
            notes=tuple(dict.fromkeys((*(before.notes if before.commits else ()), *notes))),
        )
        return steps.stages

    async def _carry_out(
        self, period: AnnouncedPeriod, intent: Intent, stage: TransitionStage, basis: _Basis, plan: FabricPlan
    ) -> Hold | StageFailed | None:
        """Commit one stage in one window. Return None if the stage is committed, and otherwise the reason why it is
        not."""
        if hold := self._objection(period, intent, basis):
            return hold
        before = self.site_reading.of_site
        order = StageOrder(
            stage,
            intent,
            period,
            before,
            self._others(period, intent),
            objection=lambda: self._objection(period, intent, basis),
            begins=lambda: self._circuits.begin(period),
            waiting=lambda hold: self._waits(period, hold),
        )
        try:
            done = await self._committer.carry_out(order)
            if isinstance(done, CommitReport):
                self._changed(period, stage, done)
                return None
            if isinstance(done, StageFailed):
                await self._on_stage_failed(period, done, before, plan)
            return done
        finally:
            if self._circuits.end(period):
                self._wake()

    def _others(self, period: AnnouncedPeriod, intent: Intent) -> frozenset[str]:
        """Return the other jobs that must pause while the circuits of the period change, according to their announced
        traffic or to the servers on which they run."""
        training = list(self._book.training())
        traced = self._windows.hosts_of_jobs()
        near, unknown = unannounced(self.site, intent, {each.job for each in training}, traced)
        if unknown and intent.stage is Stage.TRAIN:
            jobs = ", ".join(each or "an unnamed job" for each in sorted(unknown)[:LISTED])
            note = f"not waited for, as their circuits are unknown: {jobs}"
            period.update(notes=tuple(dict.fromkeys((*period.report.notes, note))))
        return neighbours(self.site, intent, training) | near

    def _changed(self, period: AnnouncedPeriod, stage: TransitionStage, done: CommitReport) -> None:
        after = self.site_reading.cross_connects - set(stage.remove) | set(stage.add)
        self.site_reading = replace(self.site_reading, cross_connects=after, of_site=self._reader.of_site(after))
        self._left, self.period = self.site_reading.of_site, ""
        period.update(
            state=PeriodState.COMMITTING,
            code="",
            detail=done.detail,
            stages_done=period.report.stages_done + 1,
            commits=(*period.report.commits, done),
        )

    async def _on_stage_failed(
        self, period: AnnouncedPeriod, failed: StageFailed, before: frozenset[PortPair], plan: FabricPlan
    ) -> None:
        """Record the commands that were sent for a failed stage. Also record the pairs of endpoints that have lost
        light and the ports to avoid."""
        until_s = self._clock.now_s() + SUSPECT_S
        self._suspects |= dict.fromkeys(failed.suspects, until_s)
        if failed.report is None:
            return
        self.period = ""
        site_reading = await self.scan()
        self._left = site_reading.of_site
        dark = (self._pairs(before) & self._pairs(plan.cross_connects)) - self._pairs(site_reading.of_site)
        notes = [f"without light until the next change: {a} - {b}" for a, b in sorted(dark)]
        if failed.suspects:
            ports = ", ".join(f"{switch}:{port}" for switch, port in sorted(failed.suspects))
            notes.append(f"ports not used for {SUSPECT_S:.0f} s, because no circuit came up there: {ports}")
        period.update(
            state=PeriodState.COMMITTING,
            detail=failed.report.detail,
            commits=(*period.report.commits, failed.report),
            notes=tuple(dict.fromkeys((*period.report.notes, *notes))),
        )

    # --- constraints

    def _objection(self, period: AnnouncedPeriod, intent: Intent, basis: _Basis) -> Hold | None:
        """Return the reason why no more changes may be sent for this period, or None if changes may be sent."""
        if period.stop is not None:
            return period.stop
        if not period.boundary and self._queue.urgent:
            return PUT_OFF
        constraints, changes = basis
        if self._constraints != constraints or not self._circuits.as_at(changes):
            return RESTATED
        return self._restraint(intent)

    def _bound(self, intent: Intent) -> Intent | Hold:
        """Return the intent of the operator's override if one exists for the same lane (job and kind of traffic), and
        the given intent otherwise. Return a Hold if no intent is known for the override's period."""
        control = self.overrides.control
        if control.state is not OverrideState.OVERRIDDEN:
            return intent
        if (control.job, control.period) == (intent.job, intent.period):
            return intent
        wanted = self._book.get(control.period, control.job)
        if wanted is None:
            return Hold("overridden", f"an operator requires period {control.period}, which was never announced")
        # An override for other PoDs is applied when their own jobs announce.
        return wanted if lane_of(wanted) == lane_of(intent) else intent

    def _restraint(self, intent: Intent) -> Hold | None:
        """Return the reason why no circuit may change now, or None if circuits may change."""
        if self._mode() is not Mode.ACT:
            return Hold("advise", "mode is advise: nothing is changed")
        if hold := self._pause_registry.hold(PauseScope.FABRIC):
            return hold
        if intent.stage is Stage.WEIGHT_SYNC and (hold := self._pause_registry.hold(PauseScope.SYNC)):
            return hold
        control = self.overrides.control
        if control.state is OverrideState.PINNED and not control.cross_connects:
            return Hold("pinned", f"an operator pinned all circuits: {control.reason or 'no reason given'}")
        return None

    def _state(self, site_reading: SiteReading) -> FabricState:
        now_s = self._clock.now_s()
        self._suspects = {port: until_s for port, until_s in self._suspects.items() if until_s > now_s}
        failures = site_reading.failures | self.overrides.failures | FabricFailures(ports=frozenset(self._suspects))
        # Foreign circuits carry the traffic of the endpoints that they join; their ports cannot be used otherwise.
        return FabricState(site_reading.of_site, failures, self.overrides.pinned | site_reading.foreign)

    def _not_ours(self, site_reading: SiteReading) -> list[str]:
        """Return a note for each switch that has foreign circuits. The note lists the circuits and the command that
        takes them over."""
        notes = []
        for switch in sorted({pair.switch for pair in site_reading.foreign}):
            pairs = [pair for pair in sorted(site_reading.foreign) if pair.switch == switch]
            names = " ".join(str(each) for pair in pairs[:LISTED] for each in self._reader.device_pairs(pair))
            more = f" and {len(pairs) - LISTED} more" if len(pairs) > LISTED else ""
            notes.append(
                f"foreign circuits, left in place: {_listed(pairs)}; to use their ports: "
                f"orchestrrl ocs take-over {switch} {names}{more}, or set owns: all in the configuration"
            )
        return notes

    @property
    def _constraints(self) -> object:
        """The constraints that operators have set, and the number of times that switches have reported new failures."""
        return self.overrides.control, self.overrides.masked, self._failed_anew

    def _wake(self) -> None:
        for each in self._active:
            each.woken.set()

    def _reallocate(self) -> None:
        """Announce again the periods whose circuits are up, so that they are planned under the current constraints.
        Weight syncs, and periods whose lane has a newer period, are skipped."""
        coming = {each.lane for each in (*self._queue, *self.active)}
        for (job, stage), period in list(self._up.items()):
            intent = self._book.get(period, job)
            if stage is not Stage.WEIGHT_SYNC and intent is not None and lane_of(intent) not in coming:
                self.expect(intent)

    def _pairs(self, cross_connects: Iterable[PortPair]) -> set[Pair]:
        return {ends for pair in cross_connects if (ends := self.site.cabling.ends(pair)) is not None}

    # --- reports and records

    def _waits(self, period: AnnouncedPeriod, hold: Hold) -> None:
        if period.report.state is not PeriodState.WAITING:
            period.update(state=PeriodState.WAITING, code=hold.code, detail=hold.detail)
        else:  # several times in each iteration, so no follower is woken
            period.report = replace(period.report, code=hold.code, detail=hold.detail)

    def _committed(self, period: AnnouncedPeriod, intent: Intent, code: str, detail: str) -> None:
        self.period = intent.period
        self._up.pop((intent.job, intent.stage), None)  # keeps the latest one last
        self._up[intent.job, intent.stage] = intent.period
        self._left = self.site_reading.of_site
        self._end(period, PeriodState.COMMITTED, code, detail)

    def _keep(self, period: AnnouncedPeriod, hold: Hold) -> None:
        state = PeriodState.SUPERSEDED if hold.code == "superseded" else PeriodState.KEPT
        self._end(period, state, hold.code, hold.detail)

    def _end(self, period: AnnouncedPeriod, state: PeriodState, code: str, detail: str) -> None:
        now_s = self._clock.now_s()
        full_detail = "; ".join(filter(None, (detail, period.report.detail if state is PeriodState.COMMITTED else "")))
        period.update(state=state, code=code, detail=full_detail, ended_s=now_s)
        logger.info("period %s: %s %s %s", period.report.period, state, code, full_detail)
        self._book.ended(period.report, now_s)

    def _recover(self) -> None:
        for took in self._book.switch_times():
            if took.switch in self.site.switch:
                self.times.measured(took)
        for intent in self._book.up():
            self._up.pop((intent.job, intent.stage), None)  # as in `_committed`
            self._up[intent.job, intent.stage] = self.period = intent.period


def _listed(pairs: Iterable[PortPair]) -> str:
    return few([str(pair) for pair in sorted(pairs)], LISTED, ", ")
