"""`orchestrrl engines` against a real daemon's control plane, served over gRPC in its own thread."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from builders import engine_report, gateway_hello, gateway_report, request, sample
from prometheus_client import CollectorRegistry
from typer.testing import CliRunner, Result

from orchestrrl.cli.command import DAEMON_VARIABLE
from orchestrrl.cli.main import application
from orchestrrl.core.clock import WallClock
from orchestrrl.core.config.schema import ListenSettings
from orchestrrl.core.journal.store import Journal
from orchestrrl.core.nodes import Attachment
from orchestrrl.core.operations import MoveRequests, OperationItemResult, OperationResult, status_of
from orchestrrl.daemon.configuration import parse_config
from orchestrrl.daemon.metrics import DaemonCollector
from orchestrrl.daemon.wiring import build_daemon
from orchestrrl.rpc.pb import control_pb2, control_pb2_grpc
from orchestrrl.rpc.server import DaemonServer
from orchestrrl.rpc.switches_service import SwitchesService
from planner.model import NodeId

CONFIG = """
fleet:
  gpus: {count: 6}
  configurations:
    - {id: tp2, gpus: 2, alpha_s: 0.02, beta_s: 1e-4, gamma_s: 4e-8, kv_capacity_tokens: 100000, max_sequences: 4,
       prefill_tokens_per_s: 9000, switch_s: 1.5}
  engines:
    - {id: e0, url: "http://e0", configuration: tp2, gpus: [0, 1]}
    - {id: e1, url: "http://e1", configuration: tp2, gpus: [2, 3], pool: long}
"""


class Daemon:
    """A control plane and its server. A gateway has `a` and `b` on e0 and carries out moves; e0 has an agent."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self.address = ""
        self.where = {"a": "e0", "b": "e0"}
        self.immovable: set[str] = set()

    def __enter__(self) -> "Daemon":
        self._thread.start()
        assert self._ready.wait(60)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()

    def pin(self, id: str) -> None:
        """Make the request immovable, and return when the daemon has received the report of it."""
        self.immovable = {id}
        received = False
        while not received:
            command = ["requests", "--json", "--daemon", self.address]
            requests = json.loads(CliRunner().invoke(application(), command).stdout)["requests"]
            received = any(not view["movable"] for view in requests)

    async def _serve(self) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        clock = WallClock()
        with Journal(self._folder / "journal.sqlite", clock.now_s()) as journal:
            self.parts = build_daemon(parse_config(CONFIG), journal, clock)
            self.plane = self.parts.control_plane
            server = await DaemonServer.start(
                self.parts, ListenSettings(address="127.0.0.1:0"), SwitchesService({}, self.parts.circuits)
            )
            self.address = server.address
            attachment = self.plane.fleet.attach(gateway_hello())
            tasks = [asyncio.create_task(part) for part in (self._report(), self._obey(attachment))]
            await asyncio.sleep(0)
            self._ready.set()
            await self._end.wait()
            for task in tasks:
                task.cancel()
            await server.stop(0.1)

    async def _report(self) -> None:
        sequence = 0
        while True:
            sequence += 1
            on_e0 = sum(engine == "e0" for engine in self.where.values())
            self.plane.fleet.engine_reported(engine_report("e0", sequence, sample(running=on_e0)), 1)
            views = [request(id, on, movable=id not in self.immovable) for id, on in self.where.items()]
            self.plane.fleet.gateway_reported(gateway_report(*views, sequence=sequence), 1)
            self.plane.fast_tick()
            await asyncio.sleep(0.05)

    async def _obey(self, attachment: Attachment) -> None:
        async for operation in attachment.orders():
            if isinstance(operation.action, MoveRequests):
                for move in operation.action.moves:
                    self.where[move.request] = move.to_engine
                items = tuple(OperationItemResult(move.request, True) for move in operation.action.moves)
                self.plane.fleet.result_received(
                    OperationResult(operation.id, NodeId("gw"), status_of(items), items=items)
                )


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    with Daemon(tmp_path) as running:
        yield running


