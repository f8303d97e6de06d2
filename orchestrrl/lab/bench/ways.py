"""The ways to an engine that are compared: straight to it, through the gateway, through others' proxies and routers."""

import shutil
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, closing
from functools import partial
from pathlib import Path
from string import Template

from orchestrrl.core.errors import OrchestrRLError, Permanent
from orchestrrl.lab.bench.plain_client import LoadClient, request
from orchestrrl.lab.testbed.processes import REPOSITORY, LabProcess, flags_of, free_port
from orchestrrl.lab.testbed.stack import ANY_PORT, Stack

DIRECT, OURS, PLAIN, NGINX = "direct", "ours", "plain aiohttp proxy", "nginx"
# What `make venv-routers` sets up.
ROUTERS_BIN = REPOSITORY / ".venv-routers" / "bin"
PLAIN_ENGINE, PLAIN_PROXY = ("orchestrrl.lab.bench.plain_engine",), ("orchestrrl.lab.bench.proxy",)


@asynccontextmanager
async def started(folder: Path) -> AsyncIterator[tuple[dict[str, LabProcess], dict[str, str]]]:
    """Start all in front of one engine, which is the first. Yield those that are there, by name, and why the others are
    not."""
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
    """Start `python -m WORDS`, and return it once it has printed its URL."""
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
    """Start a program, and return it once it answers a completion on the port. Raises Permanent when it does not."""
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
