"""A fleet whose daemon may be killed at any moment, while the engines, their GPUs and the gateway's requests continue.
Time is virtual; the daemon has the real control plane and the real transaction."""

import asyncio
import dataclasses
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from builders import gateway_hello, gateway_report, request

from orchestrrl.core.clock import VirtualClock
from orchestrrl.core.errors import OrchestrRLError, OutcomeUnknown, Permanent, Retryable
from orchestrrl.core.journal.store import EntryKind, Journal, JournalEntry
from orchestrrl.core.operations import (
    MoveRequests,
    Operation,
    OperationItemResult,
    OperationResult,
    OperationStatus,
    SetRoutes,
)
from orchestrrl.daemon.configuration import parse_config
from orchestrrl.daemon.control_plane import ControlPlane, run_loops
from orchestrrl.daemon.redeployment_wiring import RedeployedFleet
from orchestrrl.daemon.wiring import DaemonEdges, build_daemon
from orchestrrl.engines.base import AnswerExcerpt, EngineCapabilities, EngineSample, LoadedWeights, ReportedLayout
from orchestrrl.fleet.deployers.base import DeployedInstance, EngineLife
from orchestrrl.fleet.deployers.command_line import EngineSpec
from orchestrrl.fleet.launch import spec_of
from orchestrrl.fleet.redeployment.actions import FleetDeployment
from orchestrrl.fleet.redeployment.controller import RedeploymentController
from orchestrrl.fleet.redeployment.steps import (
    RedeploymentReport,
    RedeployTimeouts,
)
from planner.model import EngineId, GpuId, NodeId, RequestId, RequestView

CONFIG = """
mode: act
fast: {interval_s: 1, policy: none}
slow: {interval_s: 10000}
fleet:
  gpus: {count: 4}
  configurations:
    - {id: tp1, gpus: 1, alpha_s: 0.02, beta_s: 1e-4, gamma_s: 4e-8, kv_capacity_tokens: 1000, max_sequences: 16,
       prefill_tokens_per_s: 400, switch_s: 1.5}
    - {id: tp2, gpus: 2, alpha_s: 0.02, beta_s: 1e-4, gamma_s: 4e-8, kv_capacity_tokens: 2000, max_sequences: 16,
       prefill_tokens_per_s: 400, switch_s: 1.5}
    - {id: ep2, gpus: 2, alpha_s: 0.02, beta_s: 1e-4, gamma_s: 4e-8, kv_capacity_tokens: 2000, max_sequences: 16,
       prefill_tokens_per_s: 400, switch_s: 1.5, parallelism: {dp: 2, ep: 2}}
    - {id: ep4, gpus: 4, alpha_s: 0.02, beta_s: 1e-4, gamma_s: 4e-8, kv_capacity_tokens: 4000, max_sequences: 16,
       prefill_tokens_per_s: 400, switch_s: 1.5, parallelism: {dp: 4, ep: 4}}
"""
LIMITS = RedeployTimeouts(drain_s=5.0, stop_s=5.0, start_s=5.0, ready_s=10.0, load_s=5.0, check_s=5.0)
UP_AFTER_S = 1.5
REFERENCE = -1.0  # log-probability of every token, for engines that answer correctly


@dataclasses.dataclass
class FakeEngine:
    """A fake engine, by its processes. Tests set its faults."""

    spec: EngineSpec
    up_at_s: float
    life: EngineLife = EngineLife.ALIVE
    lent: bool = False
    sleeping: bool = False
    weights: int | None = None
    logprob: float = REFERENCE
    tp: int | None = None
    dp: int = 0
    capacity_tokens: int | None = None

    def __post_init__(self) -> None:
        self.dp = self.spec.parallelism.dp  # of its processes, even if the deployer reports otherwise


