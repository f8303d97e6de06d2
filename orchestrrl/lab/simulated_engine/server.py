"""The simulated engine: an HTTP server with vLLM's API, whose step times and tokens are computed.

The command `orchestrrl engine simulated` runs the server. scheduler.py computes step times, tokens.py computes tokens,
and runtime.py advances the scheduler. This module defines the routes. The engines' conformance suite checks that the
server behaves like vLLM.
"""

import asyncio
import contextlib
import time
import uuid
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Self

from aiohttp import web

from orchestrrl import __version__
from orchestrrl.core.clock import Clock, WallClock
from orchestrrl.core.errors import Permanent
from orchestrrl.core.operations import PauseMode
from orchestrrl.engines.base import CompletionEndpoint, RequestRefused
from orchestrrl.lab.simulated_engine.managed import ManagedFace, json_of, object_of
from orchestrrl.lab.simulated_engine.options import SimulatedOptions
from orchestrrl.lab.simulated_engine.requests import read_completion_request, read_detokenize, read_tokenize, refusal
from orchestrrl.lab.simulated_engine.responses import Formatter, metrics_page
from orchestrrl.lab.simulated_engine.runtime import Runtime, SimulatedAnswer
from orchestrrl.lab.simulated_engine.weights import model_of, read_weights

__all__ = ["SimulatedOptions", "SimulatedServer"]

MOST_BODY_BYTES = 64 << 20  # long prompts are sent as lists of ids
SHUTDOWN_S = 1.0  # time for running requests at shutdown, before their connections are closed
ID_PREFIXES = {CompletionEndpoint.COMPLETIONS: "cmpl-", CompletionEndpoint.CHAT: "chatcmpl-"}


