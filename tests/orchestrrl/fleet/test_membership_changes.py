"""Tests of engines that are added and removed under a daemon on a virtual clock, with a behaving gateway and agents."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from builders import GATEWAY, engine_report, gateway_hello, gateway_report, request, sample

from orchestrrl.core.clock import VirtualClock
from orchestrrl.core.errors import Permanent, ProblemFaults
from orchestrrl.core.journal.store import EntryKind, Journal
from orchestrrl.core.nodes import Attachment
from orchestrrl.core.operations import (
    CloseBarrier,
    EngineRoute,
    MoveRequests,
    OpenBarrier,
    OperationItemResult,
    OperationResult,
    OperationStatus,
    SetRoutes,
    status_of,
)
from orchestrrl.daemon.configuration import parse_config
from orchestrrl.daemon.control_plane import ControlPlane, run_loops
from orchestrrl.daemon.wiring import build_daemon
from orchestrrl.engines.base import EngineCapabilities
from orchestrrl.fleet.membership_changes import RETRY_CAP_S, EngineRemoval
from orchestrrl.fleet.pause_barrier import PauseRequest
from orchestrrl.fleet.reports import BarrierPhase, BarrierReport
from orchestrrl.fleet.state import EngineFacts
from planner.model import EngineHealth, EngineId, RequestId, RequestMove
from planner.solver.from_snapshot import live_fleet

CONFIG = """
mode: {mode}
fast: {{interval_s: 1, policy: none}}
slow: {{epsilon_s: 1.0e+6}}
fleet:
  gpus: {{count: 6}}
  configurations:
    - {{id: tp2, gpus: 2, alpha_s: 0.02, beta_s: 1e-4, gamma_s: 4e-8, kv_capacity_tokens: 100000, max_sequences: 16,
       prefill_tokens_per_s: 9000, switch_s: 1.5}}
  engines:
    - {{id: e0, url: "http://e0", configuration: tp2, gpus: [0, 1], pool: wide}}
    - {{id: e1, url: "http://e1", configuration: tp2, gpus: [2, 3]}}
"""
E0, E1, E2 = EngineId("e0"), EngineId("e1"), EngineId("e2")


class Nodes:
    """A gateway whose requests really move, and agents of the `reported` engines."""

    def __init__(self, plane: ControlPlane, clock: VirtualClock) -> None:
        self.plane = plane
        self.clock = clock
        self.reported = ["e0", "e1"]
        self.where: dict[str, str] = {}
        self.immovable: set[str] = set()
        self.refusing: set[str] = set()  # engines that refuse moved requests
        self.routes: dict[str, EngineRoute] = {}
        self.orders: list[RequestMove] = []
        self.barrier = BarrierReport()
        self.moves_take_s = 0.0
        self.report_interval_s = 0.25
        self._sequence = 0
        self._attachment: Attachment | None = None

    async def run(self) -> None:
        while True:
            self.report()
            await self.clock.sleep(self.report_interval_s)

    def report(self) -> None:
        self._sequence += 1
        held = Counter(self.where.values())
        for engine in self.reported:
            busy = sample(self.clock.now_s(), held[engine], kv_capacity_tokens=100_000, decode_tokens_per_s=10.0)
            self.plane.fleet.engine_reported(engine_report(engine, self._sequence, busy), 1)
        live = [request(id, engine, movable=id not in self.immovable) for id, engine in self.where.items()]
        self.plane.fleet.gateway_reported(gateway_report(*live, sequence=self._sequence, barrier=self.barrier), 1)

    async def attach(self) -> None:
        self._attachment = self.plane.fleet.attach(gateway_hello("e0", "e1"))
        async for operation in self._attachment.orders():
            match operation.action:
                case SetRoutes(routes):
                    self.routes = {route.engine: route for route in routes}
                case MoveRequests(moves):
                    await self.clock.sleep(self.moves_take_s)
                    items = tuple(map(self._move, moves))
                    result = OperationResult(operation.id, GATEWAY, status_of(items), items=items)
                    self.plane.fleet.result_received(result)
                case CloseBarrier(lease):
                    self.barrier = BarrierReport(BarrierPhase.QUIET, lease, self.clock.now_s() + 60.0)
                    rests = tuple(OperationItemResult(engine, True) for engine in self.routes)
                    self.plane.fleet.result_received(
                        OperationResult(operation.id, GATEWAY, OperationStatus.DONE, items=rests)
                    )
                case OpenBarrier():
                    self.barrier = BarrierReport()
                    self.plane.fleet.result_received(OperationResult(operation.id, GATEWAY, OperationStatus.DONE))

    def _move(self, move: RequestMove) -> OperationItemResult:
        self.orders.append(move)
        if move.to_engine in self.refusing:
            return OperationItemResult(move.request, False, f"{move.to_engine} takes no requests: it does not answer")
        assert self.where[move.request] == move.from_engine
        assert not self.routes[move.to_engine].draining
        self.where[move.request] = move.to_engine
        return OperationItemResult(move.request, True)


class Harness:
    """Successive daemons over one journal."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "journal.sqlite"
        self.clock = VirtualClock(1000.0)
        self.journal: Journal | None = None

    def start(self, mode: str = "advise") -> ControlPlane:
        self.stop()
        self.journal = Journal(self.path, self.clock.now_s())
        self.plane = build_daemon(parse_config(CONFIG.format(mode=mode)), self.journal, self.clock).control_plane
        return self.plane

    def stop(self) -> None:
        if self.journal is not None:
            self.journal.close()

    @asynccontextmanager
    async def running(self, **where: str) -> AsyncIterator[Nodes]:
        """Start requests on engines, e.g. `a="e0"`."""
        nodes = Nodes(self.plane, self.clock)
        nodes.where.update(where)
        parts = [nodes.run(), nodes.attach(), run_loops(self.plane, self.clock)]
        tasks = [asyncio.create_task(part) for part in parts]
        await self.clock.advance(0.5)
        try:
            yield nodes
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            for task in tasks:
                task.cancel()
            for task in tasks:
                with suppress(asyncio.CancelledError):
                    await task

    def changes(self) -> list[tuple[str, str]]:
        assert self.journal is not None
        return [(entry.body["change"], entry.subject) for entry in self.journal.since(0, (EntryKind.ENGINES,))]


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[Harness]:
    made = Harness(tmp_path)
    yield made
    made.stop()


