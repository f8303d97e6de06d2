"""The simulated engine: a real HTTP server with vLLM's surface, whose time and tokens are computed.

`orchestrrl engine simulated` runs it. Step times come from `simulated_core`, tokens from `simulated_tokens`, the pace
from `simulated_runtime`; here are the routes. Where it differs from vLLM, vLLM is right: see `conformance`.
"""

import asyncio
import contextlib
import json
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any, Self

from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field, model_validator

from orchestrrl import __version__
from orchestrrl.clock import Clock, WallClock
from orchestrrl.engines.base import Endpoint, PauseMode, Refused
from orchestrrl.engines.simulated_asks import Served, read_ask, read_detokenize, read_tokenize, refusal
from orchestrrl.engines.simulated_core import EngineShape
from orchestrrl.engines.simulated_format import Formatter, metrics_page
from orchestrrl.engines.simulated_handover import KvLink
from orchestrrl.engines.simulated_runtime import Answer, Part, Runtime
from orchestrrl.engines.simulated_tokens import DEFAULT_LENGTHS, LengthModel, TokenModel
from orchestrrl.engines.vllm import VllmEngine

MOST_BODY_BYTES = 64 << 20  # a long prompt comes as a list of ids
SHUTDOWN_S = 1.0  # what running requests get at the end; then their connections are cut
ID_PREFIXES = {Endpoint.COMPLETIONS: "cmpl-", Endpoint.CHAT: "chatcmpl-"}


class SimulatedEngine(VllmEngine):
    """A client of a simulated engine: vLLM's, by another name."""

    name = "simulated"


