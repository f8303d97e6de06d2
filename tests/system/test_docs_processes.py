"""Run every command in the README and in docs/ unchanged, on simulated engines."""

import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest

from tests.docs import reference_pages
from tests.docs.test_docs import PAGES, ROOT
from tests.orchestrrl.gateway.processes import free_port

EXAMPLES = ROOT / "deploy" / "examples"


FLEET_PAGE = ROOT / "docs" / "fleet.md"


WITHIN_S = 120.0


def commands(page: Path) -> list[str]:
    """Return the lines that begin with `$ ` in console blocks, in order."""
    blocks = re.findall(r"^```console\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return [line[2:] for block in blocks for line in block.splitlines() if line.startswith("$ ")]


class Harness:
    """A folder and ports in which the commands of a page run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ports = {str(port): str(free_port()) for port in (5025, 7070, 8000, 8001, 8002, 8010)}
        self.background: list[subprocess.Popen[bytes]] = []
        examples = folder / EXAMPLES.relative_to(ROOT)
        examples.mkdir(parents=True)
        for example in EXAMPLES.glob("*.yaml"):
            (examples / example.name).write_text(self.here(example.read_text()))
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        # The commands use the default address of the daemon, which is replaced here.
        self.environment = {**os.environ, "PATH": path, "ORCHESTRRL_DAEMON": f"127.0.0.1:{self.ports['7070']}"}

    def here(self, text: str) -> str:
        text = re.sub(r"^orchestrrl up", "orchestrrl up --listen 127.0.0.1:8000", text)  # which is the default
        return re.sub(r"\b(5025|7070|800[012]|8010)\b", lambda port: self.ports[port[0]], text)

    def start(self, command: str) -> None:
        out = (self.folder / f"{len(self.background)}.out").open("wb")
        process = subprocess.Popen(
            f"exec {self.here(command)}", shell=True, cwd=self.folder, env=self.environment, stdout=out, stderr=out
        )
        self.background.append(process)

    def run(self, command: str) -> str:
        """Run a command and return its output. It is retried, because it may call services that are still starting."""
        deadline_s = time.monotonic() + WITHIN_S
        while True:
            done = subprocess.run(
                self.here(command), shell=True, cwd=self.folder, env=self.environment, capture_output=True, text=True
            )
            if done.returncode == 0:
                return done.stdout
            if "already assigned to engine e1" in done.stderr:  # the page moves a request to its other engine
                command = command.replace("--to e1", "--to e0")
            assert time.monotonic() < deadline_s, f"{command}: {done.stdout}{done.stderr}"
            time.sleep(0.3)

    def stop(self) -> None:
        for process in reversed(self.background):
            process.send_signal(signal.SIGTERM)
        for process in self.background:
            try:
                process.wait(WITHIN_S)
            except subprocess.TimeoutExpired:
                process.kill()


@pytest.mark.parametrize("page", [page for page in PAGES if page != FLEET_PAGE], ids=lambda page: page.name)
def test_every_documented_command_works(page: Path, tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    path = harness.environment["PATH"]
    try:
        for port in ("8001", "8002"):  # instead of the user's vLLM servers
            harness.start(f"orchestrrl engine simulated --port {port}")
        for command in commands(page):
            if command.startswith("make "):
                # These tests are part of `make test`, and the demo has its own test: only check that the target exists.
                subprocess.run(["make", "-n", *command.split()[1:]], cwd=ROOT, check=True, capture_output=True)
            elif not command.startswith("until ") and shutil.which(command.split()[0], path=path) is None:
                warnings.warn(f"not run, {command.split()[0]} is not installed: {command}", stacklevel=1)
            elif command.endswith("&"):
                harness.start(command.removesuffix("&"))
                if "daemon -c" in command or command.startswith("orchestrrl up"):
                    harness.run("orchestrrl status")
                elif "sync peer" in command:  # a user runs the next command when it is attached
                    harness.run(f"orchestrrl sync status | grep -w {command.partition('--id ')[2].split()[0]}")
            else:
                harness.run(command)
        assert all(process.poll() is None for process in harness.background)
    finally:
        harness.stop()


def run_fleet_page(harness: Harness, example: str) -> tuple[dict[str, str], list[list[str]]]:
    """Run the commands of FLEET_PAGE with an example configuration. Return the output of each command, and the
    configurations of the engines after each `redeploy` command."""
    printed, fleets = dict[str, str](), list[list[str]]()
    for command in commands(FLEET_PAGE):
        if command.endswith("&"):
            harness.start(command.removesuffix("&").replace("fleet.yaml", example))
            continue
        printed[command] = harness.run(command)
        if command.startswith("orchestrrl redeploy"):
            workers = json.loads(harness.run("orchestrrl workers --json"))["workers"]
            fleets.append([worker["configuration"] for worker in workers])
    return printed, fleets


def check_fleet_page(printed: dict[str, str]) -> None:
    (answer,) = (json.loads(text) for command, text in printed.items() if command.startswith("curl"))
    assert answer["usage"]["completion_tokens"] == 2000
    explained = " ".join(printed["orchestrrl plan explain --acted"].split())
    assert "by the operator's override: to see it" in explained
    assert "proposed" in explained


def test_override_replaces_the_engines(tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    try:
        printed, fleets = run_fleet_page(harness, "fleet.yaml")
        check_fleet_page(printed)
        assert fleets == [["tp1"] * 4, ["tp2"] * 2, []]
    finally:
        harness.stop()


def test_grpc_reference_matches_the_proto_files() -> None:
    path = reference_pages.FOLDER / "grpc.md"
    assert path.read_text() == reference_pages.page("grpc.md"), "run: python tests/docs/reference_pages.py"


@pytest.mark.parametrize("unit", sorted((ROOT / "deploy" / "systemd").glob("*.service")), ids=lambda path: path.name)
def test_systemd_units_use_existing_flags(unit: Path) -> None:
    (line,) = re.findall(r"^ExecStart=/opt/orchestrrl/bin/orchestrrl (.*)$", unit.read_text(), flags=re.MULTILINE)
    words = line.split()
    command = list(itertools.takewhile(lambda word: not word.startswith("-"), words))
    shown = subprocess.run(
        [sys.executable, "-m", "orchestrrl", *command, "--help"], capture_output=True, text=True, check=True
    ).stdout
    for flag in (word for word in words if word.startswith("-")):
        assert re.search(rf"{flag}\b", shown), f"{unit.name}: {' '.join(command)} has no {flag}"
