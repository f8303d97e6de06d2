"""Endpoints of vLLM that the gateway passes through to one engine: the answer is the engine's own."""

import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from orchestrrl.core.operations import EngineRoute
from orchestrrl.gateway.http.engine_answers import MOST_HELD_BYTES
from planner.model import EngineId
from tests.orchestrrl.gateway.http_fuzz import encoded, no_json, odd_headers, settled, spoilt_body
from tests.orchestrrl.gateway.http_harness import HttpHarness, LogLines, request
from tests.orchestrrl.gateway.passing_fleet import DEADLINE_S, PATHS, PassedEngine, PassingFleet, passing_fleet

ASK = {"model": "m", "input": "Hello"}
EVENT = b'event: response.created\ndata: {"type": "response.created", "response": {"id": "resp_s"}}\n\n'


async def responds(engine: PassedEngine, request: web.Request) -> web.StreamResponse:
    """Answer as /v1/responses does, whole or as a stream."""
    if request.method == "GET" or request.path.endswith("/cancel"):
        held = request.path.split("/")[3] == f"resp_{engine.name}"
        return web.json_response({"id": request.path}, status=200 if held else 404)
    if (await request.json()).get("stream"):
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        await answer.write(EVENT)
        await asyncio.sleep(0.01)
        await answer.write(b"event: response.completed\ndata: {}\n\n")
        return answer
    return web.json_response({"id": f"resp_{engine.name}", "object": "response"})


def breaks_off(content_type: str, first: bytes) -> Any:
    async def answer(engine: PassedEngine, request: web.Request) -> web.StreamResponse:
        begun = web.StreamResponse(headers={"Content-Type": content_type})
        await begun.prepare(request)
        await begun.write(first)
        assert request.transport is not None
        request.transport.close()
        return begun

    return answer


async def hangs(engine: PassedEngine, request: web.Request) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError


@pytest.fixture
async def fleet() -> AsyncIterator[PassingFleet]:
    async with passing_fleet(PassedEngine("e0"), PassedEngine("e1")) as fixture:
        yield fixture


async def test_request_and_answer_are_passed_unchanged(fleet: PassingFleet) -> None:
    body = b'{"model": "m",  "prompt": "caf\xc3\xa9"}'
    headers = {"X-Request-Id": "r1", "Authorization": "Bearer k", "Content-Type": "application/json", "X-Tag": "t"}
    async with fleet.http.post(f"{fleet.url}/tokenize?a=%20b&c", data=body, headers=headers) as answer:
        assert (answer.status, answer.headers["X-Own"]) == (201, "kept")
        received = await answer.json()
    assert received["target"] == "/tokenize?a=%20b&c"
    assert received["body"].encode("latin-1") == body
    kept = {name: received["headers"].get(name) for name in ("x-request-id", "authorization", "x-tag")}
    assert kept == {"x-request-id": "r1", "authorization": "Bearer k", "x-tag": None}


async def test_other_bodies_keep_their_content_type(fleet: PassingFleet) -> None:
    form = aiohttp.FormData({"model": "m"})
    form.add_field("file", b"\x00\xff", filename="a.wav")
    _, received = await fleet.ask("POST", "/v1/audio/transcriptions", data=form)
    assert received["headers"]["content-type"].startswith("multipart/form-data; boundary=")
    assert "\x00\xff" in received["body"]


async def test_requests_are_spread_over_engines(fleet: PassingFleet) -> None:
    for _ in range(4):
        await fleet.ask("POST", "/tokenize", json={})
    assert [len(engine.asked) for engine in fleet.engines] == [2, 2]


