"""The ring of a traced process: reads return written events, and torn or overwritten events are never returned."""

import os
import signal
import struct
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrrl.integrations.instrument import rings
from orchestrrl.integrations.instrument.rings import (
    RingDoorbell,
    RingEvent,
    RingReader,
    RingWriter,
    group_id,
    list_rings,
)

CAPACITY = 8
READABLE = rings.readable(CAPACITY)


class Clock:
    """A fake clock that advances by 1 ns per call."""

    now_ns = 0

    def __call__(self) -> int:
        self.now_ns += 1
        return self.now_ns


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[RingWriter]:
    made = RingWriter(tmp_path, capacity=CAPACITY, job="rl", clock_ns=Clock())
    yield made
    made.close()


@pytest.fixture
def reader(writer: RingWriter) -> Iterator[RingReader]:
    with RingReader(writer.path) as made:
        yield made


def test_event_is_returned_at_its_start_and_at_its_end(writer: RingWriter, reader: RingReader) -> None:
    group = group_id([4, 0, 2], "dp")
    sequence = writer.begin(writer.op("all_reduce"), group, 4096, rings.ASYNCHRONOUS)
    (running,), lost = reader.events()
    assert (running.op, running.n_bytes, running.end_ns, running.asynchronous, lost) == (
        "all_reduce",
        4096,
        None,
        True,
        0,
    )
    assert running.group == group
    assert reader.communicates
    assert reader.events() == ([], 0)
    writer.end(sequence)
    (ended,), lost = reader.events()
    assert (ended.sequence, ended.start_ns, lost) == (sequence, running.start_ns, 0)
    assert ended.end_ns is not None
    assert not reader.communicates
    assert reader.events() == ([], 0)


def test_header_identifies_the_writer(writer: RingWriter, reader: RingReader) -> None:
    assert reader.header() == rings.RingHeader("rl", rings.UNKNOWN, 1)
    writer.set_rank(3)
    assert reader.header() == rings.RingHeader("rl", 3, 1)
    assert reader.alive


def test_full_ring_drops_the_oldest_events_and_counts_them(writer: RingWriter, reader: RingReader) -> None:
    op = writer.op("x")
    long_one = writer.begin(op)
    for _ in range(20):
        writer.end(writer.begin(op))
    events, lost = reader.events()
    assert [event.sequence for event in events] == list(range(21 - READABLE, 21))
    assert lost == 21 - READABLE
    writer.end(long_one)
    assert reader.in_flight == 0
    assert all(event.end_ns for event in reader.events()[0])


def test_running_event_that_is_overwritten_counts_as_lost(writer: RingWriter, reader: RingReader) -> None:
    op = writer.op("x")
    writer.begin(op)
    assert len(reader.events()[0]) == 1
    for _ in range(CAPACITY):
        writer.end(writer.begin(op))
    events, lost = reader.events()
    assert (len(events), lost) == (READABLE, 2)


Step = tuple[str, int]
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("begin"), st.integers(0, 2**40)),
        st.tuples(st.just("end"), st.integers(0, 30)),
        st.tuples(st.just("moment"), st.integers(0, 9)),
        st.tuples(st.just("read"), st.just(0)),
    ),
    max_size=60,
)


@given(steps=STEPS)
def test_read_and_lost_events_add_up_to_the_written_ones(steps: list[Step], tmp_path_factory: Any) -> None:
    writer = RingWriter(tmp_path_factory.mktemp("rings"), capacity=CAPACITY, clock_ns=Clock())
    running: list[int] = []
    written: dict[int, tuple[str, int]] = {}
    begun: set[int] = set()  # returned by the reader
    lost_in_all = 0
    with RingReader(writer.path) as reader:
        for step, number in [*steps, ("read", 0)]:
            if step == "begin":
                sequence = writer.begin(writer.op("op"), 7, number)
                written[sequence] = ("op", number)
                running.append(sequence)
            elif step == "end" and running:
                writer.end(running.pop(number % len(running)))
            elif step == "moment":
                writer.moment("mark", number)
                written[len(written)] = ("mark", number)
            elif step == "read":
                events, lost = reader.events()
                lost_in_all += lost
                for event in events:
                    begun.add(event.sequence)
                    assert written[event.sequence] == (event.op, event.n_bytes if event.is_collective else event.value)
                    assert (event.end_ns is None) == (event.sequence in running)
                assert reader.in_flight == len(running)
        assert lost_in_all >= len(written) - len(begun)
        assert reader._state()[2] == len(written)
    writer.close()


