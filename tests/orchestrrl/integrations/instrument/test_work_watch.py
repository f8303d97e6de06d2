"""Asynchronous collectives: their recorded end is never early, and follows as soon as it can be detected."""

import gc
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from orchestrrl.integrations.instrument.rings import RingReader, RingWriter
from orchestrrl.integrations.instrument.work_watch import WorkWatch


class Work:
    """A fake of torch's Work: it may fail, or its wait may time out while it runs."""

    def __init__(self, future: Any = None) -> None:
        self.completed, self.fault, self.future = False, "", future

    def is_completed(self) -> bool:
        if self.fault:
            raise RuntimeError(self.fault)
        return self.completed

    def get_future(self) -> Any:
        if self.future is None:
            raise RuntimeError("no future")
        return self.future

    def wait(self, timeout_s: float | None = None) -> bool:
        if self.fault:
            raise RuntimeError(self.fault)
        if timeout_s is not None and not self.completed:
            raise TimeoutError
        self.completed = True
        return True


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[RingWriter]:
    made = RingWriter(tmp_path)
    yield made
    made.close()


@pytest.fixture
def reader(writer: RingWriter) -> Iterator[RingReader]:
    with RingReader(writer.path) as made:
        yield made


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> WorkWatch:
    made = WorkWatch()
    monkeypatch.setattr(made, "_start", lambda: None)  # the test polls instead
    return made


def waiting(watch: WorkWatch) -> Callable[..., Any]:
    found: Callable[..., Any] = watch.wait(Work.wait)
    return found


def test_end_is_recorded_when_the_owner_has_waited(watch: WorkWatch, writer: RingWriter, reader: RingReader) -> None:
    first, second = Work(), Work()
    for work in (first, second):
        watch.follow(work, writer, writer.begin(writer.op("x")), True)
    assert waiting(watch)(second) is True
    assert [event.end_ns is None for event in reader.events()[0]] == [True, False]
    waiting(watch)(second)  # again: already over
    assert reader.in_flight == 1
    waiting(watch)(first)
    assert reader.in_flight == 0


def test_end_is_recorded_without_a_waiting_owner(watch: WorkWatch, writer: RingWriter, reader: RingReader) -> None:
    work = Work()
    watch.follow(work, writer, writer.begin(writer.op("x")), True)
    assert watch.poll() == 1
    assert reader.in_flight == 1
    work.completed = True
    assert watch.poll() == 0
    assert reader.in_flight == 0
    waiting(watch)(work)
    assert reader.in_flight == 0


def test_dropped_work_continues(watch: WorkWatch, writer: RingWriter, reader: RingReader) -> None:
    watch.follow(Work(), writer, writer.begin(writer.op("x")), True)
    gc.collect()
    watch.poll()
    assert reader.in_flight == 1


def test_wait_that_times_out_leaves_it_in_flight(watch: WorkWatch, writer: RingWriter, reader: RingReader) -> None:
    work = Work()
    watch.follow(work, writer, writer.begin(writer.op("x")), True)
    with pytest.raises(TimeoutError):
        waiting(watch)(work, timeout_s=1.0)
    assert (watch.poll(), reader.in_flight) == (1, 1)
    waiting(watch)(work)
    assert reader.in_flight == 0


def test_failed_operation_is_over(watch: WorkWatch, writer: RingWriter, reader: RingReader) -> None:
    work = Work()
    watch.follow(work, writer, writer.begin(writer.op("x")), True)
    work.fault = "a peer is gone"
    with pytest.raises(RuntimeError, match="a peer is gone"):
        waiting(watch)(work)
    assert (watch.poll(), reader.in_flight) == (0, 0)


def test_end_of_other_works_comes_from_their_future_or_waiter(
    watch: WorkWatch, writer: RingWriter, reader: RingReader
) -> None:
    future: Future[None] = Future()
    told, silent, dropped = Work(future), Work(), Work()
    for work in (told, silent, dropped):
        watch.follow(work, writer, writer.begin(writer.op("x")), False)
    assert reader.in_flight == 3
    future.set_result(None)
    assert reader.in_flight == 2
    waiting(watch)(silent)
    assert reader.in_flight == 1
    del dropped, work
    gc.collect()
    assert reader.in_flight == 0


def test_thread_polls_until_stopped(writer: RingWriter, reader: RingReader) -> None:
    watch, work, over = WorkWatch(), Work(), threading.Event()
    ended = writer.end

    def end(sequence: int) -> None:
        ended(sequence)
        over.set()

    writer.end = end  # type: ignore[method-assign]
    watch.follow(work, writer, writer.begin(writer.op("x")), True)
    work.completed = True
    assert over.wait(timeout=60)
    assert reader.in_flight == 0
    thread = watch._thread
    assert thread is not None
    watch.stop()
    thread.join(timeout=60)
    assert not thread.is_alive()