class Machines:
    """The engines on GPUs, which outlive every daemon, and faults to inject per step."""

    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock
        self.engines: dict[EngineId, FakeEngine] = {}
        self.starts: Counter[EngineId] = Counter()
        self.stops: list[EngineId] = []
        self.faults: dict[tuple[str, str], OrchestrRLError] = {}  # (call, configuration or engine) -> always
        self.lost: set[tuple[str, str]] = set()  # results, each used once
        self.hangs: set[tuple[str, str]] = set()
        self.lasts_s: dict[tuple[str, str], float] = {}
        self.made: Callable[[FakeEngine], None] = lambda engine: None
        self.can_sleep = self.can_scale = False
        self.connections = 0  # open clients

    def place(self, spec: EngineSpec) -> None:
        self._own(spec)
        self.engines[spec.engine] = FakeEngine(spec, self.clock.now_s())

    def alive(self) -> dict[EngineId, FakeEngine]:
        return {
            id: engine for id, engine in self.engines.items() if engine.life is EngineLife.ALIVE and not engine.lent
        }

    async def meddle(self, what: str, engine: FakeEngine | EngineSpec) -> None:
        spec = engine.spec if isinstance(engine, FakeEngine) else engine
        for name in (spec.configuration, spec.engine):
            if (what, name) in self.hangs:
                await asyncio.Event().wait()
            if (what, name) in self.lasts_s:
                await self.clock.sleep(self.lasts_s[what, name])
            if (what, name) in self.faults:
                raise self.faults[what, name]

    def lose(self, what: str, engine: EngineId) -> None:
        if (what, engine) in self.lost:
            self.lost.discard((what, engine))
            raise OutcomeUnknown(f"{what} of {engine}: the connection broke")

    def _own(self, spec: EngineSpec) -> None:
        for other in self.engines.values():
            if not other.lent and set(other.spec.gpus) & set(spec.gpus):
                raise Permanent(f"GPUs of {spec.engine} are in use by {other.spec.engine}")


class Deployer:
    """One daemon's deployer for the machines."""

    def __init__(self, machines: Machines) -> None:
        self._machines = machines
        self.can_lend = machines.can_sleep
        self.can_scale = machines.can_scale
        self.closed = False

    def check(self, spec: EngineSpec) -> None:
        if ("check", spec.configuration) in self._machines.faults:
            raise self._machines.faults["check", spec.configuration]

    async def start(self, spec: EngineSpec) -> DeployedInstance:
        machines = self._machines
        await machines.meddle("start", spec)
        there = machines.engines.get(spec.engine)
        if there is None:
            machines._own(spec)
            there = FakeEngine(spec, machines.clock.now_s() + UP_AFTER_S)
            machines.made(there)
            machines.engines[spec.engine] = there
            machines.starts[spec.engine] += 1
        elif there.spec != spec:
            raise Permanent(f"{spec.engine} runs otherwise")
        machines.lose("start", spec.engine)
        return self._told(there)

    async def stop(self, engine: EngineId) -> None:
        there = self._machines.engines.get(engine)
        if there is not None:
            await self._machines.meddle("stop", there)
            del self._machines.engines[engine]
            self._machines.stops.append(engine)
            self._machines.lose("stop", engine)

    async def status(self, engine: EngineId) -> DeployedInstance | None:
        there = self._machines.engines.get(engine)
        return None if there is None else self._told(there)

    async def list_engines(self) -> tuple[DeployedInstance, ...]:
        return tuple(self._told(self._machines.engines[engine]) for engine in sorted(self._machines.engines))

    async def lend(self, engine: EngineId, lent: bool) -> None:
        there = self._machines.engines[engine]
        await self._machines.meddle("lend", there)
        if not lent and there.lent:
            there.lent = False
            self._machines.engines.pop(engine)
            try:
                self._machines._own(there.spec)
            finally:
                self._machines.engines[engine] = there
        there.lent = lent

    async def scale(self, spec: EngineSpec) -> DeployedInstance:
        there = self._machines.engines.pop(spec.engine)
        try:
            self._machines._own(spec)
            there.spec = spec
        finally:
            self._machines.engines[there.spec.engine] = there
        return self._told(there)

    async def close(self) -> None:
        self.closed = True

    def _told(self, engine: FakeEngine) -> DeployedInstance:
        spec = engine.spec
        url = f"http://{spec.engine}"
        return DeployedInstance(
            spec.engine, spec.configuration, spec.gpus, url, engine.life, "died", spec=spec, lent=engine.lent
        )


