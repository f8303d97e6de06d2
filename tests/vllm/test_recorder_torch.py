"""The recorder in unmodified torch.distributed programs over gloo."""

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
    """One run of the program: the output and the ring of each rank."""

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


def test_each_collective_is_recorded_with_its_bytes_and_end(run: Run) -> None:
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
        # A rank waits for each collective, so they do not overlap.
        blocking = [event for event in ran.events[rank] if not event.asynchronous]
        assert all(a.end_ns <= b.start_ns for a, b in pairwise(blocking) if a.end_ns)
    # Point to point: rank 0 to rank 1, then each rank with its neighbour in both directions, then two for an object.
    peers = {rank: [(e.op, e.value) for e in ran.events[rank] if e.op in ("send", "recv")] for rank in range(4)}
    both = {rank: [("recv", rank ^ 1), ("send", rank ^ 1)] for rank in range(4)}
    assert peers[0][:1] == [("send", 1)]
    assert peers[1][:1] == [("recv", 0)]
    assert {rank: sorted(found[-2:]) for rank, found in peers.items()} == both
    assert {e.flags for e in ran.events[0] if e.op == "send"} == {ASYNCHRONOUS}
    assert [op for op, _ in ran.ops(2)][12:14] == ["all_gather", "all_gather"]


def test_collective_ends_after_all_ranks_have_started_it(run: Run) -> None:
    """No rank's all-reduce ends before all ranks have started it; the ranks share one clock."""
    ran = run("many", 4).fine()
    for number in range(300):
        of_ranks = [ran.events[rank][number] for rank in range(4)]
        assert max(event.start_ns for event in of_ranks) <= min(event.end_ns or 0 for event in of_ranks)


def test_subgroup_has_the_same_id_on_all_ranks(run: Run) -> None:
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
def test_functional_collective_lasts_until_it_is_waited_for(run: Run) -> None:
    ran = run("functional", 2).fine()
    event = ran.events[0][0]
    assert (event.op, event.n_bytes, event.flags) == ("all_reduce", 16, ASYNCHRONOUS)
    assert event.end_ns is not None


@pytest.mark.slow
def test_ddp_gradients_are_recorded_and_unchanged(run: Run) -> None:
    """Three ranks, so that the mean is rounded."""
    ran = run("ddp", 3).fine()
    plain = run("ddp", 3, recorded=False).fine()
    assert [op for op, _ in ran.ops(0)] == ["broadcast", "all_reduce", "all_reduce", "all_reduce", "barrier"]
    assert {n_bytes for op, n_bytes in ran.ops(1) if op == "all_reduce"} == {4 * (7 * 5 + 5 + 5 * 3 + 3)}
    assert ran.out == plain.out
    assert ran.out[0].startswith("gradients ")


def test_killed_process_leaves_its_collectives_in_flight(run: Run) -> None:
    ran = run("killed", 3)
    assert ran.codes == [0, -9, 0]
    assert ran.in_flight[1] == 1
    assert [(event.op, event.end_ns) for event in ran.events[1]] == [("barrier", None)]
    assert not ran.alive[1]


def test_forked_child_writes_to_its_own_ring(run: Run) -> None:
    ran = run("forked", 2).fine()
    assert [event.op for event in ran.events[0]] == ["all_reduce", "barrier"]
    assert [event.op for event in ran.events[-1]] == ["child"]  # it has no rank
    assert ran.headers[-1].created_ns != ran.headers[0].created_ns


def test_marks_enclose_their_code_and_announcements_have_a_body(run: Run) -> None:
    ran = run("trainer", 2).fine()
    events = ran.events[0]
    assert [event.op for event in events] == ["iteration", "forward", "all_reduce", "announce"] * 2
    iteration, forward, reduced, announced = events[4:]
    assert iteration.value == 1
    assert forward.end_ns is not None
    assert reduced.end_ns is not None
    assert forward.start_ns < reduced.start_ns < reduced.end_ns < forward.end_ns
    assert announced.payload == b'{"period": "sync", "body": {"bytes": 5}}'
    assert not ran.alive[0]  # the program has stopped the recorder, and communicates once more


def test_program_runs_normally_if_the_ring_cannot_be_created(run: Run) -> None:
    ran = run("groups", 2, ORCHESTRRL_RECORDER="/dev/null/rings").fine()
    assert ran.errors.count("recording is disabled") == 2  # once per rank
    assert not ran.headers
