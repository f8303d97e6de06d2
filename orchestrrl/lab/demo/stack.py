"""The processes of the demo: engines, and OrchestrRL beside them (daemon, agent, gateway), each with its log."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from orchestrrl.core.errors import Permanent
from orchestrrl.lab.demo.scenario import ENGINES, DemoScenario, SyncSection
from orchestrrl.lab.deployers.attended import LocalEngine, start_simulated, start_vllm

READY_WITHIN_S = 120.0
STOP_WITHIN_S = 10.0
LOG_TAIL_LINES = 15
GPUS_PER_ENGINE = 2
STREAM_INTERVAL_TOKENS = 16
# Of an engine's time: what a plan must gain.
EPSILON_S = 10.0
# Where `make venv-vllm` puts it; a GPU host's own vLLM does as well.
VLLM_PYTHON = Path(".venv-vllm/bin/python")
MODEL_MAKER = Path(__file__).parents[1] / "tiny_model.py"


class Process:
    """One of OrchestrRL's own commands. The first line it prints is the address that it serves."""

    def __init__(self, name: str, arguments: Sequence[str], log_dir: Path) -> None:
        self.name = name
        self.arguments = list(arguments)
        self.log_path = log_dir / f"{name}.log"
        self._out_path = log_dir / f"{name}.out"
        log_dir.mkdir(parents=True, exist_ok=True)
        for path in (self.log_path, self._out_path):
            path.unlink(missing_ok=True)
        self._process = self._spawn()

    @property
    def pid(self) -> int:
        return self._process.pid

    async def address(self) -> str:
        """The first line of its output. Raises Permanent with the end of its log if it ends or keeps silent."""
        deadline_s = time.monotonic() + READY_WITHIN_S
        while time.monotonic() < deadline_s:
            line, newline, _ = self._out_path.read_text(errors="replace").partition("\n")
            if newline:
                return line.strip()
            if self._process.poll() is not None:
                break
            await asyncio.sleep(0.05)
        raise Permanent(self._obituary())

    def check(self) -> None:
        """Raises Permanent with the end of its log if it has ended."""
        if self._process.poll() is not None:
            raise Permanent(self._obituary())

    def _obituary(self) -> str:
        tail = "\n".join(self.log_path.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:])
        return f"{self.name} did not start; the end of {self.log_path}:\n{tail}"

    def kill(self) -> None:
        """SIGKILL, as a crash would have it."""
        self._process.kill()
        self._process.wait()

    async def restart(self) -> None:
        """Start it again after it has ended, and wait for its address."""
        self._out_path.unlink()
        self._process = self._spawn()
        await self.address()

    async def stop(self) -> int:
        """SIGTERM, and SIGKILL when it does not end in time. Returns the exit status."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        deadline_s = time.monotonic() + STOP_WITHIN_S
        while self._process.poll() is None and time.monotonic() < deadline_s:
            await asyncio.sleep(0.05)
        if self._process.poll() is None:
            self._process.kill()
        return self._process.wait()

    def _spawn(self) -> subprocess.Popen[bytes]:
        with self._out_path.open("wb") as out, self.log_path.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "orchestrrl", *self.arguments],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=log,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )


@dataclass(slots=True)
class Stack:
    """OrchestrRL beside running engines."""

    daemon: Process
    agent: Process
    gateway: Process
    daemon_address: str
    gateway_url: str


@contextlib.asynccontextmanager
async def engines(scenario: DemoScenario, kind: str, out_dir: Path) -> AsyncIterator[list[LocalEngine]]:
    """The scenario's engines, ready; stopped on leaving."""
    if kind not in ENGINES:
        raise Permanent(f"unknown engine {kind!r}; known: {', '.join(ENGINES)}")
    starting = _simulated(scenario, out_dir) if kind == "simulated" else await _vllm(scenario, out_dir)
    started = await asyncio.gather(*starting, return_exceptions=True)
    running = [engine for engine in started if isinstance(engine, LocalEngine)]
    try:
        for outcome in started:
            if isinstance(outcome, BaseException):
                raise outcome
        yield running
    finally:
        await asyncio.gather(*(engine.stop() for engine in running))


