"""Tests of the cost of routes while a large fleet starts: in orders to gateways, and in the journal."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from builders import engine_report, gateway_hello, sample

from orchestrrl.core.clock import VirtualClock
from orchestrrl.core.journal.store import EntryKind, Journal
from orchestrrl.core.operations import Operation, SetRoutes
from orchestrrl.daemon.configuration import parse_config
from orchestrrl.daemon.wiring import build_daemon
from orchestrrl.fleet.routes import SPACING_LAST_S
from orchestrrl.rpc.codecs.node import OPERATION
from planner.model import EngineHealth, NodeId

MB = 1_000_000
ENGINES = 1024


class Harness:
    def __init__(self, folder: Path, gateways: int) -> None:
        self.clock = VirtualClock(1000.0)
        self.journal = Journal(folder / "journal.sqlite", self.clock.now_s())
        self.plane = build_daemon(parse_config("fast: {interval_s: 1}"), self.journal, self.clock).control_plane
        self.sent: list[tuple[NodeId, int]] = []  # bytes of each order
        self.routes: dict[NodeId, SetRoutes] = {}
        self._send = self.plane.fleet.nodes.send
        self.plane.fleet.nodes.send = self.send  # type: ignore[method-assign]
        for number in range(gateways):
            self.plane.fleet.attach(gateway_hello(gateway=NodeId(f"gw{number}")))
        self.sent.clear()

    def send(self, node: NodeId, operation: Operation) -> None:
        assert isinstance(operation.action, SetRoutes)
        self.sent.append((node, OPERATION.to_pb(operation).ByteSize()))
        self.routes[node] = operation.action
        self._send(node, operation)

    def report(self, number: int, health: EngineHealth = EngineHealth.OK, sequence: int = 1) -> None:
        taken = sample(self.clock.now_s()) if health is EngineHealth.OK else None
        self.plane.fleet.engine_reported(engine_report(f"engine-{number:04d}", sequence, taken, health), 1)

    @property
    def sent_bytes(self) -> int:
        return sum(size for _, size in self.sent)

    @property
    def written_bytes(self) -> int:
        return sum(len(json.dumps(dict(entry.body))) for entry in self.journal.since(0, limit=100_000))

    def engines_routed(self) -> set[int]:
        return {sum(route.health is EngineHealth.OK for route in routes.routes) for routes in self.routes.values()}


@pytest.fixture
def harnesses(tmp_path: Path) -> Iterator[list[Harness]]:
    made: list[Harness] = []
    yield made
    for harness in made:
        harness.journal.close()


@pytest.mark.parametrize("gateways", [1, 4])
async def test_engines_that_start_together_cost_one_message_per_gateway(
    tmp_path: Path, gateways: int, harnesses: list[Harness]
) -> None:
    harnesses.append(harness := Harness(tmp_path, gateways))
    for number in range(ENGINES):
        harness.report(number)
    await harness.clock.advance(0.1)
    assert harness.engines_routed() == {ENGINES}
    assert len(harness.sent) == gateways
    assert harness.sent_bytes < 0.1 * MB * gateways
    assert harness.written_bytes < 0.5 * MB
    assert len(harness.journal.since(0, [EntryKind.ENGINE_HEALTH], limit=2 * ENGINES)) == ENGINES


@pytest.mark.parametrize("gateways", [1, 4])
async def test_engines_that_start_one_by_one_share_messages(
    tmp_path: Path, gateways: int, harnesses: list[Harness]
) -> None:
    harnesses.append(harness := Harness(tmp_path, gateways))
    for number in range(ENGINES):  # within ten seconds
        harness.report(number)
        await harness.clock.advance(10.0 / ENGINES)
    await harness.clock.advance(SPACING_LAST_S)
    assert harness.engines_routed() == {ENGINES}
    assert len(harness.sent) <= 16 * gateways
    assert harness.sent_bytes < 0.5 * MB * gateways
    assert harness.written_bytes < 1.5 * MB
    # One more costs a message for each gateway.
    before = len(harness.sent)
    harness.report(0, EngineHealth.GONE, sequence=2)
    await harness.clock.advance(0.0)
    assert len(harness.sent) == before + gateways


async def test_unchanged_routes_are_not_sent_again_before_half_their_expiry(
    tmp_path: Path, harnesses: list[Harness]
) -> None:
    harnesses.append(harness := Harness(tmp_path, 2))
    harness.report(0)
    await harness.clock.advance(0.1)
    harness.sent.clear()
    lasts_s = harness.plane.config.fast.operation_expiry_s
    for _ in range(int(4 * lasts_s)):
        harness.report(0, sequence=int(harness.clock.now_s()))
        harness.plane.fast_tick()
        await harness.clock.advance(1.0)
    assert 2 * 4 <= len(harness.sent) <= 2 * 9  # twice in the time in which an order expires
    assert len(harness.journal.since(0, [EntryKind.ROUTES])) == 1
    # A gateway that reattaches has lost them, the others have not.
    harness.sent.clear()
    harness.plane.fleet.attach(gateway_hello(gateway=NodeId("gw0")))
    harness.plane.fleet.attach(gateway_hello(gateway=NodeId("gw0")))
    assert [node for node, _ in harness.sent if node == "gw0"] == ["gw0", "gw0"]
    assert len(harness.sent) <= 3


async def test_lost_engine_is_withdrawn_at_once_even_in_a_starting_fleet(
    tmp_path: Path, harnesses: list[Harness]
) -> None:
    harnesses.append(harness := Harness(tmp_path, 1))
    for number in range(64):
        harness.report(number)
        await harness.clock.advance(0.02)
    harness.report(0, EngineHealth.GONE, sequence=2)
    await harness.clock.advance(0.0)
    (routes,) = harness.routes.values()
    assert routes.routes[0].health is EngineHealth.GONE
