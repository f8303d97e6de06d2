"""Implement the common parts of the HTTP emulators: a server that can break connections, and Basic authentication."""

import base64
import json
from abc import ABC, abstractmethod
from dataclasses import dataclass, field

from aiohttp import web

from ocs_drivers.emulators.base import ConnectionBroken, address_text


@dataclass(frozen=True, slots=True)
class EmulatedReply:
    status: int = 200
    content: object = None  # sent as JSON
    headers: dict[str, str] = field(default_factory=dict)


class EmulatedHttpServer(ABC):
    """An HTTP server that passes each request with its body to `answer`. If `answer` raises ConnectionBroken, the TCP
    connection is closed without an answer. If `chunked` is True, answers are sent with chunked encoding, without a
    content length."""

    def __init__(self, media_type: str, *, chunked: bool = False) -> None:
        self._media_type = media_type
        self._chunked = chunked
        self._runner: web.AppRunner | None = None

    @abstractmethod
    async def answer(self, request: web.Request, body: bytes) -> EmulatedReply: ...

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> str:
        app = web.Application(client_max_size=16 * 1024 * 1024)
        app.router.add_route("*", "/{path:.*}", self._serve)
        # Cancel a request when its client disconnects, because an answer may be delayed for a day.
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, host, port).start()
        return address_text(*self._runner.addresses[0][:2])

    async def stop(self) -> None:
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        try:
            reply = await self.answer(request, await request.read())
        except ConnectionBroken:
            if request.transport is not None:
                request.transport.abort()
            return web.Response()  # never received
        headers = {"Content-Type": self._media_type, **reply.headers}
        body = b"" if reply.content is None else json.dumps(reply.content).encode()
        if not body:
            return web.Response(status=reply.status, headers=reply.headers)
        if not self._chunked:
            return web.Response(status=reply.status, body=body, headers=headers)
        response = web.StreamResponse(status=reply.status, headers=headers)
        response.enable_chunked_encoding()
        await response.prepare(request)
        for at in range(0, len(body), 7):
            await response.write(body[at : at + 7])
        await response.write_eof()
        return response


def is_let_in(request: web.Request, user: str, password: str) -> bool:
    """Return whether the request carries this user and password as Basic authentication. Always return True if `user`
    is empty."""
    words = base64.b64encode(f"{user}:{password}".encode()).decode()
    return not user or request.headers.get("Authorization", "") == f"Basic {words}"
