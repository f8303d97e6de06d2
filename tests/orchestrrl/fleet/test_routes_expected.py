"""Tests of the engines that gateways should expect, until when, and what a restarted daemon recovers of them."""

import asyncio
from pathlib import Path

from builders import engine_report, gateway_hello, sample

from orchestrrl.core.clock import VirtualClock
from orchestrrl.core.journal.store import EntryKind, Journal
from orchestrrl.core.nodes import Attachment
from orchestrrl.core.operations import SetRoutes
from orchestrrl.daemon.configuration import parse_config
from orchestrrl.daemon.control_plane import ControlPlane
from orchestrrl.daemon.wiring import build_daemon
from planner.model import EngineId

CONFIG = """
mode: act
fast: {interval_s: 1, policy: none}
fleet:
  gpus: {count: 4}
  configurations:
    - {id: tp2, gpus: 2, alpha_s: 0.02, beta_s: 1e-4, gamma_s: 4e-8, kv_capacity_tokens: 100000, max_sequences: 16,
       prefill_tokens_per_s: 9000, switch_s: 1.5}
  engines:
    - {id: e0, url: "http://e0", configuration: tp2, gpus: [0, 1]}
    - {id: e1, url: "http://e1", configuration: tp2, gpus: [2, 3]}
"""
E0, E1, E2 = EngineId("e0"), EngineId("e1"), EngineId("e2")


class Harness:
    """Successive daemons over one journal."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "journal.sqlite"
        self.clock = VirtualClock(1000.0)
        self.journal: Journal | None = None

    def start(self) -> ControlPlane:
        if self.journal is not None:
            self.journal.close()
        self.journal = Journal(self.path, self.clock.now_s())
        self.plane = build_daemon(parse_config(CONFIG), self.journal, self.clock).control_plane
        return self.plane

    def tell(self) -> None:
        self.plane.fleet.routes.send(self.plane.fleet.state.engines(self.clock.now_s()))

    def written(self) -> int:
        assert self.journal is not None
        return len(self.journal.since(0, [EntryKind.ROUTES]))


async def reported(attachment: Attachment) -> SetRoutes:
    async with asyncio.timeout(60):
        async for operation in attachment.orders():
            assert isinstance(operation.action, SetRoutes)
            return operation.action
    raise AssertionError("the stream ended")


def draining(action: SetRoutes) -> dict[str, bool]:
    return {route.engine: route.draining for route in action.routes}


async def test_gateways_receive_engines_that_are_being_started(tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    plane = harness.start()
    gateway = plane.fleet.attach(gateway_hello())
    first = await reported(gateway)
    assert (first.expected, first.expected_until_s) == ((), 0.0)
    plane.fleet.routes.expected |= {E2: 1030.0, E1: 1010.0}
    harness.tell()
    action = await reported(gateway)
    assert (action.expected, action.expected_until_s) == ((E1, E2), 1030.0)
    # A gateway that attaches now receives the same, and so do the others.
    late = plane.fleet.attach(gateway_hello())
    assert (await reported(late)).expected == (E1, E2)
    await harness.clock.advance(10.0)
    harness.tell()
    assert (await reported(late)).expected == (E2,)
    await harness.clock.advance(20.0)
    harness.tell()
    action = await reported(late)
    assert (action.expected, action.expected_until_s) == ((), 0.0)


async def test_expected_engine_gets_no_requests_though_reported_healthy(tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    plane = harness.start()
    plane.fleet.routes.expected[E2] = 1030.0
    plane.fleet.engine_reported(engine_report("e2", 1, sample(harness.clock.now_s())), 1)
    gateway = plane.fleet.attach(gateway_hello())
    action = await reported(gateway)
    assert action.expected == (E2,)
    assert draining(action) == {"e0": False, "e1": False, "e2": True}
    del plane.fleet.routes.expected[E2]
    harness.tell()
    action = await reported(gateway)
    assert action.expected == ()
    assert draining(action)["e2"] is False


async def test_expected_engines_are_journalled_on_change_and_recovered(tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    plane = harness.start()
    harness.tell()
    assert harness.written() == 0  # no gateway is attached
    plane.fleet.routes.expected |= {E1: 1010.0, E2: 1030.0}
    for _ in range(3):
        harness.tell()
    assert harness.written() == 1
    await harness.clock.advance(15.0)
    plane = harness.start()
    assert plane.fleet.routes.expected == {E2: 1030.0}
    assert (await reported(plane.fleet.attach(gateway_hello()))).expected == (E2,)
    # It started while no gateway was attached: the next daemon has recorded that.
    plane.fleet.nodes.end_all()
    plane = harness.start()
    plane.fleet.routes.expected.clear()
    harness.tell()
    assert harness.start().fleet.routes.expected == {}
