"""The operation of a weight sync: for each fault, and a daemon killed after any journal entry, the fleet ends with the
old or the new version, as reported. The cases are those of core/test_operation.py."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from fabric_harness import Killed
from weights_harness import Harness, played

from orchestrrl.core.errors import OrchestrRLError
from orchestrrl.weights.controller.reports import EngineSync, SyncState
from orchestrrl.weights.orders import InstallVersion, PeerOrder

ENTRIES = ("after sync.", "after weights")
ENDS_S = 180.0


def _fails(harness: Harness) -> None:
    harness.engine("e1").fails = 1


def _undo_fails(harness: Harness) -> None:
    """Make the install leave partial weights, and the first attempt to restore the previous version fail."""
    harness.engine("e1").fails, harness.engine("e1").spoils = 2, True


def _loses_result(seconds: float) -> Callable[[Harness], None]:
    """Kill the peer's process after an install, before its result is sent, and restart it after `seconds`."""

    def fault(harness: Harness) -> None:
        def dies() -> None:
            harness.peer("p1").die()
            harness.later(seconds, harness.peer("p1").come_back)

        harness.when("p1 has done install", dies)

    return fault


def _delivers(harness: Harness, deliver: Callable[[Callable[..., Any], PeerOrder, Any], Any]) -> None:
    """Replace the delivery of orders to one peer."""
    peer = harness.peer("p1")
    once = peer._do
    peer._do = lambda order, stream: deliver(once, order, stream)  # type: ignore[method-assign]


def _doubled(harness: Harness) -> None:
    async def twice(once: Callable[..., Any], order: PeerOrder, stream: Any) -> None:
        await once(order, stream)
        await harness.clock.sleep(0.3)
        await once(order, stream)

    _delivers(harness, twice)


def _late(harness: Harness) -> None:
    left = 1

    async def late(once: Callable[..., Any], order: PeerOrder, stream: Any) -> None:
        nonlocal left
        if left and isinstance(order.order, InstallVersion):
            left -= 1
            await harness.clock.sleep(harness.settings.install_within_s + 1.0)
        await once(order, stream)

    _delivers(harness, late)


FAULTS: dict[str, Callable[[Harness], None]] = {
    "none": lambda _: None,
    "a step that fails": _fails,
    "an undo that fails": _undo_fails,
    "a lost result": _loses_result(2.0),  # the order is delivered again
    "an unknown outcome": _loses_result(12.0),  # longer than the controller waits for the peer
    "doubled delivery": _doubled,
    "late delivery": _late,
}
NEW = frozenset({"none", "a lost result", "doubled delivery"})


async def _second_version(harness: Harness, fault: Callable[[Harness], None], kill_at: int | None = None) -> list[str]:
    """Publish version 2 in a fleet with version 1; return the points passed until the sync ends or the daemon dies."""
    await harness.pass_time(0.5)
    await harness.report(harness.publish(1))
    await harness.pass_time(2.0)
    harness.check_one_version(1)
    fault(harness)
    harness.counting = True
    if kill_at is not None:
        harness.at_point[kill_at] = harness.kill
    with suppress(Killed):
        harness.publish(2)
    for _ in range(round(ENDS_S / 0.25)):
        await harness.pass_time(0.25)
        if harness.daemon is None or harness.sync.history(1)[0].over:
            break
    harness.counting = False
    return harness.points


def _folder(path: Path, name: str) -> Path:
    (path / name).mkdir()
    return path / name


def _agrees(harness: Harness) -> SyncState:
    """Check that the report agrees with the engines' versions; return its state."""
    report = harness.sync.report(version=2)
    version = {SyncState.DONE: 2, SyncState.ABORTED: 1}[report.state]
    fleet = harness.sync.book.fleet
    assert fleet.committed is not None
    assert fleet.version == version
    assert {harness.engines[engine].weights for engine in fleet.committed.has if harness.engines[engine].alive} == {
        version
    }
    quarantined = {EngineSync.QUARANTINED} if report.code != "done" else set()
    has = EngineSync.SERVES if version == 2 else EngineSync.ROLLED_BACK
    if report.code != "restarted":  # an early kill leaves earlier states of engines in the report
        assert {each.state for each in report.engines} <= {has, *quarantined}, report
    return report.state


@pytest.mark.parametrize("attempts", [1, 2])
@pytest.mark.parametrize("fault", FAULTS)
def test_sync_with_a_fault_ends_with_the_reported_version(tmp_path: Path, fault: str, attempts: int) -> None:
    async def scene(harness: Harness) -> None:
        await _second_version(harness, FAULTS[fault])
        state = _agrees(harness)
        if attempts == 1:
            assert (state is SyncState.DONE) == (fault in NEW), harness.sync.report(version=2)
        await harness.settled()
        harness.check_one_version(2 if state is SyncState.DONE else 1)

    played(tmp_path, scene, attempts=attempts, install_within_s=10.0)


@pytest.mark.parametrize("fault", FAULTS)
def test_daemon_killed_after_any_entry_ends_with_the_reported_version(tmp_path: Path, fault: str) -> None:
    async def count(harness: Harness) -> list[str]:
        return await _second_version(harness, FAULTS[fault])

    points: list[str] = played(_folder(tmp_path, "count"), count, attempts=2, install_within_s=10.0)
    entries = [at for at, what in enumerate(points) if what.startswith(ENTRIES)]
    assert len(entries) >= 18, points
    ends, wrong = set(), []
    for at in entries:

        async def scene(harness: Harness, at: int = at) -> None:
            await _second_version(harness, FAULTS[fault], at)
            if harness.daemon is None:
                await harness.pass_time(3.0)
                harness.start()
            await harness.settled()
            state = _agrees(harness)
            ends.add(state)
            harness.check_one_version(2 if state is SyncState.DONE else 1)

        try:
            played(_folder(tmp_path, str(at)), scene, attempts=2, install_within_s=10.0)
        except (AssertionError, OrchestrRLError, Killed) as failure:
            wrong.append(f"killed at {at}, {points[at]}: {failure!r}")
    assert not wrong, "\n".join(wrong)
    assert ends == {SyncState.DONE, SyncState.ABORTED}