def _simulated(scenario: DemoScenario, out_dir: Path) -> list[asyncio.Task[LocalEngine]]:
    out_dir.mkdir(parents=True, exist_ok=True)
    lengths_path = out_dir / "lengths.yaml"
    lengths_path.write_text(yaml.safe_dump(scenario.lengths.model_dump(mode="json")))
    engine = scenario.engine
    flags = {
        "alpha-s": engine.alpha_s,
        "beta-s": engine.beta_s,
        "gamma-s": engine.gamma_s,
        "prefill-tokens-per-s": engine.prefill_tokens_per_s,
        "max-num-seqs": engine.max_num_seqs,
        "kv-capacity-tokens": engine.kv_capacity_tokens,
        "max-model-len": engine.max_model_len_tokens,
        "lengths": lengths_path,
        "speed": scenario.speed,
        "tick-s": scenario.tick_s,
    }
    if scenario.kv is not None:
        kv_directory = out_dir / "kv"
        kv_directory.mkdir(exist_ok=True)
        flags |= {
            "kv-directory": kv_directory,
            "kv-bytes-per-token": scenario.kv.bytes_per_token,
            "kv-gbps": GPUS_PER_ENGINE * scenario.kv.gbps_per_gpu,
            "kv-latency-s": scenario.kv.latency_s,
        }
    arguments = [text for flag, value in flags.items() for text in (f"--{flag}", str(value))]
    return [
        asyncio.create_task(start_simulated(f"engine-{index}", log_dir=out_dir, arguments=arguments))
        for index in range(scenario.engines)
    ]


async def _vllm(scenario: DemoScenario, out_dir: Path) -> list[asyncio.Task[LocalEngine]]:
    if not VLLM_PYTHON.exists():
        raise Permanent(f"{VLLM_PYTHON} is missing: run `make venv-vllm` first, in the repository's folder")
    model = out_dir / "tiny-model"
    made = await asyncio.create_subprocess_exec(str(VLLM_PYTHON.absolute()), str(MODEL_MAKER), str(model))
    if await made.wait() != 0:
        raise Permanent(f"{MODEL_MAKER.name} failed, see above")
    # The gateway has every token streamed; sent one by one they would cost vLLM's front end more than the tiny model.
    arguments = ["--stream-interval", str(STREAM_INTERVAL_TOKENS)]
    arguments += ["--max-model-len", str(scenario.engine.max_model_len_tokens)]
    return [
        asyncio.create_task(
            start_vllm(
                f"engine-{index}",
                python=VLLM_PYTHON,
                model=model,
                log_dir=out_dir,
                max_num_seqs=scenario.engine.max_num_seqs,
                arguments=arguments,
            )
        )
        for index in range(scenario.engines)
    ]


@contextlib.asynccontextmanager
async def orchestrrl(
    scenario: DemoScenario, kind: str, running: Sequence[LocalEngine], out_dir: Path
) -> AsyncIterator[Stack]:
    """Daemon, agent and gateway beside running engines; ended on leaving."""
    config_path = out_dir / "daemon.yaml"
    for path in out_dir.glob("journal.sqlite*"):
        path.unlink()
    config_path.write_text(yaml.safe_dump(_daemon_config(scenario, running, out_dir), sort_keys=False))
    async with contextlib.AsyncExitStack() as undo:

        async def start(name: str, arguments: Sequence[str]) -> tuple[Process, str]:
            process = Process(name, arguments, out_dir)
            undo.push_async_callback(process.stop)
            return process, await process.address()

        daemon, daemon_address = await start("daemon", ["daemon", "-c", str(config_path)])
        config_path.write_text(config_path.read_text().replace("127.0.0.1:0", daemon_address))  # for a restart
        agent = Process("agent", _agent_flags(scenario, kind, running, daemon_address), out_dir)
        undo.push_async_callback(agent.stop)
        flags = _gateway_flags(scenario, kind, running, daemon_address)
        gateway, gateway_url = await start("gateway", ["gateway", "--listen", "127.0.0.1:0", *flags])
        gateway.arguments[2] = gateway_url.removeprefix("http://")
        yield Stack(daemon, agent, gateway, daemon_address, gateway_url)


