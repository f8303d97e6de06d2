"""Pauses: in force until taken back or expired, written down first, and still there after a restart."""

from pathlib import Path

import pytest

from orchestrrl.core.clock import VirtualClock
from orchestrrl.core.errors import Permanent, ProblemFaults
from orchestrrl.core.journal.store import Journal, Kind
from orchestrrl.core.pause_registry import HoldBook, Part


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock(1000.0)


async def test_until_taken_back_or_expired(tmp_path: Path, clock: VirtualClock) -> None:
    with Journal(tmp_path / "journal.sqlite", 1000.0) as journal:
        holds = HoldBook(journal, clock)
        assert holds.hold(Part.FABRIC) is None
        holds.pause(Part.FABRIC, "cleaning", ttl_s=10.0)
        holds.pause(Part.BALANCER, "")
        await clock.advance(4.0)
        hold = holds.hold(Part.FABRIC)
        assert hold is not None
        assert (hold.code, hold.detail) == ("operator_paused", "an operator paused the fabric, for 6 s more: cleaning")
        assert holds.hold(Part.SYNC) is None
        balancer = holds.hold(Part.BALANCER)
        assert balancer is not None
        assert balancer.detail == "an operator paused the balancer: no reason given"
        again = HoldBook(journal, clock)
        assert again.pauses == holds.pauses
        await clock.advance(6.0)
        assert holds.hold(Part.FABRIC) is None
        assert set(again.pauses) == {Part.BALANCER}
        assert not again.resume(Part.FABRIC, "")
        assert again.resume(Part.BALANCER, "over")
        assert HoldBook(journal, clock).pauses == {}
        assert [entry.kind for entry in journal.tail(9)] == [Kind.HOLDS] * 3


@pytest.mark.parametrize("ttl_s", [-1.0, float("inf"), float("nan")])
def test_for_no_sensible_time(tmp_path: Path, clock: VirtualClock, ttl_s: float) -> None:
    with Journal(tmp_path / "journal.sqlite", 1000.0) as journal, pytest.raises(ProblemFaults, match="ttl_s"):
        HoldBook(journal, clock).pause(Part.SYNC, "", ttl_s)


def test_what_cannot_be_written_down_is_not_so(
    tmp_path: Path, clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Journal(tmp_path / "journal.sqlite", 1000.0) as journal:
        holds = HoldBook(journal, clock)
        holds.pause(Part.SYNC, "bad weights")

        def full(*_: object) -> int:
            raise Permanent("disk full")

        monkeypatch.setattr(journal, "append", full)
        with pytest.raises(Permanent):
            holds.pause(Part.FABRIC, "")
        with pytest.raises(Permanent):
            holds.resume(Part.SYNC, "")
        assert set(holds.pauses) == {Part.SYNC}
