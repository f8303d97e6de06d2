"""Demand against collectives executed message by message, with failures and various placements."""

import math
from collections import Counter, defaultdict

import pytest
from collective_oracle import Walk, messages
from fabric_sites import GB, failures, gpus_of, intents, sites, small_site, traffic
from hypothesis import given
from hypothesis import strategies as st

from planner.fabric.collectives import double_tree, transfers_of
from planner.fabric.demand import GENERAL, flows_of
from planner.fabric.intent import Intent, Primitive, Stage, Traffic, TrafficOperation
from planner.fabric.model import EndpointId
from planner.fabric.plan import FabricFailures
from planner.fabric.topology import RESPONSES, PodRole, ServerId
from planner.model import GpuId

NOTHING = FabricFailures()


def one(primitive: Primitive, groups: tuple[tuple[int, ...], ...], **more: object) -> Intent:
    each = Traffic(TrafficOperation.EP, primitive, groups, bytes_per_rank=GB, **more)  # type: ignore[arg-type]
    return Intent("any", Stage.TRAIN, (each,))


@given(st.data())
def test_every_message_counts_between_its_tors(data: st.DataObject) -> None:
    site = data.draw(sites())
    ranks = tuple(range(len(site.server_of)))
    some = data.draw(
        traffic(ranks).filter(lambda each: each.primitive not in (Primitive.TREE_ALL_REDUCE, Primitive.BROADCAST))
    )
    servers = data.draw(st.lists(st.sampled_from([each.id for each in site.servers]), max_size=3, unique=True))
    broken = FabricFailures(
        nics=frozenset((server, data.draw(st.integers(0, 3))) for server in servers),
        servers=frozenset(data.draw(st.lists(st.sampled_from([each.id for each in site.servers]), max_size=1))),
    )
    places = dict(enumerate(map(GpuId, data.draw(st.permutations((*ranks[1:], 999))))))
    walk = Walk(site, broken)
    expected: dict[object, float] = defaultdict(float)
    for source, destination, sent_bytes in messages(some):
        expected[walk.hop(places[source], places[destination])] += sent_bytes
    flows = flows_of(Intent("any", Stage.TRAIN, (some,), places), site, broken)
    purpose = RESPONSES if some.operation is TrafficOperation.RESPONSES and site.reservations else GENERAL
    found = {**flows.tors[purpose], "nvlink": flows.nvlink_bytes, "below": flows.below_tor_bytes}
    found["dropped"] = flows.dropped_bytes  # type: ignore[index]
    assert {key: value for key, value in found.items() if value} == pytest.approx(dict(expected))


@given(st.integers(2, 70))
def test_trees_reach_every_rank_with_disjoint_inner_ranks(size: int) -> None:
    children, parents = (each.tolist() for each in double_tree(size))
    inner = []
    for tree in range(2):
        edges = dict(list(zip(children, parents, strict=True))[tree * (size - 1) : (tree + 1) * (size - 1)])
        assert len(edges) == size - 1
        (root,) = set(range(size)) - edges.keys()
        depth = 0
        for rank in range(size):
            steps = 0
            while rank != root:
                rank, steps = edges[rank], steps + 1
            depth = max(depth, steps)
        assert depth <= math.ceil(math.log2(size)) + 1
        fan_out = Counter(edges.values())
        assert max(fan_out.values()) <= 2
        inner.append({rank for rank in fan_out if rank != root})
    assert size <= 3 or not inner[0] & inner[1]


def test_tree_sends_as_much_as_ring() -> None:
    for size in (2, 3, 8, 13):
        for primitive in (Primitive.RING_ALL_REDUCE, Primitive.TREE_ALL_REDUCE):
            (all_reduce,) = one(primitive, (tuple(range(size)),)).traffic
            total = sum(each.sent_bytes.sum() for each in transfers_of(all_reduce))
            assert total == pytest.approx(2 * (size - 1) * GB)


@given(st.data())
def test_broadcast_enters_each_pod_tor_and_server_once(data: st.DataObject) -> None:
    site = data.draw(sites())
    ranks = tuple(range(len(site.server_of)))
    root, *receivers = data.draw(st.lists(st.sampled_from(ranks), min_size=2, unique=True))
    flows = flows_of(one(Primitive.BROADCAST, ((root,),), receivers=(tuple(receivers),)), site, NOTHING)
    pairs = flows.tors[GENERAL]
    assert flows.nvlink_bytes + flows.below_tor_bytes + sum(pairs.values()) == pytest.approx(len(receivers) * GB)
    into_tor: Counter[EndpointId] = Counter()
    into_pod: Counter[EndpointId] = Counter()
    for (source, destination), sent_bytes in pairs.items():
        into_tor[destination] += round(sent_bytes)
        if site.pod_of[source] != site.pod_of[destination]:
            into_pod[site.pod_of[destination]] += round(sent_bytes)
    pods = {site.server_of[GpuId(rank)].pod for rank in receivers}
    assert into_pod == dict.fromkeys(pods - {site.server_of[GpuId(root)].pod}, GB)
    assert max(into_tor.values(), default=0) <= GB
    servers = {site.server_of[GpuId(rank)].id for rank in receivers} - {site.server_of[GpuId(root)].id}
    crossed = flows.below_tor_bytes + sum(pairs.values())
    assert crossed == pytest.approx(len(servers) * GB)


