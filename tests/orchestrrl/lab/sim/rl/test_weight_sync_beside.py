"""Tests of weight sync with concurrent traffic of training and generation: closed forms, and invariants per fabric."""

from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import cast

import numpy as np
import pytest

from orchestrrl.lab.sim.net.fabrics.base import FabricStage, Period, SimulatedFabric, SimulatedFailures
from orchestrrl.lab.sim.net.fabrics.registry import KINDS, build
from orchestrrl.lab.sim.net.model import FlowRoutes, GpuFlows, Ints, LinkNetwork, Servers
from orchestrrl.lab.sim.rl.generation_fleet import UniformFleet, deployed
from orchestrrl.lab.sim.rl.model import SyncStage
from orchestrrl.lab.sim.rl.run import run_cluster
from orchestrrl.lab.sim.rl.scenario import TrainingSection, scenario_of
from orchestrrl.lab.sim.rl.stages import ArmTimes, FabricStages
from orchestrrl.lab.sim.rl.weight_sync import Beside, generation_beside, sync_stage, training_beside
from orchestrrl.lab.sim.train.model import TrainJob, TrainLayout
from planner.cost.hardware import gpu_named
from planner.cost.models import model_named
from planner.cost.profile import Parallelism
from tests.orchestrrl.lab.sim.rl.cluster_builders import document

SERVERS = Servers(16)
NIC = SERVERS.nic_bytes_per_s
DENSE = TrainJob(model_named("qwen2.5-7b"), gpu_named("h800"), TrainLayout(tp=4, pp=2, dp=8), 64, 1000.0)
GEN = range(64, 128)


@cache
def fabric(kind: str = "fat_tree") -> SimulatedFabric:
    return build(kind, SERVERS) if kind == "topoopt" else build(kind, SERVERS, servers_per_pod=4)


def engines(tp: int = 4) -> UniformFleet:
    return deployed(Parallelism(tp=tp), GEN, SERVERS)


def synced(kind: str, *beside: Beside, scheme: str = "tree") -> SyncStage:
    return sync_stage(DENSE, engines(), fabric(kind), scheme, beside=beside)


def trained(faster: float = 1.0, seconds: float = 2.0) -> Beside:
    return training_beside(DENSE, TrainingSection(), seconds / faster, SERVERS)