class Client:
    """A client of one engine."""

    def __init__(self, url: str, machines: Machines, running: Callable[[EngineId], int]) -> None:
        self.url = url
        self.weights = self
        self._machines = machines
        self._id = EngineId(url.removeprefix("http://"))
        self._running = running
        machines.connections += 1

    async def _engine(self, what: str) -> FakeEngine:
        engine = self._machines.engines.get(self._id)
        if engine is None or engine.life is not EngineLife.ALIVE or self._machines.clock.now_s() < engine.up_at_s:
            raise Retryable(f"{self.url}: connection refused", 0.1)
        await self._machines.meddle(what, engine)
        return engine

    async def capabilities(self) -> EngineCapabilities:
        await self._engine("capabilities")
        machines = self._machines
        offers = {"sleep": machines.can_sleep, "scale_elastic_ep": machines.can_scale}
        return EngineCapabilities("fake", "1", ("fake",), **offers)

    async def metrics(self) -> EngineSample:
        engine = await self._engine("metrics")
        capacity_tokens = engine.capacity_tokens or 1000 * len(engine.spec.gpus)
        return EngineSample(self._running(self._id), 0, 0.0, capacity_tokens, 0, 0, 0)

    async def healthy(self) -> bool:
        await self._engine("healthy")
        return True

    async def probe(self) -> float:
        await self._engine("probe")
        return 0.01

    async def layout(self) -> ReportedLayout:
        engine = await self._engine("layout")
        layout = engine.spec.parallelism
        return ReportedLayout(tp=engine.tp or layout.tp, dp=engine.dp, ep=layout.ep > 1)

    async def weight_version(self) -> int | None:
        return (await self._engine("weight_version")).weights

    async def load_weights(self, folder: Path | str, version: int, known_sum: str | None = "") -> LoadedWeights:
        (await self._engine("load_weights")).weights = version
        return LoadedWeights(version)

    async def name_weights(self, policy_version: int | None) -> None:
        (await self._engine("name_weights")).weights = policy_version

    async def excerpt(self, prompt_ids: Sequence[int], tokens: int) -> AnswerExcerpt:
        engine = await self._engine("excerpt")
        return AnswerExcerpt(tuple(prompt_ids), (1,) * tokens, (engine.logprob,) * tokens)

    async def score(self, excerpt: AnswerExcerpt) -> tuple[float, ...]:
        return ((await self._engine("score")).logprob,) * len(excerpt.token_ids)

    async def sleep(self) -> None:
        (await self._engine("sleep")).sleeping = True

    async def wake(self) -> None:
        (await self._engine("wake")).sleeping = False

    async def asleep(self) -> bool:
        return (await self._engine("asleep")).sleeping

    async def scale(self, dp: int) -> None:
        engine = await self._engine("scale")
        engine.dp = dp

    async def close(self) -> None:
        self._machines.connections -= 1