async def test_engine_without_endpoint_or_model_is_not_asked() -> None:
    short = PassedEngine("e0", paths=tuple(path for path in PATHS if path != "/tokenize"))
    adapter = PassedEngine("e2", models=["m", "adapter"])
    async with passing_fleet(short, PassedEngine("e1"), adapter) as fleet:
        for _ in range(4):
            assert (await fleet.ask("POST", "/tokenize", json={"model": "m"}))[1]["engine"] != "e0"
            assert (await fleet.ask("POST", "/tokenize", json={"model": "adapter"}))[1]["engine"] == "e2"
            assert (await fleet.ask("POST", "/v1/responses", json={"model": "adapter"}))[1]["engine"] == "e2"


async def test_adapter_that_is_loaded_later_is_found(fleet: PassingFleet) -> None:
    fleet.engines[1].models.append("adapter")
    for _ in range(3):
        assert (await fleet.ask("POST", "/tokenize", json={"model": "adapter"}))[1]["engine"] == "e1"


@pytest.mark.parametrize("path", ["/tokenize", "/v1/responses"])
async def test_endpoint_that_no_engine_has_is_refused_by_an_engine(path: str) -> None:
    async with passing_fleet(PassedEngine("e0", paths=())) as fleet:
        assert (await fleet.ask("POST", path, json=ASK))[0] == 201
        assert not fleet.gateway.ledger.finished


async def test_request_that_runs_the_model_counts_as_load(fleet: PassingFleet) -> None:
    released = asyncio.Event()

    async def waits(engine: PassedEngine, request: web.Request) -> web.StreamResponse:
        await released.wait()
        return await responds(engine, request)

    for engine in fleet.engines:
        engine.answer = waits
    asked = [asyncio.create_task(fleet.ask("POST", "/v1/responses", json=ASK)) for _ in range(4)]
    await fleet.until(lambda: all(len(engine.asked) == 2 for engine in fleet.engines))
    assert [backend.running + backend.waiting for backend in fleet.gateway.fleet] == [2, 2]
    assert await fleet.ask("GET", "/load") == (200, {"server_load": 4})
    async with fleet.http.get(f"{fleet.operator_url}/orchestrrl/requests") as shown:
        requests = (await shown.json())["in_flight"]
    assert {request["endpoint"] for request in requests} == {"/v1/responses"}
    assert {request["movable_detail"] for request in requests} == {
        "/v1/responses: the engine's answer is passed through"
    }
    moved = {"request_id": requests[0]["id"], "to_engine_id": "e1" if requests[0]["engine"] == "e0" else "e0"}
    _, result = await fleet.operator("move", {"moves": [moved]})
    assert result["items"][0]["detail"].startswith("the request cannot continue on another engine: /v1/responses")
    released.set()
    assert {status for status, _ in await asyncio.gather(*asked)} == {200}
    assert [backend.running + backend.waiting for backend in fleet.gateway.fleet] == [0, 0]
    assert len(fleet.gateway.ledger) == 0


@pytest.mark.parametrize("path", ["/tokenize", "/v1/responses"])
async def test_engine_that_dies_is_replaced_while_the_client_has_nothing(fleet: PassingFleet, path: str) -> None:
    fleet.engines[0].answer = breaks_off("application/json", b'{"id": ')
    for _ in range(3):
        status, answer = await fleet.ask("POST", path, json=ASK)
        assert (status, answer["engine"]) == (201, "e1")
        await fleet.until(lambda: all(backend.usable for backend in fleet.gateway.fleet))


async def test_engine_that_dies_alone_gives_502_or_503() -> None:
    async with passing_fleet(
        PassedEngine("e0", answer=breaks_off("application/json", b"{")), engine_wait_s=0.1
    ) as fleet:
        status, message = await fleet.message("POST", "/tokenize", json=ASK)
        assert (status, message[:16]) == (502, "engine e0 failed")
        assert (await fleet.message("POST", "/v1/responses", json=ASK))[0] == 503
        fleet.engines[0].answer = responds
        await fleet.until(lambda: all(backend.usable for backend in fleet.gateway.fleet))
        assert (await fleet.ask("POST", "/v1/responses", json=ASK))[0] == 200


