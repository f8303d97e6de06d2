"""Requests wait for engines that are being started, but no longer than these are expected."""

import asyncio

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from orchestrrl.core.operations import (
    CloseBarrier,
    EngineRoute,
    FrozenRequests,
    OpenBarrier,
    OperationItemResult,
    PauseMode,
)
from orchestrrl.gateway.ledger.ledger import RequestRecord
from orchestrrl.gateway.metrics import GatewayCollector
from planner.model import EngineHealth, EngineId, RequestId, RequestMove, RequestState
from tests.orchestrrl.gateway.fakes import World, undisturbed, world
from tests.orchestrrl.gateway.test_holding import begun
from tests.orchestrrl.gateway.test_relay import PROMPT, assert_undisturbed, finish

PATIENCE_S = 5.0


def send_routes(w: World, *names: str, draining: str = "", expected: str = "", for_s: float = 0.0) -> None:
    """Set the routes and the expected engines with their remaining time. Names are separated by spaces."""
    routes = [
        EngineRoute(EngineId(name), f"http://{name}", EngineHealth.OK, draining=name in draining) for name in names
    ]
    assert not w.gateway.set_routes(routes, map(EngineId, expected.split()), w.clock.now_s() + for_s)


async def move(w: World, source: str, target: str, hold_s: float = 0.0, request: str = "r") -> OperationItemResult:
    order = RequestMove(RequestId(request), EngineId(source), EngineId(target), hold_s)
    moving = asyncio.create_task(w.gateway.move([order]))
    await w.settle()
    if not moving.done():
        await w.step()
    (result,) = await moving
    return result


async def park(w: World, for_s: float = 60.0) -> None:
    """Park request `r`, on e0, for e1, which is expected."""
    await begun(w, 5)
    send_routes(w, "e0", draining="e0", expected="e1", for_s=for_s)
    assert (await move(w, "e0", "e1")).done


def kept(w: World) -> str:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(GatewayCollector(w.gateway))
    text = generate_latest(registry).decode()
    return "".join(line for line in text.splitlines() if line.startswith("orchestrrl_gateway_requests_kept{"))


async def test_parked_request_continues_when_expected_engine_starts() -> None:
    w = world(2, stall_s=20.0)
    send_routes(w, "e0")
    watching = asyncio.create_task(w.gateway.watch())
    async with w.gateway.request_group(w.ask(prompt=PROMPT, max_tokens=30, stream=True)) as job:
        await begun(w, 5)
        send_routes(w, "e0", draining="e0", expected="e1", for_s=60.0)
        assert (await move(w, "e0", "e1", hold_s=2.0)).done
        (record,) = job.records
        await w.clock.advance(55.0)  # longer than `stall_s`
        assert record.engine is None
        (view,) = w.gateway.report().in_flight
        assert (view.engine, view.state, view.generated_tokens) == (None, RequestState.WAITING, 5)
        assert kept(w) == 'orchestrrl_gateway_requests_kept{engine="e1"} 1.0'
        assert not w.engines["e0"].attempts
        send_routes(w, "e1")
        await w.settle()
        assert record.engine == "e1"
        assert record.progressed_s == w.clock.now_s()  # it has not stalled
        assert kept(w) == ""
        await finish(w, job)
        assert_undisturbed(job, PROMPT, 30)
        assert record.moves == 1
    watching.cancel()


async def test_suspected_engine_is_trusted_after_its_restart() -> None:
    w = world(2)
    async with w.gateway.request_group(w.ask(prompt=PROMPT, max_tokens=30)) as job:
        await begun(w, 5)
        (record,) = job.records
        source = record.engine or ""
        other = {"e0": "e1", "e1": "e0"}[source]
        w.engines[other].die()
        w.fleet.suspect(w.fleet._backends[EngineId(other)], "connection reset")
        send_routes(w, source, draining=source, expected=other, for_s=60.0)
        assert (await move(w, source, other)).done
        await w.clock.advance(20.0)
        w.engines[other].revive()
        send_routes(w, other)
        await w.settle()
        assert record.engine == other
        await finish(w, job)
        assert_undisturbed(job, PROMPT, 30)