async def settle() -> None:
    """Deliver orders to the gateway, without advancing the clock."""
    for _ in range(10):
        await asyncio.sleep(0)


# --- add


async def test_added_engine_is_routed_to_at_once(harness: Harness) -> None:
    plane = harness.start()
    async with harness.running() as nodes:
        plane.fleet.membership_changes.add(EngineFacts("e2", "http://e2", "tp2", (4, 5), pool="wide"), "more load")
        await settle()
        route = nodes.routes["e2"]
        assert (route.url, route.health, route.pool, route.max_sequences) == ("http://e2", None, "wide", 16)
        assert route.kv_capacity_tokens == 0, "not known, rather than full"
        assert not plane.fleet.state.reported(E2), "only gateways determine its health"
        nodes.reported.append("e2")
        await harness.clock.advance(1.0)
        assert (nodes.routes["e2"].health, nodes.routes["e2"].waiting) == (EngineHealth.OK, 0)
        (view,) = (view for view in plane.fleet.state.engines(harness.clock.now_s()) if view.id == E2)
        assert (view.configuration, view.gpus) == ("tp2", (4, 5))
        assert (nodes.routes["e0"].pool, nodes.routes["e1"].pool) == ("wide", "")
    assert harness.changes() == [("add", "e2")]


async def test_all_faults_of_a_new_engine_are_reported_at_once(harness: Harness) -> None:
    plane = harness.start()
    with pytest.raises(ProblemFaults) as caught:
        plane.fleet.membership_changes.add(EngineFacts("e0", "e7:80", "tp4", (2, 6, 6)))
    assert caught.value.faults == [
        "engine_id: is in use by the engine at http://e0; remove that engine first, got 'e0'",
        "url: must be an http:// or https:// URL, got 'e7:80'",
        "configuration: is not a known configuration (known: tp2), got 'tp4'",
        "gpus[0]: is in use by e1, got 2",
        "gpus[1]: must be less than fleet.gpus.count (6), got 6",
        "gpus[2]: must be less than fleet.gpus.count (6), got 6",
        "gpus[2]: must not be repeated, got 6",
    ]
    with pytest.raises(ProblemFaults) as caught:
        plane.fleet.membership_changes.add(EngineFacts(" ", "http://e1/", "tp2", (4,)))
    assert caught.value.faults == [
        "engine_id: must not be empty, got ' '",
        "url: is in use by engine e1, got 'http://e1/'",
        "gpus: must have the 2 GPUs of tp2, got [4]",
    ]
    assert harness.changes() == []
    for url in ("http://[::1", "http://e7:port", "ftp://e7", "http://"):
        with pytest.raises(ProblemFaults, match="url: must be"):
            plane.fleet.membership_changes.add(EngineFacts("e7", url))


