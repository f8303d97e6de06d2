"""Turns of sessions in a gateway before fake engines, in virtual time."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from orchestrrl.core.clock import VirtualClock
from orchestrrl.core.operations import EngineRoute
from orchestrrl.engines.base import CompletionEndpoint
from orchestrrl.gateway.http.completion_requests import read_completion_request
from orchestrrl.gateway.http.field_types import HttpRefusal
from orchestrrl.gateway.metrics import GatewayCollector
from orchestrrl.gateway.relay import RelayLimits
from orchestrrl.gateway.routing.backends import EngineBackends
from orchestrrl.gateway.routing.sessions import SessionOutcome
from orchestrrl.gateway.routing.strategies import RoutingPolicy
from orchestrrl.integrations.instrument.kv_scheduler import DEFAULT_WAIT_S
from planner.model import EngineHealth, EngineId, NodeId, RequestId, RequestMove
from tests.orchestrrl.gateway.barriers import close, open_barrier
from tests.orchestrrl.gateway.fakes import FakeEngine, GatewayUnderTest, RunningGroup, World, world
from tests.orchestrrl.gateway.test_relay import finish

_COMPLETIONS = CompletionEndpoint.COMPLETIONS
CONTEXT = list(b"Once upon a time")
TOOL = list(b" [4]")


@asynccontextmanager
async def running(w: World, name: str, session: str, prompt: Sequence[int] = CONTEXT) -> AsyncIterator[RunningGroup]:
    """Run a request that has its first token."""
    ask = w.ask(request_id=name, prompt=list(prompt), max_tokens=12, min_tokens=12, session_id=session or None)
    async with w.gateway.request_group(ask) as job:
        await w.settle()
        await w.clock.advance(0.1)
        await w.step()
        yield job


async def turn(w: World, name: str, session: str, prompt: Sequence[int] = CONTEXT) -> str:
    """Run one request to its end, and return its engine."""
    async with running(w, name, session, prompt) as job:
        await finish(w, job)
        (record,) = job.records
        assert record.engine is not None
        return record.engine


def other_than(engine: str) -> str:
    return "e1" if engine == "e0" else "e0"


def turns(w: World) -> dict[str, int]:
    return {outcome: count for outcome, count in w.fleet.sessions.turns.items() if count}


async def test_turns_stay_on_one_engine_while_another_is_idle() -> None:
    w = world()
    first = await turn(w, "r0", "s")
    async with running(w, "other", "") as other:
        for number in range(1, 4):
            assert await turn(w, f"r{number}", "s") == first
        assert other.records[0].engine is not None
        await finish(w, other)
    assert turns(w) == {"new": 1, "warm": 3}
    # The first turn's prompt of 16 tokens, and the 12 tokens of its answer; a prompt's last token is never cached.
    assert w.fleet.sessions.get("s", w.clock.now_s()).context_tokens == 28  # type: ignore[union-attr]


async def test_move_of_a_running_turn_moves_the_session() -> None:
    w = world()
    async with running(w, "r0", "s") as job:
        source = job.records[0].engine or ""
        target = other_than(source)
        order = RequestMove(RequestId("r0"), EngineId(source), EngineId(target))
        moving = w.gateway.move([order])
        task = w.fleet.in_background(_ignore(moving))
        await w.settle()
        await w.step()
        assert await turn(w, "parallel", "s") == target
        await finish(w, job)
        await task
    assert await turn(w, "r1", "s") == target


async def _ignore(awaitable: Any) -> None:
    await awaitable


@pytest.mark.parametrize("event", ["version", "setting", "pause", "restart", "redeployment", "ttl"])
async def test_session_is_cold_after_its_kv_is_lost(event: str) -> None:
    w = world()
    engine = await turn(w, "r0", "s")
    if event == "version":
        await w.gateway.barrier.set_version((EngineId("e0"), EngineId("e1")), 7)
    elif event == "setting":  # of the daemon, after a change of weights without a version
        w.fleet.set_routes([replace(backend.route, kv_version="c/v2") for backend in w.fleet])
    elif event == "pause":  # which discards the KV
        await (await close(w))
        await open_barrier(w)
    elif event == "restart":
        w.fleet.suspect(w.fleet.get(EngineId(engine)), "died")  # type: ignore[arg-type]
        await w.clock.advance(10.0)  # its health is probed
    elif event == "redeployment":
        fakes = {name: FakeEngine(url=f"http://{name}:81") for name in w.engines}
        w.fleet._connect = {fake.url: fake for fake in fakes.values()}.__getitem__
        w.fleet.set_routes([EngineRoute(EngineId(name), fake.url) for name, fake in fakes.items()])
        w.engines.update(fakes)
    else:
        await w.clock.advance(600.0)
    before = turns(w)
    await turn(w, "r1", "s")
    outcome = "new" if event == "ttl" else "cold"
    assert turns(w) == before | {outcome: before.get(outcome, 0) + 1}
    await turn(w, "r2", "s")
    assert turns(w)["warm"] == before.get("warm", 0) + 1
    await w.fleet.close()


async def test_policy_version_that_does_not_change_keeps_sessions_warm() -> None:
    w = world()
    routes = [EngineRoute(EngineId(name), fake.url, policy_version=3) for name, fake in w.engines.items()]
    w.fleet.set_routes(routes)
    engine = await turn(w, "r0", "s")
    w.fleet.set_routes(routes)
    assert await turn(w, "r1", "s") == engine
    assert turns(w) == {"new": 1, "warm": 1}


async def test_session_survives_a_new_id_of_its_engine() -> None:
    w = world()
    engine = await turn(w, "r0", "s")
    w.fleet.keep_ids()
    names = {"e0": "a", "e1": "b"}
    w.gateway.set_routes(
        [EngineRoute(EngineId(names[name]), fake.url, EngineHealth.OK) for name, fake in w.engines.items()]
    )
    assert await turn(w, "r1", "s") == names[engine]
    assert turns(w) == {"new": 1, "warm": 1}


async def test_unusable_engine_is_left_and_its_session_returns_while_warm() -> None:
    w = world()
    engine = await turn(w, "r0", "s")
    routes = [EngineRoute(EngineId(name), fake.url) for name, fake in w.engines.items()]
    w.fleet.set_routes([replace(route, draining=route.engine == engine) for route in routes])
    assert await turn(w, "r1", "s") == other_than(engine)
    assert turns(w) == {"new": 1, "cold": 1}
    # The KV of the latest turn counts.
    w.fleet.set_routes(routes)
    assert await turn(w, "r2", "s") == other_than(engine)
    assert turns(w) == {"new": 1, "cold": 1, "warm": 1}


async def test_kv_that_other_requests_replaced_is_cold() -> None:
    w = world(1)
    w.fleet.set_routes([EngineRoute(EngineId("e0"), "http://e0", kv_capacity_tokens=100, kv_free_tokens=100)])
    await turn(w, "r0", "s")
    backend = w.fleet.get(EngineId("e0"))
    assert backend is not None
    assert (backend.computed_tokens, backend.kv_free_tokens) == (28, 100)
    await turn(w, "r1", "s", [*CONTEXT * 2, *TOOL])  # of its 36 tokens, 8 are new
    assert backend.computed_tokens == 28 + 8 + 12
    await turn(w, "x", "", list(b"a large prompt") * 5)
    async with running(w, "r2", "s", CONTEXT * 4) as job:
        assert job.records[0].cached_tokens == 100 - (70 + 12)
        await finish(w, job)
    await turn(w, "y", "", list(b"a large prompt") * 6)
    await turn(w, "z", "", list(b"a large prompt") * 6)
    await turn(w, "r3", "s")
    assert turns(w) == {"new": 1, "warm": 2, "cold": 1}


async def test_queue_depth_and_sessions_combine() -> None:
    engines = {f"e{index}": FakeEngine(url=f"http://e{index}", max_sequences=1) for index in range(2)}
    clock = VirtualClock(1000.0)
    by_url = {engine.url: engine for engine in engines.values()}
    fleet = EngineBackends(by_url.__getitem__, clock=clock, routing=RoutingPolicy(queue_depth=1))
    fleet.set_routes([EngineRoute(EngineId(name), engine.url) for name, engine in engines.items()])
    w = World(GatewayUnderTest(NodeId("g"), fleet, limits=RelayLimits()), engines, clock)
    engine = await turn(w, "r0", "s")
    # A waiting request fills the session's engine.
    async with w.gateway.request_group(w.ask(request_id="x", prompt=CONTEXT, max_tokens=30, session_id="s")) as one:
        await w.settle()
        assert one.records[0].engine == engine
        async with w.gateway.request_group(w.ask(request_id="y", prompt=CONTEXT, max_tokens=30, session_id="s")) as two:
            await w.settle()
            assert two.records[0].engine == other_than(engine)
            await finish(w, one)
            await finish(w, two)
    assert turns(w) == {"new": 1, "warm": 1, "moved": 1}
    assert all(not backend.cached_waiting_tokens for backend in w.fleet)


def kv_fields(w: World, engine: str) -> dict[str, Any]:
    """Return the KV parameters of the engine's last request."""
    found: dict[str, Any] = w.engines[engine].seen[-1].body["kv_transfer_params"]["handover"]
    return found


