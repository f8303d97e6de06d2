"""Build the distributions into dist/, install them into fresh environments, check their sizes, and run a fleet:
`make dist`.

    python tests/distributions.py [OPTIONS OF PIP]

The environments are in out/dist. `base` has no extra and runs the agent, the gateway and the commands. `planner` has
the extra `planner` and runs the daemon and an engine. `client` has orchestrrl-client.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
import urllib.request
import venv
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "out" / "dist"
FOLDERS = (".", "deploy/client")  # of the distributions
CODE = ("balancer", "ocs_drivers", "orchestrrl", "planner")
BUILD = "from setuptools import build_meta as b; import sys; to = sys.argv[1]; b.build_sdist(to); b.build_wheel(to)"
BASE_MB = 150.0  # with dependencies
CLIENT_MB = 30.0  # without dependencies, all of which vLLM's environment has
OF_EXTRAS = ("matplotlib", "numba", "ortools", "pandas", "scipy", "statsmodels")
CLIENT_MODULES = (
    "orchestrrl.fabric.client",
    "orchestrrl.integrations.instrument.recorder",
    "orchestrrl.integrations.trl",
    "orchestrrl.integrations.vllm_weights",
    "orchestrrl.weights.peer.main",
    "orchestrrl.weights.trainer.client",
    "orchestrrl.weights.trainer.megatron",
)
LIMIT_S = 60.0
# Without the variables of Python: a folder in PYTHONPATH would hide missing files.
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}


def main(pip: list[str]) -> None:
    dist = ROOT / "dist"
    for folder in (dist, OUT):
        shutil.rmtree(folder, ignore_errors=True)
    (OUT / "work").mkdir(parents=True)
    build(dist)
    pip = [*pip, "--find-links", str(dist)]

    client_mb = install("client", "orchestrrl-client", [*pip, "--no-deps"])
    check(client_mb <= CLIENT_MB, f"orchestrrl-client adds {client_mb:.1f} MB, at most {CLIENT_MB:g}")
    install("client", "orchestrrl-client[adapters]", pip)
    call("client", "python", "-c", f"import {', '.join(CLIENT_MODULES)}")
    call("client", "python", "-m", "orchestrrl.weights.peer.main", "--help")
    check(True, "the modules for trainers and engines can be imported")

    base_mb = install("base", "orchestrrl", pip)
    check(base_mb <= BASE_MB, f"orchestrrl adds {base_mb:.1f} MB with dependencies, at most {BASE_MB:g}")
    for package in OF_EXTRAS:
        call("base", "python", "-c", f"import {package}", status=1)
    call("base", "orchestrrl", "--help")
    needs = call("base", "orchestrrl", "daemon", "-c", "orchestrrl.yaml", status=2)
    check('needs the extra "planner"' in needs, needs.strip())
    for folder in ("proto", "deploy"):
        check(
            any((OUT / "base" / "share" / "orchestrrl" / folder).iterdir()), f"share/orchestrrl/{folder} is installed"
        )

    planner_mb = install("planner", "orchestrrl[planner]", pip)
    check(True, f"orchestrrl[planner] adds {planner_mb:.1f} MB with dependencies")
    run_fleet()


def run_fleet() -> None:
    """Run the daemon and an engine from one environment, the agent and the gateway from the other, and a request."""
    (OUT / "work" / "orchestrrl.yaml").write_text('mode: advise\nlisten: {address: "127.0.0.1:0"}\n')
    with contextlib.ExitStack() as running:
        start = running.enter_context
        daemon = start(service("planner", "daemon", "-c", "orchestrrl.yaml")).readline().strip()
        engine = start(service("planner", "engine", "simulated", "--speed", "30")).readline().strip()
        shared = ("--engine", f"e0={engine}", "--engine-kind", "simulated", "--daemon", daemon)
        start(service("base", "agent", *shared))
        gateway = start(service("base", "gateway", "--listen", "127.0.0.1:0", *shared)).readline().strip()
        body = json.dumps({"prompt": [1, 2, 3], "max_tokens": 8}).encode()
        request = urllib.request.Request(f"{gateway}/v1/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=LIMIT_S) as response:
            check(json.load(response)["usage"]["completion_tokens"] == 8, "a request is answered through the gateway")
        last_s = time.monotonic() + LIMIT_S
        while not (found := reported(daemon)) and time.monotonic() < last_s:
            time.sleep(0.2)
        check(found == ["e0"], "the daemon receives the agent's reports")


def build(dist: Path) -> None:
    """Build the wheels and source archives into a folder, from a copy of the sources: an earlier build in build/ could
    add files that no longer exist."""
    made = shutil.ignore_patterns("__pycache__", "build", "*.egg-info")
    with TemporaryDirectory() as copy:
        for name in (*CODE, "deploy", "proto"):
            shutil.copytree(ROOT / name, Path(copy, name), symlinks=True, ignore=made)
        for name in ("LICENSE", "README.md", "pyproject.toml"):
            shutil.copy(ROOT / name, copy)
        for folder in FOLDERS:
            line = [sys.executable, "-c", BUILD, str(dist)]
            done = subprocess.run(line, cwd=Path(copy, folder), capture_output=True, text=True)
            if done.returncode:
                sys.exit(f"FAILED: build of {folder}\n{done.stdout}{done.stderr}")


def install(name: str, requirement: str, pip: list[str]) -> float:
    """Install a requirement into the environment `name`, which is created if it does not exist; return the megabytes
    that this adds."""
    folder = OUT / name
    if not folder.exists():
        venv.create(folder, with_pip=True)
    before = size(folder)
    line = [folder / "bin/python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *pip, requirement]
    subprocess.run(line, check=True, env=ENVIRONMENT)
    return (size(folder) - before) / 1e6


def size(folder: Path) -> int:
    return sum(each.lstat().st_size for each in folder.rglob("*") if not each.is_dir())


def call(name: str, command: str, *arguments: str, status: int = 0) -> str:
    """Run a command of an environment. Return its standard output, or its standard error if it is to fail."""
    line = [OUT / name / "bin" / command, *arguments]
    done = subprocess.run(line, env=ENVIRONMENT, cwd=OUT / "work", capture_output=True, text=True)
    if done.returncode != status:
        said = f"exit status {done.returncode}, not {status}\n{done.stdout}{done.stderr}"
        sys.exit(f"FAILED: {command} {' '.join(arguments)}: {said}")
    return done.stderr if status else done.stdout


@contextlib.contextmanager
def service(name: str, *arguments: str) -> Iterator[IO[str]]:
    """Run `orchestrrl` of an environment with these arguments until the body ends; yield its standard output."""
    line = [OUT / name / "bin" / "orchestrrl", *arguments]
    with subprocess.Popen(line, env=ENVIRONMENT, cwd=OUT / "work", stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout
        finally:
            process.terminate()
            process.wait(LIMIT_S)


def reported(daemon: str) -> list[str]:
    found = json.loads(call("base", "orchestrrl", "workers", "--daemon", daemon, "--json"))["workers"]
    return [each["engine_id"] for each in found if each["reported"]]


def check(is_met: bool, claim: str) -> None:
    print(f"{'ok' if is_met else 'FAILED'}: {claim}", flush=True)
    if not is_met:
        sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