@pytest.fixture
def run(daemon: Daemon) -> Callable[..., Result]:
    def invoke(*words: str) -> Result:
        return CliRunner().invoke(application(), ["engines", *words], env={DAEMON_VARIABLE: daemon.address})

    return invoke


Run = Callable[..., Result]


def printed(result: Result) -> str:
    assert result.exit_code == 0, result.output
    return " ".join(result.stdout.split())


def listed(run: Run) -> dict[str, dict[str, Any]]:
    engines = json.loads(run("list", "--json").stdout)["engines"]
    return {engine["engine_id"]: engine for engine in engines}


def test_list_shows_engines_without_agent(run: Run) -> None:
    text = printed(run("list"))
    assert "e0 serving ok 2 2 0 - tp2 http://e0" in text
    assert "e1 serving no agent 0 - - long tp2 http://e1" in text
    assert "no agent reports e1: its health is judged by gateways only" in text


def test_added_engine_is_listed(run: Run) -> None:
    text = printed(run("add", "e2", "--url", "http://e2", "--configuration", "tp2", "--gpus", "4,5", "--pool", "long"))
    assert text.startswith("e2 added: gateways send requests to it no agent reports e2")
    e2 = listed(run)["e2"]
    assert (e2["url"], e2["configuration"], e2["pool"], e2["reported"]) == ("http://e2", "tp2", "long", False)
    again = run("add", "e2", "--url", "http://e2", "--json")
    assert again.exit_code == 2
    assert "engine_id: is in use by the engine at http://e2; remove that engine first, got 'e2'" in again.stderr


@pytest.mark.parametrize(
    ("words", "faults"),
    [
        (
            ["add", " ", "--url", "e9", "--gpus", "1,x,-2"],
            [
                "ID: must not be empty, got ' '",
                "--url: must be an http:// or https:// URL, got 'e9'",
                "--gpus: must be numbers and ascending ranges up to 1048576, such as '1-4,9', got '1,x,-2'",
            ],
        ),
        (
            ["add", "e0", "--url", "http://e1", "--configuration", "tp8", "--gpus", "3,9"],
            [
                "engine_id: is in use by the engine at http://e0; remove that engine first, got 'e0'",
                "url: is in use by engine e1, got 'http://e1'",
                "configuration: is not a known configuration (known: tp2), got 'tp8'",
                "gpus[0]: is in use by e1, got 3",
                "gpus[1]: must be less than fleet.gpus.count (6), got 9",
            ],
        ),
        (["drain", "e9"], ["engine_id: must be a known engine (e0, e1), got 'e9'"]),
        (
            ["drain", "e0", "--undo", "--move", "--wait"],
            ["--move: cannot go with --undo", "--wait: cannot go with --undo"],
        ),
        (["remove", "e9"], ["engine_id: must be a known engine (e0, e1), got 'e9'"]),
    ],
    ids=lambda words: " ".join(words[:2]),
)
def test_all_errors_are_reported_at_once(run: Run, words: list[str], faults: list[str]) -> None:
    refused = run(*words)
    assert (refused.exit_code, refused.stdout, refused.stderr.splitlines()) == (2, "", faults)
    assert not any(engine["draining"] for engine in listed(run).values())


def test_drain_waits_until_requests_moved_or_ended(daemon: Daemon, run: Run) -> None:
    daemon.pin("b")
    late = run("drain", "e0", "--move", "--wait", "--timeout-s", "3")
    assert late.exit_code == 1
    assert "e0: 2 requests" in late.stderr
    assert "engine e0 is not empty after 3 s and is still draining: 1 request" in late.stderr
    assert daemon.where == {"a": "e1", "b": "e0"}
    assert "e0 draining ok 1 1 0" in printed(run("list"))
    daemon.where.pop("b")
    assert printed(run("drain", "e0", "--wait")) == "e0 is drained: no requests"
    assert "e0 drained ok 0 0 0" in printed(run("list"))
    assert printed(run("drain", "e0", "--undo")) == "e0 accepts requests again"
    assert not listed(run)["e0"]["draining"]