def offloading_world() -> World:
    """Return a world whose engines transfer KV and prefill slowly, and where many turns leave their engine."""
    w = world()
    routes = [EngineRoute(EngineId(name), fake.url, kv_version="c/v1") for name, fake in w.engines.items()]
    w.fleet.set_routes(routes)
    for backend in w.fleet:
        backend.prefill_times.fitted = 0.0, 0.01
    w.fleet.sessions.turns.update({SessionOutcome.WARM: 10, SessionOutcome.MOVED: 10})
    return w


async def test_saved_kv_of_a_turn_is_loaded_by_another_engine() -> None:
    w = offloading_world()
    engine = await turn(w, "r0", "s")
    first = kv_fields(w, engine)
    assert (first["at_end"], "load" in first) == (True, False)
    assert await turn(w, "r1", "s", CONTEXT * 2) == engine
    second = kv_fields(w, engine)
    assert "load" not in second  # it is cached there
    w.fleet.set_routes([replace(backend.route, draining=backend.id == engine) for backend in w.fleet])
    assert await turn(w, "r2", "s", CONTEXT * 3) == other_than(engine)
    third = kv_fields(w, other_than(engine))
    assert third["load"] == second["save"]
    assert 0 < third["wait_s"] < DEFAULT_WAIT_S  # it may still be being saved
    w.fleet.set_routes([replace(backend.route, draining=backend.id != engine) for backend in w.fleet])
    await w.clock.advance(60.0)
    assert await turn(w, "r3", "s", CONTEXT * 4) == engine
    assert (kv_fields(w, engine)["load"], kv_fields(w, engine)["wait_s"]) == (third["save"], 0.0)
    assert len({first["save"], second["save"], third["save"]}) == 3


