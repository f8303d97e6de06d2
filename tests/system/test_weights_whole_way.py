"""Four trainer ranks on two hosts publish rows of all tensors. The daemon, peers and an agent are processes. Engines
receive whole models, or one half each with tensor parallelism. Some tensors are quantised, with scales."""

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path

import numpy as np
from peer_harness import WITHIN_S, PeerProcess, peers
from staged_parts import Array

from orchestrrl.core.errors import Retryable
from orchestrrl.integrations.instrument.checkpoint_files import folder_sum
from orchestrrl.lab.simulated_engine.server import SimulatedOptions, SimulatedServer
from orchestrrl.rpc.codecs.weights import STATUS
from orchestrrl.rpc.control_client import ControlClient
from orchestrrl.rpc.pb import control_pb2, weights_pb2
from orchestrrl.weights.controller.reports import SyncReport, SyncState
from orchestrrl.weights.layout import read_layout
from orchestrrl.weights.model import DTYPE_BYTES, MODEL_FILE, TensorMeta
from orchestrrl.weights.trainer.boxes import TensorPiece, slices
from orchestrrl.weights.trainer.client import PublishInProgress, WeightsClient
from planner.sync_tree.shares import EngineShare, needed_boxes
from tests.orchestrrl.gateway.processes import free_port

ROOT = Path(__file__).parents[2]
WORLD = 4
BEGIN_WITHIN_S = 300.0  # eight processes, on a busy machine
TENSORS = tuple(
    TensorMeta(name, dtype, shape)
    for name, dtype, shape in [
        ("model.embed_tokens.weight", "BF16", (256, 64)),
        ("model.layers.0.mlp.down_proj.weight", "F8_E4M3", (64, 1 << 14)),
        ("model.layers.0.mlp.down_proj.weight_scale_inv", "F32", (1, 128)),
        ("model.layers.0.mlp.up_proj.weight", "F8_E4M3", (1 << 14, 64)),
        ("model.layers.0.mlp.up_proj.weight_scale_inv", "F32", (128, 1)),
        ("model.layers.0.input_layernorm.weight", "BF16", (64,)),
        ("model.norm.weight", "BF16", (63,)),  # ranks have different numbers of rows
        ("model.scale", "F32", ()),
    ]
)
# Engine, its peer, and the flags for its share.
ENGINES = (
    ("e0", "gen0", ()),
    ("e1", "gen1", ()),
    ("left", "gen2", ("--tp", "2", "--tp-rank", "0")),
    ("right", "gen3", ("--tp", "2", "--tp-rank", "1")),
)


def content(version: int) -> dict[str, Array]:
    rng = np.random.default_rng(version)
    return {
        each.name: np.frombuffer(rng.bytes(each.bytes), dtype=f"u{DTYPE_BYTES[each.dtype]}").reshape(each.shape)
        for each in TENSORS
    }


