"""The recorder in the workers of a real vLLM server of two ranks."""

from pathlib import Path

import aiohttp
import pytest

from orchestrrl.integrations.instrument.rings import UNKNOWN, RingEvent, RingReader, group_id, list_rings
from orchestrrl.lab.testbed.engines import start_vllm
from planner.cost.profile import Parallelism
from planner.model import GpuId
from tests.vllm.conftest import VLLM_PYTHON

INSTRUMENT = Path(__file__).parents[2] / "orchestrrl" / "integrations" / "instrument"


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_vllm_workers_record_their_all_reduces(tiny_model: Path, tmp_path: Path) -> None:
    rings = tmp_path / "rings"
    engine = await start_vllm(
        "tp2",
        python=VLLM_PYTHON,
        model=tiny_model,
        log_dir=tmp_path,
        max_num_seqs=2,
        arguments=("--worker-extension-cls", "vllm_recorder.RecorderExtension", "--max-model-len", "1024"),
        environment={"PYTHONPATH": str(INSTRUMENT), "ORCHESTRRL_RECORDER": str(rings)},
        parallelism=Parallelism(tp=2),
        gpus=(GpuId(0), GpuId(1)),
    )
    try:
        with Workers(rings) as workers:
            workers.events()
            async with aiohttp.ClientSession() as session:
                body = {"model": tiny_model.name, "prompt": [1, 2, 3], "max_tokens": 4, "ignore_eos": True}
                async with session.post(f"{engine.url}/v1/completions", json=body) as answer:
                    assert answer.status == 200
            first, second = workers.events()
            # Per token: one for the embedding, two for each of two layers.
            reduced = [event for event in first if event.op == "all_reduce"]
            assert len(reduced) >= 4 * 5
            assert [(event.op, event.n_bytes, event.group) for event in second if event.op == "all_reduce"] == [
                (event.op, event.n_bytes, event.group) for event in reduced
            ]
            assert all(event.end_ns is not None for event in reduced)
            (group,) = {event.group for event in reduced}
            assert group == group_id((0, 1), "tp:0")
    finally:
        await engine.stop()


class Workers:
    """The rings of both ranks, by rank."""

    def __init__(self, directory: Path) -> None:
        found = [RingReader(path) for path in list_rings(directory)]
        self.readers = sorted(
            (reader for reader in found if reader.header().rank != UNKNOWN), key=lambda reader: reader.header().rank
        )
        assert [reader.header().rank for reader in self.readers] == [0, 1]

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *_: object) -> None:
        for reader in self.readers:
            reader.close()

    def events(self) -> list[list[RingEvent]]:
        return [[event for event in reader.events()[0] if event.end_ns is not None] for reader in self.readers]
