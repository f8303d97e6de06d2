"""`orchestrrl daemon` and `check-config` as processes: addresses, signals, exit statuses, a kill and a restart."""

import asyncio
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml
from builders import GATEWAY, engine_report, gateway_hello, gateway_report, request, sample

from orchestrrl.core.clock import WallClock
from orchestrrl.core.journal.store import EntryKind, JournalReader
from orchestrrl.core.operations import (
    MoveRequests,
    Operation,
    OperationItemResult,
    OperationResult,
    OperationStatus,
)
from orchestrrl.rpc.codecs import node as node_codec
from orchestrrl.rpc.codecs import telemetry as telemetry_codec
from orchestrrl.rpc.node import NodeLink, ReportStream
from orchestrrl.rpc.pb import control_pb2, control_pb2_grpc, telemetry_pb2_grpc

DEADLINE_S = 120.0


ORCHESTRRL = (sys.executable, "-m", "orchestrrl")


class Daemon:
    def __init__(self, config: Path, *flags: str) -> None:
        command = [*ORCHESTRRL, "daemon", "-c", str(config), *flags]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.errors: list[str] = []
        threading.Thread(target=self._listen, daemon=True).start()
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip()  # empty: the daemon ended before it listened

    def _listen(self) -> None:
        assert self.process.stderr is not None
        self.errors.extend(self.process.stderr)

    def logged(self, text: str) -> bool:
        return any(text in line for line in self.errors)

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(DEADLINE_S)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Daemon]]:
    started: list[Daemon] = []

    def make(*flags: str, **sections: Any) -> Daemon:
        path = tmp_path / "config.yaml"
        document = {
            "listen": {"address": "127.0.0.1:0"},
            "journal": {"path": str(tmp_path / "journal.sqlite")},
            "fast": {"interval_s": 0.1},
            **sections,
        }
        path.write_text(yaml.safe_dump(document))
        started.append(Daemon(path, *flags))
        return started[-1]

    yield make
    for daemon in started:
        if daemon.process.poll() is None:
            daemon.process.kill()
        daemon.process.wait()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s, "did not happen in time"
        time.sleep(0.02)


async def ask_status(address: str) -> Any:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = control_pb2_grpc.ControlStub(channel)
        return await stub.GetStatus(control_pb2.GetStatusRequest(), wait_for_ready=True, timeout=DEADLINE_S)


@pytest.mark.smoke
def test_daemon_prints_its_address_and_stops_cleanly(start: Callable[..., Daemon], tmp_path: Path) -> None:
    daemon = start("--mode", "act", listen={"address": "127.0.0.1:0", "socket": str(tmp_path / "s")})
    assert daemon.address, daemon.errors
    status = asyncio.run(ask_status(daemon.address))
    assert status.mode == control_pb2.MODE_ACT
    assert asyncio.run(ask_status(f"unix:{tmp_path / 's'}")).generation == status.generation
    assert daemon.end() == 0
    assert not daemon.logged("Traceback")
    assert JournalReader(tmp_path / "journal.sqlite").tail(1)[0].kind == EntryKind.DAEMON_STOPPED


def test_port_or_journal_in_use_is_reported(start: Callable[..., Daemon], tmp_path: Path) -> None:
    first = start()
    same_journal = start()
    assert first.address, first.errors
    assert same_journal.process.wait(DEADLINE_S) == 1
    wait_for(lambda: same_journal.logged("another daemon already uses this journal"))
    other = {"journal": {"path": str(tmp_path / "other.sqlite")}}
    same_port = start(listen={"address": first.address}, **other)
    assert same_port.process.wait(DEADLINE_S) == 1
    wait_for(lambda: same_port.logged(f"cannot listen on {first.address}: it is in use"))
    same_metrics = start(metrics={"address": first.address}, **other)
    assert same_metrics.process.wait(DEADLINE_S) == 1
    wait_for(lambda: same_metrics.logged(f"cannot serve metrics on {first.address}"))
    assert not any(daemon.logged("Traceback") for daemon in (same_journal, same_port, same_metrics))


