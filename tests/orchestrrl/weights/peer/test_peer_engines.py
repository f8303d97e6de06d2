"""Calls of peers to engines that are busy or whose requests do not finish."""

import asyncio
from typing import Any

import pytest

from orchestrrl.core.clock import WallClock
from orchestrrl.core.errors import Retryable
from orchestrrl.core.operations import PauseMode
from orchestrrl.weights.peer import engines as peer_engines
from orchestrrl.weights.peer.engines import CALL_S, PeerEngines
from planner.model import EngineId

E0 = EngineId("e0")


class BusyEngine:
    """A fake engine with a request that never finishes."""

    url = "http://e0"

    def __init__(self) -> None:
        self.mode: PauseMode | None = None
        self.has_request = True
        self.calls: list[str] = []

    async def pause(self, mode: PauseMode, *, drop_kv: bool = False) -> None:
        self.calls.append(mode)
        self.mode = self.mode or mode
        if mode is PauseMode.ABORT:
            self.has_request = False
        while mode is PauseMode.WAIT and self.has_request:
            await asyncio.sleep(0)

    async def resume(self) -> None:
        self.calls.append("resume")
        self.mode = None

    async def is_paused(self) -> bool:
        return self.mode is not None


class FreshEngine:
    """A server that has just started: it has no version, and its first configuration query takes 3 virtual seconds."""

    url = "http://e0"

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.weights = self
        self._said = False
        self._ahead_s = 0.0
        loop = asyncio.get_running_loop()
        now_s = loop.time
        monkeypatch.setattr(loop, "time", lambda: now_s() + self._ahead_s)

    async def loaded(self) -> None:
        return None

    async def takes_sums(self) -> bool:
        if not self._said:
            self._ahead_s += 3.0
            for _ in range(5):  # a shorter limit cancels this
                await asyncio.sleep(0)
            self._said = True
        return True


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> BusyEngine:
    engine = BusyEngine()

    def connected(product: str, url: str, **options: Any) -> BusyEngine:
        assert options == {"timeout_s": CALL_S}
        return engine

    monkeypatch.setattr(peer_engines, "connect", connected)
    return engine


def _engines() -> PeerEngines:
    return PeerEngines({E0: "http://e0"}, "simulated", WallClock(), lambda: None)


async def test_drain_timeout_resumes_the_engine(engine: BusyEngine) -> None:
    with pytest.raises(Retryable, match=r"did not finish within 0.02 s"):
        await _engines().rest(E0, True, 0.02)
    assert engine.calls == ["wait", "resume"]


async def test_pause_with_ends_aborts_requests(engine: BusyEngine) -> None:
    assert await _engines().rest(E0, True, 30.0, ends=True) == "e0 is paused"
    assert (engine.has_request, engine.calls) == (False, ["abort", "keep"])


async def test_paused_engine_is_not_drained(engine: BusyEngine) -> None:
    engine.mode = PauseMode.KEEP
    assert await _engines().rest(E0, True, 30.0) == "e0 is paused"
    assert engine.calls == ["keep"]


async def test_requests_that_finish_in_time_leave_the_engine_paused(engine: BusyEngine) -> None:
    resting = asyncio.create_task(_engines().rest(E0, True, 30.0))
    while not engine.calls:
        await asyncio.sleep(0)
    engine.has_request = False
    assert await resting == "e0 is paused"
    assert engine.calls == ["wait", "keep"]


async def test_configuration_of_a_new_engine_is_read_in_advance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the folder would be hashed while requests are paused, since the query has a short limit."""
    engine = FreshEngine(monkeypatch)
    monkeypatch.setattr(peer_engines, "connect", lambda *_, **__: engine)
    engines = _engines()
    watching = asyncio.create_task(engines.watch(5.0))
    for _ in range(30):
        await asyncio.sleep(0)
    assert await engines.take_sums()
    watching.cancel()
