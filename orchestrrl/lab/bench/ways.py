"""The ways to an engine that are compared: straight to it, through the gateway, through others' proxies and routers."""

import shutil
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from string import Template

from orchestrrl.core.errors import Permanent
from orchestrrl.lab.bench.plain_client import all_at_once, request
from orchestrrl.lab.testbed.processes import REPOSITORY, LabProcess, flags_of, free_port
from orchestrrl.lab.testbed.stack import ANY_PORT, Stack

DIRECT, OURS, PLAIN, NGINX, VLLM_ROUTER, SGLANG_ROUTER = (
    "direct",
    "ours",
    "plain aiohttp proxy",
    "nginx",
    "vllm-router",
    "sglang-router",
)
# What `make venv-routers` sets up.
ROUTERS_BIN = REPOSITORY / ".venv-routers" / "bin"
PLAIN_ENGINE, PLAIN_PROXY = ("orchestrrl.lab.bench.plain_engine",), ("orchestrrl.lab.bench.proxy",)


@dataclass(frozen=True, slots=True)
class GatewayWays:
    """Those that are there, by name, and why the others are not."""

    served: dict[str, LabProcess]
    left_out: dict[str, str]


@asynccontextmanager
async def started(folder: Path) -> AsyncIterator[GatewayWays]:
    """All in front of one engine, which is the first."""
    async with Stack(folder) as stack:
        engine = await served(stack, "engine", *PLAIN_ENGINE)
        gateway = await served(stack, "gateway", *gateway_words(engine.url))
        proxy = await served(stack, "proxy", *PLAIN_PROXY, engine.url)
        ways = GatewayWays({DIRECT: engine, OURS: gateway, PLAIN: proxy}, {})
        for name, start in _OTHERS.items():
            try:
                ways.served[name] = await start(stack, engine.url)
            except Permanent as reason:
                ways.left_out[name] = str(reason)
        yield ways


async def served(stack: Stack, name: str, *words: str) -> LabProcess:
    """Start `python -m WORDS`, and return it once it has printed its URL."""
    process = stack.launch(LabProcess(name, (sys.executable, "-m", *words), stack.folder))
    await stack.served(process)
    return process


def gateway_words(engine_url: str, *flags: str) -> tuple[str, ...]:
    return (
        "orchestrrl",
        "gateway",
        "--listen",
        ANY_PORT,
        "--engine",
        f"e0={engine_url}",
        "--log-level",
        "warning",
        *flags,
    )


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


_OTHERS = {NGINX: _nginx, VLLM_ROUTER: _router("vllm-router"), SGLANG_ROUTER: _router("sglang-router", "launch")}


async def _answering(stack: Stack, name: str, port: int, *command: str | Path) -> LabProcess:
    """Start a program, and return it once it answers a completion on the port. Raises Permanent when it does not."""
    process = stack.launch(LabProcess(name, command, stack.folder, one_log=True))
    process.url = f"http://127.0.0.1:{port}"
    await process.until(partial(_answers, process.url))
    return process


async def _answers(url: str) -> bool:
    try:
        await all_at_once(url, request(url, max_tokens=1, stream=False), 1)
    except (OSError, Permanent):
        return False
    return True
