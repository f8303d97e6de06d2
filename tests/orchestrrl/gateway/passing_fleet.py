"""A gateway with scripted engines for the endpoints that the gateway passes through."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web

from orchestrrl.core.clock import WallClock
from orchestrrl.core.operations import EngineRoute
from orchestrrl.engines.vllm import VllmEngine
from orchestrrl.gateway.core import Gateway
from orchestrrl.gateway.http.server import GatewayServer
from orchestrrl.gateway.relay import RelayLimits
from orchestrrl.gateway.routing.backends import EngineBackends
from planner.model import EngineId, NodeId

DEADLINE_S = 60.0
PATHS = (
    "/v1/completions",
    "/tokenize",
    "/v1/responses",
    "/v1/responses/{response_id}",
    "/v1/responses/{response_id}/cancel",
    "/get_world_size",
    "/v1/audio/transcriptions",
)

Answer = Callable[["PassedEngine", web.Request], Awaitable[web.StreamResponse]]


async def echo(engine: "PassedEngine", request: web.Request) -> web.StreamResponse:
    """Answer with the request as the engine received it."""
    received = {
        "engine": engine.name,
        "method": request.method,
        "target": request.raw_path,
        "headers": {name.lower(): value for name, value in request.headers.items()},
        "body": (await request.read()).decode("latin-1"),
    }
    return web.json_response(received, status=201, headers={"X-Own": "kept"})


@dataclass
class PassedEngine:
    name: str
    models: list[str] = field(default_factory=lambda: ["m"])
    paths: tuple[str, ...] = PATHS
    answer: Answer = echo
    asked: list[str] = field(default_factory=list)  # methods and targets
    disconnected: asyncio.Event = field(default_factory=asyncio.Event)
    paused: bool = False
    url: str = ""

    async def serve(self, request: web.Request) -> web.StreamResponse:
        path = request.path
        if path == "/health":
            return web.Response()
        if path == "/openapi.json":
            control = ("/pause", "/resume", "/is_paused")
            return web.json_response({"paths": dict.fromkeys([*self.paths, *control])})
        if path == "/v1/models":
            return web.json_response({"data": [{"id": model, "max_model_len": 64} for model in self.models]})
        if path in ("/pause", "/resume"):
            self.paused = path == "/pause"
            return web.json_response({})
        if path == "/is_paused":
            return web.json_response({"is_paused": self.paused})
        self.asked.append(f"{request.method} {request.raw_path}")
        try:
            return await self.answer(self, request)
        except asyncio.CancelledError:
            self.disconnected.set()
            raise


@dataclass
class PassingFleet:
    url: str
    operator_url: str
    engines: list[PassedEngine]
    gateway: Gateway
    server: GatewayServer
    http: aiohttp.ClientSession

    async def ask(self, method: str, path: str, **more: Any) -> tuple[int, Any]:
        async with self.http.request(method, self.url + path, **more) as answer:
            return answer.status, json.loads(await answer.read())

    async def message(self, method: str, path: str, **more: Any) -> tuple[int, str]:
        """Return the status and message of an error in vLLM's format."""
        status, answer = await self.ask(method, path, **more)
        assert answer["error"]["code"] == status
        return status, answer["error"]["message"]

    async def operator(self, path: str, body: Any) -> tuple[int, Any]:
        async with self.http.post(f"{self.operator_url}/orchestrrl/{path}", json=body) as answer:
            return answer.status, await answer.json()

    async def until(self, met: Callable[[], object]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not met():
                await asyncio.sleep(0.005)


@asynccontextmanager
async def passing_fleet(*engines: PassedEngine, engine_wait_s: float = 5.0) -> AsyncIterator[PassingFleet]:
    runners = []
    for engine in engines:
        application = web.Application(client_max_size=1 << 30)
        application.router.add_route("*", "/{path:.*}", engine.serve)
        # Without this, aiohttp does not cancel the handler of a client that disconnects.
        runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        engine.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        runners.append(runner)
    fleet = EngineBackends(VllmEngine, clock=WallClock())
    gateway = Gateway(NodeId("gateway"), fleet, limits=RelayLimits(engine_wait_s=engine_wait_s))
    gateway.set_routes([EngineRoute(EngineId(engine.name), engine.url) for engine in engines])
    server = GatewayServer(gateway)
    url, operator_url = await server.start("127.0.0.1", 0), await server.start_operator("127.0.0.1", 0)
    for backend in fleet:
        await fleet.learn(backend)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(DEADLINE_S)) as http:
        try:
            yield PassingFleet(url, operator_url, list(engines), gateway, server, http)
        finally:
            await server.close()
            await fleet.close()
            for runner in runners:
                await runner.cleanup()
