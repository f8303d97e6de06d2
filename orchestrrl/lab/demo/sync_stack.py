"""What the demo's weight sync takes beside engines and OrchestrRL: two checkpoints, and peers, which are processes.

A trainer's peer, and one for each of two hosts that share the engines.
"""

import asyncio
import contextlib
import shutil
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from orchestrrl.core.errors import Permanent
from orchestrrl.lab.demo.scenario import DemoScenario, SyncSection
from orchestrrl.lab.demo.stack import MODEL_MAKER, READY_WITHIN_S, VLLM_PYTHON, Process, Stack
from orchestrrl.lab.deployers.attended import LocalEngine
from orchestrrl.rpc.control_client import ControlClient
from orchestrrl.rpc.pb import weights_pb2
from orchestrrl.weights.layout import lay_out
from orchestrrl.weights.model import MODEL_FILE, TensorMeta

TRAINER = "train0"
HOSTS = 2  # of engines
BEFORE, AFTER = 1, 2  # the versions
COLUMNS = 1024
LOOK_S = 0.1


@dataclass(frozen=True, slots=True)
class SyncStack:
    folder: Path  # of the trainer's peer
    checkpoints: dict[int, Path]  # by version


@contextlib.asynccontextmanager
async def sync_stack(
    scenario: DemoScenario, kind: str, running: Sequence[LocalEngine], stack: Stack, out_dir: Path
) -> AsyncIterator[SyncStack]:
    """Peers that the daemon knows; ended on leaving."""
    assert scenario.sync is not None, "the scenario has new weights"
    home = (out_dir / "weights").absolute()
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    async with contextlib.AsyncExitStack() as undo:
        peers: dict[str, Process] = {}
        for name, engines in _hosts(running).items():
            words = ["sync", "peer", "--id", name, "--folder", str(home / name), "--daemon", stack.daemon_address]
            words += ["--pod", "train" if name == TRAINER else "generate", "--product", kind]
            words += [word for engine, url in engines.items() for word in ("--engine", f"{engine}={url}")]
            peers[name] = Process(f"peer-{name}", words, out_dir)
            undo.push_async_callback(peers[name].stop)
        checkpoints = await _checkpoints(scenario.sync, kind, home, out_dir)
        await _all_attached(stack.daemon_address, peers)
        yield SyncStack(home / TRAINER, checkpoints)


def _hosts(running: Sequence[LocalEngine]) -> dict[str, dict[str, str]]:
    """Engines of each peer, with their URLs."""
    each = -(-len(running) // HOSTS)
    hosts: dict[str, dict[str, str]] = {TRAINER: {}}
    for index, engine in enumerate(running):
        hosts.setdefault(f"gen{index // each}", {})[f"e{index}"] = engine.url
    return hosts


async def _checkpoints(sync: SyncSection, kind: str, home: Path, out_dir: Path) -> dict[int, Path]:
    """vLLM's are its model as it was started, and the same of another seed."""
    if kind == "simulated":
        made = {version: home / f"checkpoint-{version}" for version in (BEFORE, AFTER)}
        for version, folder in made.items():
            await asyncio.to_thread(_write, folder, sync, version)
        return made
    other = home / "checkpoint-2"
    maker = await asyncio.create_subprocess_exec(
        str(VLLM_PYTHON.absolute()), str(MODEL_MAKER), str(other), "--seed", "1", stdout=asyncio.subprocess.DEVNULL
    )
    if await maker.wait() != 0:
        raise Permanent(f"{MODEL_MAKER.name} failed, see above")
    return {BEFORE: out_dir / "tiny-model", AFTER: other}


def _write(folder: Path, sync: SyncSection, seed: int) -> None:
    """Random weights, which simulated engines answer differently for."""
    shape = (max(1, sync.tensor_bytes // (4 * COLUMNS)), COLUMNS)
    layout = lay_out([TensorMeta(f"model.layers.{layer}.weight", "F32", shape) for layer in range(sync.tensors)])
    chance = np.random.default_rng(seed)
    folder.mkdir()
    with (folder / MODEL_FILE).open("wb") as file:
        file.write(layout.header)
        for _ in layout.tensors:
            file.write(chance.standard_normal(shape, dtype=np.float32).tobytes())


async def _all_attached(daemon_address: str, peers: Mapping[str, Process]) -> None:
    """Raises Permanent."""
    deadline_s = time.monotonic() + READY_WITHIN_S
    async with ControlClient(daemon_address) as control:
        while time.monotonic() < deadline_s:
            told = await control.call(control.weights.GetWeights, weights_pb2.GetWeightsRequest())
            if {peer.peer_id for peer in told.peers if peer.attached} >= set(peers):
                return
            for process in peers.values():
                process.check()
            await asyncio.sleep(LOOK_S)
    raise Permanent(f"the daemon did not hear of every peer in {READY_WITHIN_S:g} s: see the logs of peers")
