"""An HTTP proxy between a client and the gateway that keeps every call and its answer."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
from aiohttp import web

# Headers of one connection, and those that the HTTP library sets itself.
_OF_CONNECTION = frozenset({"connection", "content-length", "host", "keep-alive", "transfer-encoding"})
_EVENT_STREAM = "text/event-stream"


@dataclass(frozen=True)
class RecordedCall:
    """One call of a client, with the gateway's answer: a JSON value, or the list of a stream's events."""

    method: str
    path: str  # with the query
    headers: dict[str, str]
    body: Any
    status: int
    answer: Any

    @property
    def endpoint(self) -> str:
        return self.path.partition("?")[0]


class RecordingProxy:
    """Forwards calls to `target` and appends them to `calls` when their answers are complete."""

    def __init__(self, target: str, http: aiohttp.ClientSession) -> None:
        self.calls: list[RecordedCall] = []
        self._target = target
        self._http = http

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _OF_CONNECTION}
        url = f"{self._target}{request.path_qs}"
        async with self._http.request(request.method, url, data=body or None, headers=headers) as upstream:
            if upstream.content_type == _EVENT_STREAM:
                answer, content = await _relay_stream(request, upstream)
            else:
                content = await upstream.read()
                answer = web.Response(body=content, status=upstream.status, content_type=upstream.content_type)
        self.calls.append(
            RecordedCall(
                method=request.method,
                path=request.path_qs,
                headers=headers,
                body=json.loads(body) if body else None,
                status=upstream.status,
                answer=_parsed(content, upstream.content_type),
            )
        )
        return answer


async def _relay_stream(request: web.Request, upstream: aiohttp.ClientResponse) -> tuple[web.StreamResponse, bytes]:
    answer = web.StreamResponse(status=upstream.status, headers={"Content-Type": _EVENT_STREAM})
    await answer.prepare(request)
    content = b""
    async for piece in upstream.content.iter_any():
        content += piece
        await answer.write(piece)
    await answer.write_eof()
    return answer, content


def _parsed(content: bytes, content_type: str) -> Any:
    if content_type == _EVENT_STREAM:
        lines = content.decode().splitlines()
        return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    return json.loads(content) if content_type == "application/json" else None


@asynccontextmanager
async def recording_proxy(target: str) -> AsyncIterator[tuple[str, RecordingProxy]]:
    """Start a proxy of `target` on a free port. Yields its URL and the proxy."""
    no_limit = aiohttp.ClientTimeout(total=None)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=no_limit, auto_decompress=True) as http:
        proxy = RecordingProxy(target, http)
        application = web.Application(client_max_size=64 << 20)
        application.router.add_route("*", "/{path:.*}", proxy.handle)
        # A client that disconnects cancels its request at the gateway.
        runner = web.AppRunner(application, handler_cancellation=True, access_log=None)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            yield f"http://127.0.0.1:{runner.addresses[0][1]}", proxy
        finally:
            await runner.cleanup()
