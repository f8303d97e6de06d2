"""What the demo's weight sync takes beside engines and OrchestrRL: two checkpoints, and peers, which are processes.

A trainer's peer, and one for each of two hosts that share the engines.
"""

import asyncio
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from orchestrrl.lab.demo.scenario import DemoScenario, SyncSection
from orchestrrl.lab.testbed.engines import LocalEngine, make_model
from orchestrrl.lab.testbed.stack import Stack
from orchestrrl.weights.layout import lay_out
from orchestrrl.weights.model import MODEL_FILE, TensorMeta

TRAINER = "train0"
HOSTS = 2  # of engines
BEFORE, AFTER = 1, 2  # the versions
COLUMNS = 1024


@dataclass(frozen=True, slots=True)
class SyncStack:
    folder: Path  # of the trainer's peer
    checkpoints: dict[int, Path]  # by version


async def sync_stack(
    scenario: DemoScenario, kind: str, running: Sequence[LocalEngine], stack: Stack, out_dir: Path
) -> SyncStack:
    """Start peers, which end with the stack, and return once the daemon has them."""
    assert scenario.sync is not None, "the scenario has new weights"
    home = (out_dir / "weights").absolute()
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    hosts = _hosts(running)
    for name, engines in hosts.items():
        flags = ("--pod", "train" if name == TRAINER else "generate", "--product", kind)
        stack.command(f"peer-{name}", "sync", "peer", *stack.peer_words(name, home / name, engines, *flags))
    checkpoints = await _checkpoints(scenario.sync, kind, home, out_dir)
    await stack.until_attached(hosts)
    return SyncStack(home / TRAINER, checkpoints)


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
    await make_model(other, seed=1)
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