# --- drain


async def test_drained_engine_gets_no_new_requests_and_keeps_its_own(harness: Harness) -> None:
    plane = harness.start("act")
    async with harness.running(a="e0", b="e0", c="e1") as nodes:
        plane.fleet.membership_changes.drain(E0)
        await settle()
        assert {id: route.draining for id, route in nodes.routes.items()} == {"e0": True, "e1": False}
        await harness.clock.advance(10.0)
        assert (nodes.orders, nodes.where["a"]) == ([], "e0")
        with pytest.raises(Permanent, match="e0 is draining"):
            await plane.fleet.move(RequestId("c"), E0)
        plane.fleet.membership_changes.undrain(E0)
        await settle()
        assert not nodes.routes["e0"].draining
    assert harness.changes() == [("drain", "e0"), ("undrain", "e0")]


@pytest.mark.parametrize("mode", ["advise", "act"])
async def test_requests_of_a_drained_engine_move_in_any_mode(harness: Harness, mode: str) -> None:
    plane = harness.start(mode)
    async with harness.running(**{f"r{n}": "e0" for n in range(6)}, x="e1") as nodes:
        nodes.immovable = {"r0"}
        nodes.reported.append("e2")
        await harness.clock.advance(1.0)
        plane.fleet.membership_changes.drain(E0, move=True)
        await harness.clock.advance(3.0)
        assert Counter(nodes.where.values()) == {"e0": 1, "e1": 3, "e2": 3}
        assert len(nodes.orders) == 5, "each once"
        nodes.where["late"] = "e0"  # sent before the gateway received the change
        await harness.clock.advance(3.0)
        assert nodes.where["late"] != "e0"
        nodes.immovable.clear()
        await harness.clock.advance(3.0)
        assert "e0" not in nodes.where.values()
        del nodes.where["late"]
    assert plane.fleet.state.totals.moves_done == 7


@pytest.mark.parametrize(("moves_take_s", "report_interval_s"), [(3.5, 0.25), (0.0, 1.9)])
async def test_request_is_not_moved_again_before_its_gateway_reports(
    harness: Harness, moves_take_s: float, report_interval_s: float
) -> None:
    plane = harness.start()
    plane.reconfigure(parse_config(CONFIG.format(mode="advise").replace("interval_s: 1,", "interval_s: 0.2,")))
    async with harness.running(**{f"r{n}": "e0" for n in range(4)}) as nodes:
        nodes.moves_take_s, nodes.report_interval_s = moves_take_s, report_interval_s
        await harness.clock.advance(0.5)
        plane.fleet.membership_changes.drain(E0, move=True)
        await harness.clock.advance(10.0)
        assert len(nodes.orders) == 4


async def test_refused_request_tries_another_engine_and_retries_later(harness: Harness) -> None:
    plane = harness.start()
    async with harness.running(a="e0") as nodes:
        nodes.refusing = {"e1"}
        plane.fleet.membership_changes.drain(E0, move=True)
        await harness.clock.advance(100.0)
        assert {move.to_engine for move in nodes.orders} == {"e1"}
        assert 5 <= len(nodes.orders) <= 10, "at increasing intervals"
        nodes.reported.append("e2")
        await harness.clock.advance(RETRY_CAP_S + 2.0)
        assert nodes.where["a"] == "e2"


async def test_next_daemon_continues_a_drain(harness: Harness) -> None:
    plane = harness.start()
    async with harness.running(a="e0") as nodes:
        plane.fleet.membership_changes.add(EngineFacts("e2", "http://e2"))
        await plane.fleet.membership_changes.remove(E2)
        plane.fleet.membership_changes.add(EngineFacts("e3", "http://e3", pool="p"))
        nodes.refusing = {"e1", "e3"}
        plane.fleet.membership_changes.drain(E0, move=True)
        await harness.clock.advance(3.0)
        assert nodes.where["a"] == "e0"
    plane = harness.start()
    plane.reconfigure(parse_config(CONFIG.format(mode="advise")))
    async with harness.running(a="e0") as nodes:
        await settle()
        assert {id: (r.url, r.draining, r.pool) for id, r in nodes.routes.items()} == {
            "e0": ("http://e0", True, "wide"),
            "e1": ("http://e1", False, ""),
            "e3": ("http://e3", False, "p"),
        }
        await harness.clock.advance(5.0)
        assert nodes.where["a"] in ("e1", "e3")