class SimulatedOptions(BaseModel):
    """Everything that makes one simulated engine. Times are virtual seconds, but for `tick_s`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model_name: str = "simulated"
    alpha_s: Annotated[float, Field(gt=0)] = 0.0184
    beta_s: Annotated[float, Field(ge=0)] = 0.000081
    gamma_s: Annotated[float, Field(ge=0)] = 4.1e-8
    prefill_tokens_per_s: Annotated[float, Field(gt=0)] | None = None  # None: prefill takes no time
    max_num_seqs: Annotated[int, Field(ge=1)] = 48
    kv_capacity_tokens: Annotated[int, Field(ge=1)] = 262_144
    block_tokens: Annotated[int, Field(ge=1)] = 16
    max_model_len_tokens: Annotated[int, Field(ge=2)] = 32_768
    vocab_size: Annotated[int, Field(ge=1024)] = 32_000
    seed: int = 0  # of the weights: engines with the same seed are replicas
    lengths: LengthModel = DEFAULT_LENGTHS
    kv_directory: Path | None = None  # in common with the engines that hand KV over to each other; None: none does
    kv_bytes_per_token: Annotated[float, Field(gt=0)] = 196_608
    kv_gbps: Annotated[float, Field(gt=0)] = 400.0
    kv_latency_s: Annotated[float, Field(ge=0)] = 0.002
    speed: Annotated[float, Field(gt=0)] = 1.0
    tick_s: Annotated[float, Field(gt=0)] = 0.02

    @model_validator(mode="after")
    def _holds_one_request(self) -> Self:
        whole_blocks_tokens = self.kv_capacity_tokens // self.block_tokens * self.block_tokens
        if whole_blocks_tokens < self.max_model_len_tokens:
            raise ValueError(
                f"kv_capacity_tokens must hold one request of max_model_len_tokens, got {self.kv_capacity_tokens} and "
                f"{self.max_model_len_tokens}"
            )
        return self

    @property
    def link(self) -> KvLink | None:
        if self.kv_directory is None:
            return None
        return KvLink(self.kv_directory, self.kv_bytes_per_token, self.kv_gbps, self.kv_latency_s)

    @property
    def shape(self) -> EngineShape:
        return EngineShape(
            alpha_s=self.alpha_s,
            beta_s=self.beta_s,
            gamma_s=self.gamma_s,
            max_num_seqs=self.max_num_seqs,
            kv_capacity_tokens=self.kv_capacity_tokens,
            prefill_s_per_token=0.0 if self.prefill_tokens_per_s is None else 1 / self.prefill_tokens_per_s,
            block_tokens=self.block_tokens,
        )


class SimulatedServer:
    """Serves one simulated engine: `async with SimulatedServer(options) as server: ... server.url ...`."""

    def __init__(
        self, options: SimulatedOptions, *, host: str = "127.0.0.1", port: int = 0, clock: Clock | None = None
    ) -> None:
        model = TokenModel(options.vocab_size, options.lengths, options.seed)
        self.url = ""
        clock = clock or WallClock()
        self.runtime = Runtime(options.shape, model, clock, options.speed, options.tick_s, options.link)
        self._options = options
        self._served = Served(options.model_name, model, options.max_model_len_tokens)
        self._address = (host, port)

    async def __aenter__(self) -> Self:
        # A client that goes away must have its request aborted, also while it waits for its first token.
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
        application = web.Application(client_max_size=MOST_BODY_BYTES, middlewares=[_errors_as_objects])
        application.add_routes(
            [
                web.post("/v1/completions", self._completions),
                web.post("/v1/chat/completions", self._chat),
                web.get("/v1/models", self._models),
                web.post("/tokenize", self._tokenize),
                web.post("/detokenize", self._detokenize),
                web.get("/health", self._health),
                web.get("/version", self._version),
                web.get("/openapi.json", self._openapi),
                web.get("/server_info", self._server_info),
                web.get("/metrics", self._metrics),
                web.post("/pause", self._pause),
                web.post("/resume", self._resume),
                web.get("/is_paused", self._is_paused),
                web.post("/abort_requests", self._abort_requests),
            ]
        )
        return application

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, Endpoint.COMPLETIONS)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, Endpoint.CHAT)

    async def _generate(self, request: web.Request, endpoint: Endpoint) -> web.StreamResponse:
        ask = read_ask(endpoint, await _json_of(request), self._served)
        response_id = ID_PREFIXES[endpoint] + request.headers.get("X-Request-Id", uuid.uuid4().hex[:16])
        words = Formatter(ask, response_id, int(time.time()), self._served.model_name, self._served.model)
        # A completion may have several prompts, so vLLM numbers them; a chat has one.
        answer = self.runtime.submit(ask, f"{response_id}-0" if endpoint is Endpoint.COMPLETIONS else response_id)
        try:
            if ask.stream:
                return await self._stream(request, answer, words)
            return web.json_response(words.whole(await _whole(answer.parts())))
        finally:
            self.runtime.drop(answer)

    async def _stream(self, request: web.Request, answer: Answer, words: Formatter) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        opening = words.opening()
        async for part in answer.parts():
            # vLLM leaves out the last chunk of a request that was aborted before its first token.
            await response.write(b"".join([*opening, words.part(part) if answer.made else b""]))
            opening = []
        await response.write(b"".join(words.closing(answer.made)))
        await response.write_eof()
        return response

    async def _models(self, _: web.Request) -> web.Response:
        model: dict[str, Any] = {"id": self._served.model_name, "object": "model", "owned_by": "orchestrrl"}
        model["max_model_len"] = self._served.max_model_len_tokens
        return web.json_response({"object": "list", "data": [model]})

    async def _tokenize(self, request: web.Request) -> web.Response:
        tokens = read_tokenize(await _json_of(request), self._served)
        longest = self._served.max_model_len_tokens
        return web.json_response({"count": len(tokens), "max_model_len": longest, "tokens": tokens, "token_strs": None})

    async def _detokenize(self, request: web.Request) -> web.Response:
        tokens = read_detokenize(await _json_of(request))
        return web.json_response({"prompt": self._served.model.detokenize(tokens)})

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

    async def _server_info(self, request: web.Request) -> web.Response:
        options = self._options
        config: Any = {
            "model_config": {"model": options.model_name, "max_model_len": options.max_model_len_tokens},
            "cache_config": {"block_size": options.block_tokens, "num_gpu_blocks": options.shape.blocks},
            "scheduler_config": {"max_num_seqs": options.max_num_seqs},
        }
        if request.query.get("config_format", "text") != "json":
            config = json.dumps(config)
        return web.json_response({"vllm_config": config, "vllm_env": {}, "system_env": {}})

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(text=metrics_page(self.runtime, self._served.model_name))

    async def _pause(self, request: web.Request) -> web.Response:
        mode = request.query.get("mode", PauseMode.ABORT.value)
        if mode not in list(PauseMode):
            raise refusal(f"mode must be abort, wait or keep, got {mode!r}", "query.mode", kind="Bad Request")
        await self.runtime.pause(PauseMode(mode), request.query.get("clear_cache", "true").lower() in ("true", "1"))
        return web.json_response({"status": "paused"})

    async def _resume(self, _: web.Request) -> web.Response:
        self.runtime.resume()
        return web.json_response({"status": "resumed"})

    async def _is_paused(self, _: web.Request) -> web.Response:
        return web.json_response({"is_paused": self.runtime.pause_mode is not None})

    async def _abort_requests(self, request: web.Request) -> web.Response:
        body = await _json_of(request)
        if not isinstance(body, dict):
            raise refusal("Request body must be a JSON object", kind="Bad Request")
        names = body.get("request_ids")
        # Like vLLM, the reply counts what was named, not what was found; of everything it counts what there was.
        if names:
            self.runtime.abort(names)
        aborted = len(names) if names else self.runtime.abort_all()
        return web.json_response({"status": "aborted", "aborted": aborted})


async def _whole(parts: AsyncIterator[Part]) -> Part:
    token_ids: list[int] = []
    logprobs: list[float] = []
    last = Part([], [])
    async for last in parts:
        token_ids += last.token_ids
        logprobs += last.logprobs
    return Part(token_ids, logprobs, last.finish_reason, last.stop_reason)


async def _json_of(request: web.Request) -> Any:
    try:
        return await request.json()
    except ValueError as error:
        raise refusal(f"JSON decode error: {error}", "body", kind="Bad Request") from error


@web.middleware
async def _errors_as_objects(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except Refused as error:
        return web.json_response(dict(error.body), status=error.status)
    except web.HTTPException as error:
        return web.json_response({"detail": error.reason}, status=error.status)