def test_shards_are_seeded_at_different_tors() -> None:
    site = small_site()
    gen = gpus_of(site, PodRole.GEN)
    flows = flows_of(one(Primitive.BROADCAST, tuple((rank,) for rank in range(8)), receivers=(gen,) * 8), site, NOTHING)
    seeded = {end for start, end in flows.tors[GENERAL] if site.pod_of[start] != site.pod_of[end]}
    assert len(seeded) > 4


@pytest.mark.parametrize("primitive", Primitive)
def test_empty_group_sends_nothing(primitive: Primitive) -> None:
    flows = flows_of(one(primitive, ((),), receivers=((0, 8),)), small_site(), NOTHING)
    assert not any(flows.tors.values())
    assert flows.nvlink_bytes == flows.below_tor_bytes == flows.dropped_bytes == 0


def test_rail_change_happens_inside_the_source_server() -> None:
    site = small_site(servers_per_tor=2)  # two blocks of two servers, four rails each
    below = flows_of(one(Primitive.PIPELINE, ((0, 5),)), site, NOTHING)  # another server of the block, another rail
    assert (below.below_tor_bytes, below.tors[GENERAL]) == (GB, {})
    apart = flows_of(one(Primitive.PIPELINE, ((0, 9),)), site, NOTHING)  # a server of the other block
    assert apart.tors[GENERAL] == {(site.tor_of(GpuId(1)), site.tor_of(GpuId(9))): GB}


def test_failed_nic_is_replaced_and_reported() -> None:
    site = small_site()
    server = site.servers[0]
    broken = FabricFailures(nics=frozenset({(server.id, 0)}))
    intent = one(Primitive.PIPELINE, ((8, 0),))
    flows = flows_of(intent, site, broken)
    assert flows.tors[GENERAL] == {(site.tor_of(GpuId(9)), site.tor_of(GpuId(1))): GB}
    assert flows.notes == (f"{server.id}: traffic of NIC 0 uses NIC 1",)
    both = flows_of(one(Primitive.PIPELINE, ((8, 0), (9, 1))), site, broken)
    assert both.tors[GENERAL] == {(site.tor_of(GpuId(9)), site.tor_of(GpuId(1))): 2 * GB}


def test_ranks_without_server_are_reported() -> None:
    site = small_site()
    broken = FabricFailures(servers=frozenset({ServerId("train0/s2")}))
    flows = flows_of(one(Primitive.PIPELINE, ((0, 9), (1, 2000))), site, broken)
    assert flows.tors == {GENERAL: {}}
    assert flows.notes == (
        "2 ranks are on no working server of the site (9, 2000)",
        "2e+09 bytes have no GPU or NIC at one end",
    )


def test_other_placement_changes_demand() -> None:
    site = small_site()
    groups = (tuple(range(8)),)
    together = flows_of(one(Primitive.ALL_TO_ALL, groups), site, NOTHING)
    spread = Intent("any", Stage.TRAIN, one(Primitive.ALL_TO_ALL, groups).traffic, {r: GpuId(r * 4) for r in range(8)})
    apart = flows_of(spread, site, NOTHING).tors[GENERAL]
    assert together.tors == {GENERAL: {}}
    assert {site.pod_of[one] == site.pod_of[other] for one, other in apart} == {True, False}


@given(st.data())
def test_failures_lose_only_reported_bytes(data: st.DataObject) -> None:
    site = data.draw(sites())
    intent = data.draw(intents(site).filter(lambda each: all(t.primitive != "broadcast" for t in each.traffic)))
    broken = data.draw(failures(site))
    whole, left = flows_of(intent, site, NOTHING), flows_of(intent, site, broken)
    sums = [
        each.nvlink_bytes
        + each.below_tor_bytes
        + each.dropped_bytes
        + sum(b for flows in each.tors.values() for b in flows.values())
        for each in (whole, left)
    ]
    assert sums[0] == pytest.approx(sums[1])
    assert left.dropped_bytes >= whole.dropped_bytes == 0