class Gateway:
    """A gateway that keeps its requests while the daemon is dead. It carries orders out and reports every quarter of a
    second."""

    def __init__(self, clock: VirtualClock, machines: Machines) -> None:
        self.clock = clock
        self.machines = machines
        self.requests: dict[RequestId, RequestView] = {}
        self.held: dict[RequestId, EngineId] = {}
        self.routes = SetRoutes(())
        self.cut: list[RequestId] = []  # requests on an engine when it stopped
        self._sequence = 0

    def put(self, name: str, engine: str, *, movable: bool = True) -> None:
        view = request(name, engine, movable=movable)
        self.requests[view.id] = view

    def on(self, engine: EngineId) -> list[RequestId]:
        return [id for id, view in self.requests.items() if view.engine == engine]

    async def attach(self, plane: ControlPlane) -> None:
        attachment = plane.fleet.attach(gateway_hello(gateway=NodeId("gw")))
        async for operation in attachment.orders():
            if isinstance(operation.action, SetRoutes):
                self.routes = operation.action
            else:
                plane.fleet.result_received(self._perform(operation))

    async def report(self, plane: ControlPlane) -> None:
        while True:
            self._look()
            self._sequence += 1
            plane.fleet.gateway_reported(gateway_report(*self.requests.values(), sequence=self._sequence), 1)
            await self.clock.sleep(0.25)

    def usable(self) -> list[EngineId]:
        alive = self.machines.alive()
        return [route.engine for route in self.routes.routes if not route.draining and route.engine in alive]

    def _look(self) -> None:
        """Move requests off engines that are gone, and send held ones as soon as possible."""
        usable = self.usable()
        for id, view in list(self.requests.items()):
            if view.engine is not None and view.engine not in self.machines.alive():
                self.cut.append(id)
                self._to(id, None)
        for id, engine in list(self.held.items()):
            if engine in usable or (engine not in self.routes.expected and usable):
                del self.held[id]
                self._to(id, engine if engine in usable else usable[0])
        for id, view in self.requests.items():
            if view.engine is None and id not in self.held and usable:
                self._to(id, usable[0])

    def _perform(self, operation: Operation) -> OperationResult:
        assert isinstance(operation.action, MoveRequests)
        items = []
        for move in operation.action.moves:
            view = self.requests.get(move.request)
            if view is None or view.engine != move.from_engine:
                items.append(OperationItemResult(move.request, False, "is not there"))
                continue
            if move.to_engine in self.usable():
                self._to(move.request, move.to_engine)
            elif move.hold_s:
                self.held[move.request] = move.to_engine
                self._to(move.request, None)
            else:
                items.append(OperationItemResult(move.request, False, "takes no requests"))
                continue
            items.append(OperationItemResult(move.request, True))
        return OperationResult(operation.id, NodeId("gw"), OperationStatus.DONE, items=tuple(items))

    def _to(self, id: RequestId, engine: EngineId | None) -> None:
        self.requests[id] = dataclasses.replace(self.requests[id], engine=engine)


class Watch:
    """Records the engines to watch, at each change."""

    def __init__(self, watched: list[set[str]]) -> None:
        self._watched = watched

    def follow(self, engines: Mapping[EngineId, tuple[str, str]]) -> None:
        if not self._watched or self._watched[-1] != engines.keys():
            self._watched.append({str(engine) for engine in engines})

    async def close(self) -> None:
        pass


class Killed(BaseException):
    """The daemon is killed."""


