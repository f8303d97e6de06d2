"""`orchestrrl redeploy` and `orchestrrl plan history`, with Typer's runner, real processes and real gRPC. The daemon's
redeployments need no engines."""

import contextlib
import json
import os
import select
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from redeploying_daemon import RedeploymentDaemon
from typer.testing import CliRunner, Result

from orchestrrl.cli.command import DAEMON_VARIABLE
from orchestrrl.cli.main import application
from orchestrrl.core.operation import StepDirection
from orchestrrl.fleet.redeployment.steps import (
    StepKind,
)

DEADLINE_S = 120.0
READY, BACK = (StepDirection.FORWARD, StepKind.READY), (StepDirection.BACK, StepKind.START)


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[RedeploymentDaemon]:
    with RedeploymentDaemon(tmp_path) as served:
        yield served


def run(harness: RedeploymentDaemon, *arguments: str) -> Result:
    return CliRunner().invoke(application(), [*arguments], env={DAEMON_VARIABLE: harness.address})


def printed(result: Result) -> str:
    assert result.exit_code == 0, result.output
    return " ".join(result.stdout.split())


def object_of(result: Result) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_dry_run_prints_engines_and_steps_by_stage(harness: RedeploymentDaemon) -> None:
    text = printed(run(harness, "redeploy", "--to", "tp8=1", "--to", "tp2", "--dry-run"))
    assert text.startswith("dry run, nothing changes: 8 x tp2 -> 1 x tp8, 4 x tp2")
    assert "e0 stops tp2 0-1" in text
    assert "e4 stays tp2 8-9" in text
    assert "tp8-0.0 starts tp8 0-7" in text
    assert "1 fence the fleet - 2 min 00 s" in text
    assert "2 evacuate e0-3 4 30 s" in text
    assert "4 start tp8-0.0 1 60 s ready tp8-0.0 1 10 min 00 s load weights" in text
    assert "6 commit the fleet" in text
    assert "e0-7" not in text, "who stays is not touched"
    draft = object_of(run(harness, "redeploy", "--to", "tp8", "--dry-run", "--json"))
    assert (draft["state"], draft["redeployment_id"], len(draft["new_engines"])) == ("planned", "", 2)
    assert {step["began_unix_s"] for step in draft["steps"]} == {None}
    assert "nothing to do" in printed(run(harness, "redeploy", "--to", "tp2", "--dry-run"))
    assert run(harness, "redeploy").exit_code == 1, "nothing was done"


def test_redeployment_is_followed_line_by_line_in_a_pipe(
    harness: RedeploymentDaemon,
) -> None:
    result = run(harness, "redeploy", "--to", "tp8", "--reason", "the tail is long")
    text = printed(result)
    assert text.startswith("redeployment s1: 8 x tp2 -> 2 x tp8 (the tail is long)")
    lines = [line.partition(" ")[2] for line in result.stdout.splitlines()]
    order = ["fence: done", "evacuate e0-7: done", "ready tp8-0.0, tp8-0.1: done", "commit: done"]
    places = [next(n for n, line in enumerate(lines) if line.startswith(words)) for words in order]
    assert places == sorted(places)
    assert "4 start tp8-0.0, tp8-0.1 done" in text
    assert "8 moved, 24 held by their gateway" in text
    assert "requests of stopped engines paused for at most" in text
    assert harness.redeployer.wishes[-1].reason == "the tail is long"
    assert harness.redeployer.wishes[-1].targets == (("tp8", 0),)


def test_json_output_has_progress_on_standard_error(harness: RedeploymentDaemon) -> None:
    result = run(harness, "redeploy", "--plan", "p1", "--json")
    report = object_of(result)
    assert (result.exit_code, report["state"], report["plan_id"]) == (0, "done", "p1")
    assert {step["state"] for step in report["steps"]} == {"done"}
    assert "evacuate" in result.stderr