@pytest.mark.parametrize("because", ["other weights", "aborted", "few leave", "used before"])
async def test_kv_of_a_turn_is_not_loaded(because: str) -> None:
    w = offloading_world()
    if because == "few leave":
        w.fleet.sessions.turns[SessionOutcome.MOVED] = 0
    if because == "aborted":
        async with running(w, "r0", "s") as job:
            engine = job.records[0].engine or ""
            w.gateway.cancel([RequestId("r0")], (), "cancelled")
            await w.settle()
    else:
        engine = await turn(w, "r0", "s")
    assert ("at_end" in kv_fields(w, engine)) == (because != "few leave")
    version = "c/v2" if because == "other weights" else "c/v1"
    routes = [replace(backend.route, draining=backend.id == engine, kv_version=version) for backend in w.fleet]
    w.fleet.set_routes(routes)
    if because == "used before":
        async with running(w, "parallel", "s") as job:
            assert "load" in kv_fields(w, other_than(engine))
            w.fleet.get(EngineId(other_than(engine))).lose_cache()  # type: ignore[union-attr]
            await turn(w, "r1", "s")
            await finish(w, job)
        asked = [request for request in w.engines[other_than(engine)].seen if request.request_id.startswith("r1")]
        assert "load" not in asked[0].body["kv_transfer_params"]["handover"]
    else:
        assert await turn(w, "r1", "s") == other_than(engine)
        assert "load" not in w.engines[other_than(engine)].seen[-1].body.get("kv_transfer_params", {}).get(
            "handover", {}
        )


