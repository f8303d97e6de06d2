"""Mending: edges break and peers die at any time; with a living holder of each byte, every peer gets every byte
once."""

import itertools
import random
from collections import defaultdict
from dataclasses import astuple, dataclass

from hypothesis import given
from hypothesis import strategies as st

from planner.model import PeerId
from planner.sync_tree.mend import Missing, mend
from planner.sync_tree.ranges import PeerFlow, Range

SIZE = 12  # bytes of a shard
A, B, C, D = map(PeerId, "abcd")
seeds = st.integers(0, 2**32)


@dataclass(frozen=True)
class Edge(PeerFlow):
    id: str = ""

    @property
    def end(self) -> int:
        return self.offset + self.bytes


class World:
    """Simulated peers: one byte at a time over a started edge, waves by the peers' rule, in random order."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.peers = {PeerId(f"p{number}") for number in range(rng.randint(2, 7))}
        self.has: dict[tuple[PeerId, str], set[int]] = {}  # [peer, shard]
        self.edges: dict[str, Edge] = {}  # not ended
        self.came: dict[tuple[PeerId, str, int], int] = defaultdict(int)
        self.at: dict[str, int] = {}  # [edge], the first byte that it has not carried
        self.repairs = 0
        for shard in (f"s{number}" for number in range(rng.randint(1, 3))):
            members = rng.sample(sorted(self.peers), rng.randint(2, len(self.peers)))
            holders = members[: rng.randint(1, len(members) - 1)]
            for peer in members:
                self.has[peer, shard] = set(range(SIZE)) if peer in holders else set()
            cuts = sorted({0, SIZE, *rng.sample(range(1, SIZE), 2)})
            for first, last in itertools.pairwise(cuts):
                self._tree(shard, first, last, members, len(holders))

    def _tree(self, shard: str, first: int, last: int, members: list[PeerId], holders: int) -> None:
        wave = dict.fromkeys(members[:holders], 0)
        for dst in self.rng.sample(members[holders:], len(members) - holders):
            src = self.rng.choice(sorted(wave))
            wave[dst] = wave[src] + self.rng.choice([0, 0, 1, 2])
            id = f"e{len(self.edges)}"
            self.edges[id] = Edge(shard, first, last - first, src, dst, wave[dst], id=id)

    def missing(self) -> dict[PeerId, dict[str, list[Range]]]:
        found: dict[PeerId, dict[str, list[Range]]] = {peer: {} for peer in self.peers}
        for (peer, shard), has in self.has.items():
            if peer in self.peers:
                found[peer][shard] = [(at, 1) for at in range(SIZE) if at not in has]
        return found

    def step(self) -> bool:
        """Move one byte; return False if none can move."""
        order = sorted(self.edges.values(), key=lambda edge: edge.id)
        self.rng.shuffle(order)
        for edge in order:
            before = [each for each in self.edges.values() if each.wave < edge.wave]
            if any({each.src, each.dst} & {edge.src, edge.dst} for each in before):
                continue
            there, wanted = self.has[edge.src, edge.shard], self.has[edge.dst, edge.shard]
            left = [at for at in range(edge.offset, edge.end) if self.progress(edge) <= at]
            if left[0] in there:
                assert left[0] not in wanted, "it receives bytes that it has"
                wanted.add(left[0])
                self.came[edge.dst, edge.shard, left[0]] += 1
                self.at[edge.id] = left[0] + 1
                if len(left) == 1:
                    del self.edges[edge.id]
                return True
        return False

    def progress(self, edge: Edge) -> int:
        return self.at.get(edge.id, edge.offset)

    def fail(self) -> None:
        """Fail an edge, several edges of one peer, or a peer without which each byte is still held."""
        if self.rng.random() < 0.5 and self.edges:
            broken = set(self.rng.sample(sorted(self.edges), self.rng.randint(1, min(3, len(self.edges)))))
        else:
            broken = set()
            dying = self.rng.choice(sorted(self.peers))
            others = {
                (shard, at) for (peer, shard), has in self.has.items() if peer in self.peers - {dying} for at in has
            }
            if all((shard, at) in others for _, shard in self.has for at in range(SIZE)):
                self.peers.discard(dying)
        self.mend(broken)

    def mend(self, broken: set[str]) -> None:
        self.repairs += 1
        running = [edge for edge in self.edges.values() if edge.id not in broken]
        ended = [self.edges[each] for each in broken]
        feeds, lost = mend(running, ended, self.missing(), part_bytes=self.rng.choice([2, 5, 100]))
        for edge in list(self.edges.values()):
            if edge.id in broken or not {edge.src, edge.dst} <= self.peers:
                del self.edges[edge.id]
        for number, feed in enumerate(feeds):
            id = f"r{self.repairs}.{number}"
            self.edges[id] = Edge(*astuple(feed), id)
        assert self.has_no_circle()
        assert not lost

    def has_no_circle(self) -> bool:
        for shard in {shard for _, shard in self.has}:
            for at in range(SIZE):
                above = {
                    e.dst: e.src for e in self.edges.values() if e.shard == shard and self.progress(e) <= at < e.end
                }
                for peer in above:
                    seen: set[str] = set()
                    while peer in above:
                        if peer in seen:
                            return False
                        seen.add(peer)
                        peer = above[peer]
        return True


@given(seeds)
def test_living_peers_get_every_byte_once_after_any_failure(seed: int) -> None:
    rng = random.Random(seed)
    world = World(rng)
    held = {(peer, shard, at) for (peer, shard), has in world.has.items() for at in has}
    often = rng.choice([0.05, 0.3])
    failures = rng.randint(1, 6)
    while world.step():
        if failures and rng.random() < often:
            failures -= 1
            world.fail()
    for (peer, shard), has in world.has.items():
        if peer in world.peers:
            assert has == set(range(SIZE)), f"{peer} waits for {shard}"
    assert not world.edges
    assert all(count == 1 for count in world.came.values())
    assert not held & set(world.came)


def test_peer_below_dead_one_gets_one_edge_and_forwards() -> None:
    """Peer b of the chain a -> b -> c -> d dies."""
    feeds = [PeerFlow("s", 0, 9, B, C), PeerFlow("s", 0, 9, C, D)]
    assert mend(feeds, (), {A: {"s": []}, C: {"s": [(4, 5)]}, D: {"s": [(0, 9)]}}) == (
        [PeerFlow("s", 4, 5, A, C)],
        {},
    )


def test_many_peers_serve_each_other_instead_of_one_source() -> None:
    missing: dict[PeerId, dict[str, list[Range]]] = {A: {"s": []}} | {
        PeerId(f"r{n}"): {"s": [(0, 8)]} for n in range(7)
    }
    feeds, _ = mend((), (), missing)
    sent = [feed.src for feed in feeds]
    assert len(feeds) == 7
    assert sent.count(A) <= 4


def test_holders_share_sending_in_parts() -> None:
    missing: Missing = {A: {"s": []}, B: {"s": []}, C: {"s": [(0, 100)]}}
    feeds, _ = mend((), (), missing, part_bytes=25)
    assert sum(feed.bytes for feed in feeds) == 100
    for src in (A, B):
        assert sum(feed.bytes for feed in feeds if feed.src == src) == 50


def test_unavailable_bytes_are_lost_and_others_are_not() -> None:
    running, broken = [PeerFlow("s", 0, 9, B, C)], [PeerFlow("s", 0, 9, A, B)]
    feeds, lost = mend(running, broken, {B: {"s": [(3, 6)]}, C: {"s": [(0, 9)]}})
    assert (feeds, lost) == ([], {B: {"s": ((3, 6),)}, C: {"s": ((3, 6),)}})


def test_unreachable_peer_is_served_after_a_relay() -> None:
    """The only connections lead from b to c and from a to b."""
    missing: Missing = {A: {"s": []}, B: {"s": [(0, 4)]}, C: {"s": [(0, 4)]}}

    def past_b(src: PeerId, dst: PeerId) -> float | None:
        return 1.0 if {src, dst} != {A, C} else None

    feeds, _ = mend((), (), missing, weight=past_b)
    assert [(feed.src, feed.dst) for feed in feeds] == [(A, B), (B, C)]
    _, lost = mend((), (), missing, weight=lambda src, dst: None if dst == C else 1.0)
    assert lost == {C: {"s": ((0, 4),)}}
