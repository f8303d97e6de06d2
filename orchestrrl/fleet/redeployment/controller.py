"""Change the set of running engines as the planner's plans and operators request, one redeployment at a time.

This module manages the deployment across restarts of the daemon: `recover` finds the running engines, stops the engines
that belong to no deployment, and resumes an interrupted redeployment. run.py runs a redeployment, actions.py carries
out its steps, and targets.py selects its engines and their GPUs.
"""

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping
from dataclasses import replace
from functools import partial

from orchestrrl.core.clock import stop
from orchestrrl.core.config.schema import FleetSettings
from orchestrrl.core.errors import OrchestrRLError, Permanent, ProblemFaults
from orchestrrl.core.operation import OperationState, Stage
from orchestrrl.core.operation_journal import OpenIntent
from orchestrrl.engines.base import EngineCapabilities
from orchestrrl.fleet.deployers.base import DeployedInstance, EngineLife
from orchestrrl.fleet.deployers.command_line import EngineSpec
from orchestrrl.fleet.redeployment import book, steps
from orchestrrl.fleet.redeployment.actions import (
    POLL_S,
    FleetControl,
    FleetDeployment,
    RedeployActions,
    started_with,
    take_stock,
)
from orchestrrl.fleet.redeployment.book import EngineStart, RecordedFleet, RedeploymentBook, RedeploymentOutcome
from orchestrrl.fleet.redeployment.run import RedeploymentRun
from orchestrrl.fleet.redeployment.steps import Redeployment, RedeploymentId, RedeploymentReport, RedeployRequest
from orchestrrl.fleet.redeployment.targets import StandingEngine, TargetEngine, wanted_by_plan, wanted_by_targets
from orchestrrl.fleet.redeployment.turn import DeploymentTurn
from orchestrrl.fleet.state import EngineFacts
from planner.model import Configuration, ConfigurationId, EngineId, Plan, PlanId

logger = logging.getLogger(__name__)

_NUMBERED = re.compile(r"s([0-9]{1,9})(?:$|\.)")
TEND_S = 2.0  # between scans of the deployer's engines
VANISHED = "its processes are gone, and this daemon did not stop it"