async def test_engine_that_dies_in_a_stream_ends_it_with_an_error_event(fleet: PassingFleet) -> None:
    for engine in fleet.engines:
        engine.answer = breaks_off("text/event-stream", EVENT)
    async with fleet.http.post(f"{fleet.url}/v1/responses", json=ASK) as answer:
        text = await answer.read()
    assert text.startswith(EVENT)
    error = json.loads(text.rpartition(b"event: error\ndata: ")[2])["error"]
    assert error["code"] == 502
    assert "broke off the answer" in error["message"]
    assert sum(len(engine.asked) for engine in fleet.engines) == 1


@pytest.mark.parametrize("path", ["/tokenize", "/v1/responses"])
async def test_engine_that_dies_in_a_long_answer_breaks_it_off(fleet: PassingFleet, path: str) -> None:
    for engine in fleet.engines:
        engine.answer = breaks_off("application/json", b"0" * (MOST_HELD_BYTES + 1))
    with pytest.raises(aiohttp.ClientPayloadError):
        await fleet.ask("POST", path, json=ASK)
    assert sum(len(engine.asked) for engine in fleet.engines) == 1
    fleet.engines[0].answer = fleet.engines[1].answer = responds
    await fleet.until(lambda: all(backend.usable for backend in fleet.gateway.fleet))
    assert (await fleet.ask("POST", "/v1/responses", json=ASK))[0] == 200


async def test_long_answer_arrives_whole(fleet: PassingFleet) -> None:
    async def long(engine: PassedEngine, request: web.Request) -> web.StreamResponse:
        return web.json_response("0" * (2 * MOST_HELD_BYTES))

    for engine in fleet.engines:
        engine.answer = long
    assert await fleet.ask("POST", "/tokenize", json=ASK) == (200, "0" * (2 * MOST_HELD_BYTES))


@pytest.mark.parametrize("path", ["/tokenize", "/v1/responses"])
async def test_client_that_disconnects_closes_the_engines_request(fleet: PassingFleet, path: str) -> None:
    for engine in fleet.engines:
        engine.answer = hangs
    asked = asyncio.create_task(fleet.ask("POST", path, json=ASK))
    await fleet.until(lambda: any(engine.asked for engine in fleet.engines))
    (engine,) = (engine for engine in fleet.engines if engine.asked)
    asked.cancel()
    async with asyncio.timeout(DEADLINE_S):
        await engine.disconnected.wait()
    await fleet.until(lambda: not len(fleet.gateway.ledger))


# --- responses -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_response_is_found_on_the_engine_that_created_it(fleet: PassingFleet, stream: bool) -> None:
    for engine in fleet.engines:
        engine.answer = responds
    for _ in range(3):
        async with fleet.http.post(f"{fleet.url}/v1/responses", json={**ASK, "stream": stream}) as answer:
            text = await answer.read()
        made = "s" if stream else json.loads(text)["id"].removeprefix("resp_")
        owner = next(engine for engine in fleet.engines if engine.asked)
        other = next(engine for engine in fleet.engines if engine is not owner)
        assert stream or made == owner.name
        owner.asked.clear()
        await fleet.ask("GET", f"/v1/responses/resp_{made}?starting_after=1")
        await fleet.ask("POST", f"/v1/responses/resp_{made}/cancel")
        await fleet.ask("POST", "/v1/responses", json={**ASK, "previous_response_id": f"resp_{made}"})
        assert owner.asked == [
            f"GET /v1/responses/resp_{made}?starting_after=1",
            f"POST /v1/responses/resp_{made}/cancel",
            "POST /v1/responses",
        ]
        assert not other.asked
        owner.asked.clear()


