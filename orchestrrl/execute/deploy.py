"""Carry out a plan that changes engines: requests leave or wait at their gateway, engines stop, others start.

The order is what keeps the fleet whole: nobody is sent to an engine that is about to stop, no engine stops while it
holds a request that its gateway would not take back, no engine starts on GPUs that are taken. Wherever it breaks off,
what still runs goes on, and the gateway sends a request that has waited too long to where there is room.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Protocol

from orchestrrl.clock import Clock
from orchestrrl.deployers.base import Deployed, Deployer
from orchestrrl.errors import OrchestrRLError, OutcomeUnknown, Permanent, Retryable
from orchestrrl.execute.moves import run_moves
from orchestrrl.execute.routes import Routes
from orchestrrl.execute.runner import Runner
from orchestrrl.journal import Journal, Kind
from orchestrrl.operations import RequestMove
from orchestrrl.plans import DeploymentOutcome, EngineStart
from orchestrrl.state import EngineFacts, State
from planner.model import Configuration, ConfigurationId, EngineId, GpuId, Plan, PlannedInstance, Snapshot

START_ATTEMPTS = 3
# A gateway keeps a request for an engine that is to start at least this long, and twice the time that this should take.
HOLD_S = 30.0


class Plane(Protocol):
    """What a deployment needs of the control plane."""

    runner: Runner
    state: State
    journal: Journal
    clock: Clock
    routes: Routes


class FleetDeployment:
    """One change at a time. `configurations` are those that may be deployed, for what is known of a new engine."""

    def __init__(
        self,
        plane: Plane,
        deployer: Deployer,
        configurations: Mapping[ConfigurationId, Configuration],
        move_expiry_s: float = 10.0,
    ) -> None:
        self._plane = plane
        self._deployer = deployer
        self._configurations = configurations
        self._move_expiry_s = move_expiry_s
        self._busy = False

    @property
    def busy(self) -> bool:
        return self._busy

    async def adopt(self) -> None:
        """Learn of the engines that run already, e.g. after a restart in the middle of a change."""
        for deployed in await self._deployer.observe():
            if deployed.url:
                self._plane.state.add_engine(self._facts(deployed))
        self._tell_routes()

    async def carry_out(self, plan: Plan, snapshot: Snapshot) -> DeploymentOutcome:
        """Bring the fleet to `plan.instances`. Raises Permanent before anything is done, never in the middle."""
        if self._busy:
            raise Permanent("another change of the deployment is under way")
        self._busy = True
        try:
            return await self._change(plan)
        finally:
            self._busy = False

    async def _change(self, plan: Plan) -> DeploymentOutcome:
        wanted = {instance.id: instance for instance in plan.instances}
        running = {deployed.engine: deployed for deployed in await self._deployer.observe()}
        # Those that an operator drains are no part of the plan, and their requests finish.
        drained = {view.id for view in self._plane.state.engines(self._plane.clock.now_s()) if view.draining}
        leaving = [engine for engine in running if engine not in wanted and engine not in drained]
        starting = [instance for instance in plan.instances if instance.id not in running]
        body = {"stop": leaving, "start": [instance.id for instance in starting]}
        self._plane.journal.append(self._plane.clock.now_s(), Kind.DEPLOYMENT_BEGAN, plan.id, body)
        self._plane.routes.draining.update(leaving)
        self._tell_routes()
        try:
            moved = await self._move(plan, leaving, starting)
            began_s = self._plane.clock.now_s()
            stopped = await self._stop(leaving)
        finally:
            self._plane.routes.draining.difference_update(leaving)
        blocked = {gpu for engine in leaving if engine not in stopped for gpu in running[engine].gpus}
        results = await asyncio.gather(*(self._start(instance, blocked, began_s) for instance in starting))
        failed = [result for result in results if isinstance(result, str)]
        starts = tuple(result for result in results if isinstance(result, EngineStart))
        detail = f"{len(stopped)} engines stopped, {len(starting) - len(failed)} started, {moved} requests moved"
        detail = "; ".join([detail, *failed])
        done = not failed and len(stopped) == len(leaving)
        return DeploymentOutcome(done, detail, self._plane.clock.now_s(), starts)

    async def _move(self, plan: Plan, leaving: Sequence[EngineId], starting: Sequence[PlannedInstance]) -> int:
        """The plan's moves, as the fleet is now: who was not foreseen on an engine that stops goes where least is."""
        now = self._plane.state.snapshot(self._plane.clock.now_s())
        planned = {move.request: move.destination for move in plan.moves}
        load = {instance.id: instance.requests_count for instance in plan.instances}
        fresh = {instance.id: HOLD_S + 2 * instance.switch_s for instance in starting}
        moves = []
        for request in now.requests:
            destination = planned.get(request.id)
            if request.engine is None or not request.movable or destination == request.engine:
                continue
            if destination is None and request.engine in leaving:
                destination = min(load, key=lambda engine: (load[engine], engine))
                load[destination] += 1
            if destination is not None:
                moves.append(RequestMove(request.id, request.engine, destination, fresh.get(destination, 0.0)))
        if not moves:
            return 0
        outcome = await run_moves(self._plane.runner, moves, self._plane.state.gateway_of, self._move_expiry_s)
        return sum(item.done for item in outcome.items)

    async def _stop(self, leaving: Sequence[EngineId]) -> set[EngineId]:
        """Those that are gone. What a gateway has still there goes on elsewhere, as after a crash."""
        results = await asyncio.gather(*(self._stop_one(engine) for engine in leaving))
        self._tell_routes()
        return {engine for engine, gone in zip(leaving, results, strict=True) if gone}

    async def _stop_one(self, engine: EngineId) -> bool:
        detail = ""
        try:
            await self._deployer.stop(engine)
        except OrchestrRLError as error:
            detail = str(error)
        gone = not detail or engine not in {deployed.engine for deployed in await self._deployer.observe()}
        if gone:
            self._plane.state.remove_engine(engine)
        self._note(Kind.ENGINE_STOPPED, engine, {"done": gone, "detail": detail})
        return gone

    async def _start(self, instance: PlannedInstance, blocked: set[GpuId], began_s: float) -> EngineStart | str:
        """What it took since `began_s`, or why it could not be started."""
        if blocked.intersection(instance.gpus):
            return f"{instance.id} was not started: its GPUs are not free"
        fault = ""
        for _ in range(START_ATTEMPTS):
            try:
                up = await self._deployer.start(instance.id, instance.configuration, instance.gpus)
            except Retryable as error:
                fault = str(error)
                await self._plane.clock.sleep(error.after_s)
            except OutcomeUnknown as error:  # starting again is harmless, and tells
                fault = str(error)
            except Permanent as error:
                fault = str(error)
                break
            else:
                self._plane.state.add_engine(self._facts(up))
                start = EngineStart(
                    instance.configuration,
                    self._plane.clock.now_s() - began_s,
                    self._configurations[instance.configuration].switch_s,
                )
                body = {"done": True, "url": up.url, "gpus": list(up.gpus), **asdict(start)}
                self._note(Kind.ENGINE_STARTED, instance.id, body)
                self._tell_routes()
                return start
        self._note(Kind.ENGINE_STARTED, instance.id, {"done": False, "detail": fault})
        return f"{instance.id} was not started: {fault}"

    def _facts(self, deployed: Deployed) -> EngineFacts:
        configuration = self._configurations[deployed.configuration]
        return EngineFacts(
            deployed.engine,
            deployed.url,
            deployed.configuration,
            deployed.gpus,
            configuration.max_sequences,
            configuration.kv_capacity_tokens,
        )

    def _tell_routes(self) -> None:
        self._plane.routes.send(self._plane.state.engines(self._plane.clock.now_s()))

    def _note(self, kind: Kind, engine: EngineId, body: Mapping[str, object]) -> None:
        self._plane.journal.append(self._plane.clock.now_s(), kind, engine, body)
