"""Fake vLLM servers for adapters: they answer requests and calls, or fail."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web
from multidict import CIMultiDictProxy


class FakeVllm:
    """Answers a prompt with its reversed ids, to all requests of a batch at the same time, the last one first."""

    def __init__(self, log: list[str]) -> None:
        self.log = log
        self.batch = 1  # answers wait for this number of requests
        self.asked: list[tuple[dict[str, Any], CIMultiDictProxy[str]]] = []
        self.statuses: dict[str, int] = {}
        self.paused = False
        self.load_s = 0.0
        self.left = 0  # clients that disconnected before their answer
        self.url = ""

    async def complete(self, request: web.Request) -> web.Response:
        body = await request.json()
        place = len(self.asked)
        self.asked.append((body, request.headers))
        if body["prompt"] == [ord("?")]:
            return web.json_response({"error": {"message": "what?"}}, status=400)
        try:
            while len(self.asked) < self.batch:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.02 * (self.batch - place))
        except asyncio.CancelledError:
            self.left += 1
            raise
        ids = list(reversed(body["prompt"]))
        logprobs: dict[str, list[Any]] = {"token_logprobs": [-0.5] * len(ids)}
        choice = {"index": 0, "text": "", "token_ids": ids, "finish_reason": "stop", "logprobs": logprobs}
        if not body.get("stream"):
            return web.json_response({"choices": [choice]})
        logprobs.update({"tokens": [""] * len(ids), "top_logprobs": [None] * len(ids)})
        told = json.dumps({"choices": [{**choice, "prompt_token_ids": body["prompt"]}]})
        return web.Response(text=f"data: {told}\n\ndata: [DONE]\n\n", content_type="text/event-stream")

    async def control(self, request: web.Request) -> web.Response:
        if request.path == "/collective_rpc":
            order = await request.json()
            await asyncio.sleep(self.load_s)
            folder = Path(order["kwargs"]["weights_path"])
            self.log.append(f"{self.url} {order['method']} {(folder / 'model.safetensors').read_text()}")
        else:
            self.log.append(f"{self.url} {request.path_qs}")
        status = self.statuses.get(request.path, 200)
        if status == 200 and request.path != "/collective_rpc":
            self.paused = request.path == "/pause"
        return web.json_response({}, status=status)

    async def health(self, request: web.Request) -> web.Response:
        return web.json_response({})

    async def openapi(self, request: web.Request) -> web.Response:
        paths: dict[str, Any] = {path: {} for path in ("/pause", "/resume", "/is_paused")}
        return web.json_response({"paths": paths, "components": {"schemas": {}}})

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "model", "max_model_len": 100}]})


@asynccontextmanager
async def servers(count: int = 1) -> AsyncIterator[list[FakeVllm]]:
    log: list[str] = []
    fakes, runners = [FakeVllm(log) for _ in range(count)], []
    for fake in fakes:
        app = web.Application()
        app.router.add_post("/v1/completions", fake.complete)
        app.router.add_get("/health", fake.health)
        app.router.add_get("/openapi.json", fake.openapi)
        app.router.add_get("/v1/models", fake.models)
        for path in ("/pause", "/resume", "/collective_rpc"):
            app.router.add_post(path, fake.control)
        runner = web.AppRunner(app, handler_cancellation=True)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        fake.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        runners.append(runner)
    try:
        yield fakes
    finally:
        for runner in runners:
            await runner.cleanup()