async def test_parked_request_is_released_when_engine_is_no_longer_expected() -> None:
    w = world(2)
    send_routes(w, "e0")
    async with w.gateway.request_group(w.ask(prompt=PROMPT, max_tokens=30)) as job:
        await park(w)
        await w.clock.advance(10.0)
        assert job.records[0].engine is None
        send_routes(w, "e0")
        await w.settle()
        assert job.records[0].engine == "e0"
        await finish(w, job)
        assert_undisturbed(job, PROMPT, 30)


async def test_requests_stop_waiting_at_the_deadline_if_the_daemon_dies() -> None:
    w = world(2, engine_wait_s=PATIENCE_S)
    send_routes(w, "e0")
    async with w.gateway.request_group(w.ask(prompt=PROMPT, max_tokens=30)) as job:
        await park(w, for_s=60.0)
        async with w.gateway.request_group(w.ask(request_id="new", prompt=PROMPT, max_tokens=30)) as new:
            await w.clock.advance(59.9)
            assert not job.done
            assert not new.done
            assert len(w.fleet.queue) == 1  # the other stays parked
            await w.clock.advance(0.2)
            assert len(w.fleet.queue) == 2
            assert not w.fleet.expected
            await w.clock.advance(PATIENCE_S + 1.0)
            for failed in (job, new):
                assert failed.failure is not None
                assert failed.failure.status == 503


async def test_requests_without_usable_engine_are_served_in_order() -> None:
    w = world(1, engine_wait_s=PATIENCE_S)
    send_routes(w, expected="e0", for_s=60.0)
    async with w.gateway.request_group(w.ask(prompt=PROMPT, n=6, max_tokens=3)) as job:
        await w.clock.advance(30.0)
        assert not job.done
        assert len(w.fleet.queue) == 6
        send_routes(w, "e0")
        await w.settle()
        assert [request.request_id for request in w.engines["e0"].seen] == [f"r-{index}~1" for index in range(6)]
        await finish(w, job)
        assert job.failure is None


async def test_request_does_not_wait_for_expected_engine_that_refused_it() -> None:
    w = world(1, engine_wait_s=PATIENCE_S)
    send_routes(w, expected="e0", for_s=60.0)
    record = w.ask(prompt=PROMPT, max_tokens=3).records[0]
    place = asyncio.create_task(w.fleet.place(record, without=[EngineId("e0")], patience_s=PATIENCE_S))
    await w.clock.advance(PATIENCE_S + 1.0)
    assert place.done()
    with pytest.raises(Exception, match="no engine was available"):
        place.result()


async def test_held_request_can_be_redirected() -> None:
    w = world(3)
    send_routes(w, "e0")
    async with w.gateway.request_group(w.ask(prompt=PROMPT, max_tokens=30)) as job:
        await park(w)
        (record,) = job.records
        # First to another expected engine, then to a usable one.
        send_routes(w, "e0", draining="e0", expected="e1 e2", for_s=60.0)
        assert (await move(w, "", "e2")).done
        await w.settle()
        assert kept(w).endswith('{engine="e1"} 0.0orchestrrl_gateway_requests_kept{engine="e2"} 1.0')
        send_routes(w, "e0", "e1", draining="e0", expected="e2", for_s=60.0)
        await w.settle()
        assert record.engine is None
        result = await move(w, "", "e1")
        assert (result.done, result.recomputed_tokens) == (True, 0)  # its tokens were reported when it was parked
        assert record.engine == "e1"
        # The request now runs on an engine.
        assert (await move(w, "", "e2")).detail == "the request must be assigned to engine none, got e1"
        await finish(w, job)
        assert_undisturbed(job, PROMPT, 30)
        assert record.moves == 1