def rows_of(version: int, rank: int) -> list[TensorPiece]:
    """Return the rows of a rank as FSDP divides them: the last rank has fewer; scalars are on every rank."""
    found = []
    whole = content(version)
    for meta in TENSORS:
        box = meta.whole
        if meta.shape:
            each = -(-meta.shape[0] // WORLD)
            first, last = min(meta.shape[0], rank * each), min(meta.shape[0], (rank + 1) * each)
            if first == last:
                continue
            box = ((first, last), *box[1:])
        found.append(TensorPiece(meta, box, whole[meta.name][slices(box)]))
    return found


@contextmanager
def process(log: Path, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("ab") as out:
        started = subprocess.Popen(
            [sys.executable, "-m", "orchestrrl", *words],
            stdout=out,
            stderr=out,
            cwd=log.parent,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
    try:
        yield started
    finally:
        started.terminate()
        started.wait(WITHIN_S)


async def until_ready(address: str) -> None:
    """Wait until all peers are attached and all engines are reported to the daemon."""
    want = {"train0", "train1", *(peer for _, peer, _ in ENGINES)}
    async with asyncio.timeout(BEGIN_WITHIN_S):
        while True:
            try:
                async with ControlClient(address) as daemon:
                    shown = await daemon.call(daemon.weights.GetWeights, weights_pb2.GetWeightsRequest())
                    known = await daemon.call(daemon.control.GetStatus, control_pb2.GetStatusRequest())
                there = {each.id for each in STATUS.from_pb(shown).peers if each.attached}
                if want <= there and len(known.workers) == len(ENGINES):
                    return
            except Retryable:
                pass  # it does not listen yet
            await asyncio.sleep(0.2)


@asynccontextmanager
async def fleet(folder: Path) -> AsyncIterator[tuple[str, dict[str, PeerProcess]]]:
    port = free_port()
    address = f"127.0.0.1:{port}"
    # Simulated responses depend on all bytes of a file, including holes, so halves would respond differently.
    config = "mode: advise\nlisten: {address: '%s'}\nweights: {probe: null, chunk_bytes: 100000, transports: [tcp]}\n"
    (folder / "o.yaml").write_text(config % address)
    async with AsyncExitStack() as stack:
        stack.enter_context(process(folder / "daemon.log", "daemon", "-c", "o.yaml"))
        started = {name: PeerProcess(name, port, folder / name) for name in ("train0", "train1")}
        agent = ["agent", "--daemon", address, "--engine-kind", "simulated"]
        for engine, name, words in ENGINES:
            server = await stack.enter_async_context(SimulatedServer(SimulatedOptions()))
            own = ("--engine", f"{engine}={server.url}", "--engine-kind", "simulated", *words)
            started[name] = PeerProcess(name, port, folder / name, *own)
            agent += ["--engine", f"{engine}={server.url}"]
        stack.enter_context(process(folder / "agent.log", *agent))
        await stack.enter_async_context(peers(*started.values()))
        await until_ready(address)
        yield address, started


def publish(address: str, started: dict[str, PeerProcess], version: int) -> list[SyncReport]:
    """Publish as four processes of a trainer, and return the result of each."""

    def rank(number: int) -> SyncReport:
        host = started[f"train{number // 2}"]
        client = WeightsClient(address, peer=host.name, folder=host.folder, rank=number, world=WORLD, run="one")
        with client:
            handle = client.start_publish_arrays(version, rows_of(version, number))
            return handle.result(BEGIN_WITHIN_S)

    with ThreadPoolExecutor(WORLD) as ranks:
        return list(ranks.map(rank, range(WORLD)))


def check(folder: Path, version: int, words: Sequence[str]) -> None:
    """Check that the file has the data of the peer's engine, and that other data occupies no disk space."""
    tp, ranks = (2, (int(words[-1]),)) if words else (1, (0,))
    file = folder / f"v{version}" / MODEL_FILE
    layout = read_layout(file)
    image = np.fromfile(file, dtype=np.uint8)
    for name, boxes in needed_boxes({each.name: each.shape for each in TENSORS}, EngineShare(tp, ranks)).items():
        right = content(version)[name]
        found = image[layout.places[name] :][: right.nbytes].view(right.dtype).reshape(right.shape)
        for box in boxes:
            assert (found[slices(box)] == right[slices(box)]).all(), (folder, name, box)
    if not words:
        assert file.stat().st_size == layout.bytes
    # Rows of `down_proj` have four pages; half a row touches three pages at most.
    assert file.stat().st_blocks * 512 <= layout.bytes * (0.7 if words else 1.0) + 65536


async def test_rows_of_four_ranks_reach_whole_and_half_engines(tmp_path: Path) -> None:
    async with fleet(tmp_path) as (address, started):
        for version in (1, 2):
            reports = await asyncio.to_thread(publish, address, started, version)
            for report in reports:
                assert (report.state, report.code) == (SyncState.DONE, "done"), report
            for _, name, words in ENGINES:
                check(started[name].folder, version, words)
            whole = {folder_sum(started[name].folder / f"v{version}") for name in ("gen0", "gen1")}
            assert len(whole) == 1
            (report,) = {report.id: report for report in reports}.values()
            # Two engines have everything, two have half of the divided tensors: no more bytes were sent.
            size = sum(each.bytes for each in TENSORS)
            assert 2.9 * size < report.carried_bytes < 3.1 * size
