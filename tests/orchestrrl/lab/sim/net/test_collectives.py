"""Tests of collectives: every rank sends and receives the right bytes, with the fewest crossings between servers."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrrl.lab.sim.net.collectives import (
    WIRE,
    RankShape,
    all_gather,
    all_reduce,
    all_to_all,
    best,
    m2n,
    p2p,
    reduce_scatter,
    rings,
    shaped,
)
from orchestrrl.lab.sim.net.model import Floats, GpuFlows, Servers

SERVERS = Servers(6)
SIZE = 840e6


@st.composite
def even_groups(draw: st.DrawFn) -> list[int]:
    """Draw a group with the same number of GPUs on each of some servers, at any indices."""
    each = draw(st.integers(1, 8))
    chosen = draw(st.lists(st.integers(0, 5), min_size=1, max_size=6, unique=True))
    places = st.lists(st.integers(0, 7), min_size=each, max_size=each, unique=True)
    return [server * 8 + place for server in chosen for place in draw(places)]


any_groups = st.lists(st.integers(0, 47), min_size=2, max_size=48, unique=True)
groups = st.one_of(even_groups(), any_groups).filter(lambda group: len(group) > 1)


def shape_of(group: list[int]) -> RankShape:
    ((shape, _),) = shaped(np.array([group]), SERVERS)
    return shape


def wire(group: list[int], size: float, laps: int) -> float:
    """Return the bytes sent per byte of data with the chosen protocol."""
    return WIRE[best(shape_of(group), size, laps, SERVERS).protocol]


def across(flows: GpuFlows) -> GpuFlows:
    leaves = flows.src // 8 != flows.dst // 8
    return GpuFlows(flows.src[leaves], flows.dst[leaves], flows.bytes[leaves])


def by_gpu(of: np.ndarray, size: Floats) -> Floats:
    return np.bincount(of, size, SERVERS.gpus)


@given(groups)
def test_rings_visit_every_rank_once_and_cross_each_boundary_once(group: list[int]) -> None:
    shape = shape_of(group)
    for hops in rings(shape):
        after = {hop[0][0]: hop[-1][1] for hop in hops}
        at, seen = 0, []
        for _ in group:
            seen.append(at)
            at = after[at]
        assert at == 0
        assert sorted(seen) == list(range(len(group)))
        left = Counter(shape.server[a] for hop in hops for a, b in hop if shape.server[a] != shape.server[b])
        assert set(left.values()) <= {1}
        assert len(left) == (shape.servers if shape.servers > 1 else 0)


@given(even_groups().filter(lambda group: len(group) > 1))
def test_channels_use_every_nic_of_a_group_equally(group: list[int]) -> None:
    transfer = all_reduce(group, SIZE, SERVERS)
    outside, lap = across(transfer.flows), 2 * (len(group) - 1) / len(group) * SIZE * wire(group, SIZE, 2)
    channels = Counter(gpu // 8 for gpu in group).most_common()[0][1]
    if len(outside):
        given_, got = (by_gpu(of, outside.bytes)[group] for of in (outside.src, outside.dst))
        assert given_ == pytest.approx([lap / channels] * len(group))
        assert got == pytest.approx([lap / channels] * len(group))


@given(st.integers(2, 6), st.integers(1, 8))
def test_ring_over_equal_servers_stays_on_its_rails(count: int, each: int) -> None:
    group = [server * 8 + place for server in range(count) for place in range(each)]
    for transfer in (
        all_reduce(group, SIZE, SERVERS),
        all_gather(group, SIZE, SERVERS),
        all_to_all(group, 1.0, SERVERS),
    ):
        outside = across(transfer.flows)
        assert np.array_equal(outside.src % 8, outside.dst % 8)


@given(groups, st.sampled_from(["all_reduce", "all_gather", "reduce_scatter"]))
def test_ring_bytes_equal_nccl_counts(group: list[int], name: str) -> None:
    n = len(group)
    lap = 2 * (n - 1) / n * SIZE * wire(group, SIZE, 2)
    if name != "all_reduce":
        lap = (n - 1) * SIZE * wire(group, n * SIZE, 1)
    whole = {
        "all_reduce": lambda: all_reduce(group, SIZE, SERVERS),
        "all_gather": lambda: all_gather(group, SIZE, SERVERS),
        "reduce_scatter": lambda: reduce_scatter(group, SIZE, SERVERS),
    }[name]()
    flows, shape = whole.flows, shape_of(group)
    assert by_gpu(flows.src, flows.bytes) == pytest.approx(by_gpu(flows.dst, flows.bytes))  # all data is forwarded
    # Data at the end of a hop is for the rank itself; the remaining data is forwarded to another NIC.
    got = np.zeros(n)
    for hops in rings(shape):
        for hop in hops:
            got[hop[-1][1]] += lap / len(rings(shape))
    assert got == pytest.approx([lap] * n)
    handed = by_gpu(flows.dst, flows.bytes)[group] - got
    assert np.all(handed >= -1e-3)
    assert handed.sum() == pytest.approx(flows.bytes.sum() - n * lap)
    assert whole.rounds == (2 if name == "all_reduce" else 1) * (shape.servers - 1)


@given(groups)
def test_all_to_all_delivers_equal_parts(group: list[int]) -> None:
    n, flows = len(group), all_to_all(group, SIZE, SERVERS).flows
    part, on = SIZE / n, Counter(gpu // 8 for gpu in group)
    assert by_gpu(flows.src, flows.bytes) == pytest.approx(by_gpu(flows.dst, flows.bytes))
    outside = across(flows)
    remote = [part * (n - on[gpu // 8]) for gpu in group]
    assert by_gpu(outside.dst, outside.bytes)[group] == pytest.approx(remote)
    between = np.zeros((6, 6))
    np.add.at(between, (outside.src // 8, outside.dst // 8), outside.bytes)
    assert between == pytest.approx(np.array([[part * on[a] * on[b] * (a != b) for b in range(6)] for a in range(6)]))


def test_all_to_all_crosses_servers_only_on_the_receivers_rail() -> None:
    flows = all_to_all(range(16), SIZE, SERVERS).flows
    outside = across(flows)
    assert np.array_equal(outside.src % 8, outside.dst % 8)
    assert len(outside) == 16  # one from each GPU, with the data of all eight GPUs of its server for that receiver
    assert outside.bytes == pytest.approx(np.full(16, 8 * SIZE / 16))


def test_many_groups_have_the_flows_of_separate_groups() -> None:
    many = np.arange(48).reshape(12, 4).T.copy()  # stride over servers: placements differ
    together = all_reduce(many, SIZE, SERVERS).flows
    alone = GpuFlows.joined([all_reduce(each, SIZE, SERVERS).flows for each in many])

    def rows(flows: GpuFlows) -> list[tuple[int, int, float]]:
        return sorted(zip(flows.src.tolist(), flows.dst.tolist(), flows.bytes.tolist(), strict=True))

    assert rows(together) == rows(alone)


def test_m2n_and_p2p_carry_the_given_bytes() -> None:
    size = np.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    flows = m2n([0, 1], [8, 9, 10], size, SERVERS).flows
    assert list(zip(flows.src, flows.dst, flows.bytes, strict=True)) == [
        (0, 8, 1), (0, 9, 2), (0, 10, 3), (1, 8, 4), (1, 9, 5), (1, 10, 6),
    ]  # fmt: skip
    sent = p2p([[0, 8], [1, 2]], 5.0, SERVERS)
    assert list(zip(sent.flows.src, sent.flows.dst, sent.flows.bytes, strict=True)) == [(0, 8, 5), (1, 2, 5)]
    assert p2p([1, 2], 5.0, SERVERS).rounds == 0  # inside a server
    with pytest.raises(ValueError, match="groups of 2 ranks, got groups of 3"):
        p2p([1, 2, 3], 5.0, SERVERS)


def test_single_rank_sends_nothing() -> None:
    for what in (all_reduce, all_gather, reduce_scatter, all_to_all):
        transfer = what([7], SIZE, SERVERS)  # type: ignore[operator]
        assert len(transfer.flows) == 0
        assert transfer.overhead_s == 0
