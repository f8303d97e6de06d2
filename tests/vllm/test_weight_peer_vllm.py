"""A peer in vLLM's environment, with only the orchestrrl package on the path: it attaches, and receives a version from
a peer in OrchestrRL's own environment."""

from pathlib import Path

from orchestrrl.weights.model import MODEL_FILE
from orchestrrl.weights.orders import CheckVersion, OpenVersion
from tests.orchestrrl.weights.peer_harness import PeerProcess, carry, daemon_at, edge, peers
from tests.orchestrrl.weights.weight_versions import HALVES, Contents
from tests.vllm.conftest import VLLM_PYTHON


async def test_peer_runs_in_vllms_environment(tmp_path: Path) -> None:
    contents = Contents(1)
    async with daemon_at() as (daemon, port):
        train = PeerProcess("train0", port, tmp_path / "train0", python=str(VLLM_PYTHON))
        gen = PeerProcess("gen0", port, tmp_path / "gen0")
        async with peers(train, gen):
            await daemon.peer("train0")
            there = await daemon.peer("gen0")
            parts = [contents.stage(train.folder / "v1", rank, boxes) for rank, boxes in enumerate(HALVES)]
            map = contents.map(1)
            await daemon.ask("train0", OpenVersion(map, tuple(parts)))
            await daemon.ask("gen0", OpenVersion(map))
            edges = [edge(n, shard.id, 0, shard.bytes, "train0", there) for n, shard in enumerate(map.shards)]
            await carry(daemon, 1, edges)
            await daemon.carried("gen0", [each.id for each in edges])
            assert (await daemon.ask("gen0", CheckVersion(1))).missing == {}
            assert (gen.folder / "v1" / MODEL_FILE).read_bytes() == contents.model_file()
