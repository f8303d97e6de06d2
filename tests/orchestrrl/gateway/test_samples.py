"""The `n` answers to one body run on several engines, return in order, and fail together."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import aiohttp
import pytest

from orchestrrl.core.clock import VirtualClock
from orchestrrl.core.operations import EngineRoute
from orchestrrl.engines.base import Chunk, GenerationRequest, RequestRefused
from orchestrrl.gateway.core import Gateway
from orchestrrl.gateway.http.server import GatewayServer
from orchestrrl.gateway.relay import RelayLimits
from orchestrrl.gateway.routing.backends import EngineBackends
from planner.model import EngineId, NodeId
from tests.orchestrrl.gateway.fakes import FakeEngine, World, undisturbed

PROMPT = list(b"Once upon a time")
SAMPLES = 6


class Picky(FakeEngine):
    """An engine that refuses the sample with one seed."""

    refused_seed = -1

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Chunk]:
        if request.body.get("seed") == self.refused_seed:
            self.seen.append(request)
            raise RequestRefused("no such seed", 400, {"error": {"message": "no such seed", "code": 400}})
        async for chunk in super().generate(request):
            yield chunk


def picky_world() -> World:
    engines: dict[str, FakeEngine] = {f"e{index}": Picky(url=f"http://e{index}") for index in range(3)}
    by_url = {engine.url: engine for engine in engines.values()}
    clock = VirtualClock(1000.0)
    fleet = EngineBackends(lambda url: by_url[url], clock=clock)
    fleet.set_routes([EngineRoute(EngineId(name), engine.url) for name, engine in engines.items()])
    return World(Gateway(NodeId("gateway"), fleet, limits=RelayLimits()), engines, clock)


@asynccontextmanager
async def served() -> AsyncIterator[tuple[World, str, aiohttp.ClientSession]]:
    """Yield a gateway on a socket, with three engines that step continuously."""
    w = picky_world()
    server = GatewayServer(w.gateway)
    url = await server.start("127.0.0.1", 0)

    async def run() -> None:
        while True:
            for engine in w.engines.values():
                engine.step()
            await asyncio.sleep(0.001)

    running = asyncio.create_task(run())
    async with aiohttp.ClientSession() as http:
        yield w, url, http
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running
    await server.close()
    await w.fleet.close()


async def events_of(answer: aiohttp.ClientResponse) -> list[dict[str, Any]]:
    lines = [line async for line in answer.content if line.startswith(b"data: ") and line != b"data: [DONE]\n"]
    return [json.loads(line.removeprefix(b"data: ")) for line in lines]


def body(**more: Any) -> dict[str, Any]:
    return {"prompt": PROMPT, "n": SAMPLES, "max_tokens": 40, "min_tokens": 40, "return_token_ids": True, **more}


def engines_of(w: World) -> dict[str, set[str]]:
    """Return the requests that each engine has received."""
    return {name: {request.request_id for request in engine.seen} for name, engine in w.engines.items()}


async def test_samples_run_on_all_engines_and_return_in_order() -> None:
    async with served() as (w, url, http):
        async with http.post(f"{url}/v1/completions", json=body(), headers={"X-Request-Id": "r"}) as answer:
            whole = await answer.json()
    assert [len(seen) for seen in engines_of(w).values()] == [2, 2, 2]
    assert [choice["index"] for choice in whole["choices"]] == list(range(SAMPLES))
    tokens, text, reason = undisturbed(PROMPT, 40, min_tokens=40)
    for choice in whole["choices"]:
        assert (choice["token_ids"], choice["text"], choice["finish_reason"]) == (tokens, text, reason)
    assert whole["usage"]["completion_tokens"] == SAMPLES * 40
    assert whole["usage"]["prompt_tokens"] == len(PROMPT)


async def test_streamed_samples_on_different_engines_are_complete() -> None:
    async with served() as (w, url, http):
        async with http.post(f"{url}/v1/completions", json=body(stream=True)) as answer:
            events = await events_of(answer)
    assert [len(seen) for seen in engines_of(w).values()] == [2, 2, 2]
    tokens, text, _ = undisturbed(PROMPT, 40, min_tokens=40)
    for index in range(SAMPLES):
        mine = [event["choices"][0] for event in events if event["choices"][0]["index"] == index]
        assert [token for choice in mine for token in choice["token_ids"]] == tokens
        assert "".join(choice["text"] for choice in mine) == text
        assert [choice["finish_reason"] for choice in mine if choice["finish_reason"]] == ["length"]
    # They run concurrently: every one has begun before the first has ended.
    first_end = next(place for place, event in enumerate(events) if event["choices"][0]["finish_reason"])
    assert {event["choices"][0]["index"] for event in events[:first_end]} == set(range(SAMPLES))


async def test_samples_of_a_dead_engine_continue_elsewhere() -> None:
    async with served() as (w, url, http):

        async def kill() -> None:
            while not any(record.generated_ids for record in w.gateway.ledger):
                await asyncio.sleep(0.001)
            w.engines["e1"].die()

        killing = asyncio.create_task(kill())
        async with http.post(f"{url}/v1/completions", json=body(stream=True)) as answer:
            events = await events_of(answer)
        await killing
    tokens, _, _ = undisturbed(PROMPT, 40, min_tokens=40)
    for index in range(SAMPLES):
        mine = [event["choices"][0] for event in events if event["choices"][0]["index"] == index]
        assert [token for choice in mine for token in choice["token_ids"]] == tokens


@pytest.mark.parametrize("stream", [False, True])
async def test_refused_sample_fails_and_stops_all_samples(stream: bool) -> None:
    async with served() as (w, url, http):
        for engine in w.engines.values():
            assert isinstance(engine, Picky)
            engine.refused_seed = 13
        async with http.post(f"{url}/v1/completions", json=body(seed=10, temperature=1, stream=stream)) as answer:
            if answer.status == 400:
                refusal = await answer.json()
            else:  # a stream whose other samples had begun before the refusal
                assert stream
                refusal = (await events_of(answer))[-1]
            assert refusal["error"]["message"] == "no such seed"
        async with asyncio.timeout(60.0):
            while any(engine.attempts for engine in w.engines.values()):
                await asyncio.sleep(0.001)
        assert len(w.gateway.ledger) == 0
        assert all(not backend.records and not backend.waiting for backend in w.fleet)


async def test_lost_delivered_sample_ends_the_stream_with_an_error() -> None:
    """Seeded sampling cannot continue elsewhere, so the other samples are stopped and none looks complete."""
    async with served() as (w, url, http):

        async def kill() -> None:
            while not all(record.delivered for record in w.gateway.ledger) or not len(w.gateway.ledger):
                await asyncio.sleep(0.001)
            w.engines["e1"].die()

        killing = asyncio.create_task(kill())
        async with http.post(
            f"{url}/v1/completions", json=body(seed=1, max_tokens=4000, min_tokens=4000, stream=True)
        ) as answer:
            assert answer.status == 200
            events = await events_of(answer)
        await killing
        assert events[-1]["error"]["code"] == 502
        assert {event["choices"][0]["finish_reason"] for event in events[:-1]} <= {None, "abort"}
        async with asyncio.timeout(60.0):
            while any(engine.attempts for engine in w.engines.values()):
                await asyncio.sleep(0.001)
        assert len(w.gateway.ledger) == 0
