"""Words of ranks: what goes together, and what is told where it does not."""

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


def test_a_rank_is_held_against_what_others_have_said() -> None:
    collection = PublicationSet()
    for word in (_word(0), _word(1, WEIGHT, TensorMeta("b", "F32", (2,)))):
        assert collection.faults(word) == []
        collection.add(word)
    assert collection.faults(_word(1)) == []  # its own word may be another now; whether it may is told elsewhere
    other = replace(_word(2, replace(WEIGHT, shape=(8, 5)), TensorMeta("b", "BF16", (2,))), probe=(1,), world=5)
    assert collection.faults(other) == [
        "world: rank 0 has said 4, got 5",
        "probe: rank 0 has said (1, 2), got (1,)",
        "tensors[0]: a.weight is BF16 (8, 4) of rank 0, got BF16 (8, 5)",
        "tensors[1]: b is F32 (2,) of rank 1, got BF16 (2,)",
    ]


def test_a_trainer_whose_clock_is_ahead_has_staged_before_it_said_so(tmp_path: Path) -> None:
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
