"""A simulated fleet with weight peers under a virtual clock. Peers store byte ranges and engines have a version. Peers,
engines and the daemon can die, stall and restart at every point of a sync."""

import asyncio
from collections.abc import Callable, Collection, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fabric_harness import Killed, RestingClock

from orchestrrl.core.config.weights import WeightSettings
from orchestrrl.core.errors import Permanent, Retryable
from orchestrrl.core.journal.store import EntryKind, Journal
from orchestrrl.core.operations import FrozenRequests, PauseMode
from orchestrrl.core.operator_pauses import PauseRegistry
from orchestrrl.daemon.weight_circuits import PacketNetwork
from orchestrrl.fleet.pause_lease import PauseLease, PauseState
from orchestrrl.weights.controller import carrying
from orchestrrl.weights.controller.controller import WeightSync
from orchestrrl.weights.controller.peer_hub import PeerHub, PeerStream
from orchestrrl.weights.controller.reports import SyncReport, SyncState
from orchestrrl.weights.controller.stale_versions import StaleVersions
from orchestrrl.weights.controller.state import EngineNow
from orchestrrl.weights.model import (
    EngineAt,
    HeldVersion,
    Peer,
    PeerLocation,
    PeerRole,
    Range,
    StagedPart,
    TensorMeta,
    VersionMap,
)
from orchestrrl.weights.orders import (
    ArrivedBytes,
    CarryEdge,
    CarryEdges,
    CheckVersion,
    EdgeEvent,
    EdgeState,
    EndEdges,
    InstallVersion,
    KeepVersions,
    OpenVersion,
    Order,
    OrderOutcome,
    PeerOrder,
    PeerResult,
    ProbeWeights,
    QueryVersion,
    RestEngine,
    ServeEngines,
    SumShards,
)
from orchestrrl.weights.publication import Publication
from planner.model import EngineId, PeerId
from planner.sync_tree.ranges import ByteRanges
from planner.sync_tree.shares import EngineShare

START_S = 1_000_000.0
TENSORS = (TensorMeta("a", "F32", (8, 4)), TensorMeta("b", "F32", (4, 4)))
STEP_S = 0.1  # duration of each action of a peer


@dataclass
class Engine:
    """A fake engine. `weights` is None if unknown, as with partial weights, and below zero for its initial weights."""

    id: EngineId
    weights: int | None = -1
    alive: bool = True
    resting: bool = False
    fails: int = 0  # number of next installs that fail
    spoils: bool = False  # a failed install leaves partial weights
    odd: bool = False  # generates wrong tokens
    host: str = ""  # empty: a host of its own
    unnamed: bool = False  # reports its previous version, after a trainer installed others
    stray: int = 0  # drains needed until a request ends that bypassed the gateway

    @property
    def url(self) -> str:
        return f"http://{self.host or self.id}:8000"

    def restart(self) -> None:
        self.weights, self.alive, self.resting, self.unnamed, self.stray = -1, True, False, False, 0


@dataclass
class Folder:
    """The stored bytes of a version on a peer's disk."""

    map: VersionMap
    missing: dict[str, tuple[Range, ...]]
    parts: tuple[StagedPart, ...] = ()
    rotten: bool = False  # some received bytes are wrong