def into_each_gpu(share: float) -> Beside:
    """Return traffic into each generating GPU from its counterpart on a training server, over all receiving NICs."""
    gpus = np.array(GEN)
    flows = GpuFlows(gpus - GEN.start, gpus, np.full(len(gpus), share * NIC))
    return Beside.of(FabricStage.GEN, flows, gpus // 8, SERVERS)


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("scheme", ["tree", "naive", "two_stage"])
def test_traffic_inside_servers_does_not_affect_the_sync(kind: str, scheme: str) -> None:
    inside = generation_beside(engines(), DENSE.model, 1e6, SERVERS)
    assert len(inside.flows) == 0
    assert synced(kind, inside, scheme=scheme) == synced(kind, scheme=scheme)


def test_concurrent_traffic_slows_the_sync() -> None:
    """Without blocking, weights arrive over NICs of which other traffic uses a quarter."""
    alone, beside = synced("fat_tree", scheme="two_stage"), synced("fat_tree", into_each_gpu(0.25), scheme="two_stage")
    assert beside.seconds == pytest.approx(alone.seconds / 0.75, rel=0.2)
    assert beside.tier_bytes == alone.tier_bytes  # the sync's own


def test_shared_link_of_sync_and_steady_flow_matches_closed_form() -> None:
    """A shard shares a NIC with a steady flow. The steady flow gets its demand, and at most half of the NIC."""
    servers = Servers(2, gpus_per_server=1, nics_per_server=1)
    job = replace(DENSE, layout=TrainLayout())
    fleet, two = deployed(Parallelism(tp=1), range(1, 2), servers), build("fat_tree", servers)
    alone = sync_stage(job, fleet, two)
    for wish, seconds, held in ((0.25, 1 / 0.75, 0.0), (0.5, 2.0, 0.0), (1.0, 2.0, 1 / 2), (0.8, 2.0, 0.3 / 0.8)):
        other = Beside.of(
            FabricStage.TRAIN, GpuFlows.of([(0, 1, wish * servers.nic_bytes_per_s)]), np.zeros(1, np.int64), servers
        )
        beside = sync_stage(job, fleet, two, beside=[other])
        assert beside.seconds == pytest.approx(seconds * alone.seconds, rel=0.01)
        assert beside.held_s[FabricStage.TRAIN] == pytest.approx(held * beside.seconds, rel=0.01, abs=1e-6)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_more_concurrent_traffic_never_speeds_up_the_sync(kind: str) -> None:
    """The compared cost is that of the sync plus the delays, which is minimised if circuits may change."""
    found = [synced(kind, trained(faster), into_each_gpu(0.3 * faster)) for faster in (0.01, 1.0, 4.0)]
    costs_s = [each.seconds + sum(each.held_s.values()) for each in found]
    assert all(later >= sooner * 0.98 for sooner, later in pairwise(costs_s))
    assert costs_s[0] == pytest.approx(synced(kind).seconds, rel=0.05)
    for each in found:
        assert each.seconds >= each.bound_s * 0.999
        assert all(0.0 <= late_s <= each.seconds * 1.001 for late_s in each.held_s.values())


def test_training_traffic_is_bytes_over_seconds() -> None:
    """Twice as many steps per second are twice the bytes; forward passes add bytes; all traffic is between servers."""
    once, twice = trained(), trained(2.0)
    assert twice.flows.bytes.sum() == pytest.approx(2 * once.flows.bytes.sum())
    assert (once.flows.src // 8 != once.flows.dst // 8).all()
    assert set(np.concatenate([once.flows.src, once.flows.dst]) // 8) == set(range(8))
    without = training_beside(DENSE, TrainingSection(log_prob_passes=0), 2.0, SERVERS)
    assert once.flows.bytes.sum() > without.flows.bytes.sum()
    pairs = list(zip(once.flows.src.tolist(), once.flows.dst.tolist(), strict=True))
    assert len(set(pairs)) == len(pairs)


def test_engines_wait_only_for_their_own_flows() -> None:
    """One engine is delayed by 3 s on one of its flows, another by 1 s on all of its flows."""
    fleet = engines(tp=16)
    beside = generation_beside(fleet, DENSE.model, 1000.0, SERVERS)
    assert sorted(set(beside.group.tolist())) == [0, 1, 2, 3]
    first = np.flatnonzero(beside.group == 0)
    behind_s = np.where(beside.group == 1, 1.0, 0.0)
    behind_s[first[0]] = 3.0
    assert beside.held_s(behind_s) == pytest.approx((3.0 + 1.0) / 4)


def test_stage_without_a_path_is_delayed_for_the_whole_sync() -> None:
    """The circuits connect only the servers that receive weights."""
    usual = fabric()

    class Cut:
        def __getattr__(self, name: str) -> object:
            return getattr(usual, name)

        def network(self, period: Period | None = None) -> LinkNetwork:
            network = usual.network(period)

            def router(src: Ints, dst: Ints) -> FlowRoutes:
                if (dst < GEN.start).any():
                    raise ValueError("no path")
                return network.router(src, dst)

            return replace(network, router=router)

    found = sync_stage(DENSE, engines(), cast(SimulatedFabric, Cut()), beside=[trained()])
    assert found.seconds == synced("fat_tree").seconds
    assert found.held_s == {FabricStage.TRAIN: pytest.approx(found.seconds)}


def test_no_stage_sends_while_circuits_change() -> None:
    quick = build("rfabric", SERVERS, servers_per_pod=4, device="rotornet_infocus")
    found = sync_stage(DENSE, engines(), quick, beside=[trained()])
    assert found.held_s[FabricStage.TRAIN] >= found.phases_s["circuits"]


def test_sync_runs_concurrently_with_the_given_stages() -> None:
    """Engines inside servers have no traffic on the network. A failure lengthens the sync and its delays equally."""
    scenario = scenario_of(document(fabrics=["oversubscribed"], faults=[{"at_s": 100.0, "fail": "nic", "of": 0}]))
    times = ArmTimes(FabricStages(scenario, scenario.fabrics[0]), "verl_to", 1)
    alone, beside, both = (
        times.sync_stage(SimulatedFailures(), each)
        for each in ((), (FabricStage.TRAIN,), (FabricStage.TRAIN, FabricStage.GEN))
    )
    assert beside == both
    assert beside.seconds > alone.seconds
    before, after = (times.sync(1, begin_s, (FabricStage.TRAIN,)) for begin_s in (0.0, 200.0))
    assert (before.seconds, before.held_s) == (beside.seconds, beside.held_s)
    assert after.seconds > before.seconds
    longer = after.seconds / before.seconds
    assert after.held_s[FabricStage.TRAIN] == pytest.approx(longer * before.held_s[FabricStage.TRAIN])


def test_run_notes_the_cost_of_weight_sync() -> None:
    """The trainer continues in one loop, and pauses in the other."""
    (running,), (waiting,) = (
        run_cluster(scenario_of(document(loop__steps=4, weight_sync__holds=holds))) for holds in ("engines", "both")
    )
    assert running.run.sync_beside == (FabricStage.TRAIN,)
    late_s = sum(row["train_held_s"] for row in running.run.steps)
    assert late_s > 0
    assert f"weight sync delayed training by {late_s:.3f} s, generation by 0.000 s" in running.run.notes
    beside_s, alone_s = (sum(each.sync_phases_s.values()) for each in (running, waiting))
    assert f"weight sync during training takes {beside_s:.3f} s, {alone_s:.3f} s alone" in running.run.notes
    assert beside_s > alone_s
    assert waiting.run.sync_beside == ()
    assert not any("sync during" in note or "sync delayed" in note for note in waiting.run.notes)
