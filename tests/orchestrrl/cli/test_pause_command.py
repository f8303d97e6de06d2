"""`orchestrrl pause` and `orchestrrl cancel`, through Typer's runner and real gRPC, against fixed responses."""

import json
from collections.abc import Iterator

import pytest
from fake_daemon import BARRIER, FakeDaemon, Serving
from typer.testing import CliRunner, Result

from orchestrrl.cli.command import DAEMON_VARIABLE
from orchestrrl.cli.fleet.pause import barrier_lines
from orchestrrl.cli.fleet.status import barrier_summary
from orchestrrl.cli.formats import time_of_day
from orchestrrl.cli.main import application
from orchestrrl.rpc.pb import agent_pb2
from orchestrrl.rpc.pb import control_pb2 as pb
from orchestrrl.rpc.plain_values import plain


@pytest.fixture(scope="module")
def served() -> Iterator[FakeDaemon]:
    with Serving(FakeDaemon()) as daemon:
        yield daemon


@pytest.fixture
def daemon(served: FakeDaemon) -> FakeDaemon:
    served.received.clear()
    served.empty = False
    return served


def run(daemon: FakeDaemon, *arguments: str) -> Result:
    return CliRunner().invoke(application(), [*arguments], env={DAEMON_VARIABLE: daemon.address})


def printed(result: Result) -> str:
    assert result.exit_code == 0, result.output
    return " ".join(result.stdout.split())


def test_pause_prints_the_lease_and_engines_not_paused(daemon: FakeDaemon) -> None:
    text = printed(run(daemon, "pause", "--running", "wait", "--deadline-s", "300", "--holder", "weights of step 12"))
    until = time_of_day(BARRIER.lease_until_unix_s)
    assert "barrier: quiet, policy version 11, mode keep, frozen requests recompute" in text
    assert f"lease g3-1 for weights of step 12: expires at {until}, then the fleet resumes" in text
    assert "requests: 0 running, 1,200 frozen, 3 held" in text
    assert "resume with orchestrrl resume g3-1" in text
    assert "e1: connection refused [Errno 111]" in text
    assert daemon.received == [
        pb.PauseFleetRequest(
            mode=agent_pb2.PAUSE_MODE_WAIT,
            frozen=agent_pb2.FROZEN_REQUESTS_RECOMPUTE,
            holder="weights of step 12",
            lease_s=60.0,
            deadline_s=300.0,
        )
    ]


def test_pause_fails_if_the_fleet_is_not_quiet(daemon: FakeDaemon) -> None:
    result = run(daemon, "pause", "--holder", "too late")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "cannot pause gateway gw0: 3 requests still run (temporary" in result.stderr


def test_renew_and_resume(daemon: FakeDaemon) -> None:
    assert "barrier: quiet" in printed(run(daemon, "renew", "g3-1", "--lease-s", "120"))
    late = run(daemon, "renew", "g2-1")
    assert (late.exit_code, late.stderr) == (1, "lease g2-1 has already ended (expired)\n")
    text = printed(run(daemon, "resume", "g3-1", "--policy-version", "0", "--without", "e1", "--without", "e2"))
    assert text.startswith("barrier: open, policy version 12 last opened: resumed by weights of step 12")
    printed(run(daemon, "resume", "--weights", "/shared/12"))
    assert daemon.received == [
        pb.RenewPauseRequest(lease_id="g3-1", lease_s=120.0),
        pb.RenewPauseRequest(lease_id="g2-1", lease_s=60.0),
        pb.ResumeFleetRequest(lease_id="g3-1", policy_version=0, without_engine_ids=["e1", "e2"]),
        pb.ResumeFleetRequest(weights_source="/shared/12"),
    ]


def test_barrier_shows_gateways_and_engines(daemon: FakeDaemon) -> None:
    text = printed(run(daemon, "barrier"))
    assert "gw0 quiet 0 1200 3" in text
    assert "gw1 - - - -" in text
    assert "e0 11" in text
    assert "e1 - connection refused [Errno 111]" in text
    daemon.empty = True
    assert printed(run(daemon, "barrier")).startswith("barrier: open Gateways")


def test_status_shows_the_barrier_only_if_closed_or_versioned() -> None:
    assert barrier_summary(plain(BARRIER))[0].startswith("barrier: [bold]quiet[/bold]")
    assert barrier_summary(plain(pb.PauseBarrier(phase="open", policy_version=4, detail="resumed"))) == [
        "barrier: open, policy version 4"
    ]
    assert barrier_summary(plain(pb.PauseBarrier(phase="open", detail="resumed"))) == []
    assert barrier_summary(None) == []


def test_barrier_shows_the_weights_folder() -> None:
    for phase in ("open", "quiet"):
        barrier = plain(
            pb.PauseBarrier(phase=phase, policy_version=4, weights_source="/shared/[x]", lease_until_unix_s=1.0)
        )
        assert r"weights are in /shared/\[x]" in barrier_lines(barrier)


def test_outdated_request_counts_are_not_shown() -> None:
    barrier = plain(BARRIER)
    assert "requests: 0 running, 1,200 frozen, 3 held" in barrier_lines(barrier)
    barrier["gateways"][0]["report"]["phase"] = "closing"
    assert not any("frozen," in line for line in barrier_lines(barrier))
    barrier["phase"] = "closing"
    assert any("1,200 frozen" in line for line in barrier_lines(barrier))


def test_set_version_and_cancel(daemon: FakeDaemon) -> None:
    weights = ("--weights", "/shared/12")
    assert printed(run(daemon, "engines", "set-version", "12", "e0", "e1", *weights)) == (
        "e0, e1: policy version 12, the fleet's is 12"
    )
    text = printed(run(daemon, "cancel", "--group", "g", "--request", "r1", "--reason", "reward is known"))
    assert text == "2 requests cancelled: r1, r2"
    assert daemon.received == [
        pb.SetPolicyVersionRequest(engine_ids=["e0", "e1"], policy_version=12, weights_source="/shared/12"),
        pb.CancelRequestsRequest(request_ids=["r1"], group_ids=["g"], reason="reward is known"),
    ]
    silent = run(daemon, "cancel", "--group", "slow")
    assert (silent.exit_code, silent.stderr) == (1, "no response from gw1: more requests may be cancelled there\n")


@pytest.mark.parametrize(
    "command",
    [
        ["pause"],
        ["renew", "g3-1"],
        ["resume"],
        ["barrier"],
        ["engines", "set-version", "1", "e0"],
        ["cancel", "--group", "g"],
    ],
    ids=" ".join,
)
def test_each_command_prints_one_json_object(daemon: FakeDaemon, command: list[str]) -> None:
    result = run(daemon, *command, "--json")
    assert result.exit_code == 0, result.output
    assert isinstance(json.loads(result.stdout), dict)


@pytest.mark.parametrize(
    "command",
    [["pause", "--lease-s", "-1"], ["engines", "set-version", "-1", "e0"], ["renew"]],
)
def test_invalid_arguments_exit_2(daemon: FakeDaemon, command: list[str]) -> None:
    assert run(daemon, *command).exit_code == 2
    assert daemon.received == []