@dataclass
class FakePeer:
    harness: "Harness"
    id: PeerId
    role: PeerRole
    engines: list[Engine] = field(default_factory=list)
    pod: str = "pod0"
    folders: dict[int, Folder] = field(default_factory=dict)
    installed: dict[EngineId, int] = field(default_factory=dict)
    alive: bool = True
    stalls: bool = False  # neither sends nor receives bytes
    rots: int = 0  # number of next versions of which some bytes arrive wrong
    edges: dict[str, CarryEdge] = field(default_factory=dict)
    stream: PeerStream | None = None
    results: dict[str, PeerResult] = field(default_factory=dict)
    orders: list[Order] = field(default_factory=list)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    serves: tuple[str, ...] = ()  # hosts whose engines it can be assigned
    given: set[EngineId] = field(default_factory=set)  # assigned engines
    ranks_of: tuple[EngineId, ...] = ()
    folder: str = ""
    share: EngineShare = field(default_factory=EngineShare)

    def peer(self) -> Peer:
        engines = tuple(EngineAt(e.id, e.url, self.installed.get(e.id), e.id in self.given) for e in self.engines)
        held = tuple(
            HeldVersion(
                version,
                tuple(shard.id for shard in folder.map.shards),
                {shard: tuple(ranges) for shard, ranges in folder.missing.items() if ranges},
                tuple(part.rank for part in folder.parts),
            )
            for version, folder in sorted(self.folders.items())
        )
        place = PeerLocation(None, self.pod, f"{self.pod}-tor")
        ways = {"tcp": f"{self.id}:1"}
        host, more = f"host-{self.id}", {"serves": self.serves, "ranks_of": self.ranks_of, "folder": self.folder}
        more["share"] = self.share
        return Peer(self.id, self.role, host, place, ways, engines, held=held, **more)  # type: ignore[arg-type]

    def attach(self) -> None:
        if self.alive and self.harness.daemon is not None:
            self.stream = self.harness.daemon.hub.attach(self.peer())
            self._go(self._obey(self.stream))

    def die(self) -> None:
        """Kill the peer's process; its disk stays."""
        self.alive = False
        for task in self.tasks:
            task.cancel()
        self.tasks.clear()
        self.edges.clear()
        self.results.clear()
        if self.stream is not None:
            self.stream.end()
            self.stream = None

    def come_back(self) -> None:
        if not self.alive:
            self.alive = True
            self.attach()

    def engine_restarted(self, engine: Engine) -> None:
        engine.restart()
        self.installed.pop(engine.id, None)
        self.introduce()

    def introduce(self) -> None:
        self.tell(self.peer())

    def tell(self, news: Any) -> None:
        if self.alive and self.stream is not None:
            self.stream.on_news(news)

    def has(self, edge: CarryEdge, version: int) -> bool:
        folder = self.folders.get(version)
        if folder is None:
            return False
        own = (edge.offset, edge.bytes)
        return _without([own], folder.missing.get(edge.shard, ())) == (own,)

    def _go(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _obey(self, stream: PeerStream) -> None:
        async for order in stream.orders():
            self._go(self._do(order, stream))

    async def _do(self, order: PeerOrder, stream: PeerStream) -> None:
        if order.id not in self.results:
            self.orders.append(order.order)
            self.harness.point(f"{self.id} is ordered {order.order.kind}")
            if not self.alive:
                return
            result = await self._result(order.order)
            self.results[order.id] = replace(result, id=order.id)
            self.harness.point(f"{self.id} has done {order.order.kind}")
        self.tell(self.results[order.id])

    async def _result(self, order: Order) -> PeerResult:
        if isinstance(order, CarryEdges):
            self._carry(order)
            return PeerResult("", OrderOutcome.DONE)
        await self.harness.clock.sleep(STEP_S)
        match order:
            case OpenVersion():
                return self._open(order)
            case SumShards():
                folder = self.folders[order.version]
                sizes = {shard.id: -(-shard.bytes // folder.map.block_bytes) for shard in folder.map.shards}
                sums = {shard: tuple(f"{order.version}.{k}" for k in range(sizes[shard])) for shard in order.shards}
                return PeerResult("", OrderOutcome.DONE, sums=sums)
            case EndEdges():
                for edge in order.edges or tuple(self.edges):
                    self.edges.pop(edge, None)
                return PeerResult("", OrderOutcome.DONE)
            case CheckVersion():
                return self._check(order)
            case KeepVersions():
                for version in [each for each in self.folders if each not in order.versions]:
                    del self.folders[version]
                self.introduce()
                return PeerResult("", OrderOutcome.DONE)
            case RestEngine():
                return self._rest(order)
            case ProbeWeights():
                engine = self._engine(order.engine)
                if not engine.alive:
                    return PeerResult("", OrderOutcome.FAILED, "does not answer")
                if engine.stray:
                    return PeerResult("", OrderOutcome.FAILED, "has 1 frozen requests, which would continue")
                said = (engine.weights or 0) + (1000 if engine.odd else 0)
                return PeerResult("", OrderOutcome.DONE, tokens=(said,) * order.max_tokens)
            case InstallVersion():
                return await self._install(order)
            case QueryVersion():
                engine = self._engine(order.engine)
                if not engine.alive:
                    return PeerResult("", OrderOutcome.FAILED, "does not answer")
                self._ask(engine)
                return PeerResult("", OrderOutcome.DONE)
            case ServeEngines():
                self._serve(order)
                return PeerResult("", OrderOutcome.DONE)
            case _:
                raise AssertionError(order)

    def _ask(self, engine: Engine) -> None:
        """Query an engine; report the loss of its version, if any."""
        if engine.weights is None or engine.weights < 0:
            self.installed.pop(engine.id, None)
            self.introduce()

    def _rest(self, order: RestEngine) -> PeerResult:
        engine = self._engine(order.engine)
        if order.at_rest and order.ends:
            engine.stray = 0
        elif order.at_rest and order.drain_s and not engine.resting and engine.stray:
            engine.stray -= 1
            if engine.stray:
                return PeerResult("", OrderOutcome.FAILED, "its requests did not finish")
        engine.resting = order.at_rest
        return PeerResult("", OrderOutcome.DONE)

    def _serve(self, order: ServeEngines) -> None:
        before = {engine.id for engine in self.engines}
        own = [engine for engine in self.engines if engine.id not in self.given]
        told = [self.harness.engines[id] for id in order.engines if id in self.harness.engines]
        self.engines, self.given = [*own, *told], {engine.id for engine in told}
        for engine in told:
            if engine.id not in before and engine.weights is not None and engine.weights >= 0:
                self.installed[engine.id] = engine.weights  # the engine reports it
        self.introduce()

    def _open(self, order: OpenVersion) -> PeerResult:
        folder = self.folders.get(order.map.version)
        there = {shard.id for shard in folder.map.shards} if folder is not None else set()
        missing = dict(folder.missing) if folder is not None else {}
        for shard in order.map.shards:
            if shard.id not in there and not order.parts:
                missing[shard.id] = ((0, shard.bytes),)
        self.folders[order.map.version] = Folder(order.map, missing, order.parts, bool(folder and folder.rotten))
        return PeerResult("", OrderOutcome.DONE, missing={k: tuple(v) for k, v in missing.items() if v})

    def _check(self, order: CheckVersion) -> PeerResult:
        folder = self.folders.get(order.version)
        if folder is None:
            return PeerResult("", OrderOutcome.FAILED, "no such version")
        if folder.rotten:
            shard = folder.map.shards[0]
            folder.missing[shard.id] = ((0, min(shard.bytes, folder.map.block_bytes)),)
            folder.rotten = False
        return PeerResult("", OrderOutcome.DONE, missing={k: tuple(v) for k, v in folder.missing.items() if v})

    async def _install(self, order: InstallVersion) -> PeerResult:
        engine = self._engine(order.engine)
        folder = self.folders.get(order.version)
        if folder is None or any(folder.missing.values()) or folder.rotten:
            return PeerResult("", OrderOutcome.FAILED, f"version {order.version} is incomplete")
        if self.harness.clock.now_s() > order.valid_until_s:
            return PeerResult("", OrderOutcome.FAILED, "too late")
        if not engine.alive:
            return PeerResult("", OrderOutcome.FAILED, "does not answer")
        says = self.installed.get(engine.id) if engine.unnamed else engine.weights
        if says == order.version and not order.anew:
            self.installed[engine.id] = order.version
            self.introduce()
            return PeerResult("", OrderOutcome.DONE, loaded_sum=f"sum{order.version}")
        before, engine.weights = engine.weights, None
        self.harness.check()
        noted = self.installed.pop(engine.id, None)
        await self.harness.clock.sleep(STEP_S)
        if not engine.alive:
            return PeerResult("", OrderOutcome.UNKNOWN, "died on the way")
        if engine.fails > 0:
            engine.fails -= 1
            engine.weights = None if engine.spoils else before
            if engine.weights is not None and engine.weights >= 0:
                self.installed[engine.id] = noted if engine.unnamed and noted is not None else engine.weights
            self.introduce()
            return PeerResult("", OrderOutcome.UNKNOWN if engine.spoils else OrderOutcome.FAILED, "out of memory")
        engine.weights = self.installed[engine.id] = order.version
        engine.unnamed = False
        self.introduce()
        return PeerResult("", OrderOutcome.DONE, loaded_sum=f"sum{order.version}")

    def _engine(self, id: EngineId) -> Engine:
        return next(engine for engine in self.engines if engine.id == id)

    def _carry(self, order: CarryEdges) -> None:
        for edge in order.edges:
            if edge.id not in self.edges:
                self.edges[edge.id] = edge
                self._go(self._end_of(edge, order))

    async def _end_of(self, edge: CarryEdge, order: CarryEdges) -> None:
        """Run an edge at one endpoint: the receiver moves the bytes, the sender only watches."""
        clock, began_s = self.harness.clock, self.harness.clock.now_s()
        is_receiver = edge.dst == self.id
        other = self.harness.peers[edge.src if is_receiver else edge.dst]
        met = False
        while edge.id in self.edges:
            await clock.sleep(STEP_S / 2)
            meets = other.alive and edge.id in other.edges
            done = is_receiver and self.has(edge, order.version)
            if (met and not meets and not done) or clock.now_s() - began_s > order.stall_s:
                if self.edges.pop(edge.id, None) is not None:
                    self._event(order, edge, EdgeState.BROKEN, is_receiver, 0, began_s)
                return
            met = met or meets
            if not meets or self.stalls or other.stalls or not is_receiver or not other.has(edge, order.version):
                continue
            self._event(order, edge, EdgeState.BEGAN, True, 0, began_s)
            await clock.sleep(STEP_S)
            if not other.alive or edge.id not in self.edges or order.version not in self.folders:
                continue
            folder = self.folders[order.version]
            folder.missing[edge.shard] = _without(folder.missing.get(edge.shard, ()), [(edge.offset, edge.bytes)])
            if self.rots:
                self.rots -= 1
                folder.rotten = True
            self.edges.pop(edge.id)
            self.tell(ArrivedBytes(order.version, edge.bytes))
            self.harness.point(f"edge {edge.src} to {edge.dst}")
            self._event(order, edge, EdgeState.DONE, True, edge.bytes, began_s)
            other.edges.pop(edge.id, None)
            return

    def _event(
        self, order: CarryEdges, edge: CarryEdge, state: EdgeState, receives: bool, size: int, began_s: float
    ) -> None:
        self.tell(EdgeEvent(order.version, edge.id, state, receives, size, began_s, self.harness.clock.now_s()))


def _without(ranges: Collection[Range], others: Collection[Range]) -> tuple[Range, ...]:
    left = ByteRanges(ranges)
    for offset, size in others:
        left.remove(offset, size)
    return left.ranges


class FakeFence:
    """The pause barrier with its real state transitions. It survives the daemon, as gateways and the journal do."""

    def __init__(self, harness: "Harness") -> None:
        self.harness = harness
        self.manned = True
        self.refuses = 0  # number of next pauses that fail
        self.leases = 0
        self._state = PauseState()

    @property
    def state(self) -> PauseState:
        self._state = self._state.at(self.harness.clock.now_s())
        return self._state

    def is_manned(self) -> bool:
        return self.manned

    def recover(self) -> None:
        if self.state.lease is not None and not self.state.quiet:
            self._put(self.state.abandoned(self.state.lease.id, self.harness.clock.now_s(), "restarted"))

    async def pause(self, holder: str, *, empty: bool, lease_s: float, deadline_s: float) -> str:
        self.harness.point("pause")
        self.leases += 1
        id, now_s = f"g{self.leases}", self.harness.clock.now_s()
        frozen = FrozenRequests.TAKEN_BACK if empty else FrozenRequests.RECOMPUTE
        lease = PauseLease(id, holder, PauseMode.KEEP, frozen, now_s, now_s + lease_s, now_s + deadline_s, True)
        self._put(self.state.paused(lease))
        try:
            await self.harness.clock.sleep(STEP_S)
        except asyncio.CancelledError:
            if self.harness.daemon is not None:
                self._put(self.state.abandoned(id, self.harness.clock.now_s(), "cancelled"))
            raise
        if self.refuses > 0:
            self.refuses -= 1
            self._put(self.state.abandoned(id, self.harness.clock.now_s(), "not quiet"))
            raise Retryable("e0 is not quiet", 1.0)
        self._put(self.state.at_rest(id))
        self.harness.point("paused")
        return id

    async def renew(self, lease: str, lease_s: float) -> None:
        self._put(self.state.renewed(lease, self.harness.clock.now_s() + lease_s))

    async def resume(self, lease: str, version: int | None, without: Collection[EngineId], reason: str) -> None:
        self.harness.point("resume")
        engines = self.harness.now()
        self._put(self.state.resumed(lease, self.harness.clock.now_s(), engines, version, without, reason))
        self.harness.point("resumed")
        await self.harness.clock.sleep(STEP_S)

    def set_version(self, engines: Collection[EngineId], version: int, reason: str) -> None:
        assert engines
        self._put(self.state.with_versions(engines, version))
        self.harness.point("set_version")

    def forget(self, engines: Collection[EngineId], why: str) -> None:
        self._put(self.state.forgotten(tuple(engines)))

    def sampled_anew(self, engine: EngineId) -> None:
        """Report a restart of an engine by its agent, to the daemon if it runs."""
        if self.harness.daemon is not None:
            self.harness.daemon.stale.restarted(engine)
        self.forget([engine], "was restarted")

    def close_by(self, holder: str, lease_s: float = 60.0) -> str:
        """Close the barrier for another holder; return its lease."""
        now_s = self.harness.clock.now_s()
        self.leases += 1
        lease = PauseLease(
            f"g{self.leases}", holder, PauseMode.KEEP, FrozenRequests.TAKEN_BACK, now_s, now_s + lease_s, now_s + 1
        )
        self._put(self.state.paused(lease).at_rest(lease.id))
        return lease.id

    def expire(self) -> None:
        """Expire the lease, if any."""
        if self.state.lease is not None:
            self._put(self.state.at(self.state.lease.until_s))

    def _put(self, state: PauseState) -> None:
        self._state = state
        self.harness.check()


class PointedJournal(Journal):
    """A journal with a point before and after each entry, at which its daemon may be killed."""

    def __init__(self, path: Path, at_s: float, harness: "Harness") -> None:
        super().__init__(path, at_s)
        self.harness = harness

    def append(self, at_s: float, kind: EntryKind, subject: str, body: Mapping[str, Any]) -> int:
        self.harness.point(f"before {kind} {body.get('step', '')}")
        sequence = super().append(at_s, kind, subject, body)
        self.harness.point(f"after {kind} {body.get('step', '')}")
        return sequence


@dataclass
class Daemon:
    journal: Journal
    hub: PeerHub
    sync: WeightSync
    stale: StaleVersions
    task: asyncio.Task[None]


class Harness:
    """Three engine hosts with one engine each, and a trainer's host."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.clock = RestingClock(START_S)
        self.settings = WeightSettings(
            **{"transports": ("tcp",), "chunk_bytes": 64, "stall_s": 2.0, "patience_s": 5.0, "attempts": 2, **settings}
        )
        self._folder = folder
        self.fence = FakeFence(self)
        self.engines = {EngineId(f"e{n}"): Engine(EngineId(f"e{n}")) for n in range(3)}
        self.peers: dict[PeerId, FakePeer] = {}
        self.trainer = self._peer("t", PeerRole.TRAINER, [])
        for name, own in (("p0", "e0"), ("p1", "e1"), ("p2", "e2")):
            self._peer(name, PeerRole.ENGINE, [own])
        self.daemon: Daemon | None = None
        self.points: list[str] = []
        self.at_point: dict[int, Callable[[], None]] = {}
        self.at_what: dict[str, Callable[[], None]] = {}
        self.counting = False
        self.unhealthy: set[EngineId] = set()
        self.deploying = False
        self._tasks: set[asyncio.Task[None]] = set()

    def _peer(self, id: str, role: PeerRole, engines: list[str]) -> FakePeer:
        peer = FakePeer(self, PeerId(id), role, [self.engines[EngineId(e)] for e in engines])
        self.peers[peer.id] = peer
        return peer

    def engine(self, id: str) -> Engine:
        return self.engines[EngineId(id)]

    def peer(self, id: str) -> FakePeer:
        return self.peers[PeerId(id)]

    def restart(self, id: str) -> None:
        """Restart an engine. Its peer reports it; if that is detached, the barrier only discards the version."""
        engine = self.engine(id)
        peer = next(peer for peer in self.peers.values() if engine in peer.engines)
        if peer.stream is None:
            self.fence.forget([engine.id], "was restarted")
        peer.engine_restarted(engine)

    def restart_unseen(self, id: str) -> None:
        """Restart an engine without any report. The pause barrier must be closed."""
        assert self.fence.state.lease is not None
        self.engine(id).restart()

    def restart_behind(self, id: str, lag_s: float) -> None:
        """Restart an engine; its agent reports it at once, and its peer after `lag_s`."""
        engine = self.engine(id)
        peer = next(peer for peer in self.peers.values() if engine in peer.engines)
        engine.restart()
        self.fence.sampled_anew(engine.id)

        def asks() -> None:
            if engine.weights is None or engine.weights < 0:
                peer.engine_restarted(engine)

        self.later(lag_s, asks)

    def task(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        return asyncio.ensure_future(work)

    def later(self, seconds: float, act: Callable[[], None]) -> None:
        async def wait() -> None:
            await self.clock.sleep(seconds)
            act()

        task = asyncio.ensure_future(wait())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def now(self) -> dict[EngineId, EngineNow]:
        return {id: EngineNow("tp1", e.alive and id not in self.unhealthy, e.url) for id, e in self.engines.items()}

    def come(self, id: str, host: str, weights: int = -1) -> Engine:
        """Add an engine to the fleet; `weights` >= 0 is the version with which a redeployment started it."""
        engine = self.engines[EngineId(id)] = Engine(EngineId(id), weights, host=host)
        if weights >= 0:
            self.fence.set_version([engine.id], weights, "brought by a redeployment")
        return engine

    def leave(self, id: str) -> None:
        """Remove an engine by order."""
        engine = self.engines.pop(EngineId(id))
        engine.alive = False
        self.fence.forget([engine.id], "stopped")

    # --- daemons

    def start(self, journal: Journal | None = None) -> None:
        """Start a daemon, with a journal that its owner closes or one of the harness's own."""
        assert self.daemon is None
        if journal is None:
            journal = PointedJournal(self._folder / "journal", self.clock.now_s(), self)
        hub = PeerHub(self.clock, journal.generation, self.settings.patience_s)
        circuits = PacketNetwork(self.settings.network, lambda: {id: s.peer for id, s in hub.peers.items()})
        self.fence.recover()
        self.pause_registry = PauseRegistry(journal, self.clock)
        stale = StaleVersions()
        sync = WeightSync(
            hub,
            self.fence,
            circuits,
            journal,
            self.pause_registry,
            self.clock,
            self.settings,
            engines=self.now,
            deploying=lambda: self.deploying,
            stale=stale,
        )
        sync.recover()
        self.daemon = Daemon(journal, hub, sync, stale, asyncio.ensure_future(sync.run()))
        for peer in self.peers.values():
            peer.attach()

    def kill(self) -> None:
        """Kill the daemon as with SIGKILL: pending work is lost."""
        daemon, self.daemon = self.daemon, None
        if daemon is not None:
            for peer in self.peers.values():
                peer.stream = None
            daemon.task.cancel()
            daemon.task.add_done_callback(lambda task: task.cancelled() or task.exception())
            daemon.hub.close()
            if isinstance(daemon.journal, PointedJournal):
                daemon.journal.close()

    @property
    def sync(self) -> WeightSync:
        assert self.daemon is not None
        return self.daemon.sync

    def when(self, what: str, act: Callable[[], None]) -> None:
        """Call `act` at the next point of that name."""
        self.at_what[what] = act

    def point(self, what: str) -> None:
        """Mark a point at which a scheduled fault may happen."""
        self.check()
        if (happens := self.at_what.pop(what, None)) is not None:
            happens()
        if not self.counting:
            return
        self.points.append(what)
        act = self.at_point.get(len(self.points) - 1)
        if act is not None:
            had = self.daemon
            act()
            if had is not None and self.daemon is None and what.split()[0] in DAEMONS:
                raise Killed

    # --- publishing and checks

    def publish(self, version: int, **more: Any) -> str:
        boxes = {tensor.name: (tensor.whole,) for tensor in TENSORS}
        word = Publication(version, 0, 1, self.trainer.id, TENSORS, boxes, **more)
        return self.sync.publish(word)

    async def report(self, sync_id: str, within_s: float = 120.0) -> SyncReport:
        """Return the report once the sync is over."""
        until_s = self.clock.now_s() + within_s
        while not (report := self.sync.report(sync_id)).over:
            assert self.clock.now_s() < until_s, report
            await self.pass_time(0.25)
        return report

    async def until(self, sync_id: str, state: SyncState) -> None:
        """Wait until the sync is in this state; it must not be over before."""
        while self.sync.report(sync_id).state is not state:
            assert not self.sync.report(sync_id).over
            await self.clock.advance(0.05)

    async def until_killed(self) -> None:
        while self.daemon is not None:
            await self.pass_time(0.25)

    async def pass_time(self, seconds: float) -> None:
        for _ in range(max(1, round(seconds / 0.25))):
            await self.clock.advance(0.25)
            self.check()
            if self.daemon is not None and self.daemon.task.done():
                with suppress(Killed, asyncio.CancelledError):
                    self.daemon.task.result()

    async def settled(self, within_s: float = 400.0) -> None:
        """Wait until all syncs and repairs are over, at most `within_s`."""
        until_s = self.clock.now_s() + within_s
        while self.clock.now_s() < until_s:
            await self.pass_time(5.0)
            if self.daemon is None or self.fence.state.lease is not None or self.sync.book.fleet.quarantined:
                continue
            told = self.fence.state.versions
            if all(report.over for report in self.sync.history(0)) and set(told.values()) == {
                self.sync.book.fleet.version
            }:
                break
        await self.pass_time(5.0)

    def check(self) -> None:
        """Check that every serving engine has the version that the pause barrier lists."""
        state = self.fence.state
        if state.lease is not None:
            return
        for id, engine in self.engines.items():
            told = state.versions.get(id)
            if engine.alive and state.serves(id) and told is not None:
                assert engine.weights == told, f"{id} serves as version {told}, and has {engine.weights}"

    def check_one_version(self, version: int | None) -> None:
        """Check that all engines have this version, and that daemon and barrier report it."""
        state = self.fence.state
        assert state.lease is None
        assert self.sync.book.fleet.version == version
        assert self.sync.book.fleet.quarantined == {}
        assert {id: e.weights for id, e in self.engines.items()} == dict.fromkeys(self.engines, version)
        assert all(state.serves(id) and state.versions[id] == version for id in self.engines)
        assert not any(engine.resting for engine in self.engines.values())
        assert all(report.over for report in self.sync.history(0))


DAEMONS = ("before", "after", "pause", "paused", "resume", "resumed", "set_version")


_plans: dict[str, Any] = {}


def _remembered(plan: Callable[..., Any]) -> Callable[..., Any]:
    """Cache plans, because many runs need the same slow ones. Held versions are not part of the key."""

    def planned(*asked: Any, **more: Any) -> Any:
        told = [
            [replace(each, held=()) if isinstance(each, Peer) else each for each in a] if isinstance(a, list) else a
            for a in asked
        ]
        key = f"{plan.__name__} {told} {sorted(more.items())}"
        if key not in _plans:
            _plans[key] = plan(*asked, **more)
        return _plans[key]

    return planned


carrying.plan_sync = _remembered(carrying.plan_sync)


def played(folder: Path, scene: Callable[[Harness], Any], **settings: Any) -> Any:
    """Play a scene in a harness with a running daemon; return its result."""

    async def play() -> Any:
        harness = Harness(folder, **settings)
        harness.start()
        try:
            return await scene(harness)
        finally:
            harness.kill()
            for peer in harness.peers.values():
                peer.die()

    return asyncio.run(play())


__all__ = ["Engine", "FakePeer", "Harness", "Permanent", "played"]
