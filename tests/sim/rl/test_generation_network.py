"""What instances get of a network, against closed forms on small trees of switches."""

import numpy as np
import pytest

from orchestrrl.sim.net.fabrics.base import Fabric
from orchestrrl.sim.net.fabrics.registry import build
from orchestrrl.sim.net.model import Servers
from orchestrrl.sim.rl.generation_exchange import SENT_BYTES, exchange, pattern
from orchestrrl.sim.rl.generation_fleet import GenGpus, deployed
from orchestrrl.sim.rl.generation_profiles import Hardware, on_fabric
from planner.engines import engine_named
from planner.hardware import gpu_named
from planner.models import model_named
from planner.profile import Parallelism

SERVERS = Servers(16)
WHERE = GenGpus(0, 128)
EP16 = Parallelism(tp=1, dp=16, ep=16)
AFD = Parallelism(attention_gpus=16, ffn_gpus=8, micro_batches=3)
MOE = Hardware(model_named("qwen3-235b-a22b"), gpu_named("h800"), engine_named("vllm"))


def fabric(kind: str = "fat_tree", servers: Servers = SERVERS, **options: object) -> Fabric:
    """ToRs of one server each, so that whatever leaves a server leaves its ToR."""
    ratio = options.get("ratio", 1.0)
    assert isinstance(ratio, float)
    radix = 8 + round(8 / ratio)
    return build(kind, servers, servers_per_pod=4, radix=radix, **options)


def test_instances_stay_inside_servers_or_take_whole_ones() -> None:
    assert deployed(Parallelism(tp=4), WHERE, SERVERS).gpus.shape == (32, 4)
    wide = deployed(Parallelism(tp=24), GenGpus(8, 64), SERVERS)
    assert wide.gpus.tolist() == [list(range(8, 32)), list(range(32, 56))]
    afd = deployed(AFD, WHERE, SERVERS)
    assert afd.attention[0].tolist() == list(range(16))
    assert afd.ffn[0].tolist() == list(range(16, 24))
    with pytest.raises(ValueError, match="whole ones"):
        deployed(Parallelism(tp=12), WHERE, SERVERS)


@pytest.mark.parametrize("parallelism", [EP16, AFD, Parallelism(tp=16)])
def test_each_gpu_sends_what_it_has_to(parallelism: Parallelism) -> None:
    fleet = deployed(parallelism, WHERE, SERVERS)
    flows, instance = pattern(fleet, SENT_BYTES, SERVERS)
    assert (flows.src != flows.dst).all()
    sent = np.bincount(flows.src, flows.bytes)[fleet.gpus]
    least = sent[:, parallelism.attention_gpus :] if parallelism.afd else sent
    np.testing.assert_allclose(least, SENT_BYTES)
    assert set(instance.tolist()) == set(range(len(fleet)))


def test_without_blocking_an_all_to_all_is_bound_by_nics() -> None:
    """8 of a GPU's 15 messages leave its server: the NIC carries 8/15 of its bytes."""
    got = exchange(deployed(EP16, WHERE, SERVERS), fabric(), "ep16")
    assert got.bytes_per_s == pytest.approx(SERVERS.nic_bytes_per_s * 15 / 8, rel=0.01)
    assert got.slowest_bytes_per_s == pytest.approx(got.bytes_per_s, rel=0.01)


def test_oversubscribed_uplinks_share_what_leaves_a_tor() -> None:
    got = exchange(deployed(EP16, WHERE, SERVERS), fabric("oversubscribed", ratio=4.0), "ep16")
    assert got.bytes_per_s == pytest.approx(SERVERS.nic_bytes_per_s * 15 / 8 / 4, rel=0.01)


def test_afd_sends_as_fast_as_the_smaller_side_can() -> None:
    """8 FFN GPUs receive from 16, and send as much back."""
    got = exchange(deployed(AFD, WHERE, SERVERS), fabric(), "afd")
    assert got.bytes_per_s == pytest.approx(SERVERS.nic_bytes_per_s, rel=0.01)


def test_a_profile_depends_on_the_fabric_only_where_it_leaves_servers() -> None:
    layouts = [Parallelism(tp=8), EP16, AFD]
    fast = on_fabric(MOE, layouts, WHERE, fabric()).profile
    slow = on_fabric(MOE, layouts, WHERE, fabric("oversubscribed", ratio=4.0)).profile
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


def test_where_nothing_fits_it_is_said() -> None:
    with pytest.raises(ValueError, match="no configuration of qwen3-235b-a22b fits 128 GPUs of h800"):
        on_fabric(MOE, [Parallelism(tp=1)], WHERE, fabric())