class RedeploymentController:
    """Runs redeployments, one at a time, and monitors the deployer's engines."""

    def __init__(
        self, control_plane: FleetControl, deployment: FleetDeployment, turn: DeploymentTurn, fleet: FleetSettings
    ) -> None:
        self.configurations: Mapping[ConfigurationId, Configuration] = {}
        self._control_plane = control_plane
        self._deployment = deployment
        self._deployer = deployment.deployer
        self._turn = turn
        self.reconfigure(fleet)
        self._running: dict[EngineId, DeployedInstance] = {}
        self._fleet = book.read_fleet(control_plane.journal)  # None: no redeployment has ended
        self._run: RedeploymentRun | None = None
        self._task: asyncio.Task[RedeploymentOutcome] | None = None
        self._book = RedeploymentBook(
            control_plane.journal, control_plane.clock, lambda: None if self._run is None else self._run.report()
        )
        self.report, self.history, self.watch = self._book.report, self._book.newest, self._book.watch

    def reconfigure(self, fleet: FleetSettings) -> None:
        """Apply a reloaded configuration."""
        self.configurations = {each.id: each for each in fleet.configuration_values()}
        self._make_spec = partial(self._deployment.make_spec, fleet)

    # --- the present engines

    @property
    def deployed(self) -> Mapping[EngineId, DeployedInstance]:
        return self._running

    async def recover(self) -> None:
        """Adopt running engines, stop the engines that belong to no deployment, and resume an interrupted redeployment.
        This method must be called before the other methods."""
        await self._scan()
        opened = book.read_open(self._control_plane.journal)
        ours = self._ours() if opened is None else (*opened.intent.old, *opened.intent.new, *opened.intent.asleep)
        if ours is not None:
            await self._end_strangers({spec.engine for spec in ours})
        self._drop_stopped(() if opened is None else (*opened.intent.old, *opened.intent.new))
        if opened is None:
            for deployed in [each for each in self._running.values() if each.life is EngineLife.ENDED]:
                await self._bury(deployed)
            self._adopt()
            return
        logger.warning("redeployment %s was interrupted by the end of its daemon", opened.intent.id)
        self._adopt()
        self._run = run = self._new_run(opened.intent)
        self._start(self._carry(run, self._resume(run, opened)))

    async def _resume(self, run: RedeploymentRun, opened: OpenIntent[Redeployment]) -> None:
        """Resume a redeployment once the pause barrier is open. An earlier daemon may have left the barrier closed, and
        no request can be moved while it is closed."""
        while self._control_plane.redeployment_hold():
            await self._control_plane.clock.sleep(POLL_S)
        await run.resume(opened.steps)

    async def maintain(self) -> None:
        """Detect and clean up engines that end although nobody stopped them. The method runs until it is cancelled."""
        while True:
            await self._control_plane.clock.sleep(TEND_S)
            if self._turn.busy:
                continue
            before, run = dict(self._running), self._run
            try:
                found = await self._deployer.list_engines()
            except OrchestrRLError as error:
                logger.warning("cannot list the deployer's engines: %s", error)
                continue
            if self._turn.busy or self._run is not run:  # a redeployment has newer information
                continue
            take_stock(self._running, found)
            missing = [instance for engine, instance in before.items() if engine not in self._running]
            gone = [replace(instance, life=EngineLife.ENDED, detail=VANISHED) for instance in missing]
            ended = [
                instance for e, instance in self._running.items() if instance.life is EngineLife.ENDED and e in before
            ]
            for deployed in [*gone, *ended]:
                await self._bury(deployed)

    async def _bury(self, deployed: DeployedInstance) -> None:
        """Clean up an engine that ended although nobody stopped it. Free its GPUs, and remove it from the routes."""
        logger.error("engine %s has ended: %s", deployed.engine, deployed.detail)
        try:
            await self._deployer.stop(deployed.engine)
        except OrchestrRLError as error:
            logger.error("cannot clean up engine %s: %s", deployed.engine, error)
            return
        if self._turn.busy:  # a redeployment has begun meanwhile and handles it
            return
        self._running.pop(deployed.engine, None)
        self._control_plane.engine_stopped(deployed.engine)
        self._book.note_stopped(deployed.engine, done=True, detail=deployed.detail)
        self._control_plane.engines_deployed(self._running)

    async def _scan(self) -> None:
        take_stock(self._running, await self._deployer.list_engines())

    def _ours(self) -> tuple[EngineSpec, ...] | None:
        """Return the specs of the deployment's engines, or None if they are unknown because no redeployment has ended
        yet. All running engines are adopted if they are unknown."""
        return None if self._fleet is None else (*self._fleet.serving, *self._fleet.asleep)

    def _drop_stopped(self, under_way: Collection[EngineSpec]) -> None:
        """Remove from the routes all redeployed engines that do not serve. `under_way` are the engines of an
        interrupted redeployment. The last routes of an earlier daemon may list such engines, and another engine may
        have their address now."""
        there = {engine for engine, up in self._running.items() if up.life is not EngineLife.ENDED and not up.lent}
        redeployed = (spec for report in self.history() for spec in (*report.old, *report.new))
        for engine in sorted({spec.engine for spec in (*under_way, *redeployed)} - there):
            self._control_plane.engine_stopped(engine)

    async def _end_strangers(self, ours: set[EngineId]) -> None:
        for engine in [engine for engine in self._running if engine not in ours]:
            logger.warning("engine %s belongs to no deployment; stopping it", engine)
            try:
                await self._deployer.stop(engine)
            except OrchestrRLError as error:  # continue with the others
                logger.error("cannot stop engine %s: %s", engine, error)
                self._control_plane.routes.draining.add(engine)
                self._book.note_stopped(engine, done=False, detail=str(error))
                continue
            del self._running[engine]
            self._book.note_stopped(engine, done=True, detail="belonged to no deployment")

    def _adopt(self) -> None:
        """Add the running engines to the fleet, so that requests can go to them."""
        for deployed in self._running.values():
            if deployed.life is EngineLife.ALIVE and deployed.url and not deployed.lent:
                known = self.configurations.get(deployed.configuration)
                facts = EngineFacts(deployed.engine, deployed.url, gpus=deployed.gpus)
                self._control_plane.state.add_engine(facts.of(known))
                if known is None:
                    logger.error(
                        "engine %s runs as %s, which is not configured", deployed.engine, deployed.configuration
                    )
        self._control_plane.engines_deployed(self._running)

    def _standing(self) -> StandingEngine:
        state = self._control_plane.state
        views = state.engines(self._control_plane.clock.now_s())
        specs = {spec.engine: spec for spec in self._ours() or ()}
        # An engine whose record was lost gets the spec that it would be started with now.
        there = [
            (up, up.spec or specs.get(engine) or self._make_spec(engine, up.configuration, up.gpus))
            for engine, up in sorted(self._running.items())
        ]
        alive = {engine for engine, up in self._running.items() if up.life is EngineLife.ALIVE}
        return StandingEngine(
            serving=tuple(spec for up, spec in there if not up.lent),
            asleep=tuple(spec for up, spec in there if up.lent),
            elastic=self._offering(lambda offers: offers.scale_elastic_ep) if self._deployer.can_scale else frozenset(),
            alive=frozenset(engine for engine in alive if not state.barred(engine)),
            drained=frozenset(view.id for view in views if view.draining),
            lost=frozenset(engine for engine, up in self._running.items() if up.life is EngineLife.UNKNOWN),
            others={gpu: view.id for view in views if view.id not in self._running for gpu in view.gpus},
            gpus_count=self._deployment.gpus_count,
            per_node=self._deployment.per_node,
            configurations=self.configurations,
            make_spec=self._make_spec,
        )

    # --- requests

    def draft(self, wish: RedeployRequest) -> tuple[Redeployment, tuple[Stage[steps.RedeployStep], ...]]:
        """Return the redeployment that would carry out a request, and its stages. The stages are empty if the fleet
        already has the requested engines. Raises ProblemFaults with all faults of the request, and Permanent if the
        redeployment is not possible now."""
        standing = self._standing()
        id = self._next_id()
        if wish.plan and not wish.targets:
            wanted = wanted_by_plan(self._control_plane.plan_named(wish.plan), standing)
        else:
            wanted = wanted_by_targets(wish, id, standing)
        redeployment = self._redeployment(id, PlanId(wish.plan), wish.reason or "by an operator", standing, wanted)
        return redeployment, steps.stages_of(redeployment) if _changes(redeployment) else ()

    def _next_id(self) -> RedeploymentId:
        """Return the next id of the form s1, s2, ..., with a number that no redeployment or engine name has used, even
        if the journal was lost."""
        used = [*self._book.ids, *self._running]
        numbers = (int(found[1]) for name in used if (found := _NUMBERED.match(name)))
        return RedeploymentId(f"s{max(numbers, default=0) + 1}")

    def _redeployment(
        self, id: RedeploymentId, plan: PlanId, reason: str, standing: StandingEngine, wanted: TargetEngine
    ) -> Redeployment:
        weights = self._control_plane.current_weights()
        coming = {spec.engine for spec in wanted.new} - {spec.engine for spec in standing.serving}
        woken = {spec.engine for spec in standing.asleep} & coming
        if coming - woken and weights.version is not None and not weights.source:
            raise Permanent(
                f"the engines to be started need weight version {weights.version}, whose location is unknown; run"
                f" `orchestrrl engines set-version {weights.version} --weights FOLDER`"
            )
        may_sleep = self._deployer.can_lend and not wanted.sleepers_too
        redeployment = Redeployment(
            id=id,
            plan=plan,
            reason=reason,
            created_s=self._control_plane.clock.now_s(),
            old=standing.serving,
            new=wanted.new,
            asleep=standing.asleep,
            can_sleep=standing.alive & self._offering(lambda offers: offers.sleep) if may_sleep else frozenset(),
            keep_asleep=self._deployment.keep_asleep and not wanted.sleepers_too,
            destinations=wanted.destinations,
            weights=weights,
            limits=self._deployment.limits,
        )
        self._check_starts(redeployment)
        return redeployment

    def _check_starts(self, redeployment: Redeployment) -> None:
        """Check that the deployer can start all new engines, before any engine is stopped. Raises ProblemFaults with
        the faults of all engines."""
        faults: list[str] = []
        asleep = {spec.engine for spec in redeployment.asleep}
        for spec in redeployment.coming:
            if spec.engine in asleep:
                continue
            try:
                self._deployer.check(started_with(spec, redeployment.weights))
            except ProblemFaults as error:
                faults += error.faults
        if faults:
            raise ProblemFaults(list(dict.fromkeys(faults)))

    def _offers(self, engine: EngineId) -> EngineCapabilities | None:
        """Return the engine's capabilities as last reported by an agent, or as read by the redeployment's verification
        if no agent has reported them yet."""
        verified = None if self._run is None else self._run.acts.offers.get(engine)
        return self._control_plane.state.capabilities(engine) or verified

    def _offering(self, what: Callable[[EngineCapabilities], bool]) -> frozenset[EngineId]:
        return frozenset(e for e in self._running if (offers := self._offers(e)) is not None and what(offers))

    # --- called by `GenerationCircuits`

    def serving(self) -> list[EngineSpec]:
        """Return the specs of running engines. Engines whose record was lost are left out, because the traffic of their
        ranks is unknown."""
        there = (deployed for _, deployed in sorted(self._running.items()) if deployed.life is EngineLife.ALIVE)
        return [deployed.spec for deployed in there if deployed.spec is not None and not deployed.lent]

    def redeploying(self) -> bool:
        return self._turn.busy

    def idle(self) -> bool | None:
        """Return whether no request is in flight, according to engines and gateways. Return None if no request is
        reported, but either an engine has not reported yet or no gateway has."""
        snapshot = self._control_plane.state.snapshot(self._control_plane.clock.now_s())
        reported = {view.id: view for view in snapshot.engines if view.age_s is not None}
        if snapshot.requests or any(view.running or view.waiting for view in reported.values()):
            return False
        known = snapshot.requests_age_s is not None and all(spec.engine in reported for spec in self.serving())
        return True if known else None

    # --- one at a time

    async def carry_out(self, plan: Plan) -> RedeploymentOutcome:
        """Redeploy the fleet to `plan.instances` and return the outcome. Raises Permanent or ProblemFaults if the
        redeployment cannot begin. A later failure is reported in the outcome."""
        self._check_free()
        with self._turn.preparing():
            await self._scan()
            standing = self._standing()
            id = self._next_id()
            wanted = wanted_by_plan(plan, standing)
            redeployment = self._redeployment(id, plan.id, plan.verdict.detail, standing, wanted)
            task = self._begin(redeployment, tell=False)
        return await asyncio.shield(task)

    def begin(self, wish: RedeployRequest) -> RedeploymentId:
        """Start, in the background, the redeployment that `draft` returns, and return its id. Raises Permanent if
        another change of the deployment is in progress, if redeployments are held, or if nothing would change. Also
        raises the errors of `draft`."""
        self._check_free()
        if because := self._control_plane.redeployment_hold():
            raise Permanent(because)
        redeployment, _ = self.draft(wish)
        if not _changes(redeployment):
            raise Permanent("the fleet already has the requested engines, so there is nothing to redeploy")
        self._begin(redeployment)
        return redeployment.id

    def _check_free(self) -> None:
        if self._turn.busy:
            which = f" ({self._run.redeployment.id})" if self._run is not None else ""
            raise Permanent(f"another change of the deployment is in progress{which}")

    def _begin(self, redeployment: Redeployment, *, tell: bool = True) -> "asyncio.Task[RedeploymentOutcome]":
        """Start a redeployment and return its task. If `tell` is true, also report its end to the control plane. Set
        `tell` to false only if the caller reports the end."""
        self._run = run = self._new_run(redeployment)
        task = self._start(self._carry(run, run.run(), tell=tell))
        task.add_done_callback(_log_defect)
        return task

    def _start(self, work: Coroutine[None, None, RedeploymentOutcome]) -> "asyncio.Task[RedeploymentOutcome]":
        self._task = task = asyncio.create_task(work)
        self._turn.take(task)
        return task

    def _new_run(self, redeployment: Redeployment) -> RedeploymentRun:
        engines = self.configurations, self._running
        acts = RedeployActions(self._control_plane, self._deployment, *engines, redeployment)
        return RedeploymentRun(acts, self._book.log, self._control_plane.clock, self._book.changed)

    async def _carry(self, run: RedeploymentRun, work: Awaitable[None], *, tell: bool = True) -> RedeploymentOutcome:
        try:
            await work
        except Exception:  # a defect: requests must not wait for engines of a redeployment that has stopped
            run.acts.let_be()
            raise
        try:
            await self._scan()
        except OrchestrRLError as error:  # the redeployment's own observations suffice
            logger.warning("cannot list the deployer's engines: %s", error)
        report = run.report()
        specs = {spec.engine: spec for spec in (*run.redeployment.asleep, *run.redeployment.old, *run.redeployment.new)}
        there = [
            (specs[e], d) for e, d in sorted(self._running.items()) if e in specs and d.life is not EngineLife.ENDED
        ]
        self._fleet = RecordedFleet(
            serving=tuple(spec for spec, deployed in there if not deployed.lent),
            asleep=tuple(spec for spec, deployed in there if deployed.lent),
        )
        starts = self._starts(run)
        done, now_s = report.state is OperationState.DONE, self._control_plane.clock.now_s()
        outcome = RedeploymentOutcome(done, book.summary_text(report), now_s, tuple(starts.values()))
        try:
            self._book.ended(report, self._fleet)
            self._book.note_engines(run.redeployment, report, starts)
            if tell:
                self._control_plane.redeployment_ended(run.redeployment.plan, outcome)
        except OrchestrRLError as error:
            logger.error("cannot write the end of redeployment %s to the journal: %s", report.id, error)
        self._book.changed()
        return outcome

    def _starts(self, run: RedeploymentRun) -> dict[EngineId, EngineStart]:
        """Return the start durations of the engines whose start is typical of later starts."""
        expected_s = {id: known.switch_s for id, known in run.acts.configurations.items()}
        return {
            spec.engine: EngineStart(spec.configuration, elapsed_s, expected_s.get(spec.configuration, elapsed_s))
            for spec in run.redeployment.coming
            if self._as_usual(run, spec.engine) and (elapsed_s := run.elapsed_s(spec.engine)) is not None
        }

    def _as_usual(self, run: RedeploymentRun, engine: EngineId) -> bool:
        """Return whether the engine's start is typical of its later starts. Return False for an engine that is kept
        asleep, because it is started only once and is woken up afterwards."""
        if not self._deployment.keep_asleep or engine in {spec.engine for spec in run.redeployment.asleep}:
            return True
        offers = self._offers(engine)
        return offers is not None and not offers.sleep

    def cancel(self, id: str, reason: str) -> RedeploymentReport:
        """Call off the running redeployment, so that it is undone, and return its report. An empty id matches any
        redeployment. Raises Permanent if no redeployment with this id is running."""
        if not self._turn.busy or self._run is None or id not in ("", self._run.redeployment.id):
            raise Permanent(f"redeployment {id} is not running" if id else "no redeployment is running")
        self._run.call_off(f"called off: {reason or 'by an operator'}")
        return self._run.report()

    async def close(self) -> None:
        """Stop the running redeployment without finishing it, and close the deployer. The next daemon resumes the
        redeployment."""
        if self._task is not None and not self._task.done():
            await stop(self._task)
        await self._deployer.close()


def _changes(redeployment: Redeployment) -> bool:
    unwanted = not redeployment.keep_asleep and any(spec not in redeployment.new for spec in redeployment.asleep)
    return bool(redeployment.leaving or redeployment.coming or redeployment.scaled) or unwanted


def _log_defect(task: "asyncio.Task[RedeploymentOutcome]") -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("a redeployment failed with a defect: %s", error, exc_info=error)
