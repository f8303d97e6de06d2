"""Tests of an agent with rings of real writers, on a clock of the tests."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrrl.agent.probe_link import AGAIN_AFTER_S, WindowReporter, WindowReports
from orchestrrl.agent.probes import HostTraces
from orchestrrl.core.clock import WallClock
from orchestrrl.core.errors import Permanent
from orchestrrl.integrations.instrument.rings import _ARMED, RingDoorbell, RingReader, RingWriter, group_id, list_rings
from orchestrrl.rpc.pb import fabric_pb2
from planner.model import Hold

BUSY_S = 0.002
QUIET_S = 0.1
Q = 0.05


class Host:
    """Ranks that work in step: an iteration has `collectives` of them, with a pause after each."""

    def __init__(self, folder: Path, ranks: int = 2, job: str = "", capacity: int = 1024) -> None:
        self.now_ns = 10**12
        self.folder = folder
        self.writers = [
            RingWriter(folder, job=job, capacity=capacity, clock_ns=lambda: self.now_ns) for _ in range(ranks)
        ]
        for rank, writer in enumerate(self.writers):
            writer.set_rank(rank)
        self.traces = HostTraces(folder, lambda: self.now_s)
        self.traces.poll()

    @property
    def now_s(self) -> float:
        return self.now_ns * 1e-9

    def passes(self, duration_s: float) -> None:
        self.now_ns += round(duration_s * 1e9)

    def begin(self) -> list[int]:
        return [each.begin(each.op("all_reduce"), group_id((0, 1), "all"), 64) for each in self.writers]

    def end(self, sequences: list[int]) -> None:
        for writer, sequence in zip(self.writers, sequences, strict=True):
            writer.end(sequence)

    def iterate(self, iteration: int, quiet_s: float = QUIET_S, collectives: int = 2) -> None:
        for writer in self.writers:
            writer.moment("iteration", iteration)
        for _ in range(collectives):
            flying = self.begin()
            self.passes(BUSY_S)
            self.end(flying)
            self.passes(quiet_s)

    def learn(self, iterations: int = 30) -> None:
        """Run iterations, and stop in the middle of one: the first pause has just begun."""
        for iteration in range(iterations):
            self.iterate(iteration)
            self.traces.read()
        for writer in self.writers:
            writer.moment("iteration", iterations)
        flying = self.begin()
        self.passes(BUSY_S)
        self.end(flying)
        self.traces.read()

    def close(self) -> None:
        self.traces.close()
        for writer in self.writers:
            writer.close()


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    host = Host(tmp_path)
    yield host
    host.close()


def code(found: fabric_pb2.Quiet | Hold) -> str:
    return found.code if isinstance(found, Hold) else "quiet"


def test_window_is_as_long_as_earlier_pauses(host: Host) -> None:
    host.learn()
    found = host.traces.assess("", Q)
    assert isinstance(found, fabric_pb2.Quiet)
    assert found.since_s == pytest.approx(host.now_s)
    assert found.until_s == pytest.approx(host.now_s + QUIET_S, rel=1e-3)
    assert found.position == 1
    assert 0 < found.risk <= 2 * Q + 1e-9  # of two ranks


def test_one_communicating_rank_is_traffic(host: Host) -> None:
    host.learn()
    writer = host.writers[1]
    flying = writer.begin(writer.op("send"))
    assert host.traces.busy("")
    found = host.traces.assess("", Q)
    assert code(found) == "traffic"
    assert "rank 1" in str(found)
    writer.end(flying)
    assert not host.traces.busy("")


def test_work_queued_on_a_device_is_traffic_before_it_begins(host: Host) -> None:
    host.learn()
    host.writers[0].issue(host.writers[0].op("all_reduce"))
    assert host.traces.busy("")
    assert code(host.traces.assess("", Q)) == "traffic"


def test_no_window_is_reported_before_it_is_learned(host: Host) -> None:
    host.iterate(0)
    host.traces.read()
    assert code(host.traces.assess("", Q)) == "unlearnt"
    assert code(host.traces.assess("another", Q)) == "untraced"


def test_lost_events_leave_the_position_unknown_until_the_next_iteration(tmp_path: Path) -> None:
    host = Host(tmp_path, capacity=16)
    host.learn()
    for _ in range(16):
        host.end(host.begin())
        host.passes(QUIET_S)
    host.traces.read()
    assert code(host.traces.assess("", Q)) == "place_unknown"
    host.iterate(31, quiet_s=0.0, collectives=1)
    host.traces.read()
    assert code(host.traces.assess("", Q)) == "quiet"
    host.close()


def test_processes_are_added_and_removed(host: Host) -> None:
    assert host.traces.jobs() == {"": (0, 1)}
    assert not host.traces.poll()
    other = RingWriter(host.folder, job="engine", clock_ns=lambda: host.now_ns)
    assert not host.traces.poll()  # it is in no group yet
    assert host.traces.jobs() == {"": (0, 1)}
    other.set_rank(0)
    assert host.traces.poll()
    assert host.traces.jobs() == {"": (0, 1), "engine": (0,)}
    other.close()
    host.writers.pop().close()
    assert host.traces.poll()
    assert host.traces.jobs() == {"": (0,)}
    assert len(list_rings(host.folder)) <= 3


def test_file_that_is_no_ring_is_ignored(host: Host) -> None:
    (host.folder / "strange.ring").write_bytes(b"not a ring" * 1000)
    assert not host.traces.poll()
    assert host.traces.jobs() == {"": (0, 1)}


def test_only_watched_jobs_ring(tmp_path: Path) -> None:
    host = Host(tmp_path, job="watched")
    other = RingWriter(tmp_path, job="other")
    other.set_rank(0)
    host.traces.poll()

    def armed() -> dict[str, bool]:
        found = {}
        for path in list_rings(tmp_path):
            with RingReader(path) as reader:
                found[reader.header().job] = bool(reader._words[_ARMED])
        return found

    host.traces.arm({"watched": frozenset({Q})})
    assert armed() == {"watched": True, "other": False}
    host.traces.poll()
    assert armed() == {"watched": True, "other": False}
    host.traces.close()
    assert armed() == {"watched": False, "other": False}
    host.close()
    other.close()


def test_intent_is_remembered_for_a_period_announced_by_name(host: Host) -> None:
    intent = {"stage": "train", "traffic": []}
    host.writers[0].announce("announce", json.dumps({"period": "gradients", "body": intent}).encode())
    host.writers[0].announce("announce", json.dumps({"period": "gradients", "body": {}}).encode())
    host.writers[1].announce("announce", json.dumps({"period": "unheard", "body": {}}).encode())
    reported = {(each.rank, each.period, each.intent_json) for each in host.traces.read()}
    assert reported == {(0, "gradients", json.dumps(intent)), (1, "unheard", "")}


@pytest.mark.parametrize("payload", [b"", b"{", b"[]", b'{"period": 3, "body": {}}', b'{"period": "x", "body": []}'])
def test_invalid_announcement_is_ignored(host: Host, payload: bytes) -> None:
    host.writers[0].announce("announce", payload)
    assert host.traces.read() == []


def test_summaries_cover_every_rank(host: Host) -> None:
    host.learn()
    summaries = list(host.traces.summaries(Q))
    assert [each["summary"]["ranks"] for each in summaries] == [(0,), (1,)]
    assert len(summaries[0]["summary"]["positions"]) == 2
    json.dumps(summaries, allow_nan=False)


class Told:
    """The messages that the daemon receives about one watch."""

    def __init__(self, host: Host, need_s: float) -> None:
        self.received: list[fabric_pb2.TraceMessage] = []
        self.words = WindowReports(host.traces, self.received.append, lambda: host.now_s)
        self.words.watch(fabric_pb2.Arm(id=7, job="", need_s=need_s, quantile=Q))

    def news(self) -> list[str]:
        """Return the messages since the last call."""
        found = [
            "quiet" if message.WhichOneof("message") == "quiet" else message.traffic.code for message in self.received
        ]
        self.received.clear()
        return found


def test_each_change_is_reported_once(host: Host) -> None:
    host.learn()
    reported = Told(host, need_s=0.05)
    quiet = reported.received[0].quiet
    assert (quiet.armed, quiet.job, quiet.rank) == (7, "", 0)
    assert quiet.until_s - quiet.told_s == pytest.approx(QUIET_S, rel=1e-3)
    assert reported.news() == ["quiet"]
    reported.words.read()
    assert reported.news() == []
    host.passes(QUIET_S)
    flying = host.begin()
    assert reported.words.rung()
    assert reported.news() == ["traffic"]
    assert reported.words.rung()
    reported.words.catch_up()
    assert reported.news() == []
    host.passes(BUSY_S)
    host.end(flying)
    assert not reported.words.rung()
    assert reported.news() == ["quiet"]


def test_remaining_window_may_be_too_short(host: Host) -> None:
    host.learn()
    reported = Told(host, need_s=0.05)
    host.passes(0.06)
    reported.words.read()
    assert reported.news() == ["quiet"]  # the end as reported: a change that has begun may rely on it
    assert Told(host, need_s=0.05).news() == ["short"]
    assert Told(host, need_s=2 * QUIET_S).news() == ["short"]


def test_new_ranks_are_reported_before_any_window(host: Host) -> None:
    """The daemon counts a reported rank as traced, so that windows computed without it must not last beyond that."""
    host.learn()
    reported = Told(host, need_s=0.05)
    assert reported.news() == ["quiet"]
    late = RingWriter(host.folder, clock_ns=lambda: host.now_ns)
    late.set_rank(2)
    late.end(late.begin(late.op("all_reduce")))
    assert host.traces.poll()
    reported.words.report_all_again()
    reported.words.read()
    assert reported.news() == ["unlearnt"]
    late.close()
    assert host.traces.poll()
    reported.words.report_all_again()
    reported.words.read()
    assert reported.news() == ["quiet"]


def test_work_queued_on_a_device_ends_a_window_at_once(host: Host) -> None:
    """The start of the collective itself is only seen later."""
    host.learn()
    reported = Told(host, need_s=0.05)
    doorbell = RingDoorbell(host.folder)
    writer = host.writers[0]
    writer.issue(writer.op("all_reduce"))
    assert doorbell.rung()
    writer.issue(writer.op("all_reduce"))
    assert not doorbell.rung()  # nothing new
    assert reported.words.rung()
    assert reported.news() == ["quiet", "traffic"]
    doorbell.close()


def test_unchanged_window_is_reported_again(tmp_path: Path) -> None:
    host = Host(tmp_path)
    for iteration in range(30):
        host.iterate(iteration, quiet_s=10.0, collectives=1)
        host.traces.read()
    host.iterate(30, quiet_s=0.0, collectives=1)
    reported = Told(host, need_s=0.05)
    host.passes(AGAIN_AFTER_S + 0.01)
    reported.words.read()
    assert reported.news() == ["quiet", "quiet"]
    reported.words.forget(7)
    host.passes(AGAIN_AFTER_S + 0.01)
    reported.words.read()
    assert reported.news() == []
    host.close()


@given(lengths_s=st.lists(st.floats(0.02, 0.2), min_size=40, max_size=60), need_s=st.floats(0.005, 0.1))
def test_no_window_is_reported_while_a_rank_communicates(
    tmp_path_factory: pytest.TempPathFactory, lengths_s: list[float], need_s: float
) -> None:
    """The oracle: the ranks in flight, recorded by the test. Each reported window must cover the need."""
    host = Host(tmp_path_factory.mktemp("rings"), capacity=64)
    reported = Told(host, need_s)
    for iteration, length_s in enumerate(lengths_s):
        for writer in host.writers:
            writer.moment("iteration", iteration)
        flying: dict[int, int] = {}
        for rank, writer in enumerate(host.writers):
            flying[rank] = writer.begin(writer.op("all_reduce"), 0, 8)
            reported.words.rung()
            assert all(message.WhichOneof("message") != "quiet" for message in reported.received)
        reported.words.catch_up()
        host.passes(BUSY_S)
        for rank, writer in enumerate(host.writers):
            reported.received.clear()
            writer.end(flying.pop(rank))
            reported.words.rung()
            text = [message.quiet for message in reported.received if message.WhichOneof("message") == "quiet"]
            assert not (text and flying)
            for quiet in text:
                assert quiet.until_s - quiet.told_s >= need_s
                assert quiet.since_s <= quiet.told_s
        host.passes(length_s)
        reported.words.read()
        reported.received.clear()
    host.close()


def probe(folder: Path) -> WindowReporter:
    return WindowReporter(folder, "h0", f"unix:{folder}/none", clock=WallClock())


async def test_two_agents_do_not_read_the_same_rings(tmp_path: Path) -> None:
    first = asyncio.ensure_future(probe(tmp_path).run())
    await asyncio.sleep(0)
    with pytest.raises(Permanent, match="another agent"):
        await probe(tmp_path).run()
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    after = asyncio.ensure_future(probe(tmp_path).run())
    await asyncio.sleep(0)
    assert not after.done()
    after.cancel()
    await asyncio.gather(after, return_exceptions=True)


async def test_unusable_folder_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Permanent, match="cannot create the folder or its lock file"):
        await probe(tmp_path / "file").run()
    with pytest.raises(Permanent, match="cannot create the doorbell socket"):
        await probe(tmp_path / ("long" * 30)).run()


def test_quiet_ranks_are_read_while_the_last_one_is_busy(host: Host) -> None:
    host.learn()
    reported = Told(host, need_s=0.05)
    host.passes(QUIET_S)
    flying = host.begin()
    reported.words.rung()
    reported.words.catch_up()
    host.writers[0].announce("next", json.dumps({"period": "next", "body": {}}).encode())
    host.writers[0].end(flying[0])
    reported.received.clear()
    assert reported.words.rung()  # the other still communicates
    assert [message.announcement.period for message in reported.received] == ["next"]
    one, other = host.traces.traced
    assert one.reader.changes == one.seen
    host.passes(BUSY_S)
    host.writers[1].end(flying[1])
    assert other.reader.changes != other.seen
    assert not reported.words.rung()
    assert reported.news()[-1] == "quiet"