async def test_unknown_response_is_searched_on_all_engines(fleet: PassingFleet) -> None:
    for engine in fleet.engines:
        engine.answer = responds
    assert (await fleet.ask("GET", "/v1/responses/resp_e1"))[0] == 200
    assert (await fleet.ask("GET", "/v1/responses/resp_e1"))[0] == 200
    assert [len(engine.asked) for engine in fleet.engines] == [1, 3]
    assert (await fleet.ask("GET", "/v1/responses/resp_x"))[0] == 404  # the engine's own answer


async def test_response_of_an_engine_that_left_is_lost(fleet: PassingFleet) -> None:
    for engine in fleet.engines:
        engine.answer = responds
    _, made = await fleet.ask("POST", "/v1/responses", json=ASK)
    owner = made["id"].removeprefix("resp_")
    stays = next(engine for engine in fleet.engines if engine.name != owner)
    fleet.gateway.set_routes([EngineRoute(EngineId(stays.name), stays.url)])
    for method, path, body in (
        ("GET", f"/v1/responses/{made['id']}", None),
        ("POST", "/v1/responses", {**ASK, "previous_response_id": made["id"]}),
    ):
        status, message = await fleet.message(method, path, json=body)
        assert (status, message) == (
            404,
            f"response '{made['id']}' was held by engine {owner}, which has left the fleet",
        )


# --- pauses ----------------------------------------------------------------------------------------------------------


async def test_closed_barrier_holds_requests_that_run_the_model(fleet: PassingFleet) -> None:
    status, lease = await fleet.operator("pause", {"lease_s": 60})
    assert status == 200, lease
    asked = asyncio.create_task(fleet.ask("POST", "/v1/responses", json=ASK))
    await fleet.until(lambda: len(fleet.gateway.ledger) == 1)
    assert (await fleet.ask("POST", "/tokenize", json=ASK))[0] == 201  # runs at any time
    assert [target for engine in fleet.engines for target in engine.asked] == ["POST /tokenize"]
    assert (await fleet.operator("resume", {"lease_id": lease["lease_id"]}))[0] == 200
    assert (await asked)[0] == 201


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
async def test_pause_treats_running_request_as_ordered(fleet: PassingFleet, mode: str) -> None:
    released = asyncio.Event()

    async def waits(engine: PassedEngine, request: web.Request) -> web.StreamResponse:
        await released.wait()
        return web.json_response({"paused": engine.paused})

    for engine in fleet.engines:
        engine.answer = waits
    asked = asyncio.create_task(fleet.ask("POST", "/v1/responses", json=ASK))
    await fleet.until(lambda: any(engine.asked for engine in fleet.engines))
    pause = asyncio.create_task(fleet.operator("pause", {"mode": mode, "lease_s": 60}))
    if mode == "abort":
        assert (await asked) == (
            503,
            {"error": {**(await asked)[1]["error"], "message": "the request was ended: paused"}},
        )
        assert (await pause)[0] == 200
        return
    if mode == "keep":  # the engine freezes it
        assert (await pause)[0] == 200
        assert all(engine.paused for engine in fleet.engines)
    else:
        await fleet.until(lambda: not fleet.gateway.fleet.barrier_open)
    released.set()
    assert await asked == (200, {"paused": mode == "keep"})
    assert (await pause)[0] == 200


async def test_draining_gateway_finishes_running_requests(fleet: PassingFleet) -> None:
    released = asyncio.Event()

    async def waits(engine: PassedEngine, request: web.Request) -> web.StreamResponse:
        await released.wait()
        return web.json_response({})

    for engine in fleet.engines:
        engine.answer = waits
    asked = asyncio.create_task(fleet.ask("POST", "/v1/responses", json=ASK))
    await fleet.until(lambda: any(engine.asked for engine in fleet.engines))
    drained = asyncio.create_task(fleet.server.drain(DEADLINE_S))
    await asyncio.sleep(0)
    for path in ("/tokenize", "/v1/responses"):
        assert (await fleet.message("POST", path, json=ASK)) == (503, "the gateway is shutting down")
    assert not drained.done()
    released.set()
    assert (await asked)[0] == 200
    assert await drained == 0


