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
from orchestrrl.core.errors import Permanent, shorten
from orchestrrl.core.operations import PauseMode
from orchestrrl.engines.base import CompletionEndpoint, RequestRefused
from orchestrrl.lab.simulated_engine.choices import answer_call
from orchestrrl.lab.simulated_engine.derender import derender
from orchestrrl.lab.simulated_engine.generate import GenerateFormatter, read_generate
from orchestrrl.lab.simulated_engine.managed import ManagedFace, json_of, object_of
from orchestrrl.lab.simulated_engine.options import SimulatedOptions
from orchestrrl.lab.simulated_engine.refusals import refusal
from orchestrrl.lab.simulated_engine.render import render
from orchestrrl.lab.simulated_engine.requests import read_completion, read_detokenize, read_tokenize
from orchestrrl.lab.simulated_engine.responses import CompletionFormatter, metrics_page
from orchestrrl.lab.simulated_engine.responses_api import ResponsesFormatter, read_responses
from orchestrrl.lab.simulated_engine.runtime import Runtime
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
                *self._completion_routes("/v1/completions", CompletionEndpoint.COMPLETIONS),
                *self._completion_routes("/v1/chat/completions", CompletionEndpoint.CHAT),
                web.post("/v1/responses", self._responses),
                web.post("/inference/v1/generate", self._generate),
                web.post("/inference/v1/abort_requests", self._abort_generate_requests),
                web.get("/v1/models", self._models),
                web.post("/tokenize", self._tokenize),
                web.post("/detokenize", self._detokenize),
                web.get("/tokenizer_info", self._tokenizer_info),
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

    def _completion_routes(self, path: str, endpoint: CompletionEndpoint) -> list[web.RouteDef]:
        return [
            web.post(path, partial(self._complete, endpoint)),
            web.post(f"{path}/render", partial(self._render, endpoint)),
            web.post(f"{path}/derender", partial(self._derender, endpoint)),
        ]

    async def _complete(self, endpoint: CompletionEndpoint, request: web.Request) -> web.StreamResponse:
        options, model = self._options, self.runtime.model
        call = read_completion(endpoint, await json_of(request), options, model)
        response_id = ID_PREFIXES[endpoint] + _id_of(request)
        formatter = CompletionFormatter(call, response_id, int(time.time()), options.model_name, model)
        # A completion may have several prompts, so vLLM numbers them; a chat has one.
        numbered = endpoint is CompletionEndpoint.COMPLETIONS
        requests = [
            (f"{response_id}-{index // call.choices}" if numbered else response_id, each)
            for index, each in enumerate(call.requests)
        ]
        return await answer_call(request, self.runtime, requests, formatter, stream=call.body.stream)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        options, model = self._options, self.runtime.model
        call = read_generate(await json_of(request), options, model)
        request_id = f"generate-tokens-{_id_of(request, call.body.request_id)}"
        formatter = GenerateFormatter(call, request_id, int(time.time()), options.model_name, model)
        requests = [(request_id, each) for each in call.requests]
        return await answer_call(request, self.runtime, requests, formatter, stream=bool(call.body.stream))

    async def _responses(self, request: web.Request) -> web.StreamResponse:
        options, model = self._options, self.runtime.model
        call = read_responses(await json_of(request), options, model)
        response_id = f"resp_{_new_id()}"
        formatter = ResponsesFormatter(call, response_id, int(time.time()), options.model_name, model)
        requests = [(f"{response_id}_0", call.request)]
        return await answer_call(request, self.runtime, requests, formatter, stream=bool(call.body.stream))

    async def _render(self, endpoint: CompletionEndpoint, request: web.Request) -> web.Response:
        request_id = ID_PREFIXES[endpoint] + _id_of(request)
        body = await json_of(request)
        return web.json_response(render(endpoint, body, request_id, self._options, self.runtime.model))

    async def _derender(self, endpoint: CompletionEndpoint, request: web.Request) -> web.Response:
        body = await json_of(request)
        return web.json_response(derender(endpoint, body, int(time.time()), self._options, self.runtime.model))

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

    async def _tokenizer_info(self, _: web.Request) -> web.Response:
        """Return the fields that all of vLLM's tokenizers report. The chat template cannot be written in Jinja."""
        longest = self._options.max_model_len_tokens
        info = {"tokenizer_class": "SimulatedTokenizer", "eos_token": None, "model_max_length": longest}
        return web.json_response({**info, "chat_template": None, "added_tokens_decoder": {}})

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _version(self, _: web.Request) -> web.Response:
        return web.json_response({"version": __version__})

    async def _openapi(self, request: web.Request) -> web.Response:
        paths: dict[str, Any] = {
            route.resource.canonical: {} for route in request.app.router.routes() if route.resource is not None
        }
        schemas: dict[str, Any] = {
            "CompletionRequest": {"properties": {"prompt": {}, "return_token_ids": {}}},
            "DerenderChatRequest": {"properties": {"prompt_token_ids": {}}},
        }
        return web.json_response({"paths": paths, "components": {"schemas": schemas}})

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
        names = await _request_ids(request)
        # As in vLLM, the response counts the ids given, not the requests found; without ids, all aborted requests.
        aborted = self.runtime.abort(names or ())
        return web.json_response({"status": "aborted", "aborted": len(names) if names else aborted})

    async def _abort_generate_requests(self, request: web.Request) -> web.Response:
        names = await _request_ids(request)
        if names is None:
            raise refusal("Missing 'request_ids' in request body", kind="Bad Request")
        if names:  # without ids, the runtime would abort all requests
            self.runtime.abort(names)
        return web.Response()


async def _request_ids(request: web.Request) -> list[str] | None:
    names = (await object_of(request)).get("request_ids")
    if names is None or (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        return names
    message = f"request_ids: must be a list of strings, got {shorten(names)}"
    raise refusal(message, "body.request_ids", kind="Bad Request")


def _new_id() -> str:
    return uuid.uuid4().hex[:16]


def _id_of(request: web.Request, in_body: str | None = None) -> str:
    """Return the id that the client has given to a request, or a new one."""
    return request.headers.get("X-Request-Id") or in_body or _new_id()


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
