"""The vLLM client with faulty servers. The conformance suite covers correct ones."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer, unused_port

from orchestrrl.core.errors import OutcomeUnknown, Permanent, Retryable
from orchestrrl.core.operations import PauseMode
from orchestrrl.engines.base import Chunk, CompletionEndpoint, GenerationRequest, RequestRefused
from orchestrrl.engines.vllm import VllmEngine
from orchestrrl.engines.vllm_info import parse_metrics, server_identity

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Serve = Callable[..., Awaitable[VllmEngine]]

FIRST = {"choices": [{"index": 0, "text": "a", "token_ids": [7], "prompt_token_ids": [1, 2], "finish_reason": None}]}
LAST = {"choices": [{"index": 0, "text": "b", "token_ids": [8], "finish_reason": "length", "stop_reason": None}]}
DEADLINE_S = 120.0


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """Yield a function that starts a server and returns its client: `serve(completions=handler)`, or `routes` by
    path."""
    servers: list[TestServer] = []
    engines: list[VllmEngine] = []

    async def start(completions: Handler | None = None, routes: dict[str, Handler] | None = None) -> VllmEngine:
        application = web.Application()
        for path, handler in {**({"/v1/completions": completions} if completions else {}), **(routes or {})}.items():
            application.router.add_route("*", path, handler)
        servers.append(TestServer(application))
        await servers[-1].start_server()
        engines.append(VllmEngine(str(servers[-1].make_url("/"))))
        return engines[-1]

    yield start
    for engine in engines:
        await engine.close()
    for server in servers:
        await server.close()


def streaming(*events: Any, cut: bool = False) -> Handler:
    """Return a handler that streams these events, and may then break the connection."""

    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for event in events:
            data = event if isinstance(event, str) else json.dumps(event)
            await response.write(f"data: {data}\n\n".encode())
        if cut:
            assert request.transport is not None
            request.transport.abort()
        return response

    return handler


def answering(status: int, body: Any, headers: dict[str, str] | None = None) -> Handler:
    async def handler(_: web.Request) -> web.StreamResponse:
        text = body if isinstance(body, str) else json.dumps(body)
        return web.Response(status=status, text=text, headers=headers)

    return handler


def request(request_id: str = "x1", endpoint: CompletionEndpoint = CompletionEndpoint.COMPLETIONS) -> GenerationRequest:
    return GenerationRequest(request_id, endpoint, {"model": "m", "prompt": [1, 2]})


async def chunks_of(engine: VllmEngine, *, into: list[Chunk] | None = None) -> list[Chunk]:
    chunks = [] if into is None else into
    async for chunk in engine.generate(request()):
        chunks.append(chunk)
    return chunks


async def test_request_is_streamed_with_token_ids_and_own_request_id(serve: Serve) -> None:
    seen: list[Any] = []

    async def handler(asked: web.Request) -> web.StreamResponse:
        seen.extend([await asked.json(), asked.headers["X-Request-Id"]])
        return await streaming(FIRST, LAST, "[DONE]")(asked)

    chunks = await chunks_of(await serve(handler))
    asked = {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
    assert seen == [{"model": "m", "prompt": [1, 2], **asked}, "x1"]
    assert chunks[0].prompt_token_ids == (1, 2)
    assert [chunk.token_ids for chunk in chunks] == [(7,), (8,)]
    assert chunks[1].finish_reason == "length"
    assert chunks[1].raw == LAST["choices"][0]


USAGE = {"prompt_tokens": 2, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}}


async def test_last_chunk_includes_the_fields_after_it(serve: Serve) -> None:
    closing = {"choices": [], "usage": USAGE, "system_fingerprint": "f"}
    *_, last = await chunks_of(await serve(streaming(FIRST, LAST, closing, "[DONE]")))
    assert (last.finish_reason, last.usage, last.answer_fields) == ("length", USAGE, {"system_fingerprint": "f"})


async def test_answer_is_complete_without_events_after_its_last_chunk(serve: Serve) -> None:
    """An engine becomes silent, or its connection breaks, after the last token."""
    released = asyncio.Event()

    async def silent(asked: web.Request) -> web.StreamResponse:
        await streaming(FIRST, LAST)(asked)
        await released.wait()
        return web.Response()

    for handler in (silent, streaming(FIRST, LAST, cut=True), streaming(FIRST, LAST)):
        *_, last = await chunks_of(await serve(handler))
        assert (last.token_ids, last.finish_reason, last.usage) == ((8,), "length", None)
        released.set()


async def test_request_headers_are_sent_except_the_clients_own(serve: Serve) -> None:
    seen: list[Any] = []

    async def handler(asked: web.Request) -> web.StreamResponse:
        seen.append(asked.headers)
        return await streaming(FIRST, LAST, "[DONE]")(asked)

    engine = await serve(handler)
    headers = (("X-Twice", "1"), ("X-Twice", "2"), ("authorization", "Bearer theirs"), ("content-type", "text/plain"))
    asked = replace(request(), headers=headers)
    assert len([chunk async for chunk in engine.generate(asked)]) == 2
    with_own = VllmEngine(engine.url.replace("http://", "http://user:pass@"))
    assert len([chunk async for chunk in with_own.generate(asked)]) == 2
    await with_own.close()
    assert [each.getall("X-Twice") for each in seen] == [["1", "2"]] * 2
    assert [each.getall("Authorization") for each in seen] == [["Bearer theirs"], ["Basic dXNlcjpwYXNz"]]
    assert [each.getall("Content-Type") for each in seen] == [["application/json"]] * 2
    assert "theirs" not in repr(asked)


async def test_verbatim_request_returns_a_whole_answer_or_events(serve: Serve) -> None:
    whole = {"choices": [{"text": "a", "finish_reason": "stop"}], "usage": USAGE, "odd": 1}
    asked = replace(request(), verbatim=True)
    engine = await serve(answering(200, whole, {"Content-Type": "application/json"}))
    (chunk,) = [chunk async for chunk in engine.generate(asked)]
    assert (chunk.answer, chunk.finish_reason) == (whole, "stop")
    for nonsense in ("[]", "{", '{"choices": [1]}', '{"choices": 7}'):
        engine = await serve(answering(200, nonsense, {"Content-Type": "application/json"}))
        with pytest.raises(Permanent):
            [chunk async for chunk in engine.generate(asked)]


async def test_stream_interval_is_set_unless_the_client_set_it(serve: Serve) -> None:
    seen: list[Any] = []

    async def handler(asked: web.Request) -> web.StreamResponse:
        seen.append((await asked.json()).get("stream_interval"))
        return await streaming(FIRST, LAST, "[DONE]")(asked)

    engine = await serve(handler)
    for body, coalesce_tokens in (({}, 1), ({}, 8), ({"stream_interval": 2}, 8)):
        asked = GenerationRequest("x", CompletionEndpoint.COMPLETIONS, {"prompt": [1], **body}, coalesce_tokens)
        assert len([chunk async for chunk in engine.generate(asked)]) == 2
    assert seen == [None, 8, 2]


async def test_complete_requests_share_a_connection_and_a_cut_one_closes_its_own(serve: Serve) -> None:
    peers: list[Any] = []

    async def handler(asked: web.Request) -> web.StreamResponse:
        assert asked.transport is not None
        peers.append(asked.transport.get_extra_info("peername"))
        return await streaming(FIRST, FIRST, LAST, "[DONE]")(asked)

    engine = await serve(handler)
    for _ in range(3):
        assert len(await chunks_of(engine)) == 3
    assert len(set(peers)) == 1
    async for _ in (stream := engine.generate(request())):
        break
    await stream.aclose()  # type: ignore[attr-defined]
    assert len(await chunks_of(engine)) == 3
    assert len(set(peers)) == 2


@pytest.mark.parametrize("cut", [False, True])
async def test_stream_without_finish_reason_has_an_unknown_outcome(serve: Serve, cut: bool) -> None:
    engine = await serve(streaming(FIRST, cut=cut))
    chunks: list[Chunk] = []
    with pytest.raises(OutcomeUnknown):
        await chunks_of(engine, into=chunks)
    assert [chunk.token_ids for chunk in chunks] == [(7,)]


async def test_unreachable_engine_is_retryable() -> None:
    engine = VllmEngine(f"http://127.0.0.1:{unused_port()}")
    for call in (chunks_of(engine), engine.metrics(), engine.probe(), engine.pause(PauseMode.KEEP)):
        with pytest.raises(Retryable):
            await call
    assert not await engine.healthy()
    await engine.close()


@pytest.mark.parametrize("status", [429, 500, 503])
async def test_busy_or_broken_engine_is_retryable(serve: Serve, status: int) -> None:
    engine = await serve(answering(status, {"error": {"message": "busy"}}, {"Retry-After": "7"}))
    with pytest.raises(Retryable, match="busy") as raised:
        await chunks_of(engine)
    assert raised.value.after_s == 7


async def test_refusal_has_the_engines_message(serve: Serve) -> None:
    body = {"error": {"message": "no such thing", "type": "BadRequestError", "param": "prompt", "code": 400}}
    with pytest.raises(RequestRefused, match="no such thing") as raised:
        await chunks_of(await serve(answering(400, body)))
    assert (raised.value.status, raised.value.body) == (400, body)


async def test_refusal_without_json_becomes_an_error_object(serve: Serve) -> None:
    with pytest.raises(RequestRefused) as raised:
        await chunks_of(await serve(answering(404, "<html>nothing here</html>")))
    assert raised.value.status == 404
    assert "nothing here" in raised.value.body["error"]["message"]


async def test_error_event_is_a_refusal_or_an_unknown_outcome(serve: Serve) -> None:
    wrong = {"error": {"message": "out of vocabulary", "type": "BadRequestError", "param": None, "code": 400}}
    with pytest.raises(RequestRefused, match="out of vocabulary") as raised:
        await chunks_of(await serve(streaming(wrong, "[DONE]")))
    assert raised.value.body == wrong
    dying = {"error": {"message": "EngineCore died", "type": "InternalServerError", "code": 500}}
    with pytest.raises(OutcomeUnknown, match="EngineCore died"):
        await chunks_of(await serve(streaming(FIRST, dying, "[DONE]")))


@pytest.mark.parametrize("event", ["not json", "[]", '{"choices": 3}', '{"choices": [{"index": 0}]}', "{}"])
async def test_malformed_event_is_permanent(serve: Serve, event: str) -> None:
    with pytest.raises(Permanent):
        await chunks_of(await serve(streaming(event)))


async def test_abort_sends_all_id_forms_and_never_an_empty_list(serve: Serve) -> None:
    bodies: list[Any] = []

    async def handler(asked: web.Request) -> web.StreamResponse:
        bodies.append(await asked.json())
        return web.json_response({})

    engine = await serve(routes={"/abort_requests": handler})
    await engine.abort(["x1"])
    await engine.abort([])
    assert bodies == [{"request_ids": ["cmpl-x1-0", "chatcmpl-x1", "generate-tokens-x1"]}]


@pytest.mark.parametrize("events", [(FIRST,), ()], ids=["after its first token", "before its first token"])
async def test_abort_closes_the_connection_without_the_abort_endpoint(serve: Serve, events: tuple[Any, ...]) -> None:
    gone = asyncio.Event()
    open_streams: list[web.Request] = []

    async def handler(asked: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(asked)
        for event in events:
            await response.write(f"data: {json.dumps(event)}\n\n".encode())
        open_streams.append(asked)
        try:  # the test server cancels the handler of a client that has disconnected
            await asyncio.Event().wait()
        finally:
            gone.set()
        return response

    engine = await serve(handler)
    chunks: list[Chunk] = []
    reading = asyncio.create_task(chunks_of(engine, into=chunks))
    async with asyncio.timeout(DEADLINE_S):
        while not open_streams or len(chunks) < len(events):
            await asyncio.sleep(0.01)
        await engine.abort(["x1"])
        await reading
        await gone.wait()
    assert chunks[-1] == Chunk(finish_reason="abort")
    assert len(chunks) == len(events) + 1


async def test_capabilities_are_reduced_without_development_mode(serve: Serve) -> None:
    api = {"paths": {"/version": {}, "/v1/completions": {}}, "components": {"schemas": {}}}
    routes = {
        "/openapi.json": answering(200, api),
        "/version": answering(200, {"version": "9"}),
        "/v1/models": answering(200, {"data": [{"id": "m", "max_model_len": 10}]}),
    }
    found = await (await serve(routes=routes)).capabilities()
    assert (found.version, found.models, found.max_model_len_tokens) == ("9", ("m",), 10)
    assert not any((found.token_ids, found.abort_requests, found.pause))
    assert found.max_sequences is None


@pytest.mark.parametrize("field", ["prompt_token_ids", "prompt_tokens"])
async def test_chats_are_parsed_if_derender_takes_the_prompt(serve: Serve, field: str) -> None:
    paths = {f"/v1/chat/completions/{name}": {} for name in ("render", "derender")}
    schemas = {"DerenderChatRequest": {"properties": {field: {}}}}
    routes = {
        "/openapi.json": answering(200, {"paths": paths, "components": {"schemas": schemas}}),
        "/v1/models": answering(200, {"data": [{"id": "m"}]}),
    }
    assert (await (await serve(routes=routes)).capabilities()).parses_chats == (field == "prompt_token_ids")


@pytest.mark.parametrize(
    "body", ["", "<html>", "vllm:num_requests_running 1", 'vllm:num_requests_running{engine="0"} x']
)
async def test_malformed_metrics_are_permanent(serve: Serve, body: str) -> None:
    with pytest.raises(Permanent):
        await (await serve(routes={"/metrics": answering(200, body)})).metrics()


async def test_server_without_http_is_permanent() -> None:
    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 mail.example ESMTP\r\n")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(greet, "127.0.0.1", 0) as server:
        engine = VllmEngine(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        with pytest.raises(Permanent):
            await engine.metrics()
        await engine.close()


def test_metrics_of_data_parallel_engines_are_summed() -> None:
    page = []
    for engine, (running, usage) in enumerate([(3, 0.5), (1, 0.25)]):
        labels = f'engine="{engine}",model_name="m"'
        page += [
            f"vllm:num_requests_running{{{labels}}} {running}.0",
            f"vllm:num_requests_waiting{{{labels}}} 2.0",
            f'vllm:num_requests_waiting_by_reason{{{labels},reason="capacity"}} 2.0',
            f"vllm:kv_cache_usage_perc{{{labels}}} {usage}",
            f"vllm:generation_tokens_total{{{labels}}} 1e+06",
            f"vllm:prompt_tokens_total{{{labels}}} 5.0",
            f"vllm:num_preemptions_total{{{labels}}} 0.0",
            f'vllm:cache_config_info{{block_size="16",engine="{engine}",num_gpu_blocks="200"}} 1.0',
        ]
    metrics = parse_metrics("# HELP x\n" + "\n".join(page) + "\n")
    assert (metrics.running, metrics.waiting, metrics.kv_usage_fraction) == (4, 4, 0.375)
    assert (metrics.kv_capacity_tokens, metrics.generation_tokens_total) == (3200, 2_000_000)


def identity(began: str, *created: str) -> str:
    page = [f"process_start_time_seconds {began}"] if began else []
    page += [f'vllm:generation_tokens_created{{engine="{n}",model_name="m"}} {at}' for n, at in enumerate(created)]
    return server_identity("\n".join(["# HELP x", *page, "x 1.0"]) + "\n")


def test_metrics_identify_the_server_process() -> None:
    began, created = "1.79546163365e+09", "1.795461634687782e+09"
    assert identity(began, created) == identity(began, created) != ""
    assert identity(began, created) != identity(began, "1.795461634687783e+09")  # started together, on two hosts
    assert identity(began, created) != identity("1.79546163366e+09", created)
    assert identity(began, created, "1.8e+09") == identity(began, "1.8e+09", created)  # replicas in any order
    # Several processes behind one address report no start time, and the environment may disable the other series.
    assert identity("", created) == identity(began) == identity("") == ""
