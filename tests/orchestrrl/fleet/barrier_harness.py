"""Daemons and gateways on one virtual clock, for the pause barrier. The gateways enforce leases themselves."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from builders import engine_report, gateway_hello, gateway_report, sample

from orchestrrl.core.clock import VirtualClock, stop
from orchestrrl.core.errors import Permanent
from orchestrrl.core.journal.store import EntryKind, Journal, JournalEntry
from orchestrrl.core.nodes import Attachment
from orchestrrl.core.operations import (
    CancelRequests,
    CloseBarrier,
    EngineRoute,
    OpenBarrier,
    Operation,
    OperationItemResult,
    OperationResult,
    OperationStatus,
    SetRoutes,
)
from orchestrrl.daemon.configuration import parse_config
from orchestrrl.daemon.control_plane import ControlPlane, run_loops
from orchestrrl.daemon.wiring import build_daemon
from orchestrrl.fleet.pause_barrier import PauseRequest
from orchestrrl.fleet.reports import BarrierPhase, BarrierReport, FinishedRequest
from planner.model import EngineId, NodeId, RequestView

CONFIG = """
mode: act
fast: {interval_s: 1, stall_grace_s: 3}
fleet:
  gpus: {count: 4}
  configurations:
    - {id: tp2, gpus: 2, alpha_s: 0.02, beta_s: 1e-4, gamma_s: 4e-8, kv_capacity_tokens: 100000, max_sequences: 4,
       prefill_tokens_per_s: 400, switch_s: 1.5}
  engines:
    - {id: e0, url: "http://e0", configuration: tp2, gpus: [0, 1]}
    - {id: e1, url: "http://e1", configuration: tp2, gpus: [2, 3]}
"""
E0, E1 = EngineId("e0"), EngineId("e1")


class Gateway:
    """A gateway that closes its barrier after `drains_s`, opens it on order or when the lease ends by its own clock,
    and reports both every quarter of a second. If `broken`, its results are lost."""

    def __init__(self, plane: ControlPlane, clock: VirtualClock, name: str, drains_s: float = 0.1) -> None:
        self.plane = plane
        self.clock = clock
        self.node = NodeId(name)
        self.drains_s = drains_s
        self.broken = False
        self.deaf = False  # ignores orders
        self.unpaused: dict[EngineId, str] = {}  # engines that cannot be brought to rest, with the reason
        self.lease = ""
        self.until_s = self.quiet_at_s = 0.0
        self.engines_run = False  # while the pause barrier is closed
        self.ended: list[str] = []
        self.orders: list[Operation] = []
        self.routes: tuple[EngineRoute, ...] = ()
        self.routes_at_opening: tuple[EngineRoute, ...] = ()
        self.in_flight: list[RequestView] = []
        self.done: list[FinishedRequest] = []
        self.generated: dict[str, int] = {}  # token counters of engines that differ from the others
        self.attachment: Attachment | None = None
        self._sequence = 0
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def phase(self) -> BarrierPhase:
        if not self.lease:
            return BarrierPhase.OPEN
        at_rest = self.clock.now_s() >= self.quiet_at_s and not self.engines_run
        return BarrierPhase.QUIET if at_rest else BarrierPhase.CLOSING

    def start(self) -> None:
        self._tasks = [asyncio.create_task(part) for part in (self._attach(), self._report())]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with suppress(asyncio.CancelledError):
                await task
        if self.attachment is not None:
            self.plane.fleet.detach(self.attachment)

    def leave(self) -> None:
        """Break the gateway's stream of orders; the gateway continues to run."""
        if self.attachment is not None:
            self.plane.fleet.detach(self.attachment)
            self.attachment = None

    def come_back(self) -> None:
        self._tasks.append(asyncio.create_task(self._attach()))

    def of(self, kind: type) -> list[Operation]:
        return [order for order in self.orders if isinstance(order.action, kind)]

    async def _attach(self) -> None:
        self.attachment = self.plane.fleet.attach(gateway_hello("e0", "e1", gateway=self.node))
        async for operation in self.attachment.orders():
            if isinstance(operation.action, SetRoutes):
                self.routes = operation.action.routes
                continue
            self.orders.append(operation)
            if self.deaf:
                continue
            self._tasks.append(asyncio.create_task(self._carry_out(operation)))

    async def _carry_out(self, operation: Operation) -> None:
        try:
            items = await self._act(operation)
            result = OperationResult(operation.id, self.node, OperationStatus.DONE, items=items)
        except Permanent as error:
            result = OperationResult(operation.id, self.node, OperationStatus.FAILED, str(error))
        if not self.broken:
            self.plane.fleet.result_received(result)

    async def _act(self, operation: Operation) -> tuple[OperationItemResult, ...]:
        match operation.action:
            case CloseBarrier() as order:
                return await self._close(order)
            case OpenBarrier(lease):
                if lease != self.lease:
                    raise Permanent("the pause barrier is not closed under this lease")
                self._open()
                self.routes_at_opening = self.routes
                return tuple(OperationItemResult(engine, True) for engine in ("e0", "e1"))
            case CancelRequests(requests, groups):
                ended = [r for r in self.in_flight if r.id in requests or r.group in groups]
                self.in_flight = [r for r in self.in_flight if r not in ended]
                return tuple(OperationItemResult(r.id, True) for r in ended)
            case other:
                raise Permanent(f"{other.kind} is not expected here")

    async def _close(self, order: CloseBarrier) -> tuple[OperationItemResult, ...]:
        if order.lease in self.ended or self.lease not in ("", order.lease):
            raise Permanent("this lease is over")
        if not self.lease:
            self.quiet_at_s = self.clock.now_s() + self.drains_s
            self.engines_run = order.engines_run
        self.engines_run &= order.engines_run
        self.lease, self.until_s = order.lease, order.lease_until_s
        await self.clock.sleep(min(self.quiet_at_s, order.quiet_by_s) - self.clock.now_s())
        if self.lease != order.lease:
            raise Permanent("the pause barrier opened again before all was quiet")
        if order.engines_run and self.clock.now_s() >= self.quiet_at_s:
            return ()
        if self.phase is not BarrierPhase.QUIET:
            self._open()
            raise Permanent("not quiet by the deadline: 3 requests still run: r1, r2, r3")
        return tuple(OperationItemResult(e, e not in self.unpaused, self.unpaused.get(e, "")) for e in (E0, E1))

    def _open(self) -> None:
        self.ended.append(self.lease)
        self.lease = ""

    async def _report(self) -> None:
        while True:
            if self.lease and self.clock.now_s() >= self.until_s:
                self._open()
            self.report()
            await self.clock.sleep(0.25)

    def report(self) -> None:
        self._sequence += 1
        now_s = self.clock.now_s()
        running = len(self.in_flight) if self.phase is BarrierPhase.CLOSING else 0
        barrier = BarrierReport(self.phase, self.lease, self.until_s if self.lease else 0.0, running)
        reported = gateway_report(
            *self.in_flight,
            sequence=self._sequence,
            done=tuple(self.done),
            gateway=self.node,
            at_s=now_s,
            barrier=barrier,
        )
        self.done = []
        self.plane.fleet.gateway_reported(reported, 1)
        if self.node == "gw0":
            for engine in ("e0", "e1"):
                rate = 0.0 if self.lease else 80.0
                total = self.generated.get(engine, self._sequence)
                busy = sample(now_s, total=total, decode_tokens_per_s=rate, kv_capacity_tokens=100_000)
                self.plane.fleet.engine_reported(engine_report(engine, self._sequence, busy), 1)


