"""`orchestrrl ocs conformance` as a process that is stopped by signals while it waits for a circuit."""

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from orchestrrl.cli.running import SAME_STOP_S

# The commit waits for a circuit that does not come up or go down for longer than any of these tests.
WAITING = ("--only", "diff_is_empty_after_commit", "--option", "tune_timeout_s=300")
DEADLINE_S = 120.0


class Switch:
    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        self.address = self._line()

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def report(self) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        report: dict[str, Any] = json.loads(self._line())
        return report


@contextmanager
def switch(*arguments: str) -> Iterator[Switch]:
    script = Path(__file__).parents[1] / "ocs_drivers" / "stubborn_process.py"
    process = subprocess.Popen(
        [sys.executable, str(script), *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield Switch(process)
    finally:
        process.communicate()


@contextmanager
def conformance(address: str) -> Iterator["subprocess.Popen[str]"]:
    command = ("ocs", "conformance", "--driver", "scpi", "--address", address, "--free-ports", "1-4:33-36", *WAITING)
    process = subprocess.Popen(
        [sys.executable, "-m", "orchestrrl", *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    alarm = threading.Timer(DEADLINE_S, process.kill)
    alarm.start()
    try:
        yield process
    finally:
        alarm.cancel()
        process.kill()
        process.communicate()


def wait_for_setters(device: Switch, process: "subprocess.Popen[str]", count: int) -> None:
    while device.report()["setters"] < count:
        assert process.poll() is None, process.communicate()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_stopped_run_frees_the_ports(number: signal.Signals) -> None:
    if number is signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
        pytest.skip("started under nohup, which children inherit")
    with switch("--ignores", "1") as device, conformance(device.address) as process:
        wait_for_setters(device, process, 1)
        assert device.report()["up"]
        process.send_signal(number)
        _, errors = process.communicate()
        assert process.returncode == 128 + number, errors
        assert f"stopped by {number.name}: the ports are freed" in errors
        assert "Traceback" not in errors
        assert device.report()["up"] == []


@pytest.mark.smoke
def test_second_signal_lists_circuits_still_up() -> None:
    with switch("--ignores", "1", "--keeps", "2") as device, conformance(device.address) as process:
        wait_for_setters(device, process, 1)
        process.send_signal(signal.SIGINT)
        wait_for_setters(device, process, 2)  # the ports are being freed, and port 2 keeps its circuit
        time.sleep(SAME_STOP_S)  # after the first signal; an earlier one would belong to the same stop
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate()
        assert process.returncode == 128 + signal.SIGINT, errors
        (left,) = device.report()["up"]
        assert left.startswith("2:")
        named = next(line for line in errors.splitlines() if "may still be up" in line)
        assert left in named
        assert "orchestrrl ocs disconnect SWITCH" in named
        assert "the ports are freed" not in errors