def _agent_flags(scenario: DemoScenario, kind: str, running: Sequence[LocalEngine], daemon_address: str) -> list[str]:
    flags = ["agent", "--engine", kind, "--daemon", daemon_address, "--node-id", "agent"]
    flags += ["--interval-s", str(scenario.control.scrape_interval_s)]
    flags += ["--rate-window-s", str(scenario.control.rate_window_s)]
    for index, engine in enumerate(running):
        flags += ["--url", engine.url, "--id", f"e{index}"]
    return flags


def _gateway_flags(scenario: DemoScenario, kind: str, running: Sequence[LocalEngine], daemon_address: str) -> list[str]:
    flags = ["--daemon", daemon_address, "--engine-kind", kind, "--id", "gateway"]
    flags += ["--report-interval-s", str(scenario.control.report_interval_s)]
    for index, engine in enumerate(running):
        flags += ["--engine", f"e{index}={engine.url}"]
    return flags


def _daemon_config(scenario: DemoScenario, running: Sequence[LocalEngine], out_dir: Path) -> dict[str, object]:
    control, engine, speed = scenario.control, scenario.engine, scenario.speed
    journal_path = out_dir / "journal.sqlite"
    # In wall time, as everything that the daemon sees.
    configuration = {
        "id": "as-started",
        "gpus": GPUS_PER_ENGINE,
        "alpha_s": engine.alpha_s / speed,
        "beta_s": engine.beta_s / speed,
        "gamma_s": engine.gamma_s / speed,
        "kv_capacity_tokens": engine.kv_capacity_tokens,
        "max_sequences": engine.max_num_seqs,
        "prefill_tokens_per_s": engine.prefill_tokens_per_s * speed,
        "switch_s": 1.7 / speed,
    }
    return {
        "mode": "act",
        "listen": {"address": "127.0.0.1:0"},
        "journal": {"path": str(journal_path)},
        "fast": {
            "interval_s": control.fast_interval_s,
            "theta": control.theta,
            "max_moves_per_tick": control.max_moves_per_tick,
            "max_moves_per_request": control.max_moves_per_request,
        },
        "slow": {
            "interval_s": control.slow_interval_s,
            "epsilon_s": EPSILON_S / speed,
            "max_output_tokens": scenario.max_tokens,
        },
        "fleet": {
            "gpus": {"count": GPUS_PER_ENGINE * len(running), "per_node": 8},
            "kv_transfer": _kv_transfer(scenario),
            "configurations": [configuration],
            "engines": [
                {
                    "id": f"e{index}",
                    "url": local.url,
                    "configuration": "as-started",
                    "gpus": list(range(GPUS_PER_ENGINE * index, GPUS_PER_ENGINE * (index + 1))),
                    "max_sequences": engine.max_num_seqs,
                }
                for index, local in enumerate(running)
            ],
        },
        **({} if scenario.sync is None else {"weights": _weights(scenario.sync)}),
    }


def _weights(sync: SyncSection) -> dict[str, object]:
    return {"network": {"link_gbps": sync.gbps, "nic_gbps": sync.gbps}, "hop_latency_s": sync.hop_s}


def _kv_transfer(scenario: DemoScenario) -> dict[str, object] | None:
    if scenario.kv is None:
        return None
    return {
        "connector": "kv_handover",
        "inter_node_gbps_per_gpu": scenario.kv.gbps_per_gpu * scenario.speed,
        "latency_s": scenario.kv.latency_s / scenario.speed,
        "kv_bytes_per_token": scenario.kv.bytes_per_token,
    }