# --- remove


async def test_engine_with_requests_is_removed_only_by_force(harness: Harness) -> None:
    plane = harness.start()
    async with harness.running(a="e0", b="e0", c="e0", d="e1") as nodes:
        nodes.immovable = {"b"}
        await harness.clock.advance(1.0)
        with pytest.raises(
            Permanent, match=r"engine e0 cannot be removed while it has 3 requests; .*drain e0 --move --wait.*--force"
        ):
            await plane.fleet.membership_changes.remove(E0)
        removing = asyncio.create_task(plane.fleet.membership_changes.remove(E0, force=True))
        await harness.clock.advance(1.0)
        assert await removing == EngineRemoval(requests_moved=2, requests_left=1)
        assert (sorted(nodes.routes), nodes.where) == (["e1"], {"a": "e1", "b": "e0", "c": "e1", "d": "e1"})
        await harness.clock.advance(5.0)
        assert "b" in {view.id for view in plane.fleet.state.snapshot(harness.clock.now_s()).requests}, (
            "it finishes there"
        )
    assert harness.changes() == [("drain", "e0"), ("remove", "e0")]


async def test_removed_engine_stays_away_until_added_again(harness: Harness) -> None:
    harness.start()
    async with harness.running() as nodes:
        await harness.plane.fleet.membership_changes.remove(E1)
        await harness.clock.advance(5.0)  # its agent reports it healthy all the time
        assert sorted(nodes.routes) == ["e0"]
        harness.plane.reconfigure(parse_config(CONFIG.format(mode="act")))
        await harness.clock.advance(1.0)
        assert sorted(nodes.routes) == ["e0"], "configured or not"
    plane = harness.start()
    async with harness.running() as nodes:
        await harness.clock.advance(5.0)
        assert sorted(nodes.routes) == ["e0"]
        for word in (plane.fleet.membership_changes.drain, plane.fleet.membership_changes.undrain):
            with pytest.raises(ProblemFaults, match=r"engine_id: must be a known engine \(e0\), got 'e1'"):
                word(E1)
        with pytest.raises(ProblemFaults, match="must be a known engine"):
            await plane.fleet.membership_changes.remove(E1)
        plane.fleet.membership_changes.add(EngineFacts("e1", ""))
        await harness.clock.advance(1.0)
        assert nodes.routes["e1"].health is EngineHealth.OK
        assert (nodes.routes["e1"].url, plane.fleet.state.configuration_of(E1)) == ("http://e1", "tp2"), "as configured"
        await plane.fleet.membership_changes.remove(E1)
        plane.fleet.membership_changes.add(EngineFacts("e1", "http://elsewhere"))
        await harness.clock.advance(1.0)
        assert plane.fleet.state.configuration_of(E1) is None, "as given now"
        with pytest.raises(ProblemFaults, match="url: must be"):
            plane.fleet.membership_changes.add(EngineFacts("e9", ""))


async def test_capabilities_of_a_removed_engine_are_kept(harness: Harness) -> None:
    """Agents report capabilities only once."""
    plane = harness.start()

    def received(sequence: int, version: str = "") -> None:
        report = engine_report("e1", sequence, sample())
        offers = EngineCapabilities("vllm", version, ("tiny",)) if version else None
        plane.fleet.engine_reported(replace(report, capabilities=offers), 1)

    def version() -> str | None:
        offers = plane.fleet.state.capabilities(E1)
        return offers.version if offers else None

    received(1, "1")
    await plane.fleet.membership_changes.remove(E1)
    noted = len(harness.journal.since(0, (EntryKind.ENGINE_HEALTH,))) if harness.journal else 0
    received(2)
    plane.fleet.membership_changes.add(EngineFacts("e1", ""))
    assert (version(), plane.fleet.state.reported(E1)) == ("1", False), "reports from meanwhile are ignored"
    await plane.fleet.membership_changes.remove(E1)
    received(3, "2")
    plane.fleet.membership_changes.add(EngineFacts("e1", ""))
    received(4)
    assert (version(), plane.fleet.state.reported(E1)) == ("2", True)
    assert harness.journal is not None
    assert len(harness.journal.since(0, (EntryKind.ENGINE_HEALTH,))) == noted


