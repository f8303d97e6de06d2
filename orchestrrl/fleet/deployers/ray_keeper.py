"""The actor that holds an engine's place in Ray and runs one of its processes. This module is sent to Ray's workers by
value, with `machine.py`. Both modules import only the standard library and Ray, since OrchestrRL need not be installed
there.

`ray_supervisor.py` runs the process and ensures that it always ends with the actor.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from orchestrrl.fleet.deployers.machine import hold_port, log_tail

MARK = "ORCHESTRRL_ENGINE"  # environment variable that identifies an engine's processes
POLL_S = 0.05


class PlaceKeeper:
    """An actor that holds one bundle of an engine. The first actor of an engine process runs the process; further
    actors of that process only hold GPUs."""

    def __init__(self) -> None:
        self._port_holder: socket.socket | None = None
        self._supervisor: subprocess.Popen[bytes] | None = None
        self._reader: threading.Thread | None = None
        self._log = Path()
        self._log_from = 0
        self._pid: int | None = None
        self._status: int | None = None
        self._mark = ""

    def place(self, host: str, ports: Sequence[tuple[int, bool]]) -> dict[str, Any]:
        """Return the address of the node, Ray's ids of the actor's GPUs, and the first free port. The actor reserves
        the port from then on. The port is 0 if `ports` is empty. `ports` has the format of `tries` in `hold_port`.
        Raises OSError if no port is free."""
        import ray

        if ports and self._port_holder is None:
            self._port_holder = hold_port(host, ports)
        chosen = self._port_holder.getsockname()[1] if self._port_holder is not None else 0
        return {"address": ray.util.get_node_ip_address(), "gpus": list(map(str, ray.get_gpu_ids())), "port": chosen}

    def launch(self, supervisor: str, argv: Sequence[str], environment: Mapping[str, str], log: str) -> None:
        """Run the command line `argv`, unless this actor has already run a command line. The process writes its output
        to the file `log`. It inherits the environment of the Ray worker without Ray's variables, and gets the variables
        in `environment`. `supervisor` is the text of ray_supervisor.py."""
        if self._supervisor is not None:
            return
        self._log, self._mark = Path(log), environment[MARK]
        self._log.parent.mkdir(parents=True, exist_ok=True)
        self._log_from = self._log.stat().st_size if self._log.exists() else 0
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        for name in ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "PYTHONBREAKPOINT", "SPT_NOENV"):
            inherited.pop(name, None)
        self._supervisor = subprocess.Popen(
            [sys.executable, "-c", supervisor],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**inherited, **environment},
        )
        self._send_line(json.dumps({"argv": list(argv), "log": log}))
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def report(self) -> dict[str, Any]:
        """Return the state of the process that this actor runs. `running` is None if the process was never started."""
        running = self._reader.is_alive() and self._status is None if self._reader is not None else None
        tail = "" if running is not False else self._tail()
        return {"running": running, "pid": self._pid, "status": self._status, "log": str(self._log), "tail": tail}

    def end(self, grace_s: float) -> bool:
        """End the process gracefully, and kill it after the grace period. Return whether the process and all of its
        child processes are gone."""
        if self._reader is not None:
            self._send_line(f"end {grace_s}")
            self._reader.join(grace_s + 10.0)
        # The supervisor reports a status once all processes are gone. Without one, it was killed itself.
        whole = self._status is not None
        gone = self._reader is None or (not self._reader.is_alive() and (whole or swept(self._mark, 0.0, 10.0)))
        if gone and self._port_holder is not None:
            self._port_holder.close()
        return gone

    def _send_line(self, line: str) -> None:
        assert self._supervisor is not None
        assert self._supervisor.stdin is not None
        with contextlib.suppress(OSError):  # it has ended; the reader notices
            self._supervisor.stdin.write(line.encode() + b"\n")
            self._supervisor.stdin.flush()

    def _read(self) -> None:
        assert self._supervisor is not None
        assert self._supervisor.stdout is not None
        for line in self._supervisor.stdout:
            message = json.loads(line)
            self._pid = message.get("pid", self._pid)
            if "status" in message:
                self._status = message["status"]
        self._supervisor.wait()

    def _tail(self) -> str:
        """Return the end of the process's output from the log file. The file is kept when an engine is restarted, so it
        may begin with the output of earlier processes, which is left out."""
        try:
            return log_tail(self._log, self._log_from)
        except OSError as error:
            return f"(its log cannot be read: {error})"


def swept(mark: str, patience_s: float, limit_s: float) -> bool:
    """Wait until no process with this mark is left on this machine, and return True. Kill the processes that still run
    after `patience_s`. Return False if processes remain after `limit_s`."""
    began_s = time.monotonic()
    while True:
        left = _marked(mark)
        waited_s = time.monotonic() - began_s
        if not left:
            return True
        if waited_s > limit_s:
            return False
        for pid in left if waited_s >= patience_s else ():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(POLL_S)


def _marked(mark: str) -> list[int]:
    """Return the ids of the processes with this mark in their environment. Zombies and other users' processes, whose
    environment cannot be read, are not found."""
    wanted, found = f"{MARK}={mark}".encode(), []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal() and int(folder.name) != os.getpid():
            with contextlib.suppress(OSError):
                if wanted in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
    return found