def test_drain_of_the_last_engine_warns(run: Run) -> None:
    first = run("drain", "e1")
    assert (printed(first), first.stderr) == ("e1 is draining: 0 requests", "")
    last = run("drain", "e0", "--json")
    assert json.loads(last.stdout)["requests"] == 2
    assert last.stderr.startswith("no engine accepts requests now")


def test_wait_ends_when_the_drain_is_undone(daemon: Daemon, run: Run) -> None:
    timer = threading.Timer(0.5, lambda: daemon._loop.call_soon_threadsafe(_undrain, daemon))
    timer.start()
    ended = run("drain", "e0", "--wait")
    timer.join()
    assert ended.exit_code == 1
    assert "engine e0 is no longer draining" in ended.stderr


def _undrain(daemon: Daemon) -> None:
    engine = next(view.id for view in daemon.plane.fleet.state.engines(daemon.plane.clock.now_s()) if view.id == "e0")
    daemon.plane.fleet.membership_changes.undrain(engine)


def test_remove_with_requests_requires_force(daemon: Daemon, run: Run) -> None:
    refused = run("remove", "e0")
    assert (refused.exit_code, refused.stdout) == (1, "")
    assert "engine e0 cannot be removed while it has 2 requests; empty it with `orchestrrl engines" in refused.stderr
    assert "drain e0 --move --wait`" in refused.stderr
    daemon.pin("a")
    forced = printed(run("remove", "e0", "--force"))
    assert forced == "e0 removed; requests moved to other engines: 1, finishing on it: 1"
    assert list(listed(run)) == ["e1"]
    run("add", "e2", "--url", "http://e2")
    removed = json.loads(run("remove", "e2", "--json").stdout)
    assert removed == {"engine_id": "e2", "requests_moved": 0, "requests_left": 0}


def test_engines_are_counted_by_state(daemon: Daemon, run: Run) -> None:
    run("drain", "e0")
    run("remove", "e1")
    run("add", "e2", "--url", "http://e2")
    registry = CollectorRegistry()
    registry.register(DaemonCollector(daemon.parts))
    counts = {state: registry.get_sample_value("orchestrrl_engines", {"state": state}) for state in STATES}
    assert counts == {"serving": 1, "draining": 1, "drained": 0, "removed": 1}


STATES = ("serving", "draining", "drained", "removed")


def test_status_and_top_show_draining(daemon: Daemon, run: Run) -> None:
    run("drain", "e0")
    for words in (["status"], ["workers"], ["top", "--once"]):
        shown = CliRunner().invoke(application(), words, env={DAEMON_VARIABLE: daemon.address})
        assert "ok, draining" in " ".join(printed(shown).split())
    assert "long" in printed(CliRunner().invoke(application(), ["status"], env={DAEMON_VARIABLE: daemon.address}))


async def test_invalid_grpc_requests_are_invalid_arguments(daemon: Daemon) -> None:
    async with grpc.aio.insecure_channel(daemon.address) as channel:
        control = control_pb2_grpc.ControlStub(channel)
        for call in (
            control.DrainEngine(control_pb2.DrainEngineRequest(engine_id="e0", undo=True, move_requests=True)),
            control.DrainEngine(control_pb2.DrainEngineRequest()),
            control.AddEngine(control_pb2.AddEngineRequest()),
            control.RemoveEngine(control_pb2.RemoveEngineRequest()),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await control.RemoveEngine(control_pb2.RemoveEngineRequest(engine_id="e0"))
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        worker = await control.DrainEngine(control_pb2.DrainEngineRequest(engine_id="e0", reason="test"))
        assert (worker.engine_id, worker.draining, worker.requests, worker.reported) == ("e0", True, 2, True)
