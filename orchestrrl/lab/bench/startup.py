"""Measure the CPU time, in seconds, that commands and processes need until they are ready. The baseline is the start of
Python alone."""

import asyncio
import os
import resource
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from unittest.mock import patch

from orchestrrl.lab.bench.figure import Figure
from orchestrrl.lab.testbed.stack import Stack, engine_flags

REPETITIONS = 5
PROGRAM = str(Path(sys.executable).with_name("orchestrrl"))
COMPLETION = {"_ORCHESTRRL_COMPLETE": "complete_bash", "COMP_WORDS": "orchestrrl fabric ", "COMP_CWORD": "2"}
# Name of a command line -> arguments, environment.
COMMANDS: dict[str, tuple[Sequence[str], Mapping[str, str]]] = {
    "help": (("--help",), {}),
    "version": (("--version",), {}),
    "completion": ((), COMPLETION),
    "gateway_help": (("gateway", "--help"), {}),
    "status": (("status", "--daemon", "127.0.0.1:9"), {}),  # no daemon listens there
}


def start_up(folder: Path) -> list[Figure]:
    """Measure the CPU time of commands and processes until they are ready, in seconds, as the median over rounds. The
    first round writes bytecode and is not counted.

    An engine or a gateway is ready when it has printed its address. An agent or a peer is ready when the daemon lists
    it. The daemon is ready when it has made a plan.
    """
    spent_s: dict[str, list[float]] = defaultdict(list)
    # With PYTHONDONTWRITEBYTECODE, every process would compile all modules again.
    with tempfile.TemporaryDirectory() as cache, patch.dict(os.environ, {"PYTHONPYCACHEPREFIX": cache}):
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        for repetition in range(-1, REPETITIONS):
            round_s = {"python": _command_s((sys.executable, "-c", "pass"), {})}
            round_s |= {name: _command_s((PROGRAM, *words), more) for name, (words, more) in COMMANDS.items()}
            round_s |= asyncio.run(_processes_s(folder / "start-up" / str(repetition)))
            for name, seconds in round_s.items() if repetition >= 0 else ():
                spent_s[name].append(seconds)
    python_s = median(spent_s.pop("python"))
    return [
        Figure(f"start_{name}", median(each_s), "s", "python -c pass", python_s, "CPU until ready")
        for name, each_s in spent_s.items()
    ]


def _command_s(command: Sequence[str], environment: Mapping[str, str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        command,
        check=False,  # `status` fails because no daemon listens
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **environment},
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


async def _processes_s(folder: Path) -> dict[str, float]:
    """Return the CPU time, in seconds, that each process needs until it is ready. The processes are an engine, an
    agent, a daemon that plans, a gateway and a weight peer."""
    async with Stack(folder) as stack:
        engine = stack.command("engine", "engine", "simulated", "--port", "0")
        engines = {"e0": await stack.served(engine)}
        spent_s = {"engine": engine.cpu_s()}
        await stack.start_daemon(_config(engine.url))
        stack.start_agent("--engine-kind", "simulated", *engine_flags("--engine", engines))
        await stack.until_reported(1, ("agent",))
        spent_s["agent"] = stack.agent.cpu_s()

        async def has_planned() -> bool:
            return bool((await stack.status()).plan_id)

        await stack.daemon.until(has_planned)
        spent_s["daemon"] = stack.daemon.cpu_s()
        await stack.start_gateway("--engine-kind", "simulated", *engine_flags("--engine", engines))
        spent_s["gateway"] = stack.gateway.cpu_s()
        peer = stack.command("peer", "sync", "peer", *stack.peer_words("p0", stack.folder / "weights", {}))
        await stack.until_attached(["p0"])
        spent_s["peer"] = peer.cpu_s()
    return spent_s


def _config(engine_url: str) -> dict[str, object]:
    step = {"alpha_s": 0.018, "beta_s": 8e-5, "gamma_s": 4e-8, "prefill_tokens_per_s": 18000}
    room = {"gpus": 1, "kv_capacity_tokens": 100_000, "max_sequences": 64, "switch_s": 1.0}
    engine = {"id": "e0", "url": engine_url, "configuration": "tp1", "gpus": [0], "max_sequences": 64}
    gpus = {"count": 1, "per_node": 8}
    fleet = {"gpus": gpus, "configurations": [{"id": "tp1", **step, **room}], "engines": [engine]}
    return {"slow": {"interval_s": 0.2, "max_output_tokens": 1000}, "fleet": fleet, "weights": {}}
