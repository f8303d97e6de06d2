"""The queue in front of generating engines: no request is lost, cut requests go first, and the queue is reported."""

import asyncio
from contextlib import AsyncExitStack

import pytest
from prometheus_client import generate_latest
from prometheus_client.core import CollectorRegistry

from orchestrrl.cli.gateway import GatewayFlags
from orchestrrl.cli.gateway_options import read_options
from orchestrrl.core.clock import VirtualClock
from orchestrrl.core.errors import ProblemFaults
from orchestrrl.core.operations import (
    EngineRoute,
)
from orchestrrl.gateway.metrics import GatewayCollector
from orchestrrl.gateway.relay import RelayLimits
from orchestrrl.gateway.routing.backends import EngineBackends
from orchestrrl.gateway.routing.strategies import RoutingPolicy
from planner.model import EngineId, NodeId, RequestId, RequestMove
from tests.orchestrrl.gateway.fakes import FakeEngine, GatewayUnderTest, World, undisturbed

PROMPT = list(b"Once upon a time")


def queued_world(depth: int, **known: int) -> World:
    """Return a world of engines with two seats each."""
    engines = {f"e{index}": FakeEngine(url=f"http://e{index}", max_sequences=2) for index in range(2)}
    by_url = {engine.url: engine for engine in engines.values()}
    clock = VirtualClock(1000.0)
    fleet = EngineBackends(lambda url: by_url[url], clock=clock, routing=RoutingPolicy(queue_depth=depth))
    fleet.set_routes([EngineRoute(EngineId(name), engine.url, **known) for name, engine in engines.items()])  # type: ignore[arg-type]
    return World(GatewayUnderTest(NodeId("gateway"), fleet, limits=RelayLimits()), engines, clock)


async def test_many_requests_survive_few_seats_and_a_dying_engine() -> None:
    w = queued_world(1)
    expected = undisturbed(PROMPT, 10, min_tokens=10)[0]
    async with AsyncExitStack() as stack:
        jobs = [
            await stack.enter_async_context(
                w.gateway.request_group(w.ask(request_id=f"r{number:02d}", prompt=PROMPT, max_tokens=10, min_tokens=10))
            )
            for number in range(30)
        ]
        await w.settle()
        assert len(w.fleet.queue) == 28
        began: list[str] = []
        for step in range(200):
            if step == 15:
                w.engines["e1"].die()
            await w.step()
            assert all(backend.waiting <= 1 for backend in w.fleet)
            began += [r.id for r in w.gateway.ledger if r.generated_ids and r.id not in began]
            if all(job.done for job in jobs):
                break
        for job in jobs:
            assert list(job.records[0].generated_ids) == expected
        assert began == sorted(began)
    assert all(not backend.records and not backend.reserved for backend in w.fleet)


async def test_cut_requests_precede_new_ones() -> None:
    w = queued_world(1)
    async with AsyncExitStack() as stack:
        for number in range(6):
            ask = w.ask(request_id=f"r{number}", prompt=PROMPT, max_tokens=1000, min_tokens=1000)
            await stack.enter_async_context(w.gateway.request_group(ask))
        await w.settle()
        await w.step()
        assert [waiter.record.id for waiter in w.fleet.queue] == ["r4", "r5"]
        w.engines["e1"].die()
        await w.settle()
        lost = [waiter.record.id for waiter in w.fleet.queue][:-2]
        assert {"r1", "r3"} >= set(lost)
        assert [waiter.record.id for waiter in w.fleet.queue][-2:] == ["r4", "r5"]
        for _ in range(5):
            await w.step()
        assert w.gateway.ledger.get(RequestId("r1")).engine == "e0"  # type: ignore[union-attr]


async def test_queued_requests_are_on_no_engine_and_are_counted() -> None:
    w = queued_world(1)
    async with AsyncExitStack() as stack:
        for number in range(5):
            ask = w.ask(request_id=f"r{number}", prompt=PROMPT, max_tokens=50, min_tokens=50)
            await stack.enter_async_context(w.gateway.request_group(ask))
        await w.settle()
        views = {view.id: view for view in w.gateway.report().in_flight}
        assert [views[RequestId(f"r{n}")].engine for n in range(5)] == ["e0", "e1", None, None, None]
        (refused,) = await w.gateway.move([RequestMove(RequestId("r4"), EngineId("e0"), EngineId("e1"))])
        assert (refused.done, refused.detail) == (False, "the request must be assigned to engine e0, got none")
        registry = CollectorRegistry()
        registry.register(GatewayCollector(w.gateway))
        text = generate_latest(registry).decode()
        assert "orchestrrl_gateway_requests_queued 3.0" in text
        assert 'orchestrrl_gateway_queue_seconds_bucket{le="0.0"} 2.0' in text
        await w.clock.advance(4.0)
        await w.step()
        text = generate_latest(registry).decode()
        assert "orchestrrl_gateway_requests_queued 1.0" in text
        assert 'orchestrrl_gateway_queue_seconds_bucket{le="1.0"} 2.0' in text
        assert 'orchestrrl_gateway_queue_seconds_bucket{le="5.0"} 4.0' in text


