"""Edges in threads over plain sockets, with all peers in one process: received bytes and reported events."""

import random
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrrl.core.errors import ProblemFaults
from orchestrrl.weights.orders import ArrivedBytes, CarryEdge, CarryEdges, EdgeEvent, EdgeState
from orchestrrl.weights.peer.carry import ThreadedCarrier
from orchestrrl.weights.transports.conformance import pattern
from orchestrrl.weights.transports.tcp import TcpTransport
from planner.model import PeerId
from tests.faults.in_memory import InMemory

PATIENT_S = 60.0
VERSION = 3


class InPieces(InMemory):
    """A version of which no range is contiguous."""

    def view(self, shard: str, offset: int, size: int) -> memoryview | None:
        return None


class Member:
    """A peer with its carrier, its stored version and the events that it has reported."""

    def __init__(self, name: str) -> None:
        self.name = PeerId(name)
        self.transport = TcpTransport("127.0.0.1")
        self.address = self.transport.open()
        self.told: list[EdgeEvent | ArrivedBytes] = []
        self._heard = threading.Condition()
        self.carrier = ThreadedCarrier(self.name, {"tcp": self.transport}, self._tell, time.time)
        self.staged = InMemory(VERSION, {})

    def _tell(self, news: EdgeEvent | ArrivedBytes) -> None:
        with self._heard:
            self.told.append(news)
            self._heard.notify_all()

    def ends(self) -> dict[str, EdgeEvent]:
        return {
            each.edge: each for each in self.told if isinstance(each, EdgeEvent) and each.state is not EdgeState.BEGAN
        }

    def until_ended(self, edges: Sequence[str]) -> dict[str, EdgeEvent]:
        with self._heard:
            assert self._heard.wait_for(lambda: set(edges) <= self.ends().keys(), PATIENT_S), self.told
            return self.ends()

    def until_received(self, size: int) -> None:
        """Wait until at least `size` bytes of its only shard have arrived."""
        (shard,) = self.staged.bytes
        assert self.staged.wait(shard, 0, size, PATIENT_S)

    def carry(self, edges: Sequence[CarryEdge], chunk_bytes: int = 1000, stall_s: float = PATIENT_S) -> None:
        mine = tuple(edge for edge in edges if self.name in (edge.src, edge.dst))
        self.carrier.carry(self.staged, CarryEdges(VERSION, mine, chunk_bytes, stall_s))

    def close(self) -> None:
        self.carrier.close()
        self.transport.close()


@contextmanager
def members(count: int) -> Iterator[list[Member]]:
    """Yield peers, and check that they release everything."""
    made = [Member(f"p{number}") for number in range(count)]
    try:
        yield made
    finally:
        for member in made:
            member.close()
        left = [thread.name for thread in threading.enumerate() if thread.name.startswith("weights-")]
        assert not left


def edge(number: int | str, src: Member, dst: Member, size: int, offset: int = 0, **more: object) -> CarryEdge:
    made = CarryEdge("s", offset, size, src.name, dst.name, id=f"e{number}", transport="tcp", address=dst.address)
    return replace(made, **more)  # type: ignore[arg-type]


