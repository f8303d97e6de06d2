"""Tests of the bandwidth of instances against closed forms on small trees of switches."""

import numpy as np
import pytest

from orchestrrl.lab.sim.engines import homogeneous
from orchestrrl.lab.sim.net.fabrics.base import Pods, SimulatedFabric
from orchestrrl.lab.sim.net.fabrics.registry import build
from orchestrrl.lab.sim.net.model import Servers
from orchestrrl.lab.sim.rl.generation import EnginesOnFabric
from orchestrrl.lab.sim.rl.generation_fleet import (
    SENT_BYTES,
    Hardware,
    deployed,
    exchange,
    left_idle,
    on_fabric,
    pattern,
)
from orchestrrl.lab.sim.rl.scenario import GenerationSection
from orchestrrl.lab.sim.scenario import WorkloadSection
from planner.cost.engines import engine_named
from planner.cost.hardware import gpu_named
from planner.cost.models import model_named
from planner.cost.profile import Parallelism

SERVERS = Servers(16)
WHERE = range(128)
EP16 = Parallelism(tp=1, dp=16, ep=16)
AFD = Parallelism(attention_gpus=16, ffn_gpus=8, micro_batches=3)
MOE = Hardware(model_named("qwen3-235b-a22b"), gpu_named("h800"), engine_named("vllm"))


WORKLOAD = WorkloadSection.model_validate(
    {"prompts": 4, "max_tokens": 100, "lengths": {"kind": "lognormal", "median_tokens": 50, "sigma": 0.5}}
)


def fabric(kind: str = "fat_tree", servers: Servers = SERVERS, **options: object) -> SimulatedFabric:
    """Return a fabric with one server per ToR, so that all traffic between servers crosses ToRs."""
    ratio = options.get("ratio", 1.0)
    assert isinstance(ratio, float)
    radix = 8 + round(8 / ratio)
    return build(kind, servers, servers_per_pod=4, radix=radix, **options)


def test_instances_stay_inside_servers_or_use_whole_ones() -> None:
    assert deployed(Parallelism(tp=4), WHERE, SERVERS).gpus.shape == (32, 4)
    wide = deployed(Parallelism(tp=24), range(8, 72), SERVERS)
    assert wide.gpus.tolist() == [list(range(8, 32)), list(range(32, 56))]
    afd = deployed(AFD, WHERE, SERVERS)
    assert afd.attention[0].tolist() == list(range(16))
    assert afd.ffn[0].tolist() == list(range(16, 24))
    with pytest.raises(ValueError, match="must use whole servers of 8 GPUs, got 12"):
        deployed(Parallelism(tp=12), WHERE, SERVERS)


