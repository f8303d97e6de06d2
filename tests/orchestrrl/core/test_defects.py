"""An unexpected exception in one turn of a loop or task is shown and counted, and the daemon continues."""

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
from orchestrrl.core.defects import REPEATED, Defects, keep_running
from orchestrrl.core.errors import OrchestrRLError, Permanent
from orchestrrl.core.journal.store import EntryKind, Journal
from orchestrrl.core.operation_runner import OperationRunner
from orchestrrl.daemon.configuration import parse_config
from orchestrrl.daemon.control_plane import run_loops
from orchestrrl.daemon.metrics import DaemonCollector
from orchestrrl.daemon.redeployment_wiring import RedeployedFleet
from orchestrrl.daemon.wiring import build_daemon
from orchestrrl.fabric.coordinator import CircuitCoordinator
from orchestrrl.fleet.redeployment.actions import FleetDeployment
from orchestrrl.fleet.redeployment.controller import RedeploymentController
from orchestrrl.fleet.redeployment.turn import DeploymentTurn
from orchestrrl.rpc.codecs.control import status_to_pb
from orchestrrl.rpc.plain_values import plain
from planner.model import Act, Mode, PlanId, Snapshot

CONFIG = "mode: act\nfast: {interval_s: 1}\nslow: {interval_s: 1}\n"


