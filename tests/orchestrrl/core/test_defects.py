"""A defect in one turn of a loop or task: set aside, shown and counted, and the daemon goes on."""

import asyncio
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.core import Metric

from orchestrrl.cli.fleet.status import summary
from orchestrrl.core.clock import VirtualClock
from orchestrrl.core.defects import REPEATED, Defects
from orchestrrl.core.errors import OrchestrRLError, Permanent
from orchestrrl.core.journal.store import EntryKind, Journal
from orchestrrl.daemon import control_plane as control_plane_module
from orchestrrl.daemon.configuration import parse_config
from orchestrrl.daemon.control_plane import ControlPlane
from orchestrrl.daemon.loops import run_loops
from orchestrrl.daemon.metrics import DaemonCollector
from orchestrrl.daemon.wiring import keep_running
from orchestrrl.fabric.coordinator import CircuitCoordinator
from orchestrrl.fleet.redeployment.controller import RedeploymentController
from orchestrrl.rpc.codecs.control import status_to_pb
from orchestrrl.rpc.plain_values import plain
from planner.model import Act, Mode, PlanId, Snapshot

CONFIG = "mode: act\nfast: {interval_s: 1}\nslow: {interval_s: 1}\n"


class House:
    """A control plane whose ticks can be made to fail."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.clock = VirtualClock(1000.0)
        self.journal = Journal(path, self.clock.now_s())
        self.plane: Any = ControlPlane(parse_config(CONFIG), self.journal, self.clock)

    def status(self) -> dict[str, Any]:
        return plain(status_to_pb(self.plane, "test"))

    def metric(self, name: str, label: str = "") -> float:
        found: list[Metric] = list(DaemonCollector(self.plane).collect())
        values = {(sample.name, *sample.labels.values()): sample.value for family in found for sample in family.samples}
        return values[(name, label) if label else (name,)]

    async def run(self, seconds: float) -> asyncio.Task[None]:
        task = asyncio.create_task(run_loops(self.plane, self.clock, self.plane.defects))
        await self.clock.advance(seconds)
        assert not task.done()
        task.cancel()
        return task


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    made = House(tmp_path / "journal.sqlite")
    yield made
    made.journal.close()


def failing(*errors: BaseException | None) -> Callable[[], None]:
    """Ends by each in turn, then by the last one for ever; None: it goes well."""
    left = list(errors)

    def tick() -> None:
        error = left.pop(0) if len(left) > 1 else left[0]
        if error is not None:
            raise error.with_traceback(None)

    return tick


@pytest.mark.parametrize(("loop", "part"), [("fast_tick", "fast_loop"), ("slow_tick", "slow_loop")])
async def test_a_defect_of_one_tick_is_set_aside_and_shown(
    house: House, loop: str, part: str, caplog: pytest.LogCaptureFixture
) -> None:
    setattr(house.plane, loop, failing(None, KeyError("e0"), KeyError("e1"), None))
    await house.run(2.5)
    (defect,) = house.status()["defects"]
    assert (defect["part"], defect["type"], defect["message"], defect["running"]) == (part, "KeyError", "'e1'", 2)
    assert defect["place"].startswith("core/test_defects.py:")
    assert any("2 turns running ended by KeyError" in line for line in summary(house.status()))
    assert house.metric("orchestrrl_defects_total", part) == 2
    told = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert len(told) == 1  # when it changes, not each tick
    assert told[0].exc_info
    await house.run(2.5)
    (defect,) = house.status()["defects"]
    assert (defect["running"], defect["total"]) == (0, 2)
    assert house.plane.mode is Mode.ACT


@pytest.mark.parametrize("error", [ZeroDivisionError("x"), Permanent("the disk is full"), asyncio.CancelledError()])
@pytest.mark.parametrize(("loop", "part"), [("fast_tick", "fast_loop"), ("slow_tick", "slow_loop")])
async def test_the_same_exception_ten_ticks_running_ends_acting(
    house: House, loop: str, part: str, error: BaseException
) -> None:
    setattr(house.plane, loop, failing(error))
    await house.run(REPEATED - 1.5)
    assert house.plane.mode is Mode.ACT
    await house.run(1.5)
    assert house.plane.mode is Mode.ADVISE
    assert f"{part} ended 10 times running by {type(error).__name__}" in house.status()["mode_reason"]
    (entry,) = house.journal.since(0, (EntryKind.MODE,))
    assert entry.body["mode"] == "advise"
    assert entry.body["reason"] == house.plane.mode_reason
    house.plane.set_mode(Mode.ACT, "tried again")  # the count starts anew
    await house.run(REPEATED - 1.5)
    assert house.plane.mode is Mode.ACT
    await house.run(1.5)
    assert house.plane.mode is Mode.ADVISE


async def test_other_exceptions_and_ticks_that_go_well_begin_the_count_anew(house: House) -> None:
    nine: list[BaseException | None] = [KeyError("x")] * (REPEATED - 1)
    house.plane.fast_tick = failing(*nine, None, *nine, ValueError("y"), *nine, None)
    await house.run(60.0)
    assert house.plane.mode is Mode.ACT
    assert house.metric("orchestrrl_defects_total", "fast_loop") == 3 * (REPEATED - 1) + 1


async def test_acting_ends_where_the_journal_itself_fails(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise Permanent("the disk is full")

    monkeypatch.setattr(house.journal, "append", full)
    house.plane.fast_tick = lambda: house.journal.append(0.0, EntryKind.BALANCE, "", {})
    await house.run(REPEATED + 1.0)
    assert house.plane.mode is Mode.ADVISE
    assert "the disk is full" in house.status()["mode_reason"]
    assert "not written down" in house.status()["mode_reason"]


async def test_the_mode_and_its_reason_outlast_a_restart(house: House) -> None:
    house.plane.fast_tick = failing(KeyError("e0"))
    await house.run(REPEATED + 1.0)
    reason = house.plane.mode_reason
    house.journal.close()
    again = House(house.path)
    assert (again.plane.mode, again.plane.mode_reason) == (Mode.ADVISE, reason)
    house.journal = again.journal


async def test_a_simulation_meets_the_defect_itself(house: House) -> None:
    house.plane.fast_tick = failing(KeyError("e0"))
    with pytest.raises(ExceptionGroup) as raised:
        await run_loops(house.plane, house.clock)
    assert raised.group_contains(KeyError)


async def test_a_defect_in_moves_and_plans_is_counted_and_ends_acting(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def moves(*_: object) -> None:
        raise KeyError("r1")

    monkeypatch.setattr(control_plane_module, "run_moves", moves)
    snapshot: Any = house.plane.state.snapshot(house.clock.now_s())
    plan: Any = SimpleNamespace(id=PlanId("p1"), decision="rebalance", moves=(), verdict=Act("gain", ""))

    async def slow_plan() -> tuple[Any, Snapshot]:
        return plan, snapshot

    house.plane._start_moves((), snapshot)
    monkeypatch.setattr(house.plane, "_plan", slow_plan)
    await house.plane.slow_tick()
    await asyncio.sleep(0.01)
    assert house.metric("orchestrrl_defects_total", "moves") == 1
    assert house.metric("orchestrrl_defects_total", "plans") == 1
    for _ in range(REPEATED - 1):
        assert house.plane.mode is Mode.ACT
        house.plane._start_moves((), snapshot)
        await asyncio.sleep(0.01)
    assert house.plane.mode is Mode.ADVISE


async def test_a_task_that_ends_by_a_defect_is_started_again(house: House) -> None:
    began = []

    async def work() -> None:
        began.append(house.clock.now_s())
        raise KeyError("x")

    task = asyncio.create_task(keep_running("deployment", work, house.plane.defects, house.clock))
    await house.clock.advance(10.0)
    assert not task.done()
    assert [at_s - 1000.0 for at_s in began] == [0.0, 1.0, 3.0, 7.0]  # longer pauses each time
    assert house.metric("orchestrrl_defects_total", "deployment") == 4
    assert house.plane.mode is Mode.ACT  # it is none that acts by itself
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("error", [KeyError("x"), Permanent("not now")])
async def test_the_fabric_goes_on_after_a_look_that_failed(error: Exception) -> None:
    clock, looks = VirtualClock(0.0), []

    async def look() -> None:
        looks.append(clock.now_s())
        raise error

    coordinator: Any = object.__new__(CircuitCoordinator)
    coordinator.look, coordinator._clock, coordinator.defects = look, clock, 0
    coordinator._active, coordinator._queue = {}, []
    task = asyncio.create_task(coordinator.run())
    await clock.advance(25.0)
    assert not task.done()
    assert len(looks) == coordinator.defects == 3
    task.cancel()


async def test_the_deployment_is_looked_after_again_after_a_defect(house: House) -> None:
    class Deployer:
        asked = 0

        async def list_engines(self) -> list[Any]:
            self.asked += 1
            raise KeyError("a deployer's own")

    deployer: Any = Deployer()
    switching = RedeploymentController(
        house.plane, deployer, lambda url: SimpleNamespace(), {}, lambda *_: None, gpus_count=0, per_node=1
    )  # type: ignore[arg-type, return-value]
    task = asyncio.create_task(keep_running("deployment", switching.maintain, house.plane.defects, house.clock))
    await house.clock.advance(60.0)
    assert not task.done()
    assert deployer.asked > 2
    task.cancel()


def test_a_message_that_cannot_be_shown_is_no_further_defect() -> None:
    class Odd(Exception):
        def __str__(self) -> str:
            raise ValueError

    defects = Defects(VirtualClock(), lambda _: None)
    for error in (Odd(), KeyError("\ud800"), OrchestrRLError("x" * 10_000)):
        defects.met("moves", error)
    assert [len(defect.message) <= 300 for defect in defects.latest] == [True]
    assert defects.counts["moves"] == 3