async def test_queue_depth_excludes_requests_with_known_seats_and_kv() -> None:
    w = queued_world(1, max_sequences=2, kv_capacity_tokens=10_000, kv_free_tokens=10_000)
    async with AsyncExitStack() as stack:
        for number in range(9):
            ask = w.ask(request_id=f"r{number}", prompt=PROMPT, max_tokens=50, min_tokens=50)
            await stack.enter_async_context(w.gateway.request_group(ask))
        await w.settle()
        assert [backend.waiting for backend in w.fleet] == [
            2,
            2,
        ]  # they have seats, so none waits longer than a prefill
        await w.step()
        assert [(backend.running, backend.waiting) for backend in w.fleet] == [(2, 1), (2, 1)]
        for _ in range(3):
            await w.step()
        assert [(backend.running, backend.waiting) for backend in w.fleet] == [(2, 1), (2, 1)]
        assert len(w.fleet.queue) == 3


async def test_cancelled_burst_leaves_no_state() -> None:
    w = queued_world(2)
    jobs = [
        w.gateway.request_group(w.ask(request_id=f"r{number}", prompt=PROMPT, max_tokens=50)) for number in range(500)
    ]
    tasks = [asyncio.create_task(job.run()) for job in jobs]
    await w.settle()
    assert len(w.fleet.queue) == 496
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await w.settle()
    assert len(w.fleet.queue) == len(w.gateway.ledger) == 0
    assert all(not backend.records and not backend.reserved and not backend.waiting for backend in w.fleet)


FLAGS = {
    "listen": "127.0.0.1:0",
    "daemon": None,
    "engine_kind": "vllm",
    "gateway_id": "",
    "engine_wait_s": 1.0,
    "stall_s": 1.0,
    "drain_s": 0.0,
    "coalesce_tokens": 1,
    "processes": 1,
    "log_level": "info",
}


def test_flags_set_the_routing_policy() -> None:
    flags = GatewayFlags(
        **FLAGS,  # type: ignore[arg-type]
        engines=["a=http://x", "b=http://y"],
        policy="least_tokens",
        affinity=["math=h20", "agent=h800"],
        pools=["a=h20"],
        affinity_slack=3,
        queue_depth=5,
    )
    options = read_options(flags)
    tags = {"math": "h20", "agent": "h800"}
    assert options.routing == RoutingPolicy("least_tokens", tags, slack=3, queue_depth=5, pools={EngineId("a"): "h20"})


def test_all_invalid_flags_are_reported_at_once() -> None:
    given = GatewayFlags(
        **FLAGS,  # type: ignore[arg-type]
        engines=["a=http://x"],
        policy="best",
        affinity=["math", "m=p", "m=q"],
        pools=["b=h20", "=x"],
        affinity_slack=-1,
        queue_depth=-2,
        session_ttl_s=float("nan"),
    )
    with pytest.raises(ProblemFaults) as caught:
        read_options(given)
    flags = [fault.split(":")[0] for fault in caught.value.faults]
    assert sorted(flags) == sorted(
        [
            "--policy",
            "--affinity",
            "--affinity",
            "--engine-pool",
            "--engine-pool",
            "--affinity-slack",
            "--queue-depth",
            "--session-ttl-s",
        ]
    )


async def test_own_pool_applies_if_the_daemon_names_none() -> None:
    engine = FakeEngine(url="http://e0")
    routing = RoutingPolicy(pools={EngineId("e0"): "h20"})
    fleet = EngineBackends(lambda url: engine, clock=VirtualClock(), routing=routing)
    pools = []
    for pool in ("", "h800", ""):
        fleet.set_routes([EngineRoute(EngineId("e0"), engine.url, pool=pool)])
        pools += [backend.pool for backend in fleet]
    assert pools == ["h20", "h800", "h20"]
