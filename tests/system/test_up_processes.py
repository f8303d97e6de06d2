"""`orchestrrl up`: processes that are killed are restarted, streams go on, and no process is left behind."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from orchestrrl.cli.running import SAME_STOP_S
from orchestrrl.core.errors import OrchestrRLError
from orchestrrl.lab.simulated_engine.tokens import TokenModel
from orchestrrl.lab.testbed.engines import LocalEngine, start_simulated
from orchestrrl.lab.testbed.processes import LabProcess, command_of, until
from orchestrrl.rpc.control_client import ControlClient
from orchestrrl.rpc.pb import control_pb2
from tests.orchestrrl.gateway.processes import free_port, two_engines
from tests.system.streams import Answer, read_stream

ENGINE = ("--speed", "5", "--tick-s", "0.01")
TOKENS = 400
PROMPT = [7, 8, 9]
BODY: dict[str, Any] = {"model": "simulated", "prompt": PROMPT, "temperature": 0, "ignore_eos": True}
BODY |= {"stream": True, "return_token_ids": True}


class Up(LabProcess):
    """A process of `orchestrrl up`, with the addresses on which its gateway and its daemon listen."""

    def __init__(self, folder: Path, engines: Sequence[str], *flags: str) -> None:
        self.gateway, self.daemon = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
        words = [word for url in engines for word in ("--engine", url)]
        words += ["--engine-kind", "simulated", "--listen", self.gateway, "--daemon", self.daemon, *flags]
        super().__init__("up", command_of("up", *words), folder, cwd=folder)  # the journal is in the working folder
        self.lines: list[str] = []

    async def until_line(self, start: str) -> str:
        """Return the first line of the output that begins with `start`, read or not."""
        while not (found := [line for line in self.lines if line.startswith(start)]):
            self.lines.append(await self.next_line())
        return found[0]

    def children(self) -> dict[str, psutil.Process]:
        found = {}
        for child in psutil.Process(self.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):
                words = child.cmdline()
                found[words[words.index("orchestrrl") + 1]] = child
        return found

    async def replaced(self, name: str, before: psutil.Process) -> psutil.Process:
        async def other() -> psutil.Process | None:
            with contextlib.suppress(ValueError):  # the program has not been started yet
                child = self.children().get(name)
                return child if child != before else None
            return None

        return await until(other, f"the {name} is restarted", processes=[self])


@pytest.fixture
async def engines(tmp_path: Path) -> AsyncIterator[list[LocalEngine]]:
    async with two_engines(tmp_path, *ENGINE) as started:
        yield started


@contextlib.asynccontextmanager
async def running(folder: Path, engines: Sequence[LocalEngine], *flags: str) -> AsyncIterator[Up]:
    async with Up(folder, [engine.url for engine in engines], *flags) as up:
        await up.until_line("ready")
        yield up


@contextlib.asynccontextmanager
async def streaming(up: Up, tokens: int = TOKENS) -> AsyncIterator[None]:
    """Run the body of the `async with` statement once tokens arrive. Then check that the whole answer arrives."""
    answer = Answer()
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"http://{up.gateway}/v1/completions", json={**BODY, "max_tokens": tokens}) as response,
    ):
        assert response.status == 200, await response.text()
        reading = asyncio.create_task(read_stream(response, answer))

        async def has_tokens() -> bool:
            return len(answer.token_ids) >= 10

        await until(has_tokens, "tokens arrive")
        assert not reading.done()
        yield
        await reading
    generation = TokenModel().begin(PROMPT)
    assert answer.token_ids == [generation.next_token()[0] for _ in range(tokens)]


async def status(up: Up) -> control_pb2.Status | None:
    """Return the status once the agent and the gateway are attached to the daemon."""
    with contextlib.suppress(OrchestrRLError):
        async with ControlClient(up.daemon) as control:
            found = await control.call(control.control.GetStatus, control_pb2.GetStatusRequest())
        return found if {node.kind for node in found.nodes if node.attached} == {"agent", "gateway"} else None
    return None


async def gone(processes: Sequence[psutil.Process]) -> None:
    async def ended() -> bool:
        return not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes)

    await until(ended, "all processes have exited")


async def test_first_lines_name_addresses_and_engines(engines: list[LocalEngine], tmp_path: Path) -> None:
    async with running(tmp_path, engines) as up:
        urls = [engine.url for engine in engines]
        for url in urls:
            assert "simulated" in await up.until_line(f"engine {url.removeprefix('http://')}: {url}, simulated")
        assert up.lines[:2] == [f"gateway: http://{up.gateway}", f"daemon: {up.daemon}"]
        assert up.lines.count(f"ready: http://{up.gateway} serves requests") == 1
        found = await until(lambda: status(up), "agent and gateway are attached")
        assert {worker.engine_id for worker in found.workers} == {url.removeprefix("http://") for url in urls}
        assert set(up.children()) == {"gateway", "agent", "daemon"}
    log = up.log_path.read_text()
    assert all(f"\n{name:<7} | " in f"\n{log}" for name in ("gateway", "agent", "daemon"))


async def test_stream_continues_while_daemon_and_agent_are_killed(engines: list[LocalEngine], tmp_path: Path) -> None:
    async with running(tmp_path, engines) as up:
        await until(lambda: status(up), "agent and gateway are attached")
        async with streaming(up):
            before = up.children()
            before["daemon"].kill()
            before["agent"].kill()
            await up.replaced("daemon", before["daemon"])
            await up.replaced("agent", before["agent"])
        await until(lambda: status(up), "agent and gateway are attached again")
        assert up.children()["gateway"] == before["gateway"]
    assert "up      | the daemon was ended by SIGKILL; it is restarted in 0.5 s" in up.log_path.read_text()


async def test_killed_gateway_serves_again_on_the_same_port(engines: list[LocalEngine], tmp_path: Path) -> None:
    async with running(tmp_path, engines) as up:
        before = up.children()["gateway"]
        before.kill()
        await up.replaced("gateway", before)

        async def healthy() -> bool:
            with contextlib.suppress(aiohttp.ClientError):
                async with aiohttp.ClientSession() as http, http.get(f"http://{up.gateway}/health") as response:
                    return response.status == 200
            return False

        await until(healthy, "the gateway serves again", processes=[up])
        async with streaming(up):
            pass


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_stop_waits_for_running_requests(
    engines: list[LocalEngine], tmp_path: Path, number: signal.Signals
) -> None:
    async with running(tmp_path, engines, "--drain-s", "100") as up:
        children = [*up.children().values()]
        async with streaming(up):
            up.signal(number)
        assert await asyncio.to_thread(up.process.wait) == 0
        await gone(children)


async def test_second_signal_kills_all_processes(engines: list[LocalEngine], tmp_path: Path) -> None:
    async with running(tmp_path, engines, "--drain-s", "100") as up:
        children = [*up.children().values()]

        async def stop_twice() -> None:
            async with streaming(up, 100 * TOKENS):
                up.signal(signal.SIGTERM)
                await asyncio.sleep(SAME_STOP_S + 0.5)
                up.signal(signal.SIGTERM)

        with pytest.raises(aiohttp.ClientError):
            await stop_twice()
        assert await asyncio.to_thread(up.process.wait) == 0
        await gone(children)


async def test_no_process_outlives_a_killed_up(engines: list[LocalEngine], tmp_path: Path) -> None:
    async with running(tmp_path, engines, "--drain-s", "100") as up:
        children = [*up.children().values()]
        async with streaming(up):
            os.kill(up.pid, signal.SIGKILL)
        await gone(children)


async def test_engine_may_start_later(tmp_path: Path) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    async with Up(tmp_path, [f"late={url}"]) as up:
        await up.until_line(f"engine late: no answer yet: {url}: cannot be reached")
        engine = await start_simulated("late", log_dir=tmp_path, arguments=[*ENGINE, "--port", str(port)])
        async with engine:
            await up.until_line("ready")
            await up.until_line(f"engine late: {url}, simulated, simulated")
            async with streaming(up):
                pass


@pytest.mark.parametrize("flag", ["--listen", "--daemon", "--operator"])
def test_port_in_use_is_an_error(tmp_path: Path, flag: str) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        taken = f"127.0.0.1:{holder.getsockname()[1]}"
        free = {each: f"127.0.0.1:{free_port()}" for each in ("--listen", "--daemon", "--operator")}
        words = [word for pair in ({**free, flag: taken}).items() for word in pair]
        command = command_of("up", "--engine", "http://127.0.0.1:1", *words)
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == f"{flag}: cannot listen on {taken}: Address already in use\n"
    assert done.stdout == ""


def test_daemon_that_cannot_start_stops_all(tmp_path: Path) -> None:
    config = tmp_path / "orchestrrl.yaml"
    config.write_text(f"listen: {{address: '127.0.0.1:{free_port()}'}}\njournal: {{path: {tmp_path}/none/journal}}\n")
    words = ["--engine", "http://127.0.0.1:1", "--listen", "127.0.0.1:0", "-c", str(config)]
    environment = {name: value for name, value in os.environ.items() if name != "ORCHESTRRL_DAEMON"}
    done = subprocess.run(
        command_of("up", *words), cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr.endswith("the daemon ended with status 1 before it was ready\n")
    assert "daemon  | " in done.stderr
    assert not [each for each in psutil.process_iter(["cmdline"]) if str(config) in (each.info["cmdline"] or [])]