class Harness:
    """A harness of machines and one gateway. `daemon()` runs one daemon; another may follow on the same journal."""

    def __init__(self, folder: Path, *, sleepers: bool = False, keep_asleep: bool = False) -> None:
        self.clock = VirtualClock(1000.0)
        self.machines = Machines(self.clock)
        self.machines.can_sleep = sleepers
        self.gateway = Gateway(self.clock, self.machines)
        self.config = parse_config(CONFIG)
        self.path = folder / "journal.sqlite"
        self.keep_asleep = keep_asleep
        self.plane: Any = None
        self.redeployer: Any = None
        self.watched: list[set[str]] = []  # the engines to watch, at each change
        self.killed_after: int | None = None  # the number of journal entries of steps
        self._written = 0
        self._deployer = Deployer(self.machines)
        self._tasks: list[asyncio.Task[None]] = []

    def spec(self, engine: str, configuration: str, *gpus: int) -> EngineSpec:
        return spec_of(self.config.fleet, EngineId(engine), configuration, tuple(map(GpuId, gpus)))  # type: ignore[arg-type]

    def place(self, engine: str, configuration: str, *gpus: int) -> None:
        self.machines.place(self.spec(engine, configuration, *gpus))

    @asynccontextmanager
    async def daemon(
        self, circuits: Callable[[ControlPlane], Any] | None = None
    ) -> AsyncIterator[RedeploymentController]:
        """Run a daemon in the block. `circuits` creates circuits that follow the deployment."""
        journal = Journal(self.path, self.clock.now_s())
        append = journal.append

        def counted(at_s: float, kind: EntryKind, subject: str, body: Mapping[str, Any]) -> int:
            if self.killed_after is not None and self._written > self.killed_after:
                raise Killed
            sequence = append(at_s, kind, subject, body)
            if kind in (EntryKind.REDEPLOYMENT_STEP, EntryKind.REDEPLOYMENT_BEGAN):
                self._written += 1
                if self.killed_after is not None and self._written > self.killed_after:
                    raise Killed
            return sequence

        journal.append = counted  # type: ignore[method-assign]
        self.build(journal, circuits)
        try:
            await self.start()
            await self.clock.advance(1.0)
            yield self.redeployer
        finally:
            journal.append = append  # type: ignore[method-assign]
            await self.end()
            journal.close()

    def build(self, journal: Journal, circuits: Callable[[ControlPlane], Any] | None = None) -> None:
        """Construct a daemon, which `start` runs."""
        self._deployer = Deployer(self.machines)
        deployment = FleetDeployment(
            self._deployer,
            lambda url: Client(url, self.machines, lambda engine: len(self.gateway.on(engine))),
            gpus_count=4,
            per_node=8,
            limits=LIMITS,
            keep_asleep=self.keep_asleep,
        )
        edges = DaemonEdges(deployment=deployment, watch=lambda _: Watch(self.watched), stopwatch=lambda: 0.0)
        parts = build_daemon(self.config, journal, self.clock, edges)
        plane, redeployer = parts.control_plane, parts.redeployer
        if circuits is not None:
            watch, fleet, turn = Watch(self.watched), parts.fleet, plane._turn
            redeployed = RedeployedFleet(fleet, parts.weights.syncs, circuits(plane), watch, "vllm")
            redeployer = RedeploymentController(redeployed, deployment, turn, self.config.fleet)
            plane = ControlPlane(
                fleet, plane.mode, plane.pause_registry, turn, redeployer, plane._left_for_moves, stopwatch=lambda: 0.0
            )
        assert redeployer is not None
        self.plane, self.redeployer = plane, redeployer

    async def start(self) -> None:
        self._tasks = []
        await self.redeployer.recover()
        self._tasks = [
            asyncio.create_task(self.gateway.attach(self.plane)),
            asyncio.create_task(self.gateway.report(self.plane)),
            asyncio.create_task(run_loops(self.plane, self.clock)),
        ]

    async def end(self) -> None:
        """End the daemon. Engines and the gateway continue."""
        try:
            await self.redeployer.close()
            await self.plane.fleet.close(0.0)
        finally:
            for task in self._tasks:
                task.cancel()
                with suppress(asyncio.CancelledError, Killed, BaseExceptionGroup):
                    await task
        assert self._deployer.closed
        assert self.machines.connections == 0

    async def until_ended(self, most_s: float = 120.0) -> RedeploymentReport:
        for _ in range(int(most_s / 0.5)):
            if not self.redeployer.redeploying():
                await self.clock.advance(1.0)
                return self.redeployer.report()  # type: ignore[no-any-return]
            await self.clock.advance(0.5)
        raise AssertionError(f"the redeployment has not ended: {self.redeploying.report()}")

    def engines_noted(self, kind: EntryKind) -> list[tuple[str, bool, str]]:
        """Return the engines that the journal records as started or stopped, each with its result and detail."""
        return [(entry.subject, entry.body["done"], entry.body["detail"]) for entry in self.entries(kind)]

    def entries(self, *kinds: EntryKind) -> list[JournalEntry]:
        from orchestrrl.core.journal.store import JournalReader

        reader = JournalReader(self.path)
        try:
            return reader.tail(10_000, kinds)
        finally:
            reader.close()
