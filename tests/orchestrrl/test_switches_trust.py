"""What a network engineer must be able to rely on where drivers and daemon meet: odd devices, faults of drivers."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from ocs_drivers.model import (
    Change,
    CrossConnect,
    Diff,
)
from ocs_drivers.virtual import VirtualSwitch
from orchestrrl.clock import VirtualClock, WallClock
from orchestrrl.journal import Journal
from orchestrrl.rpc.ocs_client import GrpcSwitch
from orchestrrl.rpc.ocs_server import serve_driver
from orchestrrl.rpc.pb import control_pb2
from orchestrrl.rpc.switches import SwitchesService

ONE, TWO = CrossConnect(1, 17), CrossConnect(2, 18)


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    with Journal(tmp_path / "journal.sqlite", 1000.0) as journal:
        yield journal


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock(1000.0)


async def running(clock: VirtualClock, work: Any, step_s: float = 0.005) -> Any:
    """The result of the work, with time going on."""

    task = asyncio.ensure_future(work)
    while not task.done():
        await clock.advance(step_s)
    return task.result()


class Broken(VirtualSwitch):
    """Of a driver with a defect."""

    async def facts(self) -> NoReturn:
        raise KeyError("serial-no")

    async def close(self) -> None:
        raise RuntimeError("loop is closed")


async def test_a_defect_of_one_driver_is_shown_with_its_switch(journal: Journal, clock: VirtualClock) -> None:
    closed = []

    class Sound(VirtualSwitch):
        async def close(self) -> None:
            closed.append(self.device)

    switches = {"broken": Broken("broken", clock=clock), "sound": Sound("sound", clock=clock)}
    service = SwitchesService(switches, journal, clock)
    answer = await running(clock, service.ListSwitches(control_pb2.ListSwitchesRequest(), _context()))
    assert [(each.switch_id, each.reachable) for each in answer.switches] == [("broken", False), ("sound", True)]
    assert "KeyError" in answer.switches[0].detail
    await running(clock, service.close())
    assert closed == ["sound"]


def _context() -> Any:
    return None


class FailsAfterwards(VirtualSwitch):
    """Sends, and then trips over its own feet."""

    async def commit(self, diff: Diff, expect_revision: int, revert_in_s: float | None = None) -> NoReturn:
        await super().commit(diff, expect_revision, revert_in_s)
        raise ValueError("invalid literal for int() with base 10: ''")


async def test_a_defect_after_sending_is_not_taken_for_a_refusal() -> None:
    """Over gRPC: what the driver process made of it is looked at."""
    device = FailsAfterwards("s", reconfiguration_s=0.001, link_timeout_s=0.1)
    server, port = await serve_driver(device, "127.0.0.1:0")
    driver = GrpcSwitch("s", target=f"127.0.0.1:{port}", clock=WallClock())
    try:
        diff = await driver.plan(Change((ONE,)))
        result = await driver.commit(diff, diff.revision)
        assert result.done, result
        assert (await driver.cross_connects()).foreign == frozenset()
    finally:
        await driver.close()
        await server.stop(None)
