"""The recorder in real programs of torch.distributed over gloo, which know nothing of it."""

import os
import subprocess
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from orchestrrl.integrations.instrument.rings import (
    ASYNCHRONOUS,
    RingEvent,
    RingHeader,
    RingReader,
    list_rings,
)
from tests.vllm.conftest import REPOSITORY, VLLM_PYTHON

PROGRAM = Path(__file__).with_name("traced_program.py")
STARTUP = REPOSITORY / "orchestrrl" / "integrations" / "instrument" / "startup"

pytestmark = pytest.mark.timeout(120)


class Ran:
    """One run of the program: what each rank printed, and what is in its ring."""

    def __init__(self, directory: Path, what: str, size: int, *, recorded: bool = True, **environment: str) -> None:
        self.rings = directory / "rings"
        store = directory / f"store-{recorded}"
        switched_on = {"ORCHESTRRL_RECORDER": str(self.rings), "PYTHONPATH": str(STARTUP)} if recorded else {}
        done = subprocess.run(
            [VLLM_PYTHON, PROGRAM, what, str(size), str(store)],
            env={"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1"} | switched_on | environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        *self.out, codes = sorted(done.stdout.splitlines(), reverse=True)
        self.errors = done.stderr
        self.codes = [int(code) for code in codes.split()[1:]]
        self.headers: dict[int, RingHeader] = {}
        self.events: dict[int, list[RingEvent]] = {}
        self.alive: dict[int, bool] = {}
        self.in_flight: dict[int, int] = {}
        self.lost: dict[int, int] = {}
        for path in list_rings(self.rings):
            with RingReader(path) as reader:
                header = reader.header()
                rank = header.rank
                self.headers[rank] = header
                self.events[rank], self.lost[rank] = reader.events()
                self.alive[rank] = reader.alive
                self.in_flight[rank] = reader.in_flight

    def fine(self) -> "Ran":
        assert set(self.codes) == {0}, self.errors
        return self

    def ops(self, rank: int) -> list[tuple[str, int]]:
        return [(event.op, event.n_bytes) for event in self.events[rank]]


Run = Callable[..., Ran]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return lambda what, size, **settings: Ran(tmp_path, what, size, **settings)


def test_each_collective_is_noted_with_its_bytes_and_its_end(run: Run) -> None:
    ran = run("collectives", 4).fine()
    expected = [
        ("all_reduce", 16),
        ("broadcast", 16),
        ("all_gather", 64),
        ("all_gather", 64),
        ("reduce_scatter", 64),
        ("all_to_all", 64),
        ("reduce", 16),
        ("gather", 16),
        ("scatter", 16),
        ("barrier", 0),
    ]
    assert sorted(ran.headers) == [0, 1, 2, 3]
    for rank, header in ran.headers.items():
        assert ran.ops(rank)[:10] == expected
        assert (header.rank, ran.in_flight[rank]) == (rank, 0)
        assert not ran.alive[rank]
        assert all(event.end_ns is not None and event.end_ns >= event.start_ns for event in ran.events[rank])
        assert {event.group for event in ran.events[rank]} == {ran.events[0][0].group}
        # The collectives of one rank come one after the other, as it waits for each.
        blocking = [event for event in ran.events[rank] if not event.asynchronous]
        assert all(a.end_ns <= b.start_ns for a, b in pairwise(blocking) if a.end_ns)
    # Point to point: one of rank 0 to rank 1, then each with its neighbour, both ways, then two of an object.
    peers = {rank: [(e.op, e.value) for e in ran.events[rank] if e.op in ("send", "recv")] for rank in range(4)}
    both = {rank: [("recv", rank ^ 1), ("send", rank ^ 1)] for rank in range(4)}
    assert peers[0][:1] == [("send", 1)]
    assert peers[1][:1] == [("recv", 0)]
    assert {rank: sorted(found[-2:]) for rank, found in peers.items()} == both
    assert {e.flags for e in ran.events[0] if e.op == "send"} == {ASYNCHRONOUS}
    assert [op for op, _ in ran.ops(2)][12:14] == ["all_gather", "all_gather"]


def test_the_ends_of_one_collective_come_after_all_its_starts(run: Run) -> None:
    """Nobody's all-reduce is over before everybody has begun it: the ranks' clocks are one."""
    ran = run("many", 4).fine()
    for number in range(300):
        of_ranks = [ran.events[rank][number] for rank in range(4)]
        assert max(event.start_ns for event in of_ranks) <= min(event.end_ns or 0 for event in of_ranks)


def test_sub_groups_have_the_same_id_in_all_their_ranks(run: Run) -> None:
    ran = run("groups", 4).fine()
    used = {rank: [event.group for event in ran.events[rank][:3]] for rank in range(4)}
    assert used[0] == used[2]
    assert used[1] == used[3]
    assert used[0][1:] == used[1][1:]
    assert len({*used[0], *used[1]}) == 4  # two of them have the same ranks


def test_asynchronous_collectives_overlap(run: Run) -> None:
    ran = run("overlap", 4).fine()
    for rank in range(1, 4):
        first, second = ran.events[rank][:2]
        assert first.asynchronous
        assert second.asynchronous
        assert first.end_ns is not None
        assert first.start_ns < second.start_ns < first.end_ns


@pytest.mark.slow  # they import half of torch
def test_functional_collectives_are_noted_until_they_are_waited_for(run: Run) -> None:
    ran = run("functional", 2).fine()
    event = ran.events[0][0]
    assert (event.op, event.n_bytes, event.flags) == ("all_reduce", 16, ASYNCHRONOUS)
    assert event.end_ns is not None


@pytest.mark.slow
def test_gradients_of_ddp_are_noted_and_stay_the_same(run: Run) -> None:
    """With three ranks, so that the mean is rounded."""
    ran = run("ddp", 3).fine()
    plain = run("ddp", 3, recorded=False).fine()
    assert [op for op, _ in ran.ops(0)] == ["broadcast", "all_reduce", "all_reduce", "all_reduce", "barrier"]
    assert {n_bytes for op, n_bytes in ran.ops(1) if op == "all_reduce"} == {4 * (7 * 5 + 5 + 5 * 3 + 3)}
    assert ran.out == plain.out
    assert ran.out[0].startswith("gradients ")


def test_a_killed_process_leaves_what_was_in_flight(run: Run) -> None:
    ran = run("killed", 3)
    assert ran.codes == [0, -9, 0]
    assert ran.in_flight[1] == 1
    assert [(event.op, event.end_ns) for event in ran.events[1]] == [("barrier", None)]
    assert not ran.alive[1]


def test_a_forked_child_writes_into_a_ring_of_its_own(run: Run) -> None:
    ran = run("forked", 2).fine()
    assert [event.op for event in ran.events[0]] == ["all_reduce", "barrier"]
    assert [event.op for event in ran.events[-1]] == ["child"]  # it has no rank
    assert ran.headers[-1].created_ns != ran.headers[0].created_ns


def test_marks_lie_around_what_they_mark_and_announcements_carry_their_body(run: Run) -> None:
    ran = run("trainer", 2).fine()
    events = ran.events[0]
    assert [event.op for event in events] == ["iteration", "forward", "all_reduce", "announce"] * 2
    iteration, forward, reduced, announced = events[4:]
    assert iteration.value == 1
    assert forward.end_ns is not None
    assert reduced.end_ns is not None
    assert forward.start_ns < reduced.start_ns < reduced.end_ns < forward.end_ns
    assert announced.payload == b'{"period": "sync", "body": {"bytes": 5}}'
    assert not ran.alive[0]  # the program has stopped it, and communicates once more


def test_where_nothing_can_be_written_the_program_runs_as_ever(run: Run) -> None:
    ran = run("groups", 2, ORCHESTRRL_RECORDER="/dev/null/rings").fine()
    assert ran.errors.count("nothing is recorded") == 2  # once by each rank
    assert not ran.headers
