"""The supervisor of `orchestrrl up` with processes that the test ends, and a virtual clock."""

import asyncio
import signal
from collections.abc import Sequence

import pytest

from orchestrrl.cli.up.children import ChildCommand
from orchestrrl.cli.up.restarts import MOST_FAILURES, STEADY_S, restart_pause_s
from orchestrrl.cli.up.supervisor import ChildProcess, SupervisedProcess, keep_running
from orchestrrl.core.clock import VirtualClock
from orchestrrl.core.errors import Permanent

GATEWAY = ChildCommand("gateway", ("gateway",), stop_within_s=40.0)
AGENT = ChildCommand("agent", ("agent",), prints_address=False, stop_within_s=5.0)


class FakeChild:
    """A process that ends when the test calls `end`, on SIGKILL and, unless it is stubborn, on SIGTERM."""

    def __init__(self, stubborn: bool) -> None:
        self.stdout, self.stderr = asyncio.StreamReader(), asyncio.StreamReader()
        self.returncode: int | None = None
        self.signals: list[int] = []
        self._stubborn = stubborn
        self._ended = asyncio.Event()

    def print(self, text: str) -> None:
        self.stdout.feed_data(text.encode())

    def end(self, status: int) -> None:
        self.returncode = status
        self.stdout.feed_eof()
        self.stderr.feed_eof()
        self._ended.set()

    def send_signal(self, signal_: int) -> None:
        self.signals.append(signal_)
        if signal_ == signal.SIGKILL or not self._stubborn:
            self.end(-signal_)

    async def wait(self) -> int:
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode


class Machine:
    """Starts fake processes and records the log and the order of stops."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.children: dict[str, list[FakeChild]] = {}
        self.log: list[str] = []
        self.stubborn = False
        self.refused: list[OSError] = []

    async def spawn(self, words: Sequence[str]) -> ChildProcess:
        if self.refused:
            raise self.refused.pop()
        child = FakeChild(self.stubborn)
        self.children.setdefault(words[0], []).append(child)
        return child

    def supervise(self, command: ChildCommand) -> SupervisedProcess:
        return SupervisedProcess(command, lambda name, line: self.log.append(f"{name}: {line}"), self.clock, self.spawn)

    @property
    def gateway(self) -> FakeChild:
        return self.children["gateway"][-1]


async def test_process_is_ready_once_it_prints_its_address() -> None:
    machine = Machine()
    gateway, agent = machine.supervise(GATEWAY), machine.supervise(AGENT)
    running = [gateway.start(), agent.start()]
    await machine.clock.advance(0)
    assert (gateway.ready.is_set(), agent.ready.is_set()) == (False, True)
    machine.gateway.print("http://127.0")
    await machine.clock.advance(0)
    assert not gateway.ready.is_set()
    machine.gateway.print(".0.1:8000\nhttp://")
    machine.gateway.stderr.feed_data(b"a\nlog\nwithout an end, \xff")
    await machine.clock.advance(0)
    assert gateway.ready.is_set()
    await gateway.stop()
    await agent.stop()
    await asyncio.gather(*running)
    assert [*map(sorted, (machine.log[:3], machine.log[3:]))] == [
        ["gateway: a", "gateway: http://127.0.0.1:8000", "gateway: log"],
        ["gateway: http://", "gateway: without an end, \ufffd"],
    ]


async def test_process_is_restarted_with_longer_pauses_and_not_forever() -> None:
    machine = Machine()
    gateway = machine.supervise(GATEWAY)
    task = gateway.start()
    await machine.clock.advance(0)
    machine.gateway.print("http://127.0.0.1:8000\n")
    for failure in range(1, MOST_FAILURES):
        machine.gateway.end(-signal.SIGKILL)
        pause_s = restart_pause_s(failure)
        assert pause_s is not None
        await machine.clock.advance(pause_s - 0.01)
        assert len(machine.children["gateway"]) == failure
        await machine.clock.advance(0.02)
        assert len(machine.children["gateway"]) == failure + 1
    machine.gateway.end(7)
    with pytest.raises(Permanent, match=f"the gateway ended with status 7, for the {MOST_FAILURES}th time"):
        await task
    assert machine.log[1] == "up: the gateway was ended by SIGKILL; it is restarted in 0.5 s"


async def test_process_that_ran_for_long_is_restarted_soon() -> None:
    machine = Machine()
    gateway = machine.supervise(GATEWAY)
    task = gateway.start()
    await machine.clock.advance(0)
    machine.gateway.print("http://127.0.0.1:8000\n")
    for starts in range(1, 2 * MOST_FAILURES):
        await machine.clock.advance(STEADY_S)
        machine.gateway.end(0)
        await machine.clock.advance(0.51)
        assert len(machine.children["gateway"]) == starts + 1
    await gateway.stop()
    await task


async def test_process_that_ends_before_it_was_ready_is_not_restarted() -> None:
    machine = Machine()
    task = machine.supervise(GATEWAY).start()
    await machine.clock.advance(0)
    machine.gateway.end(2)
    with pytest.raises(Permanent, match="the gateway ended with status 2 before it was ready"):
        await task


async def test_start_that_fails_later_counts_as_a_failure() -> None:
    machine = Machine()
    agent = machine.supervise(AGENT)
    task = agent.start()
    await machine.clock.advance(0)
    machine.refused = [BlockingIOError("no more processes")]
    machine.children["agent"][-1].end(1)
    await machine.clock.advance(0.51)
    assert machine.log[-1] == "up: the agent cannot be started (no more processes); it is restarted in 1 s"
    await machine.clock.advance(1)
    assert len(machine.children["agent"]) == 2
    await agent.stop()
    await task


async def test_stop_during_a_pause_starts_nothing() -> None:
    machine = Machine()
    agent = machine.supervise(AGENT)
    task = agent.start()
    await machine.clock.advance(0)
    machine.children["agent"][-1].end(1)
    await machine.clock.advance(0.1)
    await agent.stop()
    await task
    await machine.clock.advance(100)
    assert len(machine.children["agent"]) == 1


async def test_process_that_ignores_the_stop_is_killed_after_its_time() -> None:
    machine = Machine()
    machine.stubborn = True
    gateway = machine.supervise(GATEWAY)
    task = gateway.start()
    await machine.clock.advance(0)
    stopping = asyncio.create_task(gateway.stop())
    await machine.clock.advance(GATEWAY.stop_within_s - 1)
    assert machine.gateway.signals == [signal.SIGTERM]
    await machine.clock.advance(1)
    assert machine.gateway.signals == [signal.SIGTERM, signal.SIGKILL]
    await stopping
    await task


async def test_processes_stop_in_order_and_a_second_cancellation_kills_them() -> None:
    machine = Machine()
    machine.stubborn = True
    keeping = asyncio.create_task(keep_running([machine.supervise(GATEWAY), machine.supervise(AGENT)]))
    await machine.clock.advance(0)
    children = [machine.gateway, machine.children["agent"][-1]]
    keeping.cancel()
    await machine.clock.advance(GATEWAY.stop_within_s - 1)
    assert [child.signals for child in children] == [[signal.SIGTERM], []]
    keeping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await keeping
    assert [child.signals for child in children] == [[signal.SIGTERM, signal.SIGKILL], [signal.SIGKILL]]


async def test_process_starts_when_those_after_it_are_ready() -> None:
    machine = Machine()
    daemon = ChildCommand("daemon", ("daemon",))
    processes = [machine.supervise(each) for each in (GATEWAY, AGENT, daemon)]
    keeping = asyncio.create_task(keep_running(processes, lambda: machine.log.append("stopping")))
    await machine.clock.advance(10)
    assert list(machine.children) == ["daemon"]
    machine.children["daemon"][-1].print("127.0.0.1:7070\n")
    await machine.clock.advance(0)
    assert list(machine.children) == ["daemon", "agent", "gateway"]
    keeping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await keeping
    assert machine.log == ["daemon: 127.0.0.1:7070", "stopping"]


async def test_process_that_ends_before_it_was_ready_keeps_the_others_from_starting() -> None:
    machine = Machine()
    daemon = ChildCommand("daemon", ("daemon",))
    keeping = asyncio.create_task(keep_running([machine.supervise(each) for each in (GATEWAY, daemon)]))
    await machine.clock.advance(0)
    machine.children["daemon"][-1].end(1)
    with pytest.raises(Permanent, match="the daemon ended with status 1 before it was ready"):
        await keeping
    assert list(machine.children) == ["daemon"]


async def test_one_process_that_cannot_run_stops_the_others() -> None:
    machine = Machine()
    keeping = asyncio.create_task(keep_running([machine.supervise(GATEWAY), machine.supervise(AGENT)]))
    await machine.clock.advance(0)
    machine.gateway.end(1)
    with pytest.raises(Permanent, match="before it was ready"):
        await keeping
    assert machine.children["agent"][-1].signals == [signal.SIGTERM]
