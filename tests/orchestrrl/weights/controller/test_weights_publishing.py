"""Publications of ranks: agreement between ranks, and reported faults."""

from dataclasses import replace
from pathlib import Path

from weights_harness import Harness, played

from orchestrrl.weights.controller.reports import SyncPhase
from orchestrrl.weights.model import (
    TensorMeta,
)
from orchestrrl.weights.publication import Publication, PublicationSet
from planner.model import PeerId

WEIGHT = TensorMeta("a.weight", "BF16", (8, 4))


def _word(rank: int, *tensors: TensorMeta) -> Publication:
    return Publication(3, rank, 4, PeerId("t"), tensors or (WEIGHT,), {}, probe=(1, 2))


def test_publication_is_compared_with_those_of_other_ranks() -> None:
    collection = PublicationSet()
    for word in (_word(0), _word(1, WEIGHT, TensorMeta("b", "F32", (2,)))):
        assert collection.faults(word) == []
        collection.add(word)
    assert collection.faults(_word(1)) == []  # not compared with its own earlier one; the controller does that
    other = replace(_word(2, replace(WEIGHT, shape=(8, 5)), TensorMeta("b", "BF16", (2,))), probe=(1,), world=5)
    assert collection.faults(other) == [
        "world: must be 4 as for rank 0, got 5",
        "probe: must be (1, 2) as for rank 0, got (1,)",
        "tensors[0]: a.weight must be BF16 (8, 4) as for rank 0, got BF16 (8, 5)",
        "tensors[1]: b must be F32 (2,) as for rank 1, got BF16 (2,)",
    ]


def test_staging_phases_end_before_the_publication_if_the_trainers_clock_is_ahead(tmp_path: Path) -> None:
    async def scene(harness: Harness) -> None:
        await harness.pass_time(0.5)
        ahead_s = harness.clock.now_s() + 500.0
        report = await harness.report(harness.publish(1, began_s=ahead_s, offload_s=2.0, gather_s=1.0))
        offload, gather = report.phases[:2]
        assert (offload.phase, gather.phase) == (SyncPhase.OFFLOAD, SyncPhase.GATHER)
        assert (offload.seconds, gather.seconds) == (2.0, 1.0)
        assert gather.ended_s is not None
        assert gather.ended_s <= min(each.began_s for each in report.phases[3:])

    played(tmp_path, scene)
