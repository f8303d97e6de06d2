"""A gateway whose command line uses other engine ids than the daemon: both ids name the same engine."""

import asyncio
from dataclasses import replace
from typing import Any

from orchestrrl.core.clock import VirtualClock
from orchestrrl.core.nodes import GatewayEngine
from orchestrrl.core.operations import (
    EngineRoute,
)
from orchestrrl.engines.base import CompletionEndpoint, EngineSample
from orchestrrl.gateway.core import Gateway
from orchestrrl.gateway.ledger.ledger import RequestRecord
from orchestrrl.gateway.relay import RelayLimits
from orchestrrl.gateway.routing.backends import EngineBackends
from planner.model import EngineHealth, EngineId, NodeId, RequestId, RequestMove

A, B, E0, E1 = map(EngineId, ("a", "b", "e0", "e1"))
LOCAL = "http://127.0.0.1:8001"


class Line:
    """A fake engine client with the methods that these tests use."""

    def __init__(self, url: str, server: str) -> None:
        self.url = url
        self.server = server
        self.closed = False

    async def metrics(self) -> EngineSample:
        return replace(EngineSample(0, 0, 0.0, 0, 0, 0, 0), server=self.server)

    async def is_paused(self) -> bool:
        return False

    async def capabilities(self) -> None:
        return None

    async def close(self) -> None:
        self.closed = True


class Harness:
    def __init__(self, **own: str) -> None:
        self.servers: dict[str, str] = {}  # by URL
        self.lines: list[Line] = []
        self.fleet = EngineBackends(self.connect, clock=VirtualClock(1000.0))
        self.gateway = Gateway(NodeId("g"), self.fleet, limits=RelayLimits())
        self.route(**own)
        self.fleet.keep_ids()

    @property
    def own(self) -> tuple[GatewayEngine, ...]:
        return tuple(self.fleet.own.values())

    @property
    def known_as(self) -> dict[EngineId, EngineId]:
        return {own.engine: own.known_as for own in self.own if own.known_as is not None}

    def connect(self, url: str) -> Any:
        self.lines.append(Line(url, self.servers.get(url, "")))
        return self.lines[-1]

    def route(self, **urls: str) -> list[str]:
        return self.gateway.set_routes([EngineRoute(EngineId(n), url, EngineHealth.OK) for n, url in urls.items()])

    def put(self, name: str, engine: EngineId) -> RequestRecord:
        record = RequestRecord(RequestId(name), CompletionEndpoint.COMPLETIONS, {}, False, 1000.0, 64)
        backend = self.fleet.get(engine)
        assert backend is not None
        backend.enter(record, 1000.0)
        self.gateway.ledger.add(record)
        return record


async def test_daemon_id_replaces_own_id_and_keeps_requests() -> None:
    harness = Harness(a="http://localhost:8001", b="http://localhost:8002")
    record = harness.put("r", A)
    assert harness.route(e0=LOCAL, b="") == []
    assert sorted(backend.id for backend in harness.fleet) == ["b", "e0"]
    assert record.engine == "e0"
    assert harness.fleet.get(A) is harness.fleet.get(E0)
    backend = harness.fleet.get(A)
    assert backend is not None
    assert (backend.waiting, list(backend.records)) == (1, ["r"])
    assert [view.engine for view in harness.gateway.report().in_flight] == ["e0"]
    assert harness.own == (
        GatewayEngine(A, "http://localhost:8001", "", E0),
        GatewayEngine(B, "http://localhost:8002"),
    )
    assert not any(line.closed for line in harness.lines[:2])
    # Later routes keep the same backend.
    harness.route(e0=LOCAL, b="")
    assert sorted(backend.id for backend in harness.fleet) == ["b", "e0"]
    await harness.fleet.close()


async def test_route_to_another_server_keeps_own_engine_until_it_is_empty() -> None:
    harness = Harness(a="http://localhost:8001")
    record = harness.put("r", A)
    harness.route(e0="http://127.0.0.1:8002")
    assert sorted(backend.id for backend in harness.fleet) == ["a", "e0"]
    assert record.engine == "a"
    assert harness.known_as == {}
    await harness.fleet.close()


