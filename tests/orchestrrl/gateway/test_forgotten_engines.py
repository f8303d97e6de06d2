"""An engine that has left the routes keeps no connection, whoever still had something to ask it."""

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
    """Opened by whatever is asked, as those of real engines are."""

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
    engine: Any = line  # what else an engine can do is not asked here
    fleet = EngineBackends(lambda url: engine, clock=clock)
    fleet.set_routes([EngineRoute(ENGINE, URL)])
    backend = fleet.get(ENGINE)
    assert backend is not None
    return clock, fleet, backend, line


async def test_a_request_that_is_ended_there_afterwards() -> None:
    """A moved request's old engine is told so when its last one has left, and it with it."""
    clock, fleet, backend, line = harness()
    fleet.set_routes([])
    fleet.in_background(fleet.abort(backend, "r"))
    await clock.advance(1.0)
    assert (line.opened, line.is_open) == (1, False)


async def test_one_that_was_believed_dead() -> None:
    clock, fleet, backend, line = harness()
    fleet.suspect(backend, "it does not answer")
    await clock.advance(0.1)
    fleet.set_routes([])
    await clock.advance(10.0)
    assert (line.opened, line.is_open) == (1, False)


async def test_one_that_stays_keeps_its_connection() -> None:
    _, fleet, backend, line = harness()
    await fleet.abort(backend, "r")
    assert line.is_open
    await fleet.close()
    assert not line.is_open
