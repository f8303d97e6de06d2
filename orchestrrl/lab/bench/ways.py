"""The paths to an engine that are compared: direct, through the gateway, and through other proxies and routers.

The load consists of completion requests. They are sent with the gateway's HTTP client for engines, and the responses
are parsed with minimal work.
"""

import asyncio
import itertools
import json
import shutil
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from pathlib import Path
from string import Template

from orchestrrl.core.errors import OrchestrRLError, Permanent
from orchestrrl.engines.exchange import ConnectionPool
from orchestrrl.lab.bench.plain_engine import MODEL, TOKEN
from orchestrrl.lab.testbed.processes import REPOSITORY, LabProcess, flags_of, free_port
from orchestrrl.lab.testbed.stack import ANY_PORT, Stack

DIRECT, OURS, PLAIN, NGINX = "direct", "ours", "plain aiohttp proxy", "nginx"
# Created by `make venv-routers`.
ROUTERS_BIN = REPOSITORY / ".venv-routers" / "bin"
PLAIN_ENGINE, PLAIN_PROXY = ("orchestrrl.lab.bench.plain_engine",), ("orchestrrl.lab.bench.proxy",)


BODY_BYTES = 1_024
ANSWER_WITHIN_S = 60.0
_ids = itertools.count()


@asynccontextmanager
async def started(folder: Path) -> AsyncIterator[tuple[dict[str, LabProcess], dict[str, str]]]:
    """Start an engine and all paths in front of it. Yield the processes by path name, beginning with the engine itself
    for the direct path. Also yield, by path name, the reasons why other paths are not available."""
    async with Stack(folder) as stack:
        engine = await served(stack, "engine", *PLAIN_ENGINE)
        gateway = await served(stack, "gateway", *gateway_words(engine.url))
        proxy = await served(stack, "proxy", *PLAIN_PROXY, engine.url)
        ways, left_out = {DIRECT: engine, OURS: gateway, PLAIN: proxy}, dict[str, str]()
        for name, start in _OTHERS.items():
            try:
                ways[name] = await start(stack, engine.url)
            except Permanent as reason:
                left_out[name] = str(reason)
        yield ways, left_out


async def served(stack: Stack, name: str, *words: str) -> LabProcess:
    """Start a Python module, wait until it has printed its URL, and return its process."""
    process = stack.launch(LabProcess(name, (sys.executable, "-m", *words), stack.folder))
    await stack.served(process)
    return process


def gateway_words(engine_url: str, *flags: str) -> tuple[str, ...]:
    words = ("--listen", ANY_PORT, "--engine", f"e0={engine_url}", "--log-level", "warning")
    return ("orchestrrl", "gateway", *words, *flags)


async def _nginx(stack: Stack, engine_url: str) -> LabProcess:
    program = shutil.which("nginx")
    if program is None:
        raise Permanent("not installed")
    folder, port = stack.folder / NGINX, free_port()
    folder.mkdir(exist_ok=True)
    config = folder / "nginx.conf"
    template = Template(Path(__file__).with_name("nginx.conf").read_text())
    config.write_text(template.substitute(folder=folder, engine=engine_url.removeprefix("http://"), port=port))
    return await _answering(stack, NGINX, port, program, "-p", folder, "-e", "stderr", "-c", config)


def _router(name: str, *subcommand: str) -> Callable[[Stack, str], Awaitable[LabProcess]]:
    async def start(stack: Stack, engine_url: str) -> LabProcess:
        program = ROUTERS_BIN / name
        if not program.exists():
            raise Permanent("not installed: make venv-routers")
        port = free_port()
        options = {"worker_urls": engine_url, "policy": "round_robin", "host": "127.0.0.1", "port": port}
        flags = flags_of({**options, "prometheus_port": free_port()})
        return await _answering(stack, name, port, program, *subcommand, *flags)

    return start


_OTHERS = {NGINX: _nginx, "vllm-router": _router("vllm-router"), "sglang-router": _router("sglang-router", "launch")}


async def _answering(stack: Stack, name: str, port: int, *command: str | Path) -> LabProcess:
    """Start a program, and return its process when it responds to a completion request on `port`. Raises Permanent if
    it does not respond in time."""
    process = stack.launch(LabProcess(name, command, stack.folder, one_log=True))
    process.url = f"http://127.0.0.1:{port}"
    await process.until(partial(_answers, process.url))
    return process


async def _answers(url: str) -> bool:
    try:
        with closing(LoadClient(url)) as client:
            await client.send(request(max_tokens=1, stream=False))
    except OrchestrRLError:
        return False
    return True


# --- the load


@dataclass(slots=True)
class TimedResponse:
    """The size and latency of one response. Times are in seconds since the request was started, including opening a
    connection."""

    tokens: int
    chunks: int  # events with content; 1 for a response that is not streamed
    first_s: float  # until the first content
    whole_s: float


def request(*, max_tokens: int, stream: bool) -> bytes:
    """Return the body of a completion request with a size of `BODY_BYTES`."""
    asked = {"model": MODEL, "temperature": 0, "max_tokens": max_tokens, "ignore_eos": True, "stream": stream}
    empty = json.dumps({**asked, "prompt": ""})
    return json.dumps({**asked, "prompt": ("a request of one kilobyte " * 64)[: BODY_BYTES - len(empty)]}).encode()


class LoadClient:
    """Sends completion requests to one URL. `close` closes its connections."""

    def __init__(self, url: str, within_s: float = ANSWER_WITHIN_S) -> None:
        self._pool = ConnectionPool(url, connect_timeout_s=within_s)
        self._within_s = within_s

    async def send(self, body: bytes) -> TimedResponse:
        """Send a completion request, and return the size and latency of the response. Raises Permanent if the response
        is incomplete or an error, and another OrchestrRLError if there is no response."""
        started_s, first_s, text = time.perf_counter(), 0.0, bytearray()
        exchange = self._pool.exchange("/v1/completions", body, [("X-Request-Id", f"request-{next(_ids)}")])
        connection = await exchange.begin()
        while piece := await connection.read():
            text += piece
            if not first_s and (b"data:" in piece or b'"choices"' in piece):
                first_s = time.perf_counter() - started_s
        whole_s, streamed = time.perf_counter() - started_s, text.startswith(b"data:")
        is_complete = not streamed or b"data: [DONE]" in text
        if connection.status != HTTPStatus.OK or b'"error"' in text or not is_complete:
            raise Permanent(f"response must be complete, got {bytes(text[:600])!r}")
        exchange.leave()
        return TimedResponse(text.count(TOKEN), text.count(b'data: {"id"') if streamed else 1, first_s, whole_s)

    async def send_in_turn(self, body: bytes, requests: int, at_once: int) -> list[TimedResponse]:
        """Send `requests` completion requests over `at_once` connections, one after another on each connection. Raises
        TimeoutError if they do not all complete in time."""
        left = iter(range(requests))

        async def run() -> list[TimedResponse]:
            return [await self.send(body) for _ in left]

        async with asyncio.timeout(self._within_s):
            answers = await asyncio.gather(*(run() for _ in range(at_once)))
        return [answer for some in answers for answer in some]

    def close(self) -> None:
        self._pool.close()
