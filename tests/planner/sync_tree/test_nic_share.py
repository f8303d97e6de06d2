"""The NIC share that a sync leaves to KV moves, against a count of demands per NIC."""

from hypothesis import given
from hypothesis import strategies as st

from planner.model import PeerId
from planner.sync_tree.network import LeftForMoves, NetworkStation, left_for_moves

NAMES = [PeerId(name) for name in "abcd"]
RATES = {"a": 100.0, "b": 100.0, "c": 50.0, "d": 400.0}
STATIONS = {name: NetworkStation("p", "t", RATES[name]) for name in NAMES}


def edge(src: str, dst: str, rate_gbps: float) -> tuple[PeerId, PeerId, float]:
    return PeerId(src), PeerId(dst), rate_gbps


def test_moves_get_full_share_without_edges() -> None:
    assert left_for_moves([], STATIONS, NAMES) == LeftForMoves(1.0, ())


def test_unlimited_edge_leaves_half() -> None:
    assert left_for_moves([edge("a", "b", 0.0)], STATIONS, NAMES) == LeftForMoves(0.5, ("weight sync",))
    # The slower end limits an edge; NICs of hosts without moves do not count.
    assert left_for_moves([edge("c", "d", 0.0)], STATIONS, [PeerId("d")]).share == 1 / (1 + 50 / 400)
    assert left_for_moves([edge("c", "d", 0.0)], STATIONS, [PeerId("b")]).share == 1.0


@given(
    st.lists(
        st.tuples(st.sampled_from("abcd"), st.sampled_from("abcd"), st.sampled_from([0.0, 1.0, 60.0, 200.0])),
        max_size=6,
    ),
    st.sets(st.sampled_from(NAMES)),
)
def test_fullest_nic_of_moving_hosts_counts(edges: list[tuple[str, str, float]], among: set[PeerId]) -> None:
    left = left_for_moves([edge(*each) for each in edges], STATIONS, among)
    most = 0.0
    for name in among:
        for end in (0, 1):
            wishes = 0.0
            for each in edges:
                if each[end] == name:
                    src, dst, rate_gbps = each
                    wish = min(RATES[src], RATES[dst])
                    wishes += min(wish, rate_gbps) if rate_gbps else wish
            most = max(most, wishes / RATES[name])
    assert abs(left.share - 1 / (1 + most)) < 1e-12
    assert bool(left.taken_by) is (left.share < 1.0)