async def test_queued_request_can_be_redirected_to_a_usable_engine() -> None:
    w = world(2)
    send_routes(w, "e0", draining="e0")
    async with w.gateway.request_group(w.ask(prompt=PROMPT, max_tokens=5)) as job:
        await w.settle()
        assert len(w.fleet.queue) == 1
        assert (await move(w, "", "e0")).detail == "engine e0 accepts no requests: it is draining or not in the routes"
        assert (await move(w, "", "e1")).detail == "engine 'e1' is not in the routes"
        assert len(w.fleet.queue) == 1
        assert (await move(w, "", "e1", hold_s=10.0)).done
        await w.settle()
        assert len(w.fleet.queue) == 0
        send_routes(w, "e0")
        await w.clock.advance(1.0)
        assert job.records[0].engine is None
        await w.clock.advance(10.0)
        assert job.records[0].engine == "e0"
        await finish(w, job)
        assert_undisturbed(job, PROMPT, 5)


async def test_client_disconnect_removes_a_parked_request() -> None:
    w = world(2)
    send_routes(w, "e0")
    job = w.gateway.request_group(w.ask(prompt=PROMPT, max_tokens=30))
    task = asyncio.create_task(job.run())
    await park(w)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await w.settle()
    assert len(w.gateway.ledger) == 0
    assert not w.gateway.relays
    send_routes(w, "e1")
    await w.settle()
    assert not w.engines["e1"].seen


async def test_parked_request_can_be_cancelled_after_redirect() -> None:
    w = world(3)
    send_routes(w, "e0")
    async with w.gateway.request_group(w.ask(prompt=PROMPT, max_tokens=30)) as job:
        await park(w)
        w.gateway.relays[RequestId("r")].redirect(EngineId("e2"), 10.0)
        assert w.gateway.cancel([RequestId("r")], (), "cancelled") == ("r",)
        await w.settle()
        (record,) = job.records
        assert (record.finish_reason, record.stop_reason) == ("abort", "cancelled")
        assert list(record.generated_ids) == undisturbed(PROMPT, 30)[0][:5]
        assert not (await move(w, "", "e1")).done


async def test_expected_engine_starts_while_barrier_is_closed() -> None:
    w = world(2)
    send_routes(w, "e0", "e1", draining="e1")
    async with w.gateway.request_group(w.ask(prompt=PROMPT, max_tokens=30)) as job:
        await begun(w, 5)
        send_routes(w, "e0", expected="e1", for_s=60.0)
        assert (await move(w, "e0", "e1", hold_s=1.0)).done
        now_s = w.clock.now_s()
        order = CloseBarrier("l", "", PauseMode.KEEP, FrozenRequests.RECOMPUTE, now_s + 30.0, now_s + 10.0)
        closing = asyncio.create_task(w.gateway.barrier.close(order))
        await w.clock.advance(5.0)
        await closing
        assert w.gateway.barrier.report().held == 1
        send_routes(w, "e0", "e1")
        await w.clock.advance(5.0)
        (record,) = job.records
        assert record.engine is None
        opening = asyncio.create_task(w.gateway.barrier.open(OpenBarrier("l")))
        await w.clock.advance(1.0)
        await opening
        assert record.engine == "e1"
        await finish(w, job)
        assert_undisturbed(job, PROMPT, 30)


async def test_stream_pauses_while_its_request_is_parked() -> None:
    w = world(2)
    send_routes(w, "e0")
    read: list[int] = []

    def grown(record: RequestRecord) -> None:
        for delta in record.take_undelivered():
            read.extend(delta.chunk.token_ids)

    task = asyncio.create_task(w.gateway.request_group(w.ask(prompt=PROMPT, max_tokens=30, stream=True)).run(grown))
    await park(w)
    assert len(read) == 5
    await w.clock.advance(30.0)
    assert len(read) == 5
    send_routes(w, "e1")
    await w.settle()
    for _ in range(30):
        await w.step()
    await task
    assert read == undisturbed(PROMPT, 30)[0]
