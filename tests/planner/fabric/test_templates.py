"""Which topology a stage asks for."""

from planner.fabric.intent import Stage
from planner.fabric.model import EndpointId
from planner.fabric.templates import TEMPLATES
from planner.fabric.topology import Pod, PodRole

PODS = (
    Pod(EndpointId("train0"), PodRole.TRAIN),
    Pod(EndpointId("train1"), PodRole.TRAIN),
    Pod(EndpointId("gen0"), PodRole.GEN),
    Pod(EndpointId("gen1"), PodRole.GEN),
)


def test_who_may_meet_in_the_core() -> None:
    pairs = {stage: TEMPLATES[stage].core_pairs(PODS) for stage in Stage}
    assert pairs == {
        Stage.TRAIN: {("train0", "train1")},
        Stage.GEN: frozenset(),
        Stage.WEIGHT_SYNC: {("gen0", "train0"), ("gen0", "train1"), ("gen1", "train0"), ("gen1", "train1")},
    }


def test_only_weight_sync_leaves_spare_ports_as_they_are() -> None:
    assert {stage: TEMPLATES[stage].spreads_spare for stage in Stage} == {
        Stage.TRAIN: True,
        Stage.GEN: True,
        Stage.WEIGHT_SYNC: False,
    }
