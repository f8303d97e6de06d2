"""The ways to an engine that are compared: straight to it, through the gateway, through others' proxies and routers."""

import asyncio
import shutil
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from orchestrrl.core.errors import Permanent
from orchestrrl.lab.bench.plain_client import connected, request
from orchestrrl.lab.bench.processes import READY_WITHIN_S, ListeningServer, end, serving

DIRECT, OURS, PLAIN, NGINX, VLLM_ROUTER, SGLANG_ROUTER = (
    "direct",
    "ours",
    "plain aiohttp proxy",
    "nginx",
    "vllm-router",
    "sglang-router",
)
# What `make venv-routers` sets up.
ROUTERS_BIN = Path(__file__).resolve().parents[3] / ".venv-routers" / "bin"

_NGINX = """\
daemon off; master_process off; error_log stderr error; pid {folder}/nginx.pid;
events {{ worker_connections 8192; }}
http {{
  access_log off; keepalive_requests 1000000; client_body_buffer_size 64k;
  client_body_temp_path {folder}; proxy_temp_path {folder}; fastcgi_temp_path {folder}; uwsgi_temp_path {folder};
  scgi_temp_path {folder};
  upstream engine {{ server {engine}; keepalive 1024; keepalive_requests 1000000; }}
  server {{
    listen 127.0.0.1:{port} backlog=4096;
    proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off;
    location / {{ proxy_pass http://engine; }}
  }}
}}
"""


@dataclass(frozen=True, slots=True)
class GatewayWays:
    """Those that are there, by name, and why the others are not."""

    served: dict[str, ListeningServer]
    left_out: dict[str, str]


@asynccontextmanager
async def started(log_dir: Path) -> AsyncIterator[GatewayWays]:
    """All in front of one engine, which is the first."""
    async with AsyncExitStack() as stack:

        async def module(name: str, *arguments: str) -> ListeningServer:
            return await stack.enter_async_context(serving(*arguments, log_path=log_dir / f"{name}.log"))

        engine = await module("engine", "orchestrrl.lab.bench.plain_engine")
        flags = ("--listen", "127.0.0.1:0", "--engine", f"e0={engine.url}", "--log-level", "warning")
        gateway = await module("gateway", "orchestrrl", "gateway", *flags)
        proxy = await module("proxy", "orchestrrl.lab.bench.proxy", engine.url)
        ways = GatewayWays({DIRECT: engine, OURS: gateway, PLAIN: proxy}, {})
        for name, start in _OTHERS.items():
            try:
                ways.served[name] = await start(stack, engine.url, log_dir)
            except Permanent as reason:
                ways.left_out[name] = str(reason)
        yield ways


async def _nginx(stack: AsyncExitStack, engine_url: str, log_dir: Path) -> ListeningServer:
    program = shutil.which("nginx")
    if program is None:
        raise Permanent("not installed")
    folder = (log_dir / "nginx").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    port = _free_port()
    config = folder / "nginx.conf"
    config.write_text(_NGINX.format(folder=folder, engine=engine_url.removeprefix("http://"), port=port))
    command = (program, "-p", str(folder), "-e", "stderr", "-c", str(config))
    return await stack.enter_async_context(_listening(port, *command, log_path=log_dir / "nginx.log"))


def _router(name: str, *subcommand: str) -> Callable[[AsyncExitStack, str, Path], Awaitable[ListeningServer]]:
    async def start(stack: AsyncExitStack, engine_url: str, log_dir: Path) -> ListeningServer:
        program = ROUTERS_BIN / name
        if not program.exists():
            raise Permanent("not installed: make venv-routers")
        port, metrics_port = _free_port(), _free_port()
        command = (str(program), *subcommand, "--worker-urls", engine_url, "--policy", "round_robin")
        command += ("--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics_port))
        return await stack.enter_async_context(_listening(port, *command, log_path=log_dir / f"{name}.log"))

    return start


_OTHERS = {NGINX: _nginx, VLLM_ROUTER: _router("vllm-router"), SGLANG_ROUTER: _router("sglang-router", "launch")}


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port


@asynccontextmanager
async def _listening(port: int, *command: str, log_path: Path) -> AsyncIterator[ListeningServer]:
    """Run a program until it answers a completion on the port. Raises Permanent when it does not."""
    with log_path.open("wb") as log:
        process = await asyncio.create_subprocess_exec(*command, stdout=log, stderr=log)
    served = ListeningServer(f"http://127.0.0.1:{port}", process.pid)
    try:
        try:
            async with asyncio.timeout(READY_WITHIN_S):
                while not await _answers(served.url):
                    if process.returncode is not None:
                        raise Permanent(f"{command[0]} did not start: see {log_path}")
                    await asyncio.sleep(0.1)
        except TimeoutError as error:
            raise Permanent(f"{command[0]} did not answer: see {log_path}") from error
        yield served
    finally:
        await end(process)


async def _answers(url: str) -> bool:
    try:
        lane = await connected(url)
    except OSError:
        return False
    try:
        await lane.send(request(url, max_tokens=1, stream=False))
    except Permanent:
        return False
    finally:
        lane.close()
    return True
