"""The indexes of SyncProgress agree with a full scan of all edges after any events."""

from dataclasses import asdict, replace

from hypothesis import given
from hypothesis import strategies as st

from orchestrrl.core.clock import VirtualClock
from orchestrrl.weights.controller.peer_hub import PeerHub
from orchestrrl.weights.controller.planning import PlannedSync
from orchestrrl.weights.controller.progress import SyncProgress
from orchestrrl.weights.model import (
    EngineAt,
    HeldVersion,
    Peer,
    PeerLocation,
    PeerRole,
    ShardMap,
    VersionMap,
)
from orchestrrl.weights.orders import CarryEdge, EdgeEvent, EdgeState, OpenVersion
from planner.model import EngineId, PeerId
from planner.sync_tree.model import SyncPlan
from planner.sync_tree.ranges import ByteRanges, PeerFlow

PEERS = [PeerId(f"p{n}") for n in range(4)]
SHARDS = ("s0", "s1")
BYTES = 100


def _edge(id: str, shard: str, offset: int, size: int, src: int, dst: int) -> CarryEdge:
    flow = PeerFlow(shard, offset, size, PEERS[src], PEERS[dst], 0, "A" if src == 0 else "B")
    return CarryEdge(**asdict(flow), id=id, transport="tcp", address="x:1")


def _planned() -> PlannedSync:
    map = VersionMap(2, (), tuple(ShardMap(shard, BYTES, ()) for shard in SHARDS), 64)
    edges = tuple(
        _edge(f"{shard}.{half}.{dst}", shard, half * 50, 50, (dst - 1) // 2, dst)
        for dst in (1, 2, 3)
        for shard in SHARDS
        for half in (0, 1)
    )
    return PlannedSync(
        map=map,
        opens={peer: OpenVersion(map) for peer in PEERS},
        edges=edges,
        planned_s={},
        plan=SyncPlan((), 1.0, 1.0, 1.0),
    )


ids = st.integers(0, 14)
ranges = st.tuples(st.sampled_from(SHARDS), st.integers(0, 99), st.integers(1, 60))
happenings = st.one_of(
    st.tuples(st.just("done"), ids),
    st.tuples(st.just("broken"), ids, st.integers(0, 60)),
    st.tuples(st.just("gone"), st.integers(1, 3)),
    st.tuples(st.just("told"), st.integers(1, 3), ranges),
    st.tuples(st.just("corrupt"), st.integers(1, 3), ranges),
    st.tuples(st.just("added"), st.integers(1, 3), ranges),
)


@given(st.lists(happenings, max_size=30))
def test_indexes_agree_with_a_full_scan(news: list[tuple[object, ...]]) -> None:
    progress = SyncProgress(_planned())
    added, ended = 0, set[str]()
    for what, *more in news:
        names = list(progress.runs)
        match what, more:
            case "done", [int(n)]:
                id = names[n % len(names)]
                ended.add(id)
                progress.done(EdgeEvent(2, id, EdgeState.DONE, True, progress.runs[id].edge.bytes, 1.0, 2.0))
            case "broken", [int(n), int(size)]:
                ended.add(names[n % len(names)])
                progress.broken(names[n % len(names)], size)
            case "gone", [int(n)]:
                progress.on_held(PEERS[n], None)
            case "told", [int(n), (shard, offset, size)]:
                progress.on_held(PEERS[n], HeldVersion(2, SHARDS, {shard: ((offset, size),)}))
            case "corrupt", [int(n), (shard, offset, size)]:
                progress.corrupt(PEERS[n], {shard: ((offset, size),)})
            case "added", [int(n), (shard, offset, size)]:
                added += 1
                progress.add([_edge(f"m{added}", shard, offset, size, 0, n)], {})
        live = [run.edge for id, run in progress.runs.items() if id not in ended]
        assert sorted(edge.id for edge in progress.live) == sorted(edge.id for edge in live)
        assert progress.is_in_phase_a() == any(edge.phase == "A" for edge in live)
        assert progress.lacking_peers == {peer for peer in PEERS if progress.lacks(peer)}
        for peer in PEERS:
            found = {}
            for shard, lacking in progress.missing.get(peer, {}).items():
                left = ByteRanges(lacking.ranges)
                for edge in live:
                    if (edge.dst, edge.shard) == (peer, shard):
                        left.remove(edge.offset, edge.bytes)
                if left.ranges:
                    found[shard] = left.ranges
            assert progress.uncovered(peer) == found
            assert not found or peer in progress.doubtful  # no peer is missing


def test_replacement_edges_keep_the_rate_limit() -> None:
    planned = _planned()
    first = replace(planned.edges[0], rate_gbps=12.5)
    progress = SyncProgress(replace(planned, edges=(first, *planned.edges[1:])))
    assert progress.rate_gbps(first.dst, first.shard) == 12.5
    assert progress.rate_gbps(PEERS[3], first.shard) == 0.0


def test_peer_of_an_engine_is_the_attached_peer_that_lists_it() -> None:
    hub = PeerHub(VirtualClock(1000.0), 1)

    def peer(id: str, *engines: str) -> Peer:
        own = tuple(EngineAt(EngineId(e), f"http://{e}") for e in engines)
        return Peer(PeerId(id), PeerRole.ENGINE, "h", PeerLocation(), {"tcp": "h:1"}, own)

    assert hub.peer_of(EngineId("e0")) is None
    first = hub.attach(peer("p0", "e0"))
    assert hub.peer_of(EngineId("e0")) == peer("p0", "e0")
    first.on_news(peer("p0", "e0", "e1"))
    assert hub.peer_of(EngineId("e1")) == peer("p0", "e0", "e1")
    first.end()
    assert hub.peer_of(EngineId("e0")) is None
    hub.attach(peer("p1", "e0"))
    assert hub.peer_of(EngineId("e0")) == peer("p1", "e0")
    assert list(hub.peers) == ["p0", "p1"]
