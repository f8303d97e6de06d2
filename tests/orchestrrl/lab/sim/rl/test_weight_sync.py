"""Tests of weight sync over small networks: completeness, the lower bound, and monotonicity in bandwidth."""

from collections.abc import Iterable
from dataclasses import replace
from typing import cast

import numpy as np
import pytest

from orchestrrl.lab.sim.net.fabrics.base import Period, SimulatedFabric
from orchestrrl.lab.sim.net.fabrics.registry import KINDS, build
from orchestrrl.lab.sim.net.model import FlowRoutes, Ints, LinkNetwork, Servers
from orchestrrl.lab.sim.rl.generation_fleet import UniformFleet, deployed
from orchestrrl.lab.sim.rl.model import SCHEMES
from orchestrrl.lab.sim.rl.weight_sync import FlowStep, bound_s, problem_of, steps_of, sync_stage
from orchestrrl.lab.sim.rl.weight_sync_shards import ServerShard, SyncSite, parameters_of, shards_of, site_of
from orchestrrl.lab.sim.train.model import TrainJob, TrainLayout
from planner.cost.hardware import gpu_named
from planner.cost.models import MODELS, model_named
from planner.cost.profile import Parallelism
from planner.sync_tree.plan import make_plan

SERVERS = Servers(16)
GEN = range(64, 128)
DENSE = TrainJob(model_named("qwen2.5-7b"), gpu_named("h800"), TrainLayout(tp=4, pp=2, dp=8), 64, 1000.0)
MOE = TrainJob(model_named("qwen2-57b-a14b"), gpu_named("h800"), TrainLayout(tp=4, dp=16, ep=8), 64, 1000.0)
LAYOUTS = [
    (DENSE, Parallelism(tp=2)),
    (DENSE, Parallelism(tp=4)),
    (MOE, Parallelism(tp=4)),
    (MOE, Parallelism(tp=1, dp=16, ep=16)),
    (MOE, Parallelism(attention_gpus=16, ffn_gpus=8, micro_batches=3)),
]


def fabric(kind: str = "fat_tree", servers: Servers = SERVERS, **options: object) -> SimulatedFabric:
    if kind != "topoopt":
        options.setdefault("servers_per_pod", 4)
    return build(kind, servers, **options)


def engines(parallelism: Parallelism) -> UniformFleet:
    return deployed(parallelism, GEN, SERVERS)


def shards(job: TrainJob, parallelism: Parallelism) -> tuple[ServerShard, ...]:
    return shards_of(job, engines(parallelism), SERVERS.gpus_per_server)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_parameters_add_up_to_the_models(name: str) -> None:
    """Norms, biases and routers, which are negligible, are not counted."""
    model = model_named(name)
    assert sum(int(np.prod(each.shape)) for each in parameters_of(model)) == pytest.approx(model.params, rel=0.002)


@pytest.mark.parametrize(("job", "parallelism"), LAYOUTS)
def test_every_engine_receives_the_whole_model(job: TrainJob, parallelism: Parallelism) -> None:
    """The bytes of an engine's GPUs add up to the model, plus the parameters that ranks share."""
    fleet = engines(parallelism)
    needed = np.zeros(SERVERS.gpus)
    for shard in shards(job, parallelism):
        assert not set(shard.holders) & set(shard.receivers)
        for server, needs in zip(shard.receivers, shard.needs, strict=True):
            needed[server * 8 : server * 8 + 8] += needs
    of_engine = needed[fleet.gpus].sum(axis=1)
    np.testing.assert_allclose(of_engine, of_engine[0])
    whole_bytes = sum(int(np.prod(each.shape)) * 2 for each in parameters_of(job.model))
    assert of_engine[0] >= whole_bytes
    if parallelism.dp == 1 and not parallelism.afd and parallelism.tp <= job.model.kv_heads:
        assert of_engine[0] == pytest.approx(whole_bytes, rel=0.001)
    idle = np.setdiff1d(np.arange(SERVERS.gpus), fleet.gpus)
    assert not needed[idle].any()


def inbound(steps: Iterable[FlowStep]) -> np.ndarray:
    """Return the bytes that each server receives from other servers, [server]."""
    found = np.zeros(SERVERS.count)
    for step in steps:
        src, dst = step.flows.src // 8, step.flows.dst // 8
        np.add.at(found, dst[src != dst], step.flows.bytes[src != dst])
    return found


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(("job", "parallelism"), LAYOUTS)
def test_each_scheme_delivers_the_needed_bytes_to_each_server(
    scheme: str, job: TrainJob, parallelism: Parallelism
) -> None:
    """Each shard arrives once per server; the naive scheme sends a copy to each GPU."""
    held, site = shards(job, parallelism), site_of(fabric().network(None))
    wanted = np.zeros(SERVERS.count)
    for shard in held:
        for server, needs in zip(shard.receivers, shard.needs, strict=True):
            wanted[server] += needs.sum() if scheme == "naive" else shard.bytes
    np.testing.assert_allclose(inbound(steps_of(scheme, held, site, SERVERS)), wanted)


def test_servers_forward_no_more_than_they_receive_over_direct_links() -> None:
    """Shards go along chains from two holders, because a server that sends to many has few NICs for each."""
    held, site = shards(DENSE, Parallelism(tp=4)), site_of(fabric("topoopt").network(None))
    received, sent = np.zeros(SERVERS.count), np.zeros(SERVERS.count)
    for step in steps_of("tree", held, site, SERVERS):
        src, dst = step.flows.src // 8, step.flows.dst // 8
        np.add.at(received, dst[src != dst], step.flows.bytes[src != dst])
        np.add.at(sent, src[src != dst], step.flows.bytes[src != dst])
    np.testing.assert_allclose(received[8:], sum(shard.bytes for shard in held), rtol=1e-6)
    assert (sent[8:] <= received[8:] * (1 + 1e-6)).all()


