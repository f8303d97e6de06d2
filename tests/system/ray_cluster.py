"""Real Ray clusters on this machine for tests: a head and further nodes, all removed at the end."""

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import ray
from ray._raylet import AuthenticationTokenLoader, Config

from tests.orchestrrl.gateway.processes import free_port

RAY = Path(sys.executable).with_name("ray")
UP_WITHIN_S = 180.0
STORE_BYTES = 80_000_000  # Ray's minimum is 75 MiB


class RayNodes:
    """The nodes of one cluster. Clients need the variables in `environment`."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="ray"))  # a short path, because Unix sockets are nested deeply in it
        self.environment = {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(16),
            "RAY_TMPDIR": str(self.folder),
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        self.address = ""
        self._groups: list[int] = []

    def start_head(self, resources: str, gpus: int = 0) -> None:
        port = free_port()
        client = f"--ray-client-server-port={free_port()}"
        self._start("--head", f"--port={port}", client, f"--num-gpus={gpus}", f"--resources={resources}")
        self.address = (self.folder / "ray_current_cluster").read_text().strip()

    @property
    def head_ip(self) -> str:
        return self.address.partition(":")[0]

    def start_node(self, ip: str, resources: str) -> int:
        """Start a node and return its handle for `kill`."""
        return self._start(f"--address={self.address}", f"--node-ip-address={ip}", f"--resources={resources}")

    def kill(self, node: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(node, signal.SIGKILL)

    def close(self) -> None:
        for group in self._groups:
            self.kill(group)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _start(self, *arguments: str) -> int:
        common = ("--num-cpus=1", f"--object-store-memory={STORE_BYTES}", "--disable-usage-stats")
        command = [str(RAY), "start", *arguments, *common]
        if "--head" in arguments:
            # A killed node is detected after a few of these periods.
            quick = '--system-config={"health_check_period_ms": 500}'
            command += ["--include-dashboard=false", f"--temp-dir={self.folder}", quick]
        with (self.folder / "start.log").open("ab") as log:
            starting = subprocess.Popen(
                command, stdout=log, stderr=log, env={**os.environ, **self.environment}, start_new_session=True
            )
        self._groups.append(starting.pid)
        assert starting.wait(UP_WITHIN_S) == 0, (self.folder / "start.log").read_text()
        return starting.pid


@contextlib.contextmanager
def ray_nodes() -> Iterator[RayNodes]:
    nodes = RayNodes()
    try:
        yield nodes
    finally:
        nodes.close()


def connect(address: str) -> None:
    """Make this process a job of the cluster. Ray reads the environment on import, so it must be read again."""
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()
    ray.init(address=address, namespace="job", log_to_driver=False)


def environment_of(pid: int) -> Mapping[str, str]:
    """Return the environment of a process."""
    parts = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return dict(part.split("=", 1) for part in parts if "=" in part)


def until_gone(pid: int, within_s: float = 60.0) -> bool:
    """Return whether the process ends in time. A zombie counts as ended."""
    deadline_s = time.monotonic() + within_s
    while time.monotonic() < deadline_s:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False