def test_rolled_back_or_degraded_redeployment_exits_1_with_reason(harness: RedeploymentDaemon) -> None:
    harness.redeployer.failing[READY] = "exited with 1: [out of memory]"
    back = run(harness, "redeploy", "--to", "tp8")
    assert back.exit_code == 1
    assert back.stderr == "redeployment s1 is rolled back: ready of tp8-0.0: exited with 1: [out of memory]\n"
    text = " ".join(back.stdout.split())
    assert "ready tp8-0.0, tp8-0.1: failed after" in text
    assert "failed, 1 of 2 done" in text
    assert "1 back stop tp8-0.0, tp8-0.1 done" in text
    assert "tp8-0.0: exited with 1: [out of memory]" in text
    assert "rolled back in" in text
    assert " 5 admit" not in text, "steps that did not start are omitted"
    harness.redeployer.failing[BACK] = "no such GPU"
    degraded = run(harness, "redeploy", "--to", "tp8", "--json")
    assert degraded.exit_code == 1
    assert object_of(degraded)["state"] == "degraded"
    assert "no such GPU" in degraded.stderr
    assert "serving: e1-7" in printed(run(harness, "redeploy"))
    assert "redeployment s2: degraded in" in printed(run(harness, "status"))


def test_detail_of_a_done_redeployment_is_printed(harness: RedeploymentDaemon) -> None:
    harness.redeployer.remark = "retire of e0: timed out after 60 s"
    assert "done in" in (text := printed(run(harness, "redeploy", "--to", "tp8")))
    assert "s: retire of e0: timed out after 60 s" in text


def test_no_wait_show_cancel_and_watch(harness: RedeploymentDaemon) -> None:
    harness.do(harness.redeployer.held.clear)
    text = printed(run(harness, "redeploy", "--to", "tp8", "--no-wait"))
    assert "started; watch it with orchestrrl redeploy --watch --redeployment s1" in text
    assert "roll it back with orchestrrl redeploy --cancel --redeployment s1" in text
    for command in (["redeploy"], ["redeploy", "--redeployment", "s1"]):
        text = printed(run(harness, *command))
        assert "redeployment s1: 8 x tp2 -> 2 x tp8, running" in text
    summary = printed(run(harness, "status"))
    assert "redeployment s1: 8 x tp2 -> 2 x tp8, running (0 of 29 steps done, since" in summary
    assert "redeployment s1: 8 x tp2" in printed(run(harness, "top", "--once"))
    busy = run(harness, "redeploy", "--to", "tp4")
    assert (busy.exit_code, "s1 is under way" in busy.stderr) == (1, True)
    text = printed(run(harness, "redeploy", "--cancel", "--reason", "wrong one"))
    assert (
        text == "redeployment s1 is rolled back to 8 x tp2; watch it with orchestrrl redeploy --watch --redeployment s1"
    )
    ended = run(harness, "redeploy", "--watch")
    assert ended.exit_code == 1
    assert "redeployment s1 is rolled back: called off: wrong one" in ended.stderr
    late = run(harness, "redeploy", "--cancel")
    assert (late.exit_code, late.stderr) == (1, "no redeployment is running\n")
    assert "redeployment" not in printed(run(harness, "status"))