def test_invalid_reload_keeps_the_old_configuration(start: Callable[..., Daemon], tmp_path: Path) -> None:
    daemon = start()
    path = tmp_path / "config.yaml"
    good = path.read_text()
    path.write_text(good + "\nmode: perhaps")
    daemon.process.send_signal(signal.SIGHUP)
    wait_for(lambda: daemon.logged("mode: should be 'advise' or 'act', got 'perhaps'"))
    assert asyncio.run(ask_status(daemon.address)).mode == control_pb2.MODE_ADVISE
    path.write_text(good + "\nmode: act")
    daemon.process.send_signal(signal.SIGHUP)
    wait_for(lambda: asyncio.run(ask_status(daemon.address)).mode == control_pb2.MODE_ACT)
    assert daemon.end() == 0


@pytest.mark.smoke
async def test_restarted_daemon_finds_its_node_and_open_operation(start: Callable[..., Daemon]) -> None:
    """The node carries out a move, and the daemon is killed before it receives the result."""
    daemon = start("--mode", "act")
    carrying_out, killed = asyncio.Event(), asyncio.Event()

    async def handle(operation: Operation) -> OperationResult:
        moves = operation.action.moves if isinstance(operation.action, MoveRequests) else ()
        if moves:
            carrying_out.set()
            await killed.wait()
        items = tuple(OperationItemResult(move.request, True) for move in moves)
        return OperationResult(operation.id, GATEWAY, OperationStatus.DONE, items=items)

    sequence = 0

    async def report() -> Any:
        nonlocal sequence
        sequence += 1
        return telemetry_codec.GATEWAY_REPORT.to_pb(gateway_report(request("a"), sequence=sequence))

    clock = WallClock()
    hello = node_codec.HELLO.to_pb(gateway_hello("e0", "e1"))
    link = NodeLink(daemon.address, hello, handle, clock=clock)
    reports = ReportStream(daemon.address, "ReportRequests", report, 0.1, clock=clock)
    node = [asyncio.create_task(link.run()), asyncio.create_task(reports.run())]
    try:
        async with asyncio.timeout(DEADLINE_S):
            await _agent_says_ok(daemon.address)
            asking = asyncio.create_task(_move(daemon.address))
            await carrying_out.wait()
            daemon.process.kill()
            daemon.process.wait()
            killed.set()
            with pytest.raises(grpc.aio.AioRpcError):
                await asking
            again = await asyncio.to_thread(start, "--mode", "act", listen={"address": daemon.address})
            assert again.address == daemon.address
            while (status := await ask_status(again.address)).requests_running != 1 or status.moves_done != 1:
                await asyncio.sleep(0.05)
        assert [(held.node_id, held.attached) for held in status.nodes] == [("gw", True)]
        assert await asyncio.to_thread(again.end) == 0
    finally:
        for task in node:
            task.cancel()
        await asyncio.gather(*node, return_exceptions=True)


async def _agent_says_ok(address: str) -> None:
    """Send one report of an agent for each engine, and return when the daemon has folded them."""
    async with grpc.aio.insecure_channel(address) as channel:
        call = telemetry_pb2_grpc.TelemetryStub(channel).ReportEngines()
        for number, engine in enumerate(("e0", "e1"), 1):
            await call.write(telemetry_codec.ENGINE_REPORT.to_pb(engine_report(engine, number, sample())))
            await call.read()
        call.cancel()
    while (await ask_status(address)).requests_running != 1:
        await asyncio.sleep(0.05)


async def _move(address: str) -> Any:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = control_pb2_grpc.ControlStub(channel)
        return await stub.MoveRequest(control_pb2.MoveRequestRequest(request_id="a", to_engine_id="e1"))
