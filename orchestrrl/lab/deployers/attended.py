"""Start engines as processes of this machine that are attended: handed out when they work, ended by who asked for them.

For demos, measurements and tests; those that outlive the daemon are of local.py. One process group per engine.
"""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from orchestrrl.core.config.launch import EngineDevice
from orchestrrl.core.errors import OrchestrRLError, Permanent, ProblemFaults
from orchestrrl.engines.base import Engine
from orchestrrl.engines.vllm import VllmEngine
from orchestrrl.fleet.deployers.command_line import EngineLaunch, EngineSpec, render
from orchestrrl.lab.simulated_engine.client import SimulatedEngine
from planner.model import ConfigurationId, EngineId, GpuId, Parallelism

POLL_S = 0.1
PROBE_TIMEOUT_S = 120.0  # the first forward pass of a CPU build can take half a minute
LOG_TAIL_LINES = 15
MOST_CORES = 4096  # of one machine
UNDIVIDED = Parallelism()

# For a small model on the CPU build. More threads than one get into each other's way.
VLLM_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}
VLLM_ARGUMENTS = ("--dtype", "float32", "--enforce-eager")


@dataclass(frozen=True, slots=True)
class LocalEngine:
    """An engine that runs on this machine. `pid` leads a process group of its own."""

    pid: int
    url: str
    log_path: Path
    process: subprocess.Popen[bytes] = field(repr=False)
    port_holder: socket.socket | None = field(default=None, repr=False)

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def kill(self) -> None:
        """SIGKILL to the whole group, as a crash would have it. Killing twice is harmless."""
        self._signal(signal.SIGKILL)
        self.process.wait()
        if self.port_holder is not None:
            self.port_holder.close()

    async def stop(self, grace_s: float = 15.0) -> None:
        """SIGTERM, and SIGKILL for what is left of the group after `grace_s`. Stopping twice is harmless."""
        deadline_s = time.monotonic() + grace_s
        alive = self._signal(signal.SIGTERM)
        while alive and time.monotonic() < deadline_s:
            await asyncio.sleep(POLL_S)
            self.process.poll()  # a child that was not waited for still counts as alive
            alive = self._signal(0)
        self.kill()

    def _signal(self, number: int) -> bool:
        """Signal the group; False when none of it is left."""
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            return False
        return True


async def start_vllm(
    name: str,
    *,
    python: Path,
    model: Path,
    log_dir: Path,
    max_num_seqs: int | None = None,
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    parallelism: Parallelism = UNDIVIDED,
    gpus: Sequence[GpuId] = (),
    ready_within_s: float = 300.0,
) -> LocalEngine:
    """Serve the model in directory `model` with the vLLM of `python`'s environment, on loopback, in float32.

    Of the CPU build: each of `gpus` is a core, and without them it is bound to none.

    Returns after a first completion. Raises Permanent, with the end of its log (`log_dir/name.log`), when vLLM exits or
    is not ready in time; ProblemFaults when `arguments` or `environment` contradict the layout. The model is served
    under the directory's name; other `arguments` go to vLLM as they are.
    """
    launch = EngineLaunch(
        python=str(python),
        model=str(model),
        device=EngineDevice.CPU,
        served_model_name=model.name,
        per_node=MOST_CORES,
        cores_per_gpu=1,
        arguments=VLLM_ARGUMENTS,
        environment=VLLM_ENVIRONMENT,
    )
    port_holder, port = _hold_port()
    spec = EngineSpec(
        engine=EngineId(name),
        configuration=ConfigurationId(name),
        parallelism=parallelism,
        gpus=tuple(gpus),
        port=port,
        max_sequences=None if max_num_seqs is None else max_num_seqs * parallelism.dp,
        arguments=tuple(arguments),
        environment=environment or {},
    )
    try:
        (line,) = render(spec, launch)
    except ProblemFaults:
        port_holder.close()
        raise
    log_path = log_dir / f"{name}.log"
    process = _spawn(list(line.argv), log_path, line.environment)
    engine = LocalEngine(process.pid, f"http://127.0.0.1:{port}", log_path, process, port_holder)
    await _until_ready(engine, VllmEngine(engine.url, timeout_s=PROBE_TIMEOUT_S), ready_within_s)
    return engine


async def start_simulated(
    name: str, *, log_dir: Path, arguments: Sequence[str] = (), ready_within_s: float = 60.0
) -> LocalEngine:
    """Run `orchestrrl engine simulated` with `arguments`, on loopback and a port that it chooses itself."""
    log_path = log_dir / f"{name}.log"
    command = [sys.executable, "-m", "orchestrrl", "engine", "simulated", "--port", "0", *arguments]
    process = _spawn(command, log_path, {})

    async def announced() -> bool:
        return _announced_url(log_path) is not None

    await _until(LocalEngine(process.pid, "", log_path, process), announced, time.monotonic() + ready_within_s)
    engine = LocalEngine(process.pid, _announced_url(log_path) or "", log_path, process)
    await _until_ready(engine, SimulatedEngine(engine.url), ready_within_s)
    return engine


def _hold_port() -> tuple[socket.socket, int]:
    """A free port, kept from everybody else by a socket that is bound to it and never listens. A server that sets
    SO_REUSEADDR, as vLLM does, can bind beside it."""
    holder = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    return holder, holder.getsockname()[1]


def _spawn(command: list[str], log_path: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with log_path.open("wb") as log:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            start_new_session=True,
        )


def _announced_url(log_path: Path) -> str | None:
    """A simulated engine's first line of output is its URL."""
    for line in log_path.read_text(errors="replace").splitlines(keepends=True):
        if line.startswith("http://") and line.endswith("\n"):
            return line.strip()
    return None


async def _until_ready(engine: LocalEngine, client: Engine, ready_within_s: float) -> None:
    """A real completion is the proof: `/health` says yes before the first forward pass works."""

    async def ready() -> bool:
        if not await client.healthy():
            return False
        try:
            await client.probe()
        except OrchestrRLError:
            return False
        return True

    try:
        await _until(engine, ready, time.monotonic() + ready_within_s)
    finally:
        await client.close()


async def _until(engine: LocalEngine, condition: Callable[[], Awaitable[bool]], deadline_s: float) -> None:
    """Poll until the condition holds. On failure, cancellation included, the engine is killed: nothing stays behind."""
    with contextlib.ExitStack() as undo:
        undo.callback(engine.kill)
        while not await condition():
            await asyncio.sleep(POLL_S)
            if not engine.running:
                raise Permanent(_obituary(engine, f"exited with status {engine.process.returncode}"))
            if time.monotonic() > deadline_s:
                raise Permanent(_obituary(engine, "was not ready in time"))
        undo.pop_all()


def _obituary(engine: LocalEngine, what: str) -> str:
    tail = "\n".join(engine.log_path.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:])
    return f"the engine process {engine.pid} {what}; the end of {engine.log_path}:\n{tail}"