class SimulatedServer:
    """A server of one simulated engine. Usage: `async with SimulatedServer(options) as server: ... server.url ...`."""

    def __init__(
        self, options: SimulatedOptions, *, host: str = "127.0.0.1", port: int = 0, clock: Clock | None = None
    ) -> None:
        self.url = ""
        self._clock = clock or WallClock()
        weights = None if options.weights is None else read_weights(options.weights)
        self.runtime = Runtime(
            options, model_of(options, options.seed if weights is None else weights.seed), self._clock
        )
        self._options = options
        self._managed = ManagedFace(options, self.runtime, self._clock, {} if weights is None else weights.shapes)
        self._address = (host, port)

    async def __aenter__(self) -> Self:
        """Start the server. Raises Permanent if the option `fail_start` is set."""
        if self._options.start_delay_s:
            await self._clock.sleep(self._options.start_delay_s / self._options.speed)
        if self._options.fail_start:
            raise Permanent("the engine failed to start as requested by --fail-start")
        # If a client disconnects, its request must be aborted, even while it waits for its first token.
        self._runner = web.AppRunner(
            self.application(), handler_cancellation=True, shutdown_timeout=SHUTDOWN_S, access_log=None
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, *self._address)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        self._pace = asyncio.create_task(self.runtime.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()
        self._pace.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._pace

    def application(self) -> web.Application:
        layers = [_never_answering] if self._options.hang else [_errors_as_objects]
        application = web.Application(client_max_size=MOST_BODY_BYTES, middlewares=layers)
        application.add_routes(
            [
                web.post("/v1/completions", partial(self._generate, CompletionEndpoint.COMPLETIONS)),
                web.post("/v1/chat/completions", partial(self._generate, CompletionEndpoint.CHAT)),
                web.get("/v1/models", self._models),
                web.post("/tokenize", self._tokenize),
                web.post("/detokenize", self._detokenize),
                web.get("/health", self._health),
                web.get("/version", self._version),
                web.get("/openapi.json", self._openapi),
                web.get("/metrics", self._metrics),
                web.post("/pause", self._pause),
                web.post("/resume", self._resume),
                web.get("/is_paused", self._is_paused),
                web.post("/abort_requests", self._abort_requests),
                *self._managed.routes(),
            ]
        )
        return application

    async def _generate(self, endpoint: CompletionEndpoint, request: web.Request) -> web.StreamResponse:
        options, model = self._options, self.runtime.model
        ask = read_completion_request(endpoint, await json_of(request), options, model)
        response_id = ID_PREFIXES[endpoint] + request.headers.get("X-Request-Id", uuid.uuid4().hex[:16])
        words = Formatter(ask, response_id, int(time.time()), options.model_name, model)
        # A completion may have several prompts, so vLLM numbers them; a chat has one.
        answer = self.runtime.submit(
            ask, f"{response_id}-0" if endpoint is CompletionEndpoint.COMPLETIONS else response_id
        )
        try:
            if ask.body.stream:
                return await self._stream(request, answer, words)
            (whole,) = [part async for part in answer.parts(streamed=False)]
            return web.json_response(words.whole(whole))
        finally:
            self.runtime.drop(answer)

    async def _stream(self, request: web.Request, answer: SimulatedAnswer, formatter: Formatter) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        opening = formatter.opening()
        async for part in answer.parts():
            # vLLM omits the last chunk of a request that was aborted before its first token.
            await response.write(b"".join([*opening, formatter.part(part) if answer.made else b""]))
            opening = []
        await response.write(b"".join(formatter.closing(answer.made)))
        await response.write_eof()
        return response

    async def _models(self, _: web.Request) -> web.Response:
        model: dict[str, Any] = {"id": self._options.model_name, "object": "model", "owned_by": "orchestrrl"}
        model |= {"root": self._options.model_root, "max_model_len": self._options.max_model_len_tokens}
        return web.json_response({"object": "list", "data": [model]})

    async def _tokenize(self, request: web.Request) -> web.Response:
        tokens = read_tokenize(await json_of(request), self.runtime.model)
        longest = self._options.max_model_len_tokens
        return web.json_response({"count": len(tokens), "max_model_len": longest, "tokens": tokens, "token_strs": None})

    async def _detokenize(self, request: web.Request) -> web.Response:
        tokens = read_detokenize(await json_of(request))
        return web.json_response({"prompt": self.runtime.model.detokenize(tokens)})

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _version(self, _: web.Request) -> web.Response:
        return web.json_response({"version": __version__})

    async def _openapi(self, request: web.Request) -> web.Response:
        paths: dict[str, Any] = {
            route.resource.canonical: {} for route in request.app.router.routes() if route.resource is not None
        }
        schema: dict[str, Any] = {"CompletionRequest": {"properties": {"prompt": {}, "return_token_ids": {}}}}
        return web.json_response({"paths": paths, "components": {"schemas": schema}})

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(text=metrics_page(self.runtime, self._options.model_name, self._managed.asleep))

    async def _pause(self, request: web.Request) -> web.Response:
        mode = request.query.get("mode", PauseMode.ABORT.value)
        if mode not in list(PauseMode):
            raise refusal(f"mode must be abort, wait or keep, got {mode!r}", "query.mode", kind="Bad Request")
        await self.runtime.pause(PauseMode(mode), request.query.get("clear_cache", "true").lower() in ("true", "1"))
        return web.json_response({"status": "paused"})

    async def _resume(self, _: web.Request) -> web.Response:
        if self._managed.asleep:
            raise web.HTTPInternalServerError(reason="Failed to resume generation: the engine is asleep")
        self.runtime.resume()
        return web.json_response({"status": "resumed"})

    async def _is_paused(self, _: web.Request) -> web.Response:
        return web.json_response({"is_paused": self.runtime.pause_mode is not None})

    async def _abort_requests(self, request: web.Request) -> web.Response:
        names = (await object_of(request)).get("request_ids")
        # As in vLLM, the response counts the ids given, not the requests found; without ids, all aborted requests.
        aborted = self.runtime.abort(names or ())
        return web.json_response({"status": "aborted", "aborted": len(names) if names else aborted})


@web.middleware
async def _never_answering(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError("unreachable")


@web.middleware
async def _errors_as_objects(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except RequestRefused as error:
        return web.json_response(dict(error.body), status=error.status)
    except web.HTTPException as error:
        return web.json_response({"detail": error.reason}, status=error.status)