@given(
    kinds=st.lists(st.sampled_from(["both", "left", "queued"]), min_size=1, max_size=20),
    order=st.randoms(use_true_random=False),
)
def test_reader_between_two_stores_never_returns_a_torn_event(
    kinds: list[str], order: Any, tmp_path_factory: Any
) -> None:
    """Each word of an event or a state contains its sequence, so a word of another one would be detected."""
    writer = RingWriter(tmp_path_factory.mktemp("rings"), capacity=2, clock_ns=Clock())
    reader = RingReader(writer.path)
    told: list[tuple[int, ...]] = [reader._state()]  # the intended (in flight, queued, head)

    def look() -> None:
        for sequence in range(len(kinds)):
            slot = reader._slot(sequence)
            if slot is not None:
                assert slot[2:4] == (sequence + 1, sequence + 1)
                assert slot[6] == sequence + 1
        in_flight, _, _ = state = reader._state()
        # One of the last two states, or a fallback that does not report silence.
        assert state in told[-2:] or in_flight > 0

    def pack(layout: struct.Struct) -> Callable[..., None]:
        def one_by_one(memory: Any, at: int, *values: int) -> None:
            """Store as struct.pack_into does: zeros in any order, then the words."""
            if layout is rings._STATE:
                told.append((values[1] - 1, values[2] - 1, values[3] - 1))
            packed = layout.pack(*values)
            words = [slice(i, i + 8) for i in range(0, len(packed), 8)]
            shuffled = order.sample(words, len(words))
            for word, stored in [(word, bytes(8)) for word in shuffled] + [(word, packed[word]) for word in words]:
                memory[at + word.start : at + word.stop] = stored
                look()

        return one_by_one

    before = rings._pack_slot, rings._pack_state, rings._pack_word
    rings._pack_slot, rings._pack_state, rings._pack_word = map(pack, (rings._PARTS, rings._STATE, rings._WORD))
    try:
        op = writer.op("x")
        for sequence, kind in enumerate(kinds):
            make = writer.issue if kind == "queued" else writer.begin
            assert make(op, sequence + 1, sequence + 1, value=sequence + 1) == sequence
            if kind == "both":
                writer.end(sequence)
    finally:
        rings._pack_slot, rings._pack_state, rings._pack_word = before
    assert reader._state() == told[-1]
    assert reader._state()[:2] == (kinds.count("left"), kinds.count("queued"))
    reader.close()


def test_permanently_torn_state_is_not_quiet(writer: RingWriter, reader: RingReader) -> None:
    """The writer was killed or preempted between two words."""
    writer.end(writer.begin(writer.op("x")))
    assert not reader.communicates
    writer._words[rings._STATE_BEGUN] = 0
    assert reader.communicates
    assert reader._state()[2] == 1


