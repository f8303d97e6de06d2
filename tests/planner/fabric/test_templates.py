"""Which topology a stage asks for."""

from dataclasses import replace

from planner.fabric.intent import Intent, Primitive, Stage, Traffic, TrafficOperation
from planner.fabric.model import EndpointId
from planner.fabric.templates import SpareCapacity, template_of
from planner.fabric.topology import Pod, PodRole

PODS = (
    Pod(EndpointId("train0"), PodRole.TRAIN),
    Pod(EndpointId("train1"), PodRole.TRAIN),
    Pod(EndpointId("gen0"), PodRole.GEN),
    Pod(EndpointId("gen1"), PodRole.GEN),
)
ALL_TO_ALL = Traffic(TrafficOperation.EP, Primitive.ALL_TO_ALL, ((0, 1), (2, 3)), 1.0)
M2N = Traffic(TrafficOperation.AFD, Primitive.BIPARTITE, ((0, 1),), 4.0, receivers=((2, 3),))


def intent(stage: Stage, *traffic: Traffic) -> Intent:
    return Intent("again", stage, traffic or (ALL_TO_ALL,))


def test_who_may_meet_in_the_core() -> None:
    pairs = {stage: template_of(intent(stage)).core_pairs(PODS) for stage in Stage}
    assert pairs == {
        Stage.TRAIN: {("train0", "train1")},
        Stage.GEN: frozenset(),
        Stage.WEIGHT_SYNC: {("gen0", "train0"), ("gen0", "train1"), ("gen1", "train0"), ("gen1", "train1")},
    }


def test_only_weight_sync_leaves_spare_ports_as_they_are() -> None:
    assert {stage: template_of(intent(stage)).spare for stage in Stage} == {
        Stage.TRAIN: SpareCapacity.SPREAD,
        Stage.GEN: SpareCapacity.SPREAD,
        Stage.WEIGHT_SYNC: SpareCapacity.KEEP,
    }


def test_hot_endpoints_on_two_sides_are_told_by_bytes() -> None:
    assert template_of(intent(Stage.GEN, ALL_TO_ALL, M2N)).bipartite
    assert not template_of(intent(Stage.GEN, replace(ALL_TO_ALL, times=10.0), M2N)).bipartite