def test_received_shards_are_forwarded_to_all_gpus_of_a_server() -> None:
    """Four TP=2 engines of a server need the same shard; each GPU receives an eighth of it from the network."""
    held, site = shards(DENSE, Parallelism(tp=2)), site_of(fabric().network(None))
    inside = np.zeros(SERVERS.gpus)
    for step in steps_of("tree", held, site, SERVERS):
        local = step.flows.src // 8 == step.flows.dst // 8
        np.add.at(inside, step.flows.dst[local], step.flows.bytes[local])
    total_bytes = sum(shard.bytes for shard in held)
    np.testing.assert_allclose(inside[64:].reshape(-1, 2).sum(axis=1), total_bytes * 7 / 8, rtol=1e-3)


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("scheme", SCHEMES)
def test_no_scheme_beats_the_bound_on_any_fabric(kind: str, scheme: str) -> None:
    stage = sync_stage(DENSE, engines(Parallelism(tp=4)), fabric(kind), scheme)
    assert stage.seconds >= stage.bound_s * 0.999 > 0
    assert sum(stage.phases_s.values()) == pytest.approx(stage.seconds)
    assert stage == sync_stage(DENSE, engines(Parallelism(tp=4)), fabric(kind), scheme)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_slow_circuits_are_kept(scheme: str) -> None:
    """A sync is never longer than on the current circuits; circuits that change instantly may shorten it."""
    slow, fixed, quick = (
        sync_stage(DENSE, engines(Parallelism(tp=4)), fabric("rfabric", device=device, allocation=allocation), scheme)
        for device, allocation in (
            ("robotic_telescent", "traffic"),
            ("robotic_telescent", "fixed"),
            ("rotornet_infocus", "traffic"),
        )
    )
    assert slow == fixed
    assert slow.circuits == "keep"
    assert slow.phases_s["circuits"] == 0.0
    assert quick.seconds <= slow.seconds < 10.0


def test_circuits_without_paths_are_changed() -> None:
    """Circuits are changed if the circuits at rest leave servers disconnected."""
    optical = fabric("rfabric", device="robotic_telescent")

    class Apart:
        """A fabric that has no paths between NICs at rest."""

        def __getattr__(self, name: str) -> object:
            return getattr(optical, name)

        def network(self, period: Period | None = None) -> LinkNetwork:
            return optical.network(period) if period else replace(optical.network(None), router=no_way)

        def changes(self, before: Period | None, after: Period) -> bool:
            return before is None or optical.changes(before, after)

    def no_way(src: Ints, dst: Ints) -> FlowRoutes:
        raise ValueError("no path")

    stage = sync_stage(DENSE, engines(Parallelism(tp=4)), cast(SimulatedFabric, Apart()))
    assert stage.circuits == "change"
    assert stage.phases_s["circuits"] == optical.reconfigures_s


@pytest.mark.parametrize("scheme", SCHEMES)
def test_faster_links_are_never_slower(scheme: str) -> None:
    slow, fast = (
        sync_stage(DENSE, engines(Parallelism(tp=4)), fabric(servers=Servers(16, nic_gbps=gbps)), scheme)
        for gbps in (100.0, 200.0)
    )
    assert fast.seconds < slow.seconds


def test_tree_is_near_the_bound_without_blocking() -> None:
    """8 servers have 2 engines each; every server receives the model over its NICs."""
    tree, naive = (sync_stage(DENSE, engines(Parallelism(tp=4)), fabric(), scheme) for scheme in ("tree", "naive"))
    model_bytes = sum(shard.bytes for shard in shards(DENSE, Parallelism(tp=4)))
    assert tree.bound_s == pytest.approx(model_bytes / (8 * SERVERS.nic_bytes_per_s), rel=1e-6)
    assert tree.seconds < 1.3 * tree.bound_s
    assert naive.seconds >= 2 * tree.bound_s  # two copies into each server


def test_site_is_derived_from_links() -> None:
    site = site_of(fabric().network(None))
    assert site.pod.tolist() == [server // 4 for server in range(16)]
    nic = SERVERS.nic_bytes_per_s
    np.testing.assert_allclose(site.nic_bytes_per_s, 8 * nic)
    np.testing.assert_allclose(site.pod_bytes_per_s, 32 * nic)
    blocked = site_of(fabric("oversubscribed", ratio=2.0).network(None))
    np.testing.assert_allclose(blocked.pod_bytes_per_s, 16 * nic)
    joined = site_of(fabric("topoopt").network(None))
    assert joined.pods == 1
    assert len(joined.tor_bytes_per_s) == 16


def test_optical_pods_are_connected_by_their_rails() -> None:
    site = site_of(fabric("rfabric", train_servers=8).network(None))
    assert site.pod.tolist() == [server // 4 for server in range(16)]
    assert (site.pod_bytes_per_s > 0).all()


def test_plan_estimate_is_close_on_an_idle_network() -> None:
    held, site = shards(DENSE, Parallelism(tp=4)), site_of(fabric().network(None))
    plan = make_plan(problem_of(held, site, SERVERS))
    stage = sync_stage(DENSE, engines(Parallelism(tp=4)), fabric())
    assert stage.seconds == pytest.approx(plan.estimate_s, rel=0.1)


def test_bound_follows_a_narrow_core() -> None:
    pod, tor = np.array([0, 1]), np.array([0, 1])
    site = SyncSite(pod, tor, np.array([100.0, 100.0]), np.array([100.0, 100.0]), np.array([10.0, 10.0]))
    held = (ServerShard(50.0, (0,), (1,), np.full((1, 8), 50.0)),)
    assert bound_s(held, site) == 5.0