def test_concurrent_threads_lose_no_events(tmp_path: Path) -> None:
    writer = RingWriter(tmp_path, capacity=16384)
    op, before = writer.op("x"), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)

    def write(thread: int) -> None:
        for number in range(500):
            sequence = writer.begin(op, number + 1, number + 1, value=thread)
            writer.end(sequence)

    threads = [threading.Thread(target=write, args=(thread,)) for thread in range(8)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    with RingReader(writer.path) as reader:
        events, lost = reader.events()
        assert (len(events), lost, reader.in_flight) == (4000, 0, 0)
        assert all(event.group == event.n_bytes and event.end_ns for event in events)
        assert Counter(event.value for event in events) == dict.fromkeys(range(8), 500)


def test_signal_handler_may_communicate_during_a_collective(tmp_path: Path) -> None:
    writer = RingWriter(tmp_path)
    op = writer.op("x")
    handled = 0

    def handle(*_: object) -> None:
        nonlocal handled
        handled += 1
        writer.end(writer.begin(op, 7))

    before = signal.signal(signal.SIGALRM, handle)
    signal.setitimer(signal.ITIMER_REAL, 1e-4, 1e-4)
    try:
        made = 0
        while handled < 50:
            writer.end(writer.begin(op, 5))
            made += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    with RingReader(writer.path) as reader:
        assert (reader._state()[2], reader.in_flight) == (made + handled, 0)
        assert all(event.end_ns for event in reader.events()[0])


def test_half_written_slot_is_not_returned(writer: RingWriter, reader: RingReader) -> None:
    op = writer.op("x")
    sequence = writer.begin(op)
    writer._words[writer._slot_at(sequence) // 8] = sequence + 1 + CAPACITY  # when its successor begins
    assert reader.events() == ([], 1)


def test_announcements_are_readable_until_overwritten(writer: RingWriter, reader: RingReader) -> None:
    for number in range(rings.PAYLOAD_SLOTS + 1):
        writer.announce("announce", b"%d" % number)
    writer._words[writer._payloads_at // 8 + 512 * 2] = 0  # the third is being overwritten
    events, _ = reader.events()
    payloads = [event.payload for event in events]
    # Nine events, of which seven are readable: the first two are lost with their payloads.
    assert payloads == [None, b"3", b"4", b"5", b"6", b"7", b"8"]
    writer.announce("announce", b"x" * rings.PAYLOAD_BYTES)
    with pytest.raises(ValueError, match="at most 3584 bytes, got 3585"):
        writer.announce("announce", b"x" * (rings.PAYLOAD_BYTES + 1))


def test_armed_doorbell_rings_when_communication_stops_and_starts(writer: RingWriter, reader: RingReader) -> None:
    op = writer.op("x")
    bell = RingDoorbell(writer.path.parent)
    writer.end(writer.begin(op))
    assert not bell.rung()
    reader.arm(True)
    first = writer.begin(op)
    second = writer.begin(op)
    writer.end(first)
    assert (bell.rung(), bell.rung()) == (True, False)
    writer.end(second)
    assert (bell.rung(), bell.rung()) == (True, False)
    reader.arm(False)
    writer.end(writer.begin(op))
    assert not bell.rung()
    bell.close()


def test_full_or_missing_doorbell_does_not_block_the_writer(writer: RingWriter, reader: RingReader) -> None:
    op = writer.op("x")
    reader.arm(True)
    writer.end(writer.begin(op))  # no listener
    bell = RingDoorbell(writer.path.parent)
    for _ in range(1000):
        writer.end(writer.begin(op))
    assert bell.rung()
    bell.close()
    writer.end(writer.begin(op))  # the listener has gone
    assert reader._state()[2] == 1002


def test_last_opened_doorbell_receives_the_signals(writer: RingWriter, reader: RingReader) -> None:
    first, second = RingDoorbell(writer.path.parent), RingDoorbell(writer.path.parent)
    reader.arm(True)
    writer.begin(writer.op("x"))
    assert not first.rung()
    assert second.rung()
    first.close()
    second.close()


def test_closed_ring_is_read_to_its_end(writer: RingWriter, reader: RingReader) -> None:
    sequence = writer.begin(writer.op("x"))
    writer.close()
    writer.end(sequence)  # it ends after the recorder and is not recorded
    writer.begin(writer.op("x"))
    assert not reader.alive
    assert [event.end_ns for event in reader.events()[0]] == [None]


def test_full_dictionary_leaves_operations_unnamed(writer: RingWriter, reader: RingReader) -> None:
    names = [letter * 60_000 for letter in "abc"]
    for name in names:
        writer.end(writer.begin(writer.op(name)))
    assert [event.op for event in reader.events()[0]] == [*names[:2], "op3"]


@given(ranks=st.lists(st.integers(0, 5000), min_size=1, unique=True), seed=st.randoms(use_true_random=False))
def test_group_id_does_not_depend_on_the_order_of_ranks(ranks: list[int], seed: Any) -> None:
    shuffled = list(ranks)
    seed.shuffle(shuffled)
    assert group_id(ranks, "a") == group_id(shuffled, "a") != group_id(ranks, "b")
    assert 0 < group_id(ranks, "a") < 2**63


def test_started_sets_the_start_of_an_issued_operation(writer: RingWriter, reader: RingReader) -> None:
    sequence = writer.issue(writer.op("all_reduce"), n_bytes=5)
    (issued,), _ = reader.events()
    assert issued.end_ns is None
    assert reader._state()[:2] == (0, 1)
    writer.started(sequence, 100)
    assert reader._state()[:2] == (1, 0)
    writer.end(sequence)
    (ended,), _ = reader.events()
    assert ended.end_ns is not None
    expected = RingEvent(sequence, rings.COLLECTIVE, "all_reduce", 0, 5, 100, ended.end_ns, rings.UNKNOWN, 0)
    assert ended == expected
    assert not reader.communicates


def test_ring_without_memory_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        RingWriter(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_file_that_is_not_a_ring_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.ring").write_bytes(b"short")
    (tmp_path / "b.ring").write_bytes(bytes(8192))
    for path in list_rings(tmp_path):
        with pytest.raises(ValueError, match="not a ring"):
            RingReader(path)
    with pytest.raises(ValueError, match="power of two"):
        RingWriter(tmp_path, capacity=6)
    with pytest.raises(FileNotFoundError):
        RingReader(tmp_path / "c.ring")
