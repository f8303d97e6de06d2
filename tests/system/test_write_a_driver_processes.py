"""docs/write-a-driver.md: its code is that of the example, and its commands run in order.

`pip install -e` would change the environment of the tests, so the package is installed into a separate folder.
"""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ocs_drivers.test_write_a_driver import PAGE, ROOT

INSTALL = "pip install --no-deps -e ."


WITHIN_S = 280


def commands() -> list[str]:
    blocks = re.findall(r"^```sh\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)
    return [line[2:] for block in blocks for line in block.splitlines()]


def free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def follow(tmp_path: Path, steps: list[str]) -> None:
    (tmp_path / "orchestrrl").symlink_to(ROOT)
    site = tmp_path / "site"
    ports = dict(zip(("5555", "7555"), map(str, free_ports(2)), strict=True))
    script = []
    for step in steps:
        step = step.replace(INSTALL, f"pip install -q --no-deps --no-build-isolation --target {site} .")
        script.append(re.sub(r"\b[57]555\b", lambda port: ports[port[0]], step))
        if step.endswith("&"):
            script += [f'until python -c "{_knock(script[-1], ports)}" 2>/dev/null; do sleep 0.1; done']
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    # The folder `orchestrrl` in the repository is the checkout, not the package.
    environment = {**os.environ, "PATH": path, "PYTHONPATH": f"{site}{os.pathsep}{ROOT}", "PYTHONSAFEPATH": "1"}
    text = "set -e\ntrap 'kill $(jobs -p) 2>/dev/null || true' EXIT\n" + "\n".join(script)
    done = subprocess.run(
        ["bash", "-c", text], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=WITHIN_S
    )
    assert done.returncode == 0, f"{text}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"


def _knock(command: str, ports: dict[str, str]) -> str:
    """Wait for the process that was started last: its port is the last one in its command line."""
    port = re.findall(r"\d{4,5}", command)[-1]
    return f"import socket; socket.create_connection(('127.0.0.1', {port})).close()"


def test_page_commands_work_with_a_few_tests(tmp_path: Path) -> None:
    """Run every command except the last, with a few tests of the suite. The slow test below runs all of them."""
    few = " ".join(f"--only {name}" for name in ("test_facts_and_ports_agree", "test_diff_is_empty_after_commit"))
    steps = [f"{step} {few}" if "ocs conformance" in step else step for step in commands()]
    steps = [f"{step} -k 'facts or diff_is_empty'" if "test_line_switch" in step else step for step in steps]
    follow(tmp_path, [step for step in steps if "test_served" not in step])


@pytest.mark.slow
def test_page_commands_work_completely(tmp_path: Path) -> None:
    follow(tmp_path, commands())
