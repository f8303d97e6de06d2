"""Engines of a test bed. A function that starts an engine returns when the engine has completed a first request. The
caller must stop the engine.

For engines that outlive their caller, see fleet/deployers/local.py.
"""

import asyncio
import contextlib
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Iterable, Mapping, Sequence
from pathlib import Path

from orchestrrl.core.config.launch import EngineDevice
from orchestrrl.core.errors import OrchestrRLError, Permanent, ProblemFaults
from orchestrrl.engines.base import Engine
from orchestrrl.engines.vllm import VllmEngine
from orchestrrl.fleet.deployers.command_line import EngineLaunch, EngineSpec, render
from orchestrrl.fleet.deployers.machine import hold_port
from orchestrrl.lab.simulated_engine.client import SimulatedEngine
from orchestrrl.lab.testbed.processes import VLLM_PYTHON, LabProcess, command_of
from planner.model import ConfigurationId, EngineId, GpuId, Parallelism

PROBE_TIMEOUT_S = 120.0  # the first forward pass of a CPU build can take half a minute
MOST_CORES = 4096  # per machine
UNDIVIDED = Parallelism()
MODEL_MAKER = Path(__file__).parents[1] / "tiny_model.py"

# For a small model on the CPU build, which is slower with more than one thread.
VLLM_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}
VLLM_ARGUMENTS = ("--dtype", "float32", "--enforce-eager")


class LocalEngine(LabProcess):
    """An engine on this machine. The stop signal is sent to all processes of the engine. The engine's port is reserved
    until the engine is stopped or killed."""

    port_holder: socket.socket | None = None

    def kill(self) -> None:
        super().kill()
        if self.port_holder is not None:
            self.port_holder.close()

    async def stop(self, grace_s: float = 15.0) -> int:
        status = await super().stop(grace_s)
        self.kill()
        return status

    def _terminate(self) -> None:
        self._signal_all(signal.SIGTERM)

    async def answers(self, client: Engine, within_s: float) -> None:
        """Wait until the engine has completed a first request, then close `client`. A request is necessary because
        `/health` succeeds before a forward pass is possible. Raises Permanent if the engine exits or does not complete
        a request within `within_s`."""

        async def completes() -> bool:
            if not await client.healthy():
                return False
            try:
                await client.probe()
            except OrchestrRLError:
                return False
            return True

        try:
            with self.killed_on_failure():
                await self.until(completes, within_s)
        finally:
            await client.close()


async def start_vllm(
    name: str,
    *,
    python: Path = VLLM_PYTHON,
    model: Path,
    log_dir: Path,
    max_num_seqs: int | None = None,
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    parallelism: Parallelism = UNDIVIDED,
    gpus: Sequence[GpuId] = (),
    ready_within_s: float = 300.0,
) -> LocalEngine:
    """Serve the model in directory `model` with the vLLM CPU build of `python`'s environment, on loopback, in float32.

    Each of `gpus` is the number of a CPU core. Without `gpus`, the engine is not bound to cores. The model is served
    under the directory's name. `arguments` are passed to vLLM.

    The call returns after the engine has completed a first request. Raises Permanent, with the end of vLLM's log
    (`log_dir/name.log`), if vLLM exits or is not ready in time. Raises ProblemFaults if no command line can be
    rendered, for example because `arguments` or `environment` contradict `parallelism`.
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
    port_holder = hold_port("127.0.0.1", [(0, True)])
    port = port_holder.getsockname()[1]
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
    engine = LocalEngine(name, line.argv, log_dir, environment=line.environment, one_log=True)
    engine.url, engine.port_holder = f"http://127.0.0.1:{port}", port_holder
    engine.spawn()
    await engine.answers(VllmEngine(engine.url, timeout_s=PROBE_TIMEOUT_S), ready_within_s)
    return engine


async def start_simulated(
    name: str, *, log_dir: Path, arguments: Sequence[str] = (), ready_within_s: float = 60.0
) -> LocalEngine:
    """Run `orchestrrl engine simulated` with `arguments`, on loopback and a free port. Return the engine after its
    first request. Raises Permanent if the engine exits or is not ready in time."""
    engine = LocalEngine(name, command_of("engine", "simulated", "--port", "0", *arguments), log_dir)
    await engine.start(ready_within_s)
    await engine.answers(SimulatedEngine(engine.url), ready_within_s)
    return engine


@contextlib.asynccontextmanager
async def all_started(starting: Iterable[Awaitable[LocalEngine]]) -> AsyncIterator[list[LocalEngine]]:
    """Start engines in parallel and yield them. All engines are stopped on exit, or if one of them fails to start."""
    started = await asyncio.gather(*starting, return_exceptions=True)
    running = [engine for engine in started if isinstance(engine, LocalEngine)]
    try:
        for outcome in started:
            if isinstance(outcome, BaseException):
                raise outcome
        yield running
    finally:
        await asyncio.gather(*(engine.stop() for engine in running))


async def make_model(folder: Path, seed: int = 0) -> None:
    """Write the tiny model that vLLM serves in demos and tests. Raises Permanent if vLLM's environment is missing or
    the script that writes the model fails."""
    if not VLLM_PYTHON.exists():
        raise Permanent(f"{VLLM_PYTHON} is missing: run `make venv-vllm` in the repository first")
    words = (VLLM_PYTHON, MODEL_MAKER, folder, "--seed", seed)
    process = await asyncio.create_subprocess_exec(*map(str, words), stdout=asyncio.subprocess.DEVNULL)
    if await process.wait() != 0:
        raise Permanent(f"{MODEL_MAKER.name} failed: see its output above")