async def test_forgotten_engine_can_be_undrained(harness: Harness) -> None:
    plane = harness.start()
    async with harness.running() as nodes:
        nodes.reported.append("e2")
        await harness.clock.advance(1.0)
        plane.fleet.membership_changes.drain(E2)
        nodes.reported.remove("e2")
        await harness.clock.advance(120.0)
        assert "e2" not in nodes.routes
        nodes.reported.append("e2")
        await harness.clock.advance(2.0)
        assert nodes.routes["e2"].draining, "it is drained when it comes back"
        nodes.reported.remove("e2")
        await harness.clock.advance(120.0)
        assert await plane.fleet.membership_changes.remove(E2) == EngineRemoval(0, 0)


# --- effects on other parts


async def test_requests_finishing_on_a_removed_engine_disturb_neither_loop(harness: Harness) -> None:
    harness.start()
    acting = CONFIG.format(mode="act").replace("policy: none", "policy: packing").replace("1.0e+6", "0.1")
    async with harness.running(**{f"r{n}": "e0" for n in range(6)}, x="e1") as nodes:
        nodes.refusing = {"e1"}
        nodes.immovable = {"r0"}
        await harness.clock.advance(1.0)
        removing = asyncio.create_task(harness.plane.fleet.membership_changes.remove(E0, force=True))
        await harness.clock.advance(1.0)
        assert await removing == EngineRemoval(0, 6)
        nodes.orders.clear()
        harness.plane.reconfigure(parse_config(acting))
        await harness.clock.advance(40.0)
        await harness.plane.slow_tick()
        assert harness.plane.balance is not None
        assert nodes.orders == []
        assert {request.engine for request in harness.plane.fleet.state.snapshot(harness.clock.now_s()).requests} == {
            "e0",
            "e1",
        }


async def test_loops_do_not_wait_for_reports_of_a_drained_engine(harness: Harness) -> None:
    plane = harness.start()
    async with harness.running(a="e0") as nodes:
        plane.fleet.membership_changes.drain(E1)
        nodes.reported.remove("e1")  # its host is being redeployed
        await harness.clock.advance(20.0)
        age_s = plane.fleet.state.snapshot(harness.clock.now_s()).inputs_age_s
        assert age_s is not None
        assert age_s < 1.0


async def test_requests_do_not_move_while_weights_change(harness: Harness) -> None:
    plane = harness.start()
    async with harness.running(a="e0") as nodes:
        pausing = asyncio.create_task(plane.fleet.barrier.pause(PauseRequest(holder="trainer", lease_s=60.0)))
        await harness.clock.advance(1.0)
        lease = (await pausing).lease
        assert lease is not None
        plane.fleet.membership_changes.drain(E0, move=True)
        await harness.clock.advance(5.0)
        assert nodes.where["a"] == "e0"
        with pytest.raises(Permanent, match="requests are paused"):
            await plane.fleet.membership_changes.remove(E0, force=True)
        assert harness.changes() == [("drain", "e0")]
        opening = asyncio.create_task(plane.fleet.barrier.resume(lease.id, None, ()))
        await harness.clock.advance(15.0)
        await opening
        assert nodes.where["a"] == "e1"


async def test_neither_loop_uses_a_drained_engine(harness: Harness) -> None:
    config = CONFIG.format(mode="advise").replace("policy: none", "policy: packing, max_moves_per_tick: 64")
    harness.start()
    harness.plane.reconfigure(parse_config(config))
    async with harness.running(**{f"r{n}": "e0" for n in range(12)}) as nodes:
        await harness.clock.advance(2.0)
        balance = harness.plane.balance
        assert balance is not None
        assert {move.to_engine for move in balance.moves} == {"e1"}
        harness.plane.fleet.membership_changes.drain(E1)
        await harness.clock.advance(2.0)
        assert harness.plane.balance is not None
        assert not harness.plane.balance.moves
        plan = await harness.plane.slow_tick()
        assert [instance.id for instance in plan.instances if instance.kept] == ["e0"]
        assert plan.notes[-1] == "draining engines are excluded, with 0 requests: e1"
        snapshot = harness.plane.fleet.state.snapshot(harness.clock.now_s())
        blocked = live_fleet(snapshot, harness.plane.config.fleet.configuration_values(), 6, 8, 4).blocked
        assert blocked is not None
        assert blocked.code == "gpus_unavailable", "its GPUs are taken"
        assert nodes.orders == []