class Harness:
    """A control plane whose ticks can be made to fail."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.clock = VirtualClock(1000.0)
        self.journal = Journal(path, self.clock.now_s())
        self.parts = build_daemon(parse_config(CONFIG), self.journal, self.clock)
        self.plane: Any = self.parts.control_plane

    def status(self) -> dict[str, Any]:
        return plain(status_to_pb(self.parts, "test"))

    def metric(self, name: str, label: str = "") -> float:
        found: list[Metric] = list(DaemonCollector(self.parts).collect())
        values = {(sample.name, *sample.labels.values()): sample.value for family in found for sample in family.samples}
        return values[(name, label) if label else (name,)]

    async def run(self, seconds: float) -> asyncio.Task[None]:
        task = asyncio.create_task(run_loops(self.plane, self.clock, goes_on=True))
        await self.clock.advance(seconds)
        assert not task.done()
        task.cancel()
        return task


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[Harness]:
    made = Harness(tmp_path / "journal.sqlite")
    yield made
    made.journal.close()


def failing(*errors: BaseException | None) -> Callable[[], None]:
    """Return a function that raises each error in turn, then the last one forever; None: it succeeds."""
    left = list(errors)

    def tick() -> None:
        error = left.pop(0) if len(left) > 1 else left[0]
        if error is not None:
            raise error.with_traceback(None)

    return tick


@pytest.mark.parametrize(("loop", "part"), [("fast_tick", "fast_loop"), ("slow_tick", "slow_loop")])
async def test_exception_in_one_tick_is_shown_and_ticks_continue(
    harness: Harness, loop: str, part: str, caplog: pytest.LogCaptureFixture
) -> None:
    setattr(harness.plane, loop, failing(None, KeyError("e0"), KeyError("e1"), None))
    await harness.run(2.5)
    (defect,) = harness.status()["defects"]
    assert (defect["part"], defect["type"], defect["message"], defect["running"]) == (part, "KeyError", "'e1'", 2)
    assert defect["place"].startswith("core/test_defects.py:")
    assert any("2 consecutive failures: KeyError" in line for line in summary(harness.status()))
    assert harness.metric("orchestrrl_defects_total", part) == 2
    told = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert len(told) == 1  # when it changes, not each tick
    assert told[0].exc_info
    await harness.run(2.5)
    (defect,) = harness.status()["defects"]
    assert (defect["running"], defect["total"]) == (0, 2)
    assert harness.plane.mode.current is Mode.ACT


@pytest.mark.parametrize("error", [ZeroDivisionError("x"), Permanent("the disk is full"), asyncio.CancelledError()])
@pytest.mark.parametrize(("loop", "part"), [("fast_tick", "fast_loop"), ("slow_tick", "slow_loop")])
async def test_ten_consecutive_equal_exceptions_stop_acting(
    harness: Harness, loop: str, part: str, error: BaseException
) -> None:
    setattr(harness.plane, loop, failing(error))
    await harness.run(REPEATED - 1.5)
    assert harness.plane.mode.current is Mode.ACT
    await harness.run(1.5)
    assert harness.plane.mode.current is Mode.ADVISE
    assert f"{part} failed 10 times in a row: {type(error).__name__}" in harness.status()["mode_reason"]
    (entry,) = harness.journal.since(0, (EntryKind.MODE,))
    assert entry.body["mode"] == "advise"
    assert entry.body["reason"] == harness.plane.mode.reason
    harness.plane.mode.set(Mode.ACT, "tried again")  # the count is reset
    await harness.run(REPEATED - 1.5)
    assert harness.plane.mode.current is Mode.ACT
    await harness.run(1.5)
    assert harness.plane.mode.current is Mode.ADVISE


async def test_other_exceptions_and_successes_reset_the_count(harness: Harness) -> None:
    nine: list[BaseException | None] = [KeyError("x")] * (REPEATED - 1)
    harness.plane.fast_tick = failing(*nine, None, *nine, ValueError("y"), *nine, None)
    await harness.run(60.0)
    assert harness.plane.mode.current is Mode.ACT
    assert harness.metric("orchestrrl_defects_total", "fast_loop") == 3 * (REPEATED - 1) + 1


async def test_acting_stops_when_the_journal_fails(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise Permanent("the disk is full")

    monkeypatch.setattr(harness.journal, "append", full)
    harness.plane.fast_tick = lambda: harness.journal.append(0.0, EntryKind.BALANCE, "", {})
    await harness.run(REPEATED + 1.0)
    assert harness.plane.mode.current is Mode.ADVISE
    assert "the disk is full" in harness.status()["mode_reason"]
    assert "not journalled" in harness.status()["mode_reason"]


async def test_mode_and_reason_survive_restart(harness: Harness) -> None:
    harness.plane.fast_tick = failing(KeyError("e0"))
    await harness.run(REPEATED + 1.0)
    reason = harness.plane.mode.reason
    harness.journal.close()
    again = Harness(harness.path)
    assert (again.plane.mode.current, again.plane.mode.reason) == (Mode.ADVISE, reason)
    harness.journal = again.journal


async def test_simulation_raises_the_exception(harness: Harness) -> None:
    harness.plane.fast_tick = failing(KeyError("e0"))
    with pytest.raises(ExceptionGroup) as raised:
        await run_loops(harness.plane, harness.clock)
    assert raised.group_contains(KeyError)


async def test_exceptions_in_moves_and_plans_are_counted_and_stop_acting(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def moves(*_: object) -> None:
        raise KeyError("r1")

    monkeypatch.setattr(OperationRunner, "run_moves", moves)
    snapshot: Any = harness.plane.fleet.state.snapshot(harness.clock.now_s())
    plan: Any = SimpleNamespace(id=PlanId("p1"), decision="rebalance", moves=(), verdict=Act("gain", ""))

    async def slow_plan() -> tuple[Any, Snapshot]:
        return plan, snapshot

    harness.plane.fleet.start_moves((), snapshot)
    monkeypatch.setattr(harness.plane, "_plan", slow_plan)
    await harness.plane.slow_tick()
    await asyncio.sleep(0.01)
    assert harness.metric("orchestrrl_defects_total", "moves") == 1
    assert harness.metric("orchestrrl_defects_total", "plans") == 1
    for _ in range(REPEATED - 1):
        assert harness.plane.mode.current is Mode.ACT
        harness.plane.fleet.start_moves((), snapshot)
        await asyncio.sleep(0.01)
    assert harness.plane.mode.current is Mode.ADVISE


async def test_task_is_restarted_after_exception(harness: Harness) -> None:
    began = []

    async def work() -> None:
        began.append(harness.clock.now_s())
        raise KeyError("x")

    task = asyncio.create_task(keep_running("deployment", work, harness.plane.defects, harness.clock))
    await harness.clock.advance(10.0)
    assert not task.done()
    assert [at_s - 1000.0 for at_s in began] == [0.0, 1.0, 3.0, 7.0]  # increasing pauses
    assert harness.metric("orchestrrl_defects_total", "deployment") == 4
    assert harness.plane.mode.current is Mode.ACT  # not a part that acts on its own
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("error", [KeyError("x"), Permanent("not now")])
async def test_fabric_continues_after_failed_reading(error: Exception) -> None:
    clock, looks = VirtualClock(0.0), []

    async def look() -> None:
        looks.append(clock.now_s())
        raise error

    coordinator: Any = object.__new__(CircuitCoordinator)
    coordinator.scan, coordinator._clock, coordinator.defects = look, clock, 0
    coordinator._active, coordinator._queue = {}, []
    task = asyncio.create_task(coordinator.run())
    await clock.advance(25.0)
    assert not task.done()
    assert len(looks) == coordinator.defects == 3
    task.cancel()


async def test_engine_watcher_restarts_after_exception(harness: Harness) -> None:
    class Deployer:
        asked = 0

        async def list_engines(self) -> list[Any]:
            self.asked += 1
            raise KeyError("a deployer's own")

    deployer: Any = Deployer()
    redeployed = RedeployedFleet(harness.plane.fleet, harness.parts.weights.syncs, None, None, "")
    deployment = FleetDeployment(deployer, lambda url: SimpleNamespace(), gpus_count=0, per_node=1)  # type: ignore[arg-type, return-value]
    switching = RedeploymentController(redeployed, deployment, DeploymentTurn(), harness.plane.config.fleet)
    task = asyncio.create_task(keep_running("deployment", switching.maintain, harness.plane.defects, harness.clock))
    await harness.clock.advance(60.0)
    assert not task.done()
    assert deployer.asked > 2
    task.cancel()


def test_unprintable_message_raises_no_further_exception() -> None:
    class Odd(Exception):
        def __str__(self) -> str:
            raise ValueError

    defects = Defects(VirtualClock(), lambda _: None)
    for error in (Odd(), KeyError("\ud800"), OrchestrRLError("x" * 10_000)):
        defects.met("moves", error)
    assert [len(defect.message) <= 300 for defect in defects.latest] == [True]
    assert defects.counts["moves"] == 3
