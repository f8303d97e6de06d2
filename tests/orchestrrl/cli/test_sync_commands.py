"""`orchestrrl sync` against a daemon's service that transfers no weights: output and exit statuses."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from click.testing import Result
from fake_syncs import PEERS, FakePeers, FakeSyncs, carrying, done
from typer.testing import CliRunner

from orchestrrl.cli.main import application
from orchestrrl.core.clock import WallClock
from orchestrrl.rpc.channel import SERVER_OPTIONS
from orchestrrl.rpc.pb import weights_pb2 as pb
from orchestrrl.rpc.pb import weights_pb2_grpc
from orchestrrl.rpc.weights_service import WeightsService
from orchestrrl.weights.controller.reports import EngineStatus, EngineSync, SyncPhase, SyncReport, SyncState
from planner.model import EngineId

DEADLINE_S = 120.0


class Daemon:
    """A daemon served in its own thread, because commands run their own event loop."""

    def __init__(self, syncs: FakeSyncs) -> None:
        self.syncs = syncs
        self.address = ""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)

    def __enter__(self) -> "Daemon":
        self._thread.start()
        self.do(self._start)
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._server.stop(0), self._loop).result(DEADLINE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(DEADLINE_S)
        self._loop.close()

    def do(self, what: Callable[[], Any]) -> Any:
        """Run an action in the daemon's thread."""

        async def there() -> Any:
            made = what()
            return await made if asyncio.iscoroutine(made) else made

        future: Future[Any] = asyncio.run_coroutine_threadsafe(there(), self._loop)
        return future.result(DEADLINE_S)

    async def _start(self) -> None:
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        service = WeightsService(self.syncs, FakePeers(), WallClock())
        weights_pb2_grpc.add_WeightsServicer_to_server(service, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with Daemon(FakeSyncs()) as running:
        yield running


def command(daemon: Daemon, *words: str) -> Result:
    result = CliRunner().invoke(application(), ["sync", *words, "--daemon", daemon.address])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def printed(daemon: Daemon, *words: str) -> str:
    result = command(daemon, *words)
    assert result.exit_code == 0, result.output
    return " ".join(result.stdout.split())


def answer(daemon: Daemon, *words: str) -> Any:
    result = command(daemon, *words, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def fleet(daemon: Daemon, *reports: SyncReport, committed: int | None = 7) -> None:
    daemon.syncs.committed = committed
    daemon.syncs.peers = PEERS
    for report in reports:
        daemon.syncs.change(report)


# --- no syncs yet


def test_daemon_without_weights_is_reported(daemon: Daemon) -> None:
    shown = printed(daemon, "status")
    assert "no version committed yet" in shown
    assert "No peer is attached" in shown
    assert "No version has been published yet" in printed(daemon, "history")
    assert answer(daemon, "status") == {"committed_version": None, "sync": None, "quarantined": [], "peers": []}
    for words in (("profile",), ("profile", "--limit", "3"), ("watch",), ("abort",), ("install",)):
        result = command(daemon, *words)
        assert result.exit_code == 1, words
        assert result.stdout == ""
        assert "no weight sync" in result.stderr


def test_unreachable_daemon_is_reported(daemon: Daemon) -> None:
    result = CliRunner().invoke(application(), ["sync", "status", "--daemon", "127.0.0.1:1"])
    assert result.exit_code == 1
    assert "no daemon at 127.0.0.1:1" in result.stderr


# --- status


def test_status_shows_progress_and_stragglers(daemon: Daemon) -> None:
    fleet(daemon, done(7), replace(carrying(8), attempt=2, mended_edges=1, notes=("gen1 -> gen2 went silent",)))
    daemon.syncs.quarantined = (EngineStatus(EngineId("e2"), EngineSync.QUARANTINED, "loads version 7 again"),)
    shown = printed(daemon, "status")
    assert "weights of the fleet: version 7" in shown
    assert "version 8 (sync-8): carrying, phase A for" in shown
    assert "attempt 2" in shown
    assert "62 % of 4 GB over 4 edges (2 GB of weights), 1 of 4 edges failed and were replaced" in shown
    assert "late: e1 (gen1 has 500 MB of 2 GB)" in shown
    assert "gen1 -> gen2 went silent" in shown
    assert "quarantined e2: loads version 7 again" in shown
    assert "gen0 engine node1 gen0 gen0-tor0 e0 7-8 attached" in shown
    assert "gen1 engine node2 gen0 gen0-tor0 e1 7 gone" in shown
    seen = answer(daemon, "status")
    assert (seen["committed_version"], seen["sync"]["arrived_bytes"]) == (7, 2_500_000_000)
    assert [peer["peer_id"] for peer in seen["peers"]] == ["train0", "gen0", "gen1"]


def test_status_names_ranks_that_have_not_published(daemon: Daemon) -> None:
    fleet(daemon, replace(carrying(8), state=SyncState.PUBLISHING, world=8, published=(0, 1, 5), engines=()))
    assert "not published yet: ranks 2-4, 6-7 of 8" in printed(daemon, "status")


def test_status_of_an_ended_sync_shows_its_outcome(daemon: Daemon) -> None:
    fleet(
        daemon, replace(done(8), state=SyncState.ABORTED, code="probe_differs", detail="e0 and e1 answer differently")
    )
    shown = printed(daemon, "status")
    assert "last: version 8 (sync-8): aborted (probe_differs) in 4 s: e0 and e1 answer differently" in shown


# --- history


def test_history_lists_syncs_and_failures(daemon: Daemon) -> None:
    failed = replace(done(8), state=SyncState.ABORTED, code="verify_failed", detail="e1 holds other bytes")
    fleet(daemon, done(6), done(7), failed)
    lines = command(daemon, "history").stdout.splitlines()
    rows = [line.split() for line in lines if line.strip()[:1].isdigit()]
    assert [row[0] for row in rows] == ["8", "7", "6"]
    assert rows[1][2:] == ["done", "4", "s", "2", "s", "1", "s", "1.5", "s", "2", "1.11", "1.25", "2", "of", "2"]
    assert "aborted: verify_failed" in " ".join(rows[0])
    assert any("e1 holds other bytes" in line for line in lines)
    assert len(answer(daemon, "history", "--limit", "2")["syncs"]) == 2


# --- profile


OFFLOADING = done(9, (SyncPhase.OFFLOAD, 227.3), (SyncPhase.PHASE_A, 1.7), (SyncPhase.INSTALL, 1.5))


def test_profile_shows_phases_edges_and_advice(daemon: Daemon) -> None:
    fleet(daemon, done(7), replace(OFFLOADING, estimate_s=1.5))
    shown = printed(daemon, "profile")
    assert "version 9 (sync-9): done in 3 min 50 s" in shown
    assert "critical path: trainer offload 3 min 47 s" in shown
    assert "trainer offload 3 min 47 s 99 %" in shown
    assert "phase A 1.7 s 1 %" in shown
    assert "transfer: 1.7 s, 1 % of the total, 18.8 Gb/s over all edges; 1.13 x the estimate of 1.5 s" in shown
    assert "train0 -> gen0 A 2 1.9 s 1.6 s 8.42" in shown
    assert "advice: trainer offload takes 227 s, 99 % of the whole" in shown
    assert "advice: install takes 1 s, 25 % of the whole" in printed(daemon, "profile", "7")


def test_profile_as_json(daemon: Daemon) -> None:
    fleet(daemon, done(7), OFFLOADING)
    seen = answer(daemon, "profile", "9")
    assert seen["version"] == 9
    assert seen["dominating"] == "offload"
    assert seen["whole_s"] == pytest.approx(230.5)
    assert [row["phase"] for row in seen["phases"]] == ["offload", "phase_a", "install"]
    assert [each["code"] for each in seen["advice"]] == ["offload"]
    assert seen["slowest"][0]["gbps"] == pytest.approx(16 / 1.9)
    both = answer(daemon, "profile", "--limit", "5")
    assert [each["version"] for each in both["profiles"]] == [9, 7]


def test_profile_of_several_syncs_shows_medians_and_advice(daemon: Daemon) -> None:
    fleet(daemon, done(7), OFFLOADING, replace(OFFLOADING, id="sync-10", version=10), carrying(11))
    shown = printed(daemon, "profile", "--limit", "5")
    assert "Phases of 3 versions" in shown
    assert "trainer offload 3 min 47 s 3 min 47 s" in shown
    assert "advice (2 of 3): trainer offload takes 227 s" in shown


def test_profile_of_a_running_sync(daemon: Daemon) -> None:
    fleet(daemon, carrying(8))
    assert "version 8 (sync-8): carrying" in printed(daemon, "profile")


def test_picture_is_drawn_or_the_error_is_reported(daemon: Daemon, tmp_path: Path) -> None:
    waiting = done(8, *[(phase, 0.5) for phase in SyncPhase])
    fleet(daemon, done(7), waiting, carrying(9))
    target = tmp_path / "syncs.png"
    assert f"wrote {target}" in printed(daemon, "profile", "--limit", "2", "--plot", str(target))
    assert target.read_bytes().startswith(b"\x89PNG")
    assert answer(daemon, "profile", "--plot", str(tmp_path / "one.svg"))["version"] == 9
    assert (tmp_path / "one.svg").stat().st_size > 1000
    for bad in (tmp_path / "no" / "such.png", tmp_path / "syncs.exe"):
        result = command(daemon, "profile", "--plot", str(bad))
        assert result.exit_code == 2
        assert result.stderr.startswith("--plot: ")


def test_version_is_checked_before_the_daemon_is_called(daemon: Daemon) -> None:
    for words in (("profile", "-1"), ("profile", str(2**64)), ("profile", "7", "--limit", "2"), ("profile", "x")):
        result = command(daemon, *words)
        assert result.exit_code == 2, words
        assert result.stdout == ""


# --- abort, install and watch


def test_abort_and_install_send_sync_and_reason(daemon: Daemon) -> None:
    fleet(daemon, replace(carrying(8), state=SyncState.PREPARED))
    shown = printed(daemon, "install", "sync-8", "--reason", "now")
    assert shown == "version 8 (sync-8) is being installed; watch it with orchestrrl sync watch"
    assert "aborted (operator)" in printed(daemon, "abort", "--reason", "not a number")
    assert daemon.syncs.asked == [("install", "sync-8", "now"), ("abort", "", "not a number")]
    result = command(daemon, "abort")
    assert result.exit_code == 1
    assert "sync-8 is over" in result.stderr


@pytest.mark.parametrize(
    ("ended", "status"),
    [
        (done(8), 0),
        (replace(done(8), code="some_quarantined", detail="e1 has not got it"), 1),
        (replace(done(8), state=SyncState.ABORTED, code="peer_lost", detail="gen1 has gone"), 1),
        (replace(done(8), state=SyncState.SUPERSEDED, code="superseded", detail="version 9 came first"), 1),
    ],
)
@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_watch_ends_with_the_outcome(daemon: Daemon, ended: SyncReport, status: int, flags: tuple[str, ...]) -> None:
    fleet(daemon, carrying(8))
    steps = [replace(carrying(8), state=state) for state in (SyncState.PREPARED, SyncState.FENCING)]

    async def goes_on() -> None:
        while not daemon.syncs.followed:
            await asyncio.sleep(0.005)
        for report in (*steps, ended):
            daemon.syncs.change(report)

    story = threading.Thread(target=lambda: daemon.do(goes_on))
    story.start()
    result = command(daemon, "watch", *flags)
    story.join(DEADLINE_S)
    assert result.exit_code == status
    shown = result.stderr if flags else result.stdout
    assert [word for word in ("carrying", "prepared", "fencing", str(ended.state)) if word in shown] == [
        "carrying",
        "prepared",
        "fencing",
        ended.state,
    ]
    if flags:
        assert json.loads(result.stdout)["state"] == ended.state
    if status:
        assert result.stderr.splitlines()[-1] == f"version 8 is {ended.state}: {ended.detail}"


def test_watch_of_an_ended_sync_shows_its_outcome(daemon: Daemon) -> None:
    fleet(daemon, done(8))
    assert "version 8 (sync-8): done in 4 s: 2 engines have it" in printed(daemon, "watch")


def test_watch_continues_while_the_daemon_is_unreachable(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orchestrrl.cli.progress.POLL_EVERY_S", 0.01)
    fleet(daemon, carrying(8))
    broke = threading.Event()
    follow = daemon.syncs.follow

    async def breaks(sync_id: str) -> Any:
        if not broke.is_set():
            yield daemon.syncs.report(sync_id)
            broke.set()
            return  # as a stopping daemon does
        daemon.syncs.change(done(8))
        async for report in follow(sync_id):
            yield report

    monkeypatch.setattr(daemon.syncs, "follow", breaks)
    result = command(daemon, "watch")
    assert result.exit_code == 0
    assert "the daemon is unreachable" in result.stderr
    assert "done in 4 s" in result.stdout


def test_newer_daemon_is_reported(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet(daemon, done(8))
    monkeypatch.setattr(
        "orchestrrl.rpc.weights_service.report_to_pb",
        lambda report, **_: pb.SyncReport(state="pondering"),
    )
    result = command(daemon, "profile")
    assert result.exit_code == 1
    assert "because the daemon is newer than this command" in result.stderr
