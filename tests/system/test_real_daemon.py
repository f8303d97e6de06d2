"""Commands against a real daemon process, with an agent that reconnects after the daemon was killed."""

import asyncio
import json
import os
import pty
import random
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from fake_daemon import FakeDaemon, Serving
from fake_engine import FakeEngine
from typer.testing import CliRunner

from orchestrrl.agent.sidecar import Agent
from orchestrrl.cli.main import application
from orchestrrl.core.clock import WallClock
from planner.model import EngineId, NodeId

DEADLINE_S = 120.0
COMMAND = [sys.executable, "-m", "orchestrrl"]


def eventually(condition: Callable[[], Any]) -> Any:
    deadline_s = time.monotonic() + DEADLINE_S
    while not (value := condition()):
        assert time.monotonic() < deadline_s, "nothing came of it"
        time.sleep(0.05)
    return value


class DaemonProcess:
    """A daemon that can be started and killed repeatedly with one configuration, always on the same port."""

    def __init__(self, folder: Path) -> None:
        self._config = folder / "daemon.yaml"
        self._settings: dict[str, Any] = {
            "listen": {"address": "127.0.0.1:0"},
            "journal": {"path": str(folder / "journal.sqlite")},
            "fast": {"interval_s": 0.1},
        }
        self._process: subprocess.Popen[str] | None = None
        self.address = ""

    def start(self) -> None:
        self._config.write_text(yaml.safe_dump(self._settings))
        arguments = [*COMMAND, "daemon", "-c", str(self._config)]
        self._process = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.address = self._process.stdout.readline().strip()
        self._settings["listen"]["address"] = self.address

    def end(self, number: signal.Signals = signal.SIGKILL) -> int:
        assert self._process is not None
        self._process.send_signal(number)
        status = self._process.wait(DEADLINE_S)
        assert self._process.stdout is not None
        self._process.stdout.close()
        return status

    def ask(self, *arguments: str) -> dict[str, Any]:
        result = CliRunner().invoke(application(), [*arguments, "--json", "--daemon", self.address])
        assert result.exit_code == 0, result.output
        answer: dict[str, Any] = json.loads(result.stdout)
        return answer


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    process = DaemonProcess(tmp_path)
    process.start()
    yield process
    process.end()


def run_agent(address: str, ended: threading.Event) -> threading.Thread:
    """Run an agent with one engine in a thread until `ended` is set."""

    async def serve() -> None:
        clock = WallClock()
        engine = FakeEngine(clock)
        engine.current = replace(engine.current, running=7)
        agent = Agent(NodeId("a0"), {EngineId("e0"): engine}, address, clock=clock, interval_s=0.1)
        task = asyncio.create_task(agent.run())
        await asyncio.to_thread(ended.wait)
        assert not task.done()
        task.cancel()
        await asyncio.wait({task})

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    return thread


@pytest.mark.smoke
def test_agent_reconnects_to_a_restarted_daemon(daemon: DaemonProcess) -> None:
    ended = threading.Event()
    thread = run_agent(daemon.address, ended)
    try:
        generations = []
        for _ in range(2):
            status = eventually(lambda: _with_worker(daemon.ask("status")))
            (worker,) = status["workers"]
            assert (worker["engine_id"], worker["health"], worker["running"]) == ("e0", "ok", 7)
            assert worker["capabilities"]["engine"] == "fake", "reported again to each daemon"
            assert [(node["node_id"], node["attached"]) for node in status["nodes"]] == [("a0", True)]
            generations.append(status["generation"])
            daemon.end()
            daemon.start()
        assert generations[0] < generations[1]
    finally:
        ended.set()
        thread.join()


def _with_worker(status: dict[str, Any]) -> dict[str, Any] | None:
    # The first report of a stream has no time and its sample is ignored until the daemon has synchronized the clock.
    seen = any(worker["capabilities"] and worker["age_s"] is not None for worker in status["workers"])
    return status if seen and status["nodes"] else None


@pytest.mark.smoke
def test_operator_reasons_are_in_the_journal(daemon: DaemonProcess) -> None:
    assert daemon.ask("mode", "act", "--reason", "tried it") == {"mode": "act", "previous": "advise"}
    assert daemon.ask("plan", "pin", "--reason", "hands off", "--ttl-s", "600")["state"] == "pinned"
    assert daemon.ask("plan", "release")["state"] == "free"
    lines = CliRunner().invoke(application(), ["journal", "--json", "--daemon", daemon.address]).stdout.splitlines()
    entries = [json.loads(line) for line in lines]
    assert [entry["kind"] for entry in entries if entry["kind"] in ("mode", "plan.control")] == [
        "mode",
        "plan.control",
        "plan.control",
    ]
    assert "hands off" in json.dumps(entries)
    refused = CliRunner().invoke(application(), ["plan", "override", "tp9", "--daemon", daemon.address])
    assert refused.exit_code in (1, 2)
    assert "tp9" in refused.stderr
    unknown = CliRunner().invoke(application(), ["move", "r9", "--to", "e0", "--daemon", daemon.address])
    assert unknown.exit_code in (1, 2)
    assert "r9" in unknown.stderr


def read_until(terminal: int, words: str) -> str:
    seen = ""
    deadline_s = time.monotonic() + DEADLINE_S
    while words not in seen:
        assert time.monotonic() < deadline_s, seen
        if select.select([terminal], [], [], 1.0)[0]:
            seen += os.read(terminal, 65536).decode(errors="replace")
    return seen


def test_top_exits_cleanly_on_interrupt() -> None:
    with Serving(FakeDaemon()) as daemon:
        ours, theirs = pty.openpty()
        environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120", "LINES": "40"}
        process = subprocess.Popen(
            [*COMMAND, "top", "--daemon", daemon.address],
            stdin=theirs,
            stdout=theirs,
            stderr=subprocess.PIPE,
            env=environment,
            text=True,
        )
        os.close(theirs)
        read_until(ours, "planner")
        process.send_signal(signal.SIGINT)
        read_until(ours, "\x1b[?1049l")  # back on the terminal's main screen
        _, errors = process.communicate(timeout=DEADLINE_S)
        os.close(ours)
    assert (process.returncode, errors) == (0, "")


def test_journal_follow_exits_cleanly_on_sigterm(daemon: DaemonProcess) -> None:
    process = subprocess.Popen(
        [*COMMAND, "journal", "--follow", "--json", "--kind", "mode", "--daemon", daemon.address],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    daemon.ask("mode", "act")
    first = json.loads(process.stdout.readline())
    assert first["kind"] == "mode"
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, errors) == (0, "")
