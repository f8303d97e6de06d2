"""The service Fabric of a real daemon with virtual switches: commands, a trainer's client, and an agent."""

import asyncio
import contextlib
import json
import shutil
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml
from click.testing import Result
from typer.testing import CliRunner

from orchestrrl.cli.fabric.live import in_window, reasons
from orchestrrl.cli.main import application
from orchestrrl.core.errors import Permanent, ProblemFaults, Retryable
from orchestrrl.fabric.client import FabricClient, announce_period
from orchestrrl.fabric.periods import PeriodState
from orchestrrl.rpc.control_client import ControlClient
from orchestrrl.rpc.pb import fabric_pb2 as pb
from planner.fabric.slack import Signature, SlackLearner
from planner.fabric.slack_summary import summarize
from tests.system.daemons import running_daemon

SITE = Path(__file__).parents[2] / "deploy" / "examples" / "site.yaml"
DEADLINE_S = 120.0
WEIGHTS: dict[str, Any] = {
    "stage": "weight_sync",
    "traffic": [
        {"operation": "WS", "primitive": "broadcast", "groups": [[0]], "receivers": [[16, 18]], "bytes_per_rank": 4e9}
    ],
}
GRADIENTS = {
    "stage": "train",
    "traffic": [{"operation": "DP", "primitive": "ring_all_reduce", "groups": [[0, 8]], "bytes_per_rank": 4e9}],
}


@contextlib.contextmanager
def running(folder: Path, *, fabric: bool) -> Iterator[str]:
    """Run a daemon and yield its address."""
    shutil.copy(SITE, folder / "site.yaml")
    switches = [switch["id"] for switch in yaml.safe_load(SITE.read_text())["switches"]]
    options = {"ports": 64, "connectivity": "any_to_any", "reconfiguration_s": 0.005}
    ocs = [{"id": switch, "driver": "virtual", "options": options} for switch in switches]
    with running_daemon(folder, {"ocs": ocs, **({"fabric": {"site": "site.yaml"}} if fabric else {})}) as stack:
        yield stack.daemon_address


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running(tmp_path_factory.mktemp("fabric"), fabric=True) as address:
        yield address


@pytest.fixture
def daemon(served: str) -> Iterator[str]:
    """Yield the daemon's address, and clear pins, masks and pauses after each test."""
    yield served
    for words in (("fabric", "release"), ("fabric", "mask"), ("fabric", "resume"), ("sync", "resume")):
        assert command(served, *words).exit_code == 0


def command(daemon: str, *words: str) -> Result:
    result = CliRunner().invoke(application(), [*words, "--daemon", daemon])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def printed(result: Result) -> str:
    assert result.exit_code == 0, result.output
    return " ".join(result.stdout.split())


