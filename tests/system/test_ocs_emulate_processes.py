"""`orchestrrl ocs emulate`: the printed configuration works with its driver, and events are printed as they occur."""

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import yaml
from typer.testing import CliRunner

from ocs_drivers.conformance import carry_out
from ocs_drivers.model import CrossConnect
from ocs_drivers.registry import make_driver
from orchestrrl.cli.main import application
from tests.orchestrrl.cli.test_ocs_emulate import DEADLINE_S, PATIENT


@contextlib.contextmanager
def emulated(*given: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "orchestrrl", "ocs", "emulate", *given]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


async def test_printed_configuration_works_and_events_are_shown(tmp_path: Path) -> None:
    faults = tmp_path / "faults.yaml"
    faults.write_text("- {kind: fail_port, port: 2}\n")
    given = ("--protocol", "scpi-dicon", "--ports", "8x4", "--delay-ms", "1", "--faults", str(faults))
    with emulated(*given, "--quirk", "one_session=true") as process:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        assert process.stdout.readline() == "# DiCon GP750, ingress 1..8, egress 9..12, moves in 1 ms\n"
        (item,) = yaml.safe_load(process.stdout.readline())["ocs"]
        assert item == {"id": "emulated", "driver": "scpi", "options": {"address": address, "profile": "dicon"}}
        driver = make_driver(item["driver"], item["id"], {**item["options"], **PATIENT})
        assert (await carry_out(driver, (CrossConnect(1, 9), CrossConnect(3, 10)))).done
        assert [state.port for state in await driver.ports() if state.status == "failed"] == [2]
        await driver.close()
        process.send_signal(signal.SIGINT)
        assert process.wait(DEADLINE_S) == 0
        assert process.stderr is not None
        assert process.stderr.read() == ""
        words = [line.rstrip("\n")[11:] for line in process.stdout]
    assert words == [
        "port    port 2 failed",
        "setter  :oxc:swit:conn:add (@1,3),(@9,10)",
        "circuit 1:9 commanded",
        "circuit 3:10 commanded",
    ]


def test_emulator_ends_on_sigterm_and_reports_a_port_in_use() -> None:
    with emulated("--protocol", "grpc") as first:
        assert first.stdout is not None
        address = first.stdout.readline().strip()
        for protocol in ("scpi", "grpc"):
            words = ["ocs", "emulate", "--protocol", protocol, "--listen", "203.0.113.1:0"]
            result = CliRunner().invoke(application(), words)
            assert (result.exit_code, result.stdout) == (2, "")
            assert "--listen: is not a loopback address; add --allow-remote" in result.stderr
            result = CliRunner().invoke(application(), [*words, "--allow-remote"])
            assert (result.exit_code, result.stdout) == (1, "")
            assert result.stderr.startswith("cannot listen on 203.0.113.1:0: ")
        assert address.startswith("127.0.0.1:")
        first.terminate()
        assert first.wait(DEADLINE_S) == 0
        assert first.communicate()[1] == ""
