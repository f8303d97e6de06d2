"""`orchestrrl redeploy` as a process, over real gRPC, with a daemon whose redeployments need no engines."""

import os
import pty
import select
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

from redeploying_daemon import RedeploymentDaemon

from orchestrrl.cli.command import DAEMON_VARIABLE
from orchestrrl.cli.output import EXIT_LEFT
from orchestrrl.core.operation import OperationState, StepState
from tests.orchestrrl.cli.test_redeploy_command import DEADLINE_S, ended, harness, object_of, printed, run


def test_redeployment_is_followed_across_a_daemon_restart(tmp_path: Path) -> None:
    with RedeploymentDaemon(tmp_path) as first:
        first.do(first.redeployer.held.clear)
        process = subprocess.Popen(
            [sys.executable, "-m", "orchestrrl", "redeploy", "--to", "tp8", "--daemon", first.address],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        begun = process.stdout.readline()
        address, reports = first.address, first.redeployer.reports
    (report,) = reports.values()
    step = replace(report.steps[0], state=StepState.FAILED, detail="the daemon ended", began_s=report.created_s)
    gone_back = replace(
        report,
        state=OperationState.ROLLED_BACK,
        detail="the daemon ended in the middle of it",
        ended_s=report.created_s + 7.0,
        steps=(step, *report.steps[1:]),
    )
    with RedeploymentDaemon(tmp_path, 0.0, address, gone_back) as second:
        output, errors = process.communicate(timeout=DEADLINE_S)
        line = printed(run(second, "plan", "history", "--redeployment", "s1")).partition("Time line")[2]
    assert begun.startswith("redeployment s1: 8 x tp2 -> 2 x tp8")
    assert "fence: failed: the daemon ended" in output
    assert "rolled back in 7 s" in output
    assert process.returncode == 1
    assert "redeployment s1 is rolled back: the daemon ended in the middle of it" in errors
    assert "1 fence the fleet ▏" in line
    assert "took" not in line, "the end of the step was not observed"


def read_until(terminal: int, words: str) -> str:
    seen, deadline_s = "", time.monotonic() + DEADLINE_S
    while words not in seen:
        assert time.monotonic() < deadline_s, seen
        if select.select([terminal], [], [], 1.0)[0]:
            seen += os.read(terminal, 65536).decode(errors="replace")
    return seen


def on_terminal(harness: RedeploymentDaemon, *arguments: str) -> tuple[subprocess.Popen[str], int]:
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "140", "LINES": "40", DAEMON_VARIABLE: harness.address}
    process = subprocess.Popen(
        [sys.executable, "-m", "orchestrrl", *arguments],
        stdin=theirs,
        stdout=theirs,
        stderr=subprocess.PIPE,
        env=environment,
        text=True,
    )
    os.close(theirs)
    return process, ours


def test_interrupted_command_leaves_redeployment_running_with_advice(harness: RedeploymentDaemon) -> None:
    harness.do(harness.redeployer.held.clear)
    process, terminal = on_terminal(harness, "redeploy", "--to", "tp8")
    read_until(terminal, "0 of 29 steps done")
    process.send_signal(signal.SIGINT)
    status, errors = ended(process, terminal)
    assert status == EXIT_LEFT
    text = " ".join(errors.split())
    assert text.startswith("redeployment s1 continues; watch it with orchestrrl redeploy --watch --redeployment s1")
    assert object_of(run(harness, "redeploy", "--json"))["state"] == "running"
    process, terminal = on_terminal(harness, "redeploy", "--watch")
    seen = read_until(terminal, "0 of 29 steps done")
    harness.do(harness.redeployer.held.set)
    seen += read_until(terminal, "paused for")
    assert ended(process, terminal)[0] == 0
    assert "\x1b[?25l" in seen, "the table is renewed in place"