def test_all_errors_of_the_command_line_are_reported_at_once(harness: RedeploymentDaemon) -> None:
    wrong = ["--to", "tp2", "--to", "tp2=1", "--to", "tp4=0", "--to", "=3", "--plan", "p1", "--cancel", "--watch"]
    result = run(harness, "redeploy", *wrong, "--redeployment", "s1", "--dry-run", "--no-wait")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.splitlines() == [
        "--plan: cannot go with --to, got 'p1'",
        "--watch: cannot go with --to or --plan",
        "--cancel: cannot go with --to or --plan",
        "--cancel: cannot go with --watch",
        "--no-wait: cannot go with --dry-run",
        "--id: cannot go with --to or --plan, got 's1'",
        "--to: must name a configuration only once, got 'tp2=1' again",
        "--to: must be CONFIGURATION or CONFIGURATION=N with N of at least 1, got 'tp4=0'",
        "--to: must be CONFIGURATION or CONFIGURATION=N with N of at least 1, got '=3'",
    ]
    aimless = run(harness, "redeploy", "--dry-run", "--reason", "why")
    assert aimless.stderr.splitlines() == [
        "--dry-run: needs --to or --plan",
        "--reason: needs --to, --plan or --cancel, got 'why'",
    ]
    for count in ("٣", "-1", "1.5", "9999999999"):
        assert run(harness, "redeploy", "--to", f"tp2={count}").exit_code == 2
    assert harness.redeployer.wishes == []


@pytest.mark.parametrize("flags", [["--dry-run"], ["--no-wait"], []], ids=str)
def test_daemon_reports_all_errors_of_the_target(harness: RedeploymentDaemon, flags: list[str]) -> None:
    result = run(harness, "redeploy", "--to", "tp3", "--to", "tp8=9", *flags)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.splitlines() == [
        "targets[0].configuration: must be one of tp1, tp2, tp4, tp8, got 'tp3'",
        "targets[1].engines: take more GPUs than the 16 left, got 9",
    ]


def test_history_lists_redeployments_and_shows_one_over_time(harness: RedeploymentDaemon) -> None:
    assert printed(run(harness, "plan", "history")) == "no redeployment yet"
    run(harness, "redeploy", "--to", "tp8", "--reason", "the [tail]")
    harness.redeployer.failing[READY] = "hung"
    run(harness, "redeploy", "--plan", "p1")
    run(harness, "redeploy", "--to", "tp2")
    text = printed(run(harness, "plan", "history"))
    assert "the [tail] 8 x tp2 -> 2 x tp8 done" in text
    assert "2 x tp8 -> 8 x tp2 rolled back" in text
    assert text.index("s2 20") < text.index("s1 20")
    only = printed(run(harness, "plan", "history", "--limit", "1"))
    assert "s1 20" not in only
    assert [
        report["redeployment_id"] for report in object_of(run(harness, "plan", "history", "--json"))["redeployments"]
    ][-1] == "s1"
    full = printed(run(harness, "plan", "history", "--redeployment", "s1"))
    assert full.startswith("redeployment s1: 8 x tp2 -> 2 x tp8 (the [tail]) started 20")
    assert "tp8-0.1 starts tp8 8-15" in full
    line = full.partition("Time line")[2]
    assert "4 start tp8-0.0" in line
    assert "requests paused" in line
    assert object_of(run(harness, "plan", "history", "--redeployment", "s1", "--json"))["redeployment_id"] == "s1"
    missing = run(harness, "plan", "history", "--redeployment", "s9")
    assert (missing.exit_code, missing.stderr) == (1, "no redeployment 's9'\n")


def test_missing_deployer_is_reported_with_advice(harness: RedeploymentDaemon) -> None:
    harness.parts.redeployer = None
    refused = run(harness, "redeploy", "--to", "tp2")
    assert refused.exit_code == 1
    assert "fleet.deployer" in refused.stderr
    assert printed(run(harness, "plan", "history")) == "no redeployment yet"


# --- a terminal


def ended(process: subprocess.Popen[str], terminal: int) -> tuple[int, str]:
    """Return the exit status and the standard error of a command in a terminal. Output is read until the end, because
    a terminal that is not read blocks the command."""
    deadline_s = time.monotonic() + DEADLINE_S
    while process.poll() is None:
        assert time.monotonic() < deadline_s
        if select.select([terminal], [], [], 0.1)[0]:
            with contextlib.suppress(OSError):  # the other end of the terminal is closed
                os.read(terminal, 65536)
    os.close(terminal)
    _, errors = process.communicate()
    return process.returncode, errors