async def test_two_routes_to_one_server_stay_separate() -> None:
    """The daemon decides which routes are the same engine."""
    harness = Harness(a="http://localhost:8001")
    harness.route(a="", e0=LOCAL)
    assert sorted(backend.id for backend in harness.fleet) == ["a", "e0"]
    assert harness.known_as == {}
    await harness.fleet.close()


async def test_moves_accept_both_ids() -> None:
    harness = Harness(a="http://localhost:8001", b="http://localhost:8002")
    harness.route(e0=LOCAL, e1="http://127.0.0.1:8002")
    asked: list[tuple[str, str]] = []

    class Relayed:
        def __init__(self, record: RequestRecord) -> None:
            self.record = record

        async def move(self, target: Any, move: RequestMove) -> str:
            asked.append((move.request, target.id))
            return "moved"

    for name in "rst":
        harness.gateway.relays[RequestId(name)] = Relayed(harness.put(name, E0))  # type: ignore[assignment]
    for name, source, target in (("r", A, B), ("s", E0, B), ("t", A, E1)):
        assert await harness.gateway._move(RequestMove(RequestId(name), source, target)) == "moved"
    assert asked == [("r", "e1"), ("s", "e1"), ("t", "e1")]
    await harness.fleet.close()


async def test_server_identity_finds_daemon_id_at_another_address() -> None:
    harness = Harness(a="http://gpu7:8001", b="http://gpu7:8002")
    for backend, server in zip(harness.fleet, ("s1", "s2"), strict=True):
        backend.engine.server = server  # type: ignore[attr-defined]
    await harness.gateway.identify_engines()
    assert [engine.server for engine in harness.own] == ["s1", "s2"]
    harness.put("r", A)
    harness.servers[LOCAL] = "s1"
    harness.route(e0=LOCAL, b="")
    assert sorted(backend.id for backend in harness.fleet) == ["a", "b", "e0"]
    await harness.gateway.identify_engines()
    assert harness.known_as == {A: E0}
    assert harness.own[0].known_as == "e0"
    await harness.fleet.close()


async def test_unreadable_engine_is_identified_later() -> None:
    harness = Harness(a="http://gpu7:8001")
    (backend,) = harness.fleet
    backend.engine.server = ""  # type: ignore[attr-defined]
    await harness.gateway.identify_engines()
    assert harness.own[0].server == ""
    backend.engine.server = "s1"  # type: ignore[attr-defined]
    await asyncio.gather(harness.gateway.identify_engines())
    assert harness.own[0].server == "s1"
    await harness.fleet.close()


async def test_new_engine_at_old_address_is_not_the_previous_one() -> None:
    harness = Harness()
    harness.route(e0=LOCAL)
    record = harness.put("r", E0)
    (before,) = harness.fleet
    before.suspect_because, before.tying_field = "it died", "odd"
    harness.route(e1=LOCAL)
    backend = harness.fleet.get(E1)
    assert backend is not None
    assert backend is not before
    assert (backend.usable, backend.tying_field, backend.records) == (True, "", {})
    assert record.engine == "e0"
    assert before.suspect_because
    await harness.fleet.close()


async def test_daemon_id_may_change_again() -> None:
    harness = Harness(a="http://localhost:8001")
    (backend,) = harness.fleet
    harness.put("r", A)
    harness.route(e0=LOCAL)
    assert harness.known_as == {A: E0}
    harness.route(e1=LOCAL)
    assert (harness.known_as, harness.fleet.get(A), harness.fleet.get(E1)) == ({A: E1}, backend, backend)
    harness.route(a=LOCAL)
    assert (harness.known_as, harness.fleet.get(A)) == ({}, backend)
    assert harness.own[0].known_as is None
    assert list(backend.records) == ["r"]
    await harness.fleet.close()


async def test_engine_credentials_are_not_reported_to_the_daemon() -> None:
    harness = Harness(a="http://user:s3cret@localhost:8001")
    assert harness.own == (GatewayEngine(A, "http://localhost:8001"),)
    await harness.fleet.close()