@given(
    parents=st.lists(st.integers(0, 100), min_size=1, max_size=7),
    size=st.integers(1, 40_000),
    chunk_bytes=st.sampled_from([64, 1000, 4096, 65536]),
    waves=st.integers(1, 3),
    stripes=st.integers(1, 3),
    has_views=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_all_peers_of_a_tree_receive_the_same_bytes(
    parents: list[int], size: int, chunk_bytes: int, waves: int, stripes: int, has_views: bool, seed: int
) -> None:
    """Covers random trees and cuts, and edges ordered in any order and repeatedly."""
    chance = random.Random(seed)
    whole = pattern(max(size, chunk_bytes // 16), seed)
    with members(len(parents) + 1) as peers:
        memory = InMemory if has_views else InPieces
        peers[0].staged = memory(VERSION, {"s": whole})
        for peer in peers[1:]:
            peer.staged = memory(VERSION, {"s": len(whole)})
        cuts = [len(whole) * stripe // stripes for stripe in range(stripes + 1)]
        edges = [
            edge(
                f"{child}-{stripe}",
                peers[parent % child],
                peers[child],
                cuts[stripe + 1] - cuts[stripe],
                cuts[stripe],
                wave=stripe % waves,
            )
            for child, parent in enumerate(parents, start=1)
            for stripe in range(stripes)
        ]
        for each in chance.sample(edges, len(edges)) + chance.choices(edges, k=3):
            for peer in chance.sample(peers, len(peers)):
                if peer.name in (each.src, each.dst):
                    peer.carry([each], chunk_bytes)
        for peer in peers:
            mine = [each for each in edges if peer.name in (each.src, each.dst)]
            ends = peer.until_ended([each.id for each in mine])
            assert {ends[each.id].state for each in mine} == {EdgeState.DONE}
            assert all(ends[each.id].bytes == each.bytes for each in mine)
            assert bytes(peer.staged.bytes["s"]) == whole
            assert not peer.staged.missing()
            began = [each.edge for each in peer.told if isinstance(each, EdgeEvent) and each.state is EdgeState.BEGAN]
            assert sorted(began) == sorted({each.id for each in mine if each.bytes})


def test_peer_starts_a_wave_after_its_earlier_waves() -> None:
    with members(3) as (source, middle, last):
        source.staged = InMemory(VERSION, {"s": pattern(5000)})
        middle.staged = InMemory(VERSION, {"s": 5000})
        last.staged = InMemory(VERSION, {"s": 5000})
        first, second = edge(1, source, middle, 5000), edge(2, source, last, 5000, wave=1)
        for peer in (source, last):
            peer.carry([first, second])
        time.sleep(0.2)
        assert not source.ends()  # the other endpoint of its first wave is missing
        assert not last.ends()
        middle.carry([first, second])
        assert [*source.until_ended(["e1", "e2"])] == ["e1", "e2"]
        assert last.until_ended(["e2"])["e2"].state is EdgeState.DONE


def test_sender_that_waits_for_bytes_is_kept_alive() -> None:
    """No bytes arrive for many times `stall_s`; then the rest arrives."""
    whole = pattern(8000)
    with members(2) as (source, sink):
        source.staged = InMemory(VERSION, {"s": 8000})
        sink.staged = InMemory(VERSION, {"s": 8000})
        for peer in (source, sink):
            peer.carry([edge(1, source, sink, 8000)], stall_s=1.0)
        for start in (0, 4000):
            time.sleep(2.5)
            assert not source.ends()
            assert not sink.ends()
            source.staged.write("s", start, memoryview(whole)[start : start + 4000])
            source.staged.arrived("s", start, 4000)
            sink.until_received(start + 4000)
        assert sink.until_ended(["e1"])["e1"].state is EdgeState.DONE
        assert bytes(sink.staged.bytes["s"]) == whole


def test_broken_edge_is_reported_at_both_endpoints_and_replaced() -> None:
    """The middle peer of a chain fails: the last one keeps its bytes and gets the rest from the first."""
    whole = pattern(64_000)
    with members(3) as (source, middle, last):
        source.staged = InMemory(VERSION, {"s": 64_000})
        middle.staged, last.staged = (InMemory(VERSION, {"s": 64_000}) for _ in range(2))
        edges = [edge(1, source, middle, 64_000), edge(2, middle, last, 64_000)]
        for peer in (source, middle, last):
            peer.carry(edges)
        source.staged.write("s", 0, memoryview(whole)[:20_000])
        source.staged.arrived("s", 0, 20_000)
        last.until_received(20_000)
        middle.close()
        broken = last.until_ended(["e2"])["e2"]
        assert (broken.state, broken.is_receiver, broken.bytes) == (EdgeState.BROKEN, True, 20_000)
        assert "closed the link" in broken.detail or "closed the connection" in broken.detail
        assert source.until_ended(["e1"])["e1"].state is EdgeState.BROKEN
        source.staged.write("s", 20_000, memoryview(whole)[20_000:])
        source.staged.arrived("s", 20_000, 44_000)
        assert last.staged.missing() == {"s": ((20_000, 44_000),)}
        rest = [edge("rest", source, last, 44_000, 20_000)]
        for peer in (source, last):
            peer.carry(rest)
        assert last.until_ended(["erest"])["erest"].state is EdgeState.DONE
        assert bytes(last.staged.bytes["s"]) == whole
        arrived = [each for each in last.told if isinstance(each, ArrivedBytes)][-1]
        assert arrived.received_bytes == 64_000


def test_repeated_edge_runs_once_and_is_reported_again() -> None:
    with members(2) as (source, sink):
        source.staged = InMemory(VERSION, {"s": pattern(3000)})
        sink.staged = InMemory(VERSION, {"s": 3000})
        edges = [edge(1, source, sink, 3000)]
        for peer in (sink, sink, source, source):  # ordered twice before any byte can arrive
            peer.carry(edges)
        first = sink.until_ended(["e1"])["e1"]
        source.until_ended(["e1"])
        sink.staged.bytes["s"][:] = bytes(3000)
        sink.carry(edges)
        ends = [each for each in sink.told if isinstance(each, EdgeEvent) and each.state is EdgeState.DONE]
        assert ends == [first, first]
        assert bytes(sink.staged.bytes["s"]) == bytes(3000)
        # After `end` it is a new edge.
        for peer in (source, sink):
            peer.carrier.end(VERSION)
            peer.told.clear()
            peer.carry(edges)
        assert sink.until_ended(["e1"])["e1"].state is EdgeState.DONE
        assert bytes(sink.staged.bytes["s"]) == pattern(3000)


@pytest.mark.parametrize("at", ["before the other end has come", "while nothing comes", "while bytes come"])
def test_ended_edge_reports_no_events(at: str) -> None:
    with members(2) as (source, sink):
        comes = at == "while bytes come"
        source.staged = InMemory(VERSION, {"s": pattern(4_000_000) if comes else 1000})
        sink.staged = InMemory(VERSION, {"s": 4_000_000 if comes else 1000})
        edges = [edge(1, source, sink, 4_000_000 if comes else 1000, rate_gbps=0.01 if comes else 0.0)]
        sink.carry(edges, 100_000)
        if at != "before the other end has come":
            source.carry(edges, 100_000)
        if comes:
            sink.until_received(64 * 1024)
        else:
            time.sleep(0.2)
        sink.carrier.end(VERSION)
        said = list(sink.told)
        assert not [thread for thread in threading.enumerate() if thread.name == "weights-from-e1"]
        if at != "before the other end has come":
            assert source.until_ended(["e1"])["e1"].state is EdgeState.BROKEN
        assert sink.told == said
        assert not sink.ends()


def test_single_edges_of_a_version_can_be_ended() -> None:
    with members(2) as (source, sink):
        source.staged = InMemory(VERSION, {"s": 1000})
        sink.staged = InMemory(VERSION, {"s": 1000})
        edges = [edge(1, source, sink, 500), edge(2, source, sink, 500, 500), edge(3, source, sink, 500, 500, wave=1)]
        for peer in (source, sink):
            peer.carry(edges)
            peer.carrier.end(VERSION, ["e1", "no such edge"])
        source.staged.arrived("s", 500, 500)
        for peer in (source, sink):
            assert set(peer.until_ended(["e2", "e3"])) == {"e2", "e3"}


def test_invalid_edges_are_reported_together_and_none_starts() -> None:
    with members(3) as (one, two, three):
        one.staged = InMemory(VERSION, {"s": pattern(10)})
        good = edge(1, one, two, 10)
        bad = [edge(2, two, three, 10), edge(3, one, two, 10, transport="pigeon")]
        with pytest.raises(
            ProblemFaults,
            match=r"edges.e2: must begin or end at p0, .*\nedges.e3.transport: must be open .*, got 'pigeon'",
        ):
            one.carrier.carry(one.staged, CarryEdges(VERSION, (good, *bad), 10, 1.0))
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("weights-to")]


def test_local_error_breaks_the_edge() -> None:
    class Full(InPieces):
        def write(self, shard: str, offset: int, data: memoryview) -> None:
            if offset >= 2000:
                raise OSError(28, "No space left on device")
            super().write(shard, offset, data)

    with members(2) as (source, sink):
        source.staged = InMemory(VERSION, {"s": pattern(100_000)})
        sink.staged = Full(VERSION, {"s": 100_000})
        for peer in (source, sink):
            peer.carry([edge(1, source, sink, 100_000)])
        broken = sink.until_ended(["e1"])["e1"]
        assert (broken.state, broken.bytes) == (EdgeState.BROKEN, 2000)
        assert "No space left" in broken.detail


def test_edge_to_an_address_without_listener_breaks() -> None:
    with members(2) as (source, gone):
        gone.transport.close()
        source.staged = InMemory(VERSION, {"s": b"bytes"})
        source.carry([edge(1, source, gone, 5)])
        broken = source.until_ended(["e1"])["e1"]
        assert (broken.state, broken.bytes, broken.began_s) == (EdgeState.BROKEN, 0, 0.0)


def test_empty_edge_is_done_without_the_other_endpoint() -> None:
    with members(2) as (source, sink):
        source.staged = InMemory(VERSION, {"s": b""})
        source.carry([edge(1, source, sink, 0)])
        assert source.until_ended(["e1"])["e1"].state is EdgeState.DONE


def test_edges_with_one_id_from_two_plans_do_not_connect() -> None:
    """One endpoint has the edge of the earlier plan, the other that of the later one: no byte is transferred."""
    with members(2) as (source, sink):
        source.staged = InMemory(VERSION, {"s": pattern(2000)})
        sink.staged = InMemory(VERSION, {"s": 2000})
        source.carry([edge(1, source, sink, 1000, 0)])
        sink.carry([edge(1, source, sink, 1000, 1000)])
        time.sleep(0.3)
        assert not sink.ends()
        sink.carrier.end(VERSION)
        sink.carry([edge(1, source, sink, 1000, 0)])
        assert sink.until_ended(["e1"])["e1"].state is EdgeState.DONE


def test_invalid_announcement_breaks_the_edge() -> None:
    """The sender has the right key and then sends invalid announcements."""
    with members(2) as (source, sink):
        sink.staged = InMemory(VERSION, {"s": 1000})
        edges = [edge(1, source, sink, 1000)]
        sink.carry(edges, stall_s=0.5)
        (run,) = sink.carrier._runs.values()
        link = source.transport.dial(sink.address, run.link_key, PATIENT_S)
        link.send(memoryview(b"\xff" * 64)).wait(PATIENT_S)
        broken = sink.until_ended(["e1"])["e1"]
        assert (broken.state, broken.bytes) == (EdgeState.BROKEN, 0)
        assert sink.staged.missing() == {"s": ((0, 1000),)}
        link.close()
