"""The topology of each stage."""

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


def test_pairs_of_pods_allowed_in_core() -> None:
    pairs = {stage: TEMPLATES[stage].core_pairs(PODS) for stage in Stage}
    assert pairs == {
        Stage.TRAIN: {("train0", "train1")},
        Stage.GEN: frozenset(),
        Stage.WEIGHT_SYNC: {("gen0", "train0"), ("gen0", "train1"), ("gen1", "train0"), ("gen1", "train1")},
    }


def test_only_weight_sync_keeps_spare_ports_unchanged() -> None:
    assert {stage: TEMPLATES[stage].spreads_spare for stage in Stage} == {
        Stage.TRAIN: True,
        Stage.GEN: True,
        Stage.WEIGHT_SYNC: False,
    }