def answer(daemon: str, *words: str) -> Any:
    result = command(daemon, *words, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def intent(folder: Path, body: dict[str, Any]) -> str:
    path = folder / "intent.json"
    path.write_text(json.dumps(body))
    return str(path)


class PlayedAgent:
    """A fake agent on a Trace stream: two ranks of a job on one host."""

    def __init__(self, address: str, job: str = "") -> None:
        self._address = address
        self._job = job
        self._outgoing: asyncio.Queue[pb.TraceMessage] = asyncio.Queue()
        self.armed: list[pb.Arm] = []

    async def run(self) -> None:
        self._outgoing.put_nowait(
            pb.TraceMessage(hello=pb.TraceHello(host="h0", jobs=[pb.JobRanks(job=self._job, ranks=[0, 8])]))
        )
        async with ControlClient(self._address) as client:
            async for order in client.fabric.Trace(self._messages()):
                await self._obey(order)

    async def _obey(self, order: pb.TraceOrder) -> None:
        now_s = time.monotonic()
        match order.WhichOneof("order"):
            case "ping":
                pong = pb.Pong(sent_s=order.ping.sent_s, received_s=now_s, answered_s=now_s)
                self._outgoing.put_nowait(pb.TraceMessage(pong=pong))
            case "arm":
                self.armed.append(order.arm)
                quiet = pb.Quiet(
                    since_s=now_s - 0.001,
                    until_s=now_s + 20.0,
                    armed=order.arm.id,
                    told_s=now_s,
                    job=order.arm.job,
                    samples=50,
                    risk=0.01,
                )
                self._outgoing.put_nowait(pb.TraceMessage(quiet=quiet))
            case "summarise":
                ranks = [{"job": self._job, "summary": asdict(summarize(learner(rank), 0.05))} for rank in (0, 8)]
                shown = json.dumps({"host": "h0", "ranks": ranks})
                self._outgoing.put_nowait(pb.TraceMessage(slack=pb.Slack(summary_json=shown)))

    async def _messages(self) -> AsyncIterator[pb.TraceMessage]:
        while True:
            yield await self._outgoing.get()


def learner(rank: int) -> SlackLearner:
    made = SlackLearner(rank)
    for iteration in range(20):
        made.iteration(iteration, float(iteration))
        made.ended(made.started(Signature("all_reduce", 1, 64), iteration + 0.1), iteration + 0.2)
    return made


@pytest.fixture
def agent(daemon: str) -> Iterator[PlayedAgent]:
    """Run the agent in its own thread, because commands run their own event loop."""
    played, loop = PlayedAgent(daemon), asyncio.new_event_loop()
    task = loop.create_task(played.run())

    def run() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            loop.run_until_complete(task)

    thread = threading.Thread(target=run)
    thread.start()
    wait_for(lambda: any(host["attached"] and host["bound_s"] for host in answer(daemon, "fabric", "status")["hosts"]))
    yield played
    loop.call_soon_threadsafe(task.cancel)
    thread.join()
    loop.close()
    wait_for(lambda: not any(host["attached"] for host in answer(daemon, "fabric", "status")["hosts"]))


def wait_for(condition: Any) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def test_weight_sync_is_committed_at_its_boundary(daemon: str, tmp_path: Path) -> None:
    period = answer(daemon, "fabric", "announce", "weights", "--intent", intent(tmp_path, WEIGHTS), "--boundary")
    assert (period["state"], period["stages_done"]) == ("committed", period["stages"])
    seen = answer(daemon, "fabric", "status")
    assert seen["period"] == "weights"
    assert sum(each["count"] for each in seen["circuits"]) == len(seen["cross_connects"]) > 0
    shown = printed(command(daemon, "fabric", "status"))
    assert "circuits of: weights" in shown
    assert "core0" in shown
    assert "weights committed" in printed(command(daemon, "status"))
    assert "weights" in printed(command(daemon, "fabric", "periods", "--limit", "3"))


def test_training_without_trace_keeps_its_circuits(daemon: str, tmp_path: Path) -> None:
    words = ("fabric", "announce", "gradients", "--intent", intent(tmp_path, GRADIENTS), "--within-s", "0.2")
    assert "no agent reads the recorder of rank 0, 8" in printed(command(daemon, *words))
    shown = printed(command(daemon, "fabric", "periods"))
    assert "no_window" in shown
    assert "gradients: no window opened by the deadline: untraced: no agent reads the recorder of rank 0, 8" in shown


def test_training_is_committed_in_a_reported_window(daemon: str, tmp_path: Path, agent: PlayedAgent) -> None:
    assert printed(command(daemon, "fabric", "announce", "gradients", "--intent", intent(tmp_path, GRADIENTS)))
    latest = answer(daemon, "fabric", "periods", "--limit", "1")["periods"][0]
    assert latest["state"] == "committed"
    first = latest["commits"][0]
    assert first["window_opened_unix_s"] <= first["commanded_unix_s"] <= first["window_until_unix_s"]
    assert first["needed_s"] <= agent.armed[0].need_s + 1e-9
    assert agent.armed[0].quantile == pytest.approx(0.05 / 2)  # windows of two ranks
    shown = printed(command(daemon, "fabric", "status"))
    assert "h0 2" in shown
    assert "attached" in shown


def test_slack_is_requested_from_agents(daemon: str, tmp_path: Path, agent: PlayedAgent) -> None:
    (job,) = answer(daemon, "fabric", "slack")["jobs"]
    assert (job["job"], job["hosts"]) == ("", ["h0"])
    assert [each["ranks"] for each in job["ranks"]] == [[0], [8]]
    picture = tmp_path / "slack.svg"
    shown = printed(command(daemon, "fabric", "slack", "--plot", str(picture)))
    assert "Slack before each operation, 2 ranks" in shown
    assert picture.stat().st_size > 0
    another = command(daemon, "fabric", "slack", "--job", "another")
    assert another.exit_code == 1
    assert "no job 'another' is traced; traced jobs: ''" in another.stderr


def test_slack_without_agents(daemon: str) -> None:
    result = command(daemon, "fabric", "slack")
    assert result.exit_code == 1
    assert "orchestrrl agent --rings" in result.stderr


def test_operator_control_is_shown(daemon: str, tmp_path: Path) -> None:
    command(daemon, "fabric", "announce", "weights", "--intent", intent(tmp_path, WEIGHTS), "--boundary")
    up = answer(daemon, "fabric", "status")["cross_connects"][0]
    name = f"{up['switch_id']}:{up['port_a']}-{up['port_b']}"
    pinned = printed(command(daemon, "fabric", "pin", name, "--reason", "measuring", "--ttl-s", "600"))
    assert f"{name} pinned until" in pinned
    assert name in printed(command(daemon, "status"))
    seen = answer(daemon, "fabric", "status")
    assert [each for each in seen["cross_connects"] if each["pinned"]] == [{**up, "pinned": True}]
    assert "all circuits pinned" in printed(command(daemon, "fabric", "pin"))
    overridden = printed(command(daemon, "fabric", "override", "weights", "--reason", "comparing"))
    assert "circuits of weights, regardless of its job's other periods (comparing)" in overridden
    assert answer(daemon, "fabric", "release")["state"] == "free"

    masked = printed(command(daemon, "fabric", "mask", "port:core0:7", "nic:train0/s1:1", "--reason", "flapping"))
    assert masked == "masked: nic train0/s1:1 masked: port core0:7"
    assert "masked: port core0:7" in printed(command(daemon, "fabric", "status"))
    assert printed(command(daemon, "fabric", "mask")) == "nothing is masked"


@pytest.mark.parametrize("part", ["balancer", "fabric", "sync"])
def test_parts_can_be_paused_and_resumed(daemon: str, part: str) -> None:
    paused = printed(command(daemon, part, "pause", "--reason", "looking", "--ttl-s", "600"))
    assert paused.startswith(f"{part} is paused: looking (since ")
    assert f"{part} is paused: looking" in printed(command(daemon, "status"))
    assert [each["part"] for each in answer(daemon, part, "pause")["pauses"]] == [part]
    assert printed(command(daemon, part, "resume")) == f"{part} resumed"
    assert printed(command(daemon, part, "resume")) == f"{part} was not paused"


def test_pause_keeps_periods(daemon: str, tmp_path: Path) -> None:
    assert answer(daemon, "fabric", "announce", "weights", "--intent", intent(tmp_path, WEIGHTS), "--boundary")
    answer(daemon, "sync", "pause", "--reason", "looking")
    others = {**WEIGHTS, "traffic": [{**WEIGHTS["traffic"][0], "receivers": [[24, 26]]}]}
    words = ("fabric", "announce", "others", "--intent", intent(tmp_path, others), "--boundary")
    kept = answer(daemon, *words)
    assert kept["state"] == "kept"
    assert "looking" in kept["detail"]
    answer(daemon, "sync", "resume")
    assert answer(daemon, "fabric", "announce", "others", "--boundary")["state"] == "committed"


@pytest.mark.parametrize(
    ("words", "faults"),
    [
        (
            ("pin", "core0:1", "nowhere:1-2", "--ttl-s", "-1"),
            ["cross_connects[0]: must be SWITCH", "cross_connects[1]: must be on a switch", "ttl_s: must be >= 0"],
        ),
        (
            ("mask", "port:nowhere:1", "thing"),
            ["masked[0]: must name a component of the site", "masked[1]: must be switch"],
        ),
        (
            ("announce", "", "--intent", "missing.json", "--within-s", "-1"),
            ["--within-s: must be >= 0, got -1", "missing.json: No such file"],
        ),
        (("pause", "--ttl-s", "-1"), ["--ttl-s: must be >= 0 (0: until resumed), got -1"]),
        (
            ("slack", "--risk", "7", "--plot", "a.txt"),
            ["--risk: must be > 0 and < 1, got 7", "--plot: must end in", "--risk: requires TRACE.jsonl"],
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_all_errors_are_reported_at_once(daemon: str, words: tuple[str, ...], faults: list[str]) -> None:
    result = command(daemon, "fabric", *words)
    assert result.exit_code == 2
    lines = result.stderr.splitlines()
    assert len(lines) == len(faults)
    for line, fault in zip(lines, faults, strict=True):
        assert line.startswith(fault), line


def test_unknown_period_is_not_a_usage_error(daemon: str) -> None:
    result = command(daemon, "fabric", "announce", "unheard")
    assert result.exit_code == 1
    assert "was never announced with an intent" in result.stderr
    assert command(daemon, "fabric", "override", "unheard").exit_code == 1


async def test_trainer_client_waits_until_the_period_ends(daemon: str) -> None:
    async with FabricClient(daemon) as fabric:
        report = await fabric.announce("weights", WEIGHTS, boundary=True)
        assert report.state is PeriodState.COMMITTED
        assert report.over
        states = [each.state async for each in fabric.follow("weights", boundary=True)]
        assert states[0] is PeriodState.ANNOUNCED
        assert states[-1] is PeriodState.COMMITTED
        first = await fabric.announce_nowait("weights")
        assert first.period == "weights"
        with pytest.raises(Permanent, match="never announced"):
            await fabric.announce("unheard")
        with pytest.raises(ProblemFaults, match=r"intent\.stage"):
            await fabric.announce("weights", {"stage": "lunch", "traffic": []})


def test_synchronous_client_announces(daemon: str) -> None:
    report = announce_period("weights", WEIGHTS, daemon=daemon, boundary=True)
    assert report.state is PeriodState.COMMITTED
    assert announce_period("weights", daemon=daemon, wait=False).period == "weights"
    with pytest.raises(ValueError, match="boundary"):
        announce_period("weights", daemon=daemon, boundary=True, wait=False)


def test_unreachable_daemon_is_reported_to_the_trainer(tmp_path: Path) -> None:
    with pytest.raises(Retryable, match="no daemon"):
        announce_period("weights", WEIGHTS, daemon=f"unix:{tmp_path}/none")


async def test_agent_must_send_hello_first(daemon: str) -> None:
    async def ping() -> AsyncIterator[pb.TraceMessage]:
        yield pb.TraceMessage(pong=pb.Pong(sent_s=1.0))

    async with ControlClient(daemon) as client:
        call = client.fabric.Trace(ping())
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_daemon_without_fabric_is_reported(tmp_path: Path) -> None:
    with running(tmp_path, fabric=False) as address:
        for words in (("status",), ("periods",), ("announce", "x"), ("pin",), ("mask",), ("release",)):
            result = command(address, "fabric", *words)
            assert result.exit_code == 1, words
            assert "fabric.site" in result.stderr
        with pytest.raises(Permanent, match=r"fabric\.site"):
            announce_period("weights", WEIGHTS, daemon=address)


def test_commit_is_drawn_in_its_window() -> None:
    def drawn(opened_s: float, commanded_s: float, usable_s: float, until_s: float) -> str:
        commit = {
            "window_opened_unix_s": opened_s,
            "commanded_unix_s": commanded_s,
            "usable_unix_s": usable_s,
            "window_until_unix_s": until_s,
        }
        return in_window(commit, columns=10)

    assert drawn(0, 1, 5, 10) == "─████─────"
    assert drawn(0, 0, 0.01, 10) == "█─────────"
    assert drawn(0, 9.9, 10, 10) == "─────────█"
    assert drawn(0, 8, 12, 10) == "────────██>"
    assert drawn(0, 0, 1, 0) == ""


def test_reasons_are_listed_once() -> None:
    periods = [
        {"announced_unix_s": 0.0, "period": name, "code": code, "detail": detail}
        for name, code, detail in (("a", "x", "one"), ("a", "x", "two"), ("b", "x", "three"), ("b", "", ""))
    ]
    assert [line.partition(" ")[2] for line in reasons(periods)] == ["a: one", "b: three", ""]
