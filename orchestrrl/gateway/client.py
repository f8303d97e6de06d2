"""A client for trainers that sends requests through the gateway, and directly to engines while the gateway is down.

The gateway is on the path of every request, so a client must work without it. If the gateway is unreachable, breaks off
a response or shuts down, the client sends the requests again from their start. It sends them to the engines,
round-robin, until the gateway is reachable again. If the gateway has a ledger, the client first waits some time for a
restart, because such a gateway continues a repeated request id from its stored tokens. Each call of `complete` returns
exactly one answer. Without the gateway, requests are not balanced.
"""

import asyncio
import logging
import uuid
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from orchestrrl.core.clock import stop
from orchestrrl.core.errors import Retryable
from orchestrrl.engines.base import PATHS, CompletionEndpoint, RequestRefused

logger = logging.getLogger(__name__)

# These statuses do not blame the request: the same one may succeed elsewhere, or later.
_BUSY_STATUSES = frozenset({408, 425, 429})
CONFLICT = 409


@dataclass(frozen=True, slots=True)
class ClientPatience:
    """Timeouts and probe intervals of the client, in seconds."""

    connect_s: float = 5.0
    probe_first_s: float = 0.25  # first interval between probes of a server that is down; doubles ...
    probe_cap_s: float = 5.0  # ... up to this
    watch_s: float = 2.0  # interval between probes of a gateway that is up
    silent_probes: int = 3  # consecutive missed probes after which a gateway counts as down
    unreachable_s: float = 60.0  # the longest wait while neither the gateway nor an engine answers
    restart_s: float = 10.0  # the longest wait for a gateway with a ledger to restart and resume a request


class _Gone(Exception):
    """Raised if the server cannot accept the request or broke off the response. Another server may accept the
    request."""

    def __init__(self, message: str, *, answered: bool = False) -> None:
        super().__init__(message)
        self.answered = answered


@dataclass(slots=True)
class _Server:
    url: str
    up: bool = True
    ledger: bool = False  # it stores the tokens of each request by request id
    lost: asyncio.Event = field(default_factory=asyncio.Event)  # set when pending requests should leave it


