"""Starting and stopping the recorder in a process without torch, or before torch is imported."""

import gc
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrrl.integrations.instrument import recorder
from orchestrrl.integrations.instrument.collective_hooks import METHODS, CollectiveHooks
from orchestrrl.integrations.instrument.rings import RingReader, RingWriter, group_id, list_rings
from orchestrrl.integrations.instrument.work_watch import DeviceWatch


@pytest.fixture(autouse=True)
def stopped() -> Iterator[None]:
    yield
    recorder.stop()


def test_nothing_is_recorded_before_start_and_after_stop(tmp_path: Path) -> None:
    recorder.moment("early")
    recorder.start(tmp_path, job="rl")
    assert _path() is None  # nothing recorded yet, no memory allocated
    with recorder.mark("forward"):
        recorder.iteration(3)
    found = _path()
    assert found is not None
    recorder.start(tmp_path / "other")  # already on
    recorder.stop()
    recorder.moment("late")
    with RingReader(found) as reader:
        assert [event.op for event in reader.events()[0]] == ["forward", "iteration"]
        assert (reader.header().job, reader.alive) == ("rl", False)
    assert list_rings(tmp_path) == [found]


def test_announcement_is_json_with_its_period(tmp_path: Path) -> None:
    recorder.announce("sync", "{}")  # no listener
    recorder.start(tmp_path)
    recorder.announce("sync", '{"bytes": 5}')
    found = _path()
    assert found is not None
    with RingReader(found) as reader:
        ((event,), _) = reader.events()
    assert event.payload == b'{"period": "sync", "body": {"bytes": 5}}'
    with pytest.raises(ValueError, match="at most 3584 bytes"):
        recorder.announce("sync", {"text": "x" * 3584})


def test_unwritable_directory_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    recorder.start("/dev/null/rings")
    recorder.moment("a")
    recorder.moment("b")
    assert [record.message.partition(":")[0] for record in caplog.records] == ["recording is disabled"]
    recorder.stop()


def _path() -> Path | None:
    current = recorder.current()
    return None if current is None else current.path


class Group:
    """A fake of a vLLM group, in which one method calls another."""

    ranks = (2, 3)
    rank = 2
    unique_name = "tp:0"

    def all_reduce(self, x: bytearray) -> str:
        return self.send(x)

    def send(self, x: bytearray) -> str:
        if not x:
            raise RuntimeError("nothing to send")
        return "sent"


def test_replaced_methods_record_once_and_are_restored(tmp_path: Path) -> None:
    writer = RingWriter(tmp_path)
    told: list[str] = []
    hooks = CollectiveHooks(lambda: writer, told.append)
    hooks._torch = SimpleNamespace()
    before = Group.all_reduce
    for _ in range(2):
        hooks.replace(Group, {"all_reduce": "all_reduce", "send": "send", "gone": "gather"})
    assert Group().all_reduce(bytearray(3)) == "sent"
    with pytest.raises(RuntimeError, match="nothing to send"):
        Group().send(bytearray())
    with RingReader(writer.path) as reader:
        events, _ = reader.events()
        assert [event.op for event in events] == ["all_reduce", "send"]
        assert {event.group for event in events} == {group_id((2, 3), Group.unique_name)}
        assert reader.in_flight == 0
        assert reader.header().rank == 2
    assert set(told) == {"not recorded, because it does not exist: Group.gone"}
    hooks.remove()
    assert Group.all_reduce is before


class Tensor:
    nbytes, is_cuda = 16, False


class Backend:
    """A fake process group of torch.distributed."""

    group_name = "0"

    def __init__(self, fault: str = "") -> None:
        self.fault, self.calls = fault, 0

    def allreduce(self, tensors: list[Tensor], opts: Any) -> "Work":
        self.calls += 1
        if self.fault:
            raise RuntimeError(self.fault)
        return Work()


def test_collective_runs_once_and_freed_group_leaves_the_cache(tmp_path: Path) -> None:
    writer = RingWriter(tmp_path)
    told: list[str] = []
    hooks = CollectiveHooks(lambda: writer, told.append)
    distributed = SimpleNamespace(get_process_group_ranks=lambda group: [0, 1], is_initialized=lambda: False)
    hooks._torch, hooks._wait_itself = SimpleNamespace(Tensor=Tensor, distributed=distributed), Work.wait
    hooks._replace(Backend, "allreduce", partial(hooks._method, METHODS[0]))
    good, bad = Backend(), Backend("a peer is gone")
    sync = SimpleNamespace(asyncOp=False)
    for _ in range(2):
        good.allreduce([Tensor()], sync)
    with pytest.raises(RuntimeError, match="a peer is gone"):
        bad.allreduce([Tensor()], sync)
    with RingReader(writer.path) as reader:
        assert [(event.op, event.n_bytes, bool(event.end_ns)) for event in reader.events()[0]] == [
            ("all_reduce", 16, True)
        ] * 3
    assert (good.calls, bad.calls, told) == (2, 1, [])
    assert len(hooks._places) == len(hooks._routes[0]) == 2
    del good, bad
    gc.collect()
    assert not hooks._places
    assert not hooks._routes[0]
    hooks.remove()


class Cuda:
    """A fake device with manual progress: an event is done when all operations before it are."""

    def __init__(self) -> None:
        self.issued = self.done = 0

    def Event(self, enable_timing: bool) -> Any:
        return Mark(self)

    def current_device(self) -> int:
        return 0

    def Stream(self) -> None:
        return None

    def stream(self, _: None) -> Any:
        return nullcontext()


class Mark:
    def __init__(self, cuda: Cuda) -> None:
        self.cuda, self.at = cuda, 0

    def record(self) -> None:
        self.at = self.cuda.issued

    def synchronize(self) -> None:
        self.at = 0

    def query(self) -> bool:
        return self.cuda.done >= self.at

    def elapsed_time(self, other: "Mark") -> float:
        return 0.0


class Work:
    completed = False

    def is_completed(self) -> bool:
        return self.completed

    def wait(self) -> None: ...


def test_device_operation_runs_when_its_stream_reaches_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeviceWatch, "_loop", lambda self: None)  # the test polls instead
    cuda, writer, work = Cuda(), RingWriter(tmp_path), Work()
    watch = DeviceWatch(cuda, writer)

    def issue() -> Work:
        cuda.issued += 1
        return work

    cuda.issued = 1  # other work precedes it
    watch.run(issue, writer.issue(writer.op("all_reduce")), False, None)
    watch.run(issue, writer.issue(writer.op("broadcast")), True, None)
    with RingReader(writer.path) as reader:
        watch.poll()
        assert reader._state()[:2] == (0, 2)
        assert [event.end_ns for event in reader.events()[0]] == [None, None]
        cuda.done = 1
        watch.poll()
        assert reader._state()[:2] == (1, 1)
        cuda.done = 2
        watch.poll()
        assert [(event.op, event.end_ns is None) for event in reader.events()[0]] == [
            ("all_reduce", False),
        ]
        assert reader.in_flight == 1
        work.completed = True
        assert not watch.poll()
        assert reader.in_flight == 0