def servers_of(parallelism: Parallelism, where: range, pods: Pods) -> list[list[int]]:
    fleet = deployed(parallelism, where, SERVERS, pods)
    assert len(np.unique(fleet.gpus)) == fleet.gpus.size
    return [sorted(set((gpus // 8).tolist())) for gpus in fleet.gpus]


def test_instances_that_fit_into_a_pod_stay_inside_one() -> None:
    """Eleven servers are in PoDs of four; another stage uses the first server of the first PoD."""
    where, wide = range(8, 96), Parallelism(tp=24)
    apart, together = (Pods(np.arange(16) // 4, apart=each) for each in (True, False))
    inside = [[1, 2, 3], [4, 5, 6], [8, 9, 10]]
    assert servers_of(wide, where, apart) == inside
    assert left_idle(deployed(wide, where, SERVERS, apart), where) == 0
    assert servers_of(Parallelism(tp=16), where, apart) == [[1, 2], [4, 5], [6, 7], [8, 9], [10, 11]]
    more = range(8, 104)  # twelve servers: the fourth instance would span PoDs
    assert servers_of(wide, more, apart) == inside
    assert left_idle(deployed(wide, more, SERVERS, apart), more) == 24
    assert servers_of(wide, more, together) == [[1, 2, 3], [4, 5, 6], [7, 11, 12], [8, 9, 10]]
    assert left_idle(deployed(wide, more, SERVERS, together), more) == 0


def test_instances_larger_than_a_pod_span_pods() -> None:
    pods = Pods(np.arange(16) // 4, apart=True)
    assert servers_of(Parallelism(tp=40), WHERE, pods) == [list(range(first, first + 5)) for first in (0, 5, 10)]


def test_rfabric_and_mixnet_have_less_bandwidth_between_pods() -> None:
    """An instance that spans two PoDs gets less bandwidth than the others."""
    for kind, options in (("rfabric", {"train_servers": 0}), ("mixnet", {"servers_per_region": 4})):
        found = build(kind, SERVERS, servers_per_pod=4, **options)
        wide = Parallelism(tp=1, dp=24, ep=24)
        inside, across = (exchange(deployed(wide, WHERE, SERVERS, pods), found, "ep24") for pods in (found.pods, None))
        assert found.pods.apart
        assert inside.bytes_per_s > 1.2 * across.bytes_per_s
    assert not any(build(kind, SERVERS).pods.apart for kind in ("fat_tree", "oversubscribed", "rail_optimized"))


def test_fleet_is_limited_by_room_in_pods() -> None:
    """Sixteen servers in PoDs of four have four engines of three servers; without PoDs, five would fit."""
    wide = Parallelism(tp=1, dp=24, ep=8)
    section, layouts = GenerationSection(workload=WORKLOAD), (Parallelism(tp=8), wide)
    counts = {}
    for kind in ("rfabric", "fat_tree"):
        ready = EnginesOnFabric(section, MOE, WHERE, build(kind, SERVERS, servers_per_pod=4), layouts)
        kinds = ready.kinds(ready.scenario(1))
        counts[kind] = {str(name): len(homogeneous(each, 128, 8)) for name, each in kinds.items()}
    assert counts == {
        "rfabric": {"tp8": 16, "tp1dp24ep8": 4},
        "fat_tree": {"tp8": 16, "tp1dp24ep8": 5},
    }


@pytest.mark.parametrize("parallelism", [EP16, AFD, Parallelism(tp=16)])
def test_each_gpu_sends_the_given_bytes(parallelism: Parallelism) -> None:
    fleet = deployed(parallelism, WHERE, SERVERS)
    flows, instance = pattern(fleet, SENT_BYTES, SERVERS)
    assert (flows.src != flows.dst).all()
    sent = np.bincount(flows.src, flows.bytes)[fleet.gpus]
    least = sent[:, parallelism.attention_gpus :] if parallelism.afd else sent
    np.testing.assert_allclose(least, SENT_BYTES)
    assert set(instance.tolist()) == set(range(len(fleet)))


def test_all_to_all_is_bound_by_nics_without_blocking() -> None:
    """8 of a GPU's 15 messages leave its server, so that the NIC carries 8/15 of its bytes."""
    got = exchange(deployed(EP16, WHERE, SERVERS), fabric(), "ep16")
    assert got.bytes_per_s == pytest.approx(SERVERS.nic_bytes_per_s * 15 / 8, rel=0.01)


def test_oversubscribed_uplinks_limit_the_exchange() -> None:
    got = exchange(deployed(EP16, WHERE, SERVERS), fabric("oversubscribed", ratio=4.0), "ep16")
    assert got.bytes_per_s == pytest.approx(SERVERS.nic_bytes_per_s * 15 / 8 / 4, rel=0.01)


def test_afd_rate_is_that_of_the_smaller_side() -> None:
    """8 FFN GPUs receive from 16 GPUs, and send the same number of bytes back."""
    got = exchange(deployed(AFD, WHERE, SERVERS), fabric(), "afd")
    assert got.bytes_per_s == pytest.approx(SERVERS.nic_bytes_per_s, rel=0.01)


def test_profile_depends_on_the_fabric_only_for_wide_engines() -> None:
    layouts = [Parallelism(tp=8), EP16, AFD]
    fast = on_fabric(MOE, layouts, WHERE, fabric())
    slow = on_fabric(MOE, layouts, WHERE, fabric("oversubscribed", ratio=4.0))
    quick, dull = ({str(each.id): each.step for each in profile.configurations} for profile in (fast, slow))
    assert quick["tp8"] == dull["tp8"]
    for name in ("tp1dp16ep16", "afd16+8x3"):
        assert all(a <= b for a, b in zip(quick[name].base_s.ys, dull[name].base_s.ys, strict=True))
        assert quick[name].at(512, 0) < dull[name].at(512, 0)


@pytest.mark.parametrize("nic_gbps", [100.0, 400.0])
def test_faster_nics_are_never_slower(nic_gbps: float) -> None:
    faster = Servers(16, nic_gbps=nic_gbps * 2)
    for parallelism in (EP16, AFD):
        fleet = deployed(parallelism, WHERE, SERVERS)
        slow = exchange(fleet, fabric(servers=Servers(16, nic_gbps=nic_gbps)), "slow")
        assert exchange(fleet, fabric(servers=faster), "fast").bytes_per_s >= slow.bytes_per_s


def test_no_fitting_configuration_is_reported() -> None:
    with pytest.raises(ValueError, match="no configuration of qwen3-235b-a22b fits 128 GPUs of h800"):
        on_fabric(MOE, [Parallelism(tp=1)], WHERE, fabric())