async def test_times_are_measured_from_requests() -> None:
    w = world(1)
    backend = w.fleet.get(EngineId("e0"))
    assert backend is not None
    for number in range(8):
        ask = w.ask(request_id=f"r{number}", prompt=CONTEXT * (number + 1), max_tokens=5, min_tokens=5)
        async with w.gateway.request_group(ask) as job:
            await w.settle()
            await w.clock.advance(0.5 + 0.01 * 16 * (number + 1))
            for _ in range(5):
                await w.step()
                await w.clock.advance(0.25)
            await finish(w, job)
    assert backend.prefill_times.fitted == pytest.approx((0.5, 0.01))
    assert backend.step_times.fitted == pytest.approx((0.25, 0.0))


async def test_sessions_can_be_ignored() -> None:
    w = world()
    w.fleet.sessions.ttl_s = 0.0
    for number in range(3):
        await turn(w, f"r{number}", "s")
    assert w.fleet.sessions.known(w.clock.now_s()) == 0
    assert turns(w) == {}


async def test_metrics_count_sessions_and_turns() -> None:
    w = world()
    for number in range(3):
        await turn(w, f"r{number}", "s")
    registry = CollectorRegistry()
    registry.register(GatewayCollector(w.gateway))
    text = generate_latest(registry).decode()
    assert "orchestrrl_gateway_sessions 1.0" in text
    for outcome, count in {"new": 1, "warm": 2, "moved": 0, "cold": 0}.items():
        assert SessionOutcome(outcome)
        assert f'orchestrrl_gateway_session_turns_total{{outcome="{outcome}"}} {count}.0' in text
    assert "orchestrrl_gateway_session_cached_tokens_total 56.0" in text


@pytest.mark.parametrize(
    ("header", "field", "session"), [("h", None, "h"), ("", "b", "b"), ("h", "b", "b"), ("h", "", "h"), ("", None, "")]
)
def test_id_in_the_body_has_priority_as_in_vllm(header: str, field: str | None, session: str) -> None:
    body = {"prompt": "x", "n": 2, "session_id": field}
    names: dict[str, Any] = {"request_id": "r", "group": "", "tag": "", "default_model": "m", "now_s": 0.0}
    ask = read_completion_request(_COMPLETIONS, body, session=header, **names)
    assert [record.session for record in ask.records] == [session] * 2
    assert all(record.body["session_id"] == field for record in ask.records)  # the engine reads it as well


def test_all_faults_of_ids_are_reported() -> None:
    body = {"prompt": "x", "session_id": "s" * 257}
    names: dict[str, Any] = {"request_id": "r", "group": "", "tag": "", "default_model": "m", "now_s": 0.0}
    with pytest.raises(HttpRefusal, match="X-Session-ID") as caught:
        read_completion_request(_COMPLETIONS, body, session="\n", **names)
    assert "session_id: must have at most 256 characters" in str(caught.value)
