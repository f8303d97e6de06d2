"""Pauses set by operators: in force until resumed or expired, journalled first, and kept over a restart."""

from pathlib import Path

import pytest

from orchestrrl.core.clock import VirtualClock
from orchestrrl.core.errors import Permanent, ProblemFaults
from orchestrrl.core.journal.store import EntryKind, Journal
from orchestrrl.core.operator_pauses import PauseRegistry, PauseScope


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock(1000.0)


async def test_pause_lasts_until_resumed_or_expired(tmp_path: Path, clock: VirtualClock) -> None:
    with Journal(tmp_path / "journal.sqlite", 1000.0) as journal:
        pause_registry = PauseRegistry(journal, clock)
        assert pause_registry.hold(PauseScope.FABRIC) is None
        pause_registry.pause(PauseScope.FABRIC, "cleaning", ttl_s=10.0)
        pause_registry.pause(PauseScope.BALANCER, "")
        await clock.advance(4.0)
        hold = pause_registry.hold(PauseScope.FABRIC)
        assert hold is not None
        assert (hold.code, hold.detail) == ("operator_paused", "an operator paused the fabric, for 6 s more: cleaning")
        assert pause_registry.hold(PauseScope.SYNC) is None
        balancer = pause_registry.hold(PauseScope.BALANCER)
        assert balancer is not None
        assert balancer.detail == "an operator paused the balancer: no reason given"
        again = PauseRegistry(journal, clock)
        assert again.pauses == pause_registry.pauses
        await clock.advance(6.0)
        assert pause_registry.hold(PauseScope.FABRIC) is None
        assert set(again.pauses) == {PauseScope.BALANCER}
        assert not again.resume(PauseScope.FABRIC, "")
        assert again.resume(PauseScope.BALANCER, "over")
        assert PauseRegistry(journal, clock).pauses == {}
        assert [entry.kind for entry in journal.tail(9)] == [EntryKind.PAUSES] * 3


@pytest.mark.parametrize("ttl_s", [-1.0, float("inf"), float("nan")])
def test_invalid_ttl_is_refused(tmp_path: Path, clock: VirtualClock, ttl_s: float) -> None:
    with Journal(tmp_path / "journal.sqlite", 1000.0) as journal, pytest.raises(ProblemFaults, match="ttl_s"):
        PauseRegistry(journal, clock).pause(PauseScope.SYNC, "", ttl_s)


def test_pause_that_cannot_be_journalled_is_not_in_force(
    tmp_path: Path, clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Journal(tmp_path / "journal.sqlite", 1000.0) as journal:
        pause_registry = PauseRegistry(journal, clock)
        pause_registry.pause(PauseScope.SYNC, "bad weights")

        def full(*_: object) -> int:
            raise Permanent("disk full")

        monkeypatch.setattr(journal, "append", full)
        with pytest.raises(Permanent):
            pause_registry.pause(PauseScope.FABRIC, "")
        with pytest.raises(Permanent):
            pause_registry.resume(PauseScope.SYNC, "")
        assert set(pause_registry.pauses) == {PauseScope.SYNC}
