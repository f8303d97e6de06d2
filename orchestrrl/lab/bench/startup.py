"""CPU seconds of commands and processes until they are ready, beside those that third-party packages take alone."""

import asyncio
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from statistics import median

import yaml

from orchestrrl.core.errors import Permanent
from orchestrrl.lab.bench.figure import Figure
from orchestrrl.lab.bench.processes import process_cpu_s
from orchestrrl.lab.demo.stack import Process
from orchestrrl.rpc.control_client import ControlClient
from orchestrrl.rpc.pb import control_pb2, weights_pb2

REPETITIONS = 5
READY_WITHIN_S = 60.0
POLL_S = 0.05
PROGRAM = str(Path(sys.executable).with_name("orchestrrl"))
PYTHON = "pass"
GRPC = "import grpc.aio, google.protobuf.json_format, typer"
COMPLETION = {"_ORCHESTRRL_COMPLETE": "complete_bash", "COMP_WORDS": "orchestrrl fabric ", "COMP_CWORD": "2"}
# What people type: its words, what its environment has, and the packages of others that it cannot do without.
COMMANDS: dict[str, tuple[Sequence[str], Mapping[str, str], str]] = {
    "help": (("--help",), {}, PYTHON),
    "version": (("--version",), {}, PYTHON),
    "completion": ((), COMPLETION, PYTHON),
    "gateway_help": (("gateway", "--help"), {}, PYTHON),
    "status": (("status", "--daemon", "127.0.0.1:9"), {}, f"{GRPC}, rich.table"),  # where nothing listens
}
# A process is ready when it has printed its address; an agent or a peer, when the daemon lists it; the daemon, when it
# has made a plan.
PROCESSES = {
    "engine": "import aiohttp.web, prometheus_client, pydantic, typer, xxhash, yaml",
    "gateway": f"{GRPC}, aiohttp.web, prometheus_client, pydantic",
    "agent": f"{GRPC}, aiohttp, prometheus_client.parser, pydantic",  # the client of its engine is among them
    "peer": f"{GRPC}, numpy, pydantic, xxhash",
    "daemon": f"{GRPC}, aiohttp.web, numpy, prometheus_client, pydantic, yaml",
}


def start_up(folder: Path) -> list[Figure]:
    """Medians; the first round writes bytecode and does not count."""
    spent_s: dict[str, list[float]] = {name: [] for name in (*COMMANDS, *PROCESSES)}
    needs = {name: code for name, (_, _, code) in COMMANDS.items()} | PROCESSES
    alone_s: dict[str, list[float]] = {code: [] for code in needs.values()}
    with _bytecode_written():
        for repetition in range(-1, REPETITIONS):
            round_s = {name: _command_s((PROGRAM, *words), more) for name, (words, more, _) in COMMANDS.items()}
            round_s |= asyncio.run(_processes_s(folder / str(repetition)))
            for code, times_s in alone_s.items():
                seconds = _command_s((sys.executable, "-c", code), {})
                if repetition >= 0:
                    times_s.append(seconds)
            if repetition >= 0:
                for name, seconds in round_s.items():
                    spent_s[name].append(seconds)
    return [_figure(name, median(spent_s[name]), code, median(alone_s[code])) for name, code in needs.items()]


def _figure(name: str, value_s: float, code: str, alone_s: float) -> Figure:
    baseline = "python -c pass" if code == PYTHON else "its third-party imports"
    return Figure(
        f"start_{name}", value_s, "s", baseline, alone_s, f"CPU until ready: {value_s - alone_s:+.2f} s over it"
    )


@contextmanager
def _bytecode_written() -> Iterator[None]:
    """Where PYTHONDONTWRITEBYTECODE is set, every process would compile everything again."""
    before = os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    with tempfile.TemporaryDirectory() as cache:
        os.environ["PYTHONPYCACHEPREFIX"] = cache
        try:
            yield
        finally:
            del os.environ["PYTHONPYCACHEPREFIX"]
            if before is not None:
                os.environ["PYTHONDONTWRITEBYTECODE"] = before


def _command_s(command: Sequence[str], environment: Mapping[str, str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        command,
        check=False,  # status says with its exit status that it found no daemon
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **environment},
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


async def _processes_s(folder: Path) -> dict[str, float]:
    """Of one fleet: an engine, a daemon that plans for it, an agent, a gateway and a weight peer."""
    spent_s: dict[str, float] = {}
    async with AsyncExitStack() as undo:

        def start(name: str, *words: str) -> Process:
            process = Process(name, words, folder)
            undo.push_async_callback(process.stop)
            return process

        async def ready(process: Process, condition: Callable[[], Awaitable[bool]]) -> None:
            async with asyncio.timeout(READY_WITHIN_S):
                while not await condition():
                    process.check()
                    await asyncio.sleep(POLL_S)
            spent_s[process.name] = process_cpu_s(process.pid)

        async def announced(process: Process) -> str:
            address = await process.address()
            spent_s[process.name] = process_cpu_s(process.pid)
            return address

        engine_url = await announced(start("engine", "engine", "simulated", "--port", "0"))
        config = folder / "daemon.yaml"
        config.write_text(yaml.safe_dump(_config(engine_url, folder)))
        daemon = start("daemon", "daemon", "-c", str(config))
        address = await daemon.address()
        agent = start("agent", "agent", "--engine", "simulated", "--url", engine_url, "--id", "e0", "--daemon", address)
        async with ControlClient(address) as client:

            async def agent_is_listed() -> bool:
                return bool((await client.control.GetStatus(control_pb2.GetStatusRequest())).nodes)

            async def there_is_a_plan() -> bool:
                return bool((await client.control.GetStatus(control_pb2.GetStatusRequest())).plan_id)

            async def peer_is_listed() -> bool:
                return bool((await client.call(client.weights.GetWeights, weights_pb2.GetWeightsRequest())).peers)

            await ready(agent, agent_is_listed)
            await ready(daemon, there_is_a_plan)
            await announced(
                start(
                    "gateway",
                    "gateway",
                    "--listen",
                    "127.0.0.1:0",
                    "--engine-kind",
                    "simulated",
                    "--engine",
                    f"e0={engine_url}",
                )
            )
            peer = start(
                "peer",
                "sync",
                "peer",
                "--id",
                "p0",
                "--daemon",
                address,
                "--folder",
                str(folder.absolute() / "weights"),
            )
            await ready(peer, peer_is_listed)
    if spent_s.keys() != PROCESSES.keys():
        raise Permanent(f"no figures of {', '.join(PROCESSES.keys() - spent_s.keys())}")
    return spent_s


def _config(engine_url: str, folder: Path) -> dict[str, object]:
    step = {"alpha_s": 0.018, "beta_s": 8e-5, "gamma_s": 4e-8, "prefill_tokens_per_s": 18000}
    room = {"gpus": 1, "kv_capacity_tokens": 100_000, "max_sequences": 64, "switch_s": 1.0}
    engine = {"id": "e0", "url": engine_url, "configuration": "tp1", "gpus": [0], "max_sequences": 64}
    return {
        "mode": "act",
        "listen": {"address": "127.0.0.1:0"},
        "journal": {"path": str(folder / "journal.sqlite")},
        "slow": {"interval_s": 0.2, "max_output_tokens": 1000},
        "fleet": {
            "gpus": {"count": 1, "per_node": 8},
            "configurations": [{"id": "tp1", **step, **room}],
            "engines": [engine],
        },
        "weights": {},
    }
