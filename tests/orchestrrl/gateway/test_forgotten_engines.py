"""A forgotten engine keeps no connection, even if a call was still in progress."""

from collections.abc import Sequence
from typing import Any

from orchestrrl.core.clock import VirtualClock
from orchestrrl.core.operations import EngineRoute
from orchestrrl.gateway.routing.backend import EngineBackend
from orchestrrl.gateway.routing.backends import EngineBackends
from planner.model import EngineId

ENGINE = EngineId("e0")
URL = "http://e0"


class Line:
    """An engine client whose connection is opened by any call, as in real clients."""

    def __init__(self) -> None:
        self.url = URL
        self.opened = 0
        self.is_open = False

    def _open(self) -> None:
        self.opened += 1
        self.is_open = True

    async def abort(self, request_ids: Sequence[str]) -> None:
        self._open()

    async def healthy(self) -> bool:
        self._open()
        return False

    async def close(self) -> None:
        self.is_open = False


def harness() -> tuple[VirtualClock, EngineBackends, EngineBackend, Line]:
    clock, line = VirtualClock(), Line()
    engine: Any = line  # these tests call no other methods
    fleet = EngineBackends(lambda url: engine, clock=clock)
    fleet.set_routes([EngineRoute(ENGINE, URL)])
    backend = fleet.get(ENGINE)
    assert backend is not None
    return clock, fleet, backend, line


async def test_late_abort_on_forgotten_engine_closes_its_connection() -> None:
    """The abort of a moved request reaches its old engine after that engine has been forgotten."""
    clock, fleet, backend, line = harness()
    fleet.set_routes([])
    fleet.in_background(fleet.abort(backend, "r"))
    await clock.advance(1.0)
    assert (line.opened, line.is_open) == (1, False)


async def test_recheck_of_forgotten_engine_closes_its_connection() -> None:
    clock, fleet, backend, line = harness()
    fleet.suspect(backend, "it does not answer")
    await clock.advance(0.1)
    fleet.set_routes([])
    await clock.advance(10.0)
    assert (line.opened, line.is_open) == (1, False)


async def test_routed_engine_keeps_its_connection() -> None:
    _, fleet, backend, line = harness()
    await fleet.abort(backend, "r")
    assert line.is_open
    await fleet.close()
    assert not line.is_open