# --- other endpoints -------------------------------------------------------------------------------------------------


async def test_world_size_is_the_sum_over_engines(fleet: PassingFleet) -> None:
    async def two(engine: PassedEngine, request: web.Request) -> web.StreamResponse:
        return web.json_response({"world_size": 2})

    for engine in fleet.engines:
        engine.answer = two
    assert await fleet.ask("GET", "/get_world_size?include_dp=false") == (200, {"world_size": 4})
    assert fleet.engines[0].asked == ["GET /get_world_size?include_dp=false"]
    fleet.engines[1].answer = sizeless
    assert await fleet.message("GET", "/get_world_size") == (
        502,
        "engine e1 does not report its world size: status 200",
    )


async def sizeless(engine: PassedEngine, request: web.Request) -> web.StreamResponse:
    return web.json_response(["no size"])


@pytest.mark.parametrize(
    ("method", "path", "status", "part"),
    [
        ("POST", "/pause", 404, "`orchestrrl pause`"),
        ("POST", "/update_weights", 404, "publish weights to the whole fleet"),
        ("GET", "/is_sleeping", 404, "call the engine itself"),
        ("POST", "/v1/load_lora_adapter", 404, "routes requests by their model"),
        ("POST", "/nothing", 404, "Not Found"),
        ("POST", "/v1/v1/completions", 404, "Not Found; the endpoint is /v1/completions"),
        ("GET", "/tokenize", 405, "Method Not Allowed"),
        ("DELETE", "/v1/responses/resp_1", 405, "Method Not Allowed"),
    ],
)
async def test_endpoint_that_the_fleet_does_not_offer(
    fleet: PassingFleet, method: str, path: str, status: int, part: str
) -> None:
    got, message = await fleet.message(method, path, json={})
    assert got == status
    assert part in message
    assert not any(engine.asked for engine in fleet.engines)


async def test_invalid_names_are_refused(fleet: PassingFleet) -> None:
    status, message = await fleet.message(
        "POST", "/v1/responses", json=ASK, headers={"X-Request-Id": "a" * 300, "X-Tag": "b" * 300}
    )
    assert status == 400
    assert "X-Request-Id: must be" in message
    assert "X-Tag: must be" in message


async def test_random_requests_are_answered_or_refused(fleet: PassingFleet) -> None:
    seed = random.Random(1)
    ports = [int(url.rpartition(":")[2]) for url in (fleet.url, fleet.operator_url)]
    harness = HttpHarness(ports[0], [], fleet.gateway, fleet.server, LogLines(), ports[1])
    statuses: Counter[int] = Counter()
    for _ in range(200):
        path = seed.choice(
            [b"/tokenize", b"/v1/responses", b"/v1/responses/r1", b"/v1/responses/a%2fb/cancel", b"/pause"]
        )
        path += seed.choice([b"", b"", b"?", b"?a=%ff&b=%0d%0a", b"?\xe2\x82\xac", b"/", b"/../tokenize"])
        body = seed.choice([no_json, lambda seed: spoilt_body(seed)[1], lambda _: b'{"previous_response_id": "r"}'])(
            seed
        )
        headers = b"X-Request-Id: r\r\n"
        if seed.random() < 0.3:
            headers, body = seed.choice([encoded(body, seed), (odd_headers(seed), body)])
        method = seed.choice([b"POST", b"POST", b"POST", b"GET", b"PUT"])
        data = request(body, path=path, headers=headers, method=method)
        status, answer = await harness.send(data, patience_s=0.5)
        statuses[status] += 1
        if status >= 400:
            assert json.loads(answer)["error"]["code"] == status < 500, (data[:300], answer[:300])
        await settled(harness)
    assert statuses[201] > 20
    assert statuses[404] > 20
    assert (await fleet.ask("POST", "/tokenize", json=ASK))[0] == 201