class GatewayClient:
    """A client that opens its connections at the first call. Use it with `async with`, or call `close` at the end."""

    def __init__(
        self, gateway_url: str, engines: Sequence[str] = (), *, patience: ClientPatience | None = None
    ) -> None:
        self._gateway = _Server(gateway_url.rstrip("/"))
        self._engines = [_Server(url.rstrip("/")) for url in engines]
        self._patience = patience or ClientPatience()
        self._session: aiohttp.ClientSession | None = None
        self._watching: list[asyncio.Task[None]] = []
        self._turn = 0
        self.bypassed = 0  # requests that the engines answered directly

    @property
    def through_gateway(self) -> bool:
        """Return whether the next request goes through the gateway."""
        return self._gateway.up

    async def __aenter__(self) -> "GatewayClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def complete(
        self,
        body: Mapping[str, Any],
        *,
        endpoint: CompletionEndpoint = CompletionEndpoint.COMPLETIONS,
        request_id: str | None = None,
        group: str = "",
        tag: str = "",
    ) -> dict[str, Any]:
        """Send a request and return the complete answer. Raises RequestRefused if the request is invalid, and Retryable
        if neither the gateway nor an engine responds for `unreachable_s`."""
        name = request_id or uuid.uuid4().hex
        headers = {"X-Request-Id": name} | ({"X-Group-Id": group} if group else {}) | ({"X-Tag": tag} if tag else {})
        body = {key: value for key, value in body.items() if key not in ("stream", "stream_options")}
        spurned = False  # the gateway answered that it could not serve this request
        waited_s, delay_s = 0.0, self._patience.probe_first_s
        tries = failures = 0
        while True:
            server = self._next_server(without_gateway=spurned)
            if server is None or failures > len(self._engines) + 1:
                if waited_s >= self._patience.unreachable_s:
                    raise Retryable(f"neither the gateway {self._gateway.url} nor any engine responds", delay_s)
                await asyncio.sleep(delay_s)
                waited_s, delay_s = waited_s + delay_s, min(self._patience.probe_cap_s, delay_s * 2)
                spurned, failures = False, 0
                continue
            # Each attempt has a new id, since the previous one may still be in flight under its own. A ledger returns
            # its tokens only for the same id.
            headers["X-Request-Id"] = f"{name}.{tries}" if tries and not server.ledger else name
            # A gateway with a ledger may not yet have noticed that the previous attempt's connection is closed.
            busy = _BUSY_STATUSES | {CONFLICT} if server.ledger and tries else _BUSY_STATUSES
            tries += 1
            try:
                answer = await self._attempt(server, PATHS[endpoint], body, headers, busy)
            except _Gone as gone:
                failures += 1
                if server is self._gateway and gone.answered:
                    spurned = True
                else:
                    self._lose(server, str(gone))
                    if server.ledger:
                        await self._wait_for(server)
                continue
            self.bypassed += server is not self._gateway
            return answer

    async def chat(self, body: Mapping[str, Any], **options: Any) -> dict[str, Any]:
        return await self.complete(body, endpoint=CompletionEndpoint.CHAT, **options)

    async def close(self) -> None:
        await stop(*self._watching)
        self._watching.clear()
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _next_server(self, *, without_gateway: bool) -> _Server | None:
        self._open()
        if self._gateway.up and not without_gateway:
            return self._gateway
        for _ in self._engines:
            server = self._engines[self._turn % len(self._engines)]
            self._turn += 1
            if server.up:
                return server
        return None

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=self._patience.connect_s)
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout)
            self._watching.append(asyncio.create_task(self._watch(self._gateway)))
        return self._session

    async def _attempt(
        self, server: _Server, path: str, body: Mapping[str, Any], headers: Mapping[str, str], busy: Set[int]
    ) -> dict[str, Any]:
        """Make one attempt, which is cancelled if the server is lost. Raises _Gone if the server is lost, is
        unreachable or cannot accept the request, and RequestRefused if the request is invalid. `busy` contains the HTTP
        statuses below 500 with which the server refuses requests that it cannot accept now."""
        asking = asyncio.create_task(self._post(server, path, body, headers, busy))
        losing = asyncio.create_task(server.lost.wait())
        try:
            await asyncio.wait({asking, losing}, return_when=asyncio.FIRST_COMPLETED)
            if asking.done():
                return asking.result()
            raise _Gone("the server no longer responds")
        finally:
            await stop(asking, losing)

    async def _post(
        self, server: _Server, path: str, body: Mapping[str, Any], headers: Mapping[str, str], busy: Set[int]
    ) -> dict[str, Any]:
        try:
            async with self._open().post(server.url + path, json=body, headers=headers) as response:
                answer = await response.json(content_type=None)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise _Gone(str(error) or type(error).__name__) from error
        if response.status == 200 and isinstance(answer, dict):
            return answer
        message = answer.get("error", answer) if isinstance(answer, dict) else answer
        if response.status >= 500 or response.status in busy or not isinstance(answer, dict):
            raise _Gone(f"HTTP status {response.status}: {message}", answered=True)
        raise RequestRefused(f"{server.url}{path}: HTTP status {response.status}: {message}", response.status, answer)

    async def _wait_for(self, gateway: _Server) -> None:
        """Wait until the gateway is reachable again, but no longer than `restart_s`."""
        waited_s = 0.0
        while not gateway.up and waited_s < self._patience.restart_s:
            await asyncio.sleep(self._patience.probe_first_s)
            waited_s += self._patience.probe_first_s

    def _lose(self, server: _Server, because: str) -> None:
        if server.up:
            logger.warning("%s is down: %s", server.url, because)
            server.up = False
            if server is not self._gateway:
                self._watching = [task for task in self._watching if not task.done()]
                self._watching.append(asyncio.create_task(self._until_back(server)))

    async def _watch(self, gateway: _Server) -> None:
        """Detect when the gateway is reachable again. Also detect when the gateway stops answering while its
        connections stay open."""
        silent = 0
        await self._health(gateway)  # reads whether it has a ledger
        while True:
            if not gateway.up:
                await self._until_back(gateway)
            await asyncio.sleep(self._patience.watch_s)
            silent = 0 if await self._health(gateway) is not None else silent + 1
            if silent >= self._patience.silent_probes:
                silent = 0
                self._lose(gateway, "it no longer responds")
                gateway.lost.set()

    async def _until_back(self, server: _Server) -> None:
        delay_s = self._patience.probe_first_s
        while await self._health(server) != 200:
            await asyncio.sleep(delay_s)
            delay_s = min(self._patience.probe_cap_s, delay_s * 2)
        logger.info("%s is back", server.url)
        server.lost = asyncio.Event()
        server.up = True

    async def _health(self, server: _Server) -> int | None:
        """Return the HTTP status of the server's health endpoint, or None if the server does not respond."""
        timeout = aiohttp.ClientTimeout(total=self._patience.connect_s)
        try:
            async with self._open().get(server.url + "/health", timeout=timeout) as response:
                if server is self._gateway and response.content_type == "application/json":
                    health = await response.json()
                    server.ledger = isinstance(health, dict) and health.get("ledger") is True
                return response.status
        except (aiohttp.ClientError, TimeoutError, ValueError):
            return None