class Harness:
    """Successive daemons over one journal."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.clock = VirtualClock(1000.0)
        self.journal: Journal | None = None
        self.gateways: dict[str, Gateway] = {}
        self._loops: asyncio.Task[None] | None = None

    def start(self, config: str = CONFIG) -> ControlPlane:
        if self.journal is not None:
            self.journal.close()
        self.journal = Journal(self.path, self.clock.now_s())
        self.plane = build_daemon(parse_config(config), self.journal, self.clock).control_plane
        return self.plane

    @asynccontextmanager
    async def running(self, *names: str) -> AsyncIterator[None]:
        for name in names or ("gw0",):
            self.gateways[name] = Gateway(self.plane, self.clock, name)
            self.gateways[name].start()
        self._loops = asyncio.create_task(run_loops(self.plane, self.clock))
        await self.clock.advance(1.0)
        try:
            yield
        finally:
            await self.end()
            for gateway in self.gateways.values():
                await gateway.stop()

    async def end(self) -> None:
        """Kill the daemon. The gateways continue to run, detached."""
        if self._loops is not None:
            self._loops.cancel()
            with suppress(asyncio.CancelledError):
                await self._loops
            self._loops = None
        await stop(*self.plane.fleet.barrier.waiting)
        for gateway in self.gateways.values():
            if gateway.attachment is not None:
                self.plane.fleet.nodes.detach(gateway.attachment, self.clock.now_s())

    async def restart(self) -> None:
        """Start another daemon. The gateways attach to it, and it learns their state only from their reports."""
        await self.end()
        self.start()
        for name, old in list(self.gateways.items()):
            await old.stop()
            new = self.gateways[name] = Gateway(self.plane, self.clock, name)
            new.lease, new.until_s, new.quiet_at_s, new.ended = old.lease, old.until_s, old.quiet_at_s, old.ended
            new.start()
        self._loops = asyncio.create_task(run_loops(self.plane, self.clock))
        await self.clock.advance(0.5)

    async def within(self, seconds: float, *asked: asyncio.Task[object]) -> None:
        """Advance the clock until these are done."""
        for _ in range(round(seconds / 0.25)):
            if all(task.done() for task in asked):
                return
            await self.clock.advance(0.25)

    async def pause(self, **wish: object) -> str:
        asked = asyncio.create_task(self.plane.fleet.barrier.pause(PauseRequest(**wish)))  # type: ignore[arg-type]
        await self.within(200.0, asked)
        state = await asked
        assert state.lease is not None
        return state.lease.id

    async def resume(self, lease: str = "", version: int | None = None, without: tuple[EngineId, ...] = ()) -> None:
        asked = asyncio.create_task(self.plane.fleet.barrier.resume(lease, version, without))
        await self.within(20.0, asked)
        await asked

    async def renew(self, lease: str, lease_s: float) -> None:
        asked = asyncio.create_task(self.plane.fleet.barrier.renew(lease, lease_s))
        await self.within(20.0, asked)
        await asked

    def events(self) -> list[str]:
        return [entry.body["event"] for entry in self.entries(EntryKind.BARRIER)]

    def entries(self, *kinds: EntryKind) -> list[JournalEntry]:
        assert self.journal is not None
        return self.journal.since(0, kinds)
