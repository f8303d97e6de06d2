"""The agent's side of windows: a stream to the daemon, told of quiet and of traffic the moment it is known.

While nothing is armed, rings are read now and then. While something is, their processes ring a doorbell whenever they
go quiet or communicate again: nothing polls, and what is told was seen less than a millisecond before.
"""

import asyncio
import contextlib
import fcntl
import json
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import grpc

from orchestrrl.agent.probes import HostTraces
from orchestrrl.agent.window_reports import WindowReports
from orchestrrl.core.clock import Clock
from orchestrrl.core.errors import Permanent
from orchestrrl.integrations.instrument.rings import RingDoorbell
from orchestrrl.rpc.channel import Established, first_of, stay_connected
from orchestrrl.rpc.pb import fabric_pb2, fabric_pb2_grpc

READ_EVERY_S = 0.1  # while nobody rings
POLL_EVERY_S = 0.5  # for processes that have come or gone
LOOK_AFTER_OPENING_S = 0.005
CATCH_UP_AFTER_S = 0.001
SUMMARY_QUANTILE = 0.05
LOCK = "agent.lock"


class WindowReporter:
    """Runs until cancelled, through losses of the daemon."""

    def __init__(self, directory: Path, host: str, daemon: str, *, clock: Clock) -> None:
        self._traces = HostTraces(directory)
        self._reports = WindowReports(self._traces, self._put)
        self._directory = directory
        self._host = host
        self._daemon = daemon
        self._clock = clock
        self._outgoing: asyncio.Queue[fabric_pb2.TraceMessage] | None = None
        self._catching_up: asyncio.TimerHandle | None = None
        self._next_poll: asyncio.TimerHandle | None = None
        self._polled_s = 0.0
        self._summarising: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Raises Permanent where the rings cannot be had."""
        with _alone(self._directory):
            await self._run()

    async def _run(self) -> None:
        try:
            doorbell = RingDoorbell(self._directory)
        except OSError as error:  # e.g. a path too long for a socket
            raise Permanent(f"{self._directory}: no doorbell can be put there: {error}") from error
        loop = asyncio.get_running_loop()
        loop.add_reader(doorbell.fileno(), self._rung, doorbell)
        try:
            self._traces.poll()
            await first_of(
                self._keep_looking(),
                self._repeat(READ_EVERY_S, self._reports.read),
                stay_connected(self._daemon, self._converse, clock=self._clock, name="probe"),
            )
        finally:
            loop.remove_reader(doorbell.fileno())
            for later in (self._catching_up, self._next_poll, self._summarising):
                if later is not None:
                    later.cancel()
            doorbell.close()
            self._traces.close()

    def _rung(self, doorbell: RingDoorbell) -> None:
        while doorbell.rung():
            pass
        if not self._reports.rung():
            if self._catching_up is not None:  # all is read
                self._catching_up.cancel()
                self._catching_up = None
            if self._next_poll is None and time.monotonic() > self._polled_s + POLL_EVERY_S / 2:
                # A window has just opened: nobody waits for anything that is told in the next moment.
                loop = asyncio.get_running_loop()
                self._next_poll = loop.call_later(LOOK_AFTER_OPENING_S, self._poll)
        elif self._catching_up is None:
            self._catching_up = asyncio.get_running_loop().call_later(CATCH_UP_AFTER_S, self._catch_up)

    def _catch_up(self) -> None:
        self._catching_up = None
        self._reports.catch_up()

    async def _keep_looking(self) -> None:
        """At the latest so often: better when a window has just opened, as it takes a millisecond."""
        while True:
            if (early_s := self._polled_s + POLL_EVERY_S - time.monotonic()) > 0:
                await self._clock.sleep(early_s)
            else:
                self._poll()

    def _poll(self) -> None:
        if self._next_poll is not None:
            self._next_poll.cancel()
            self._next_poll = None
        self._polled_s = time.monotonic()
        if self._traces.poll():
            self._put(self._hello())
            self._reports.report_all_again()  # what was told of a job's other ranks is void there
        self._reports.read()  # of a process that has come, before anything is made of the others

    async def _converse(self, channel: grpc.aio.Channel, established: Established) -> None:
        outgoing: asyncio.Queue[fabric_pb2.TraceMessage] = asyncio.Queue()
        outgoing.put_nowait(self._hello())
        call = fabric_pb2_grpc.FabricStub(channel).Trace(_drained(outgoing))
        await call.wait_for_connection()
        established()
        self._outgoing = outgoing
        try:
            async for order in call:
                self._obey(order)
        finally:
            self._outgoing = None
            self._reports.forget_all()
            call.cancel()

    def _obey(self, order: fabric_pb2.TraceOrder) -> None:
        received_s = time.monotonic()
        match order.WhichOneof("order"):
            case "ping":
                pong = fabric_pb2.Pong(sent_s=order.ping.sent_s, received_s=received_s, answered_s=time.monotonic())
                self._put(fabric_pb2.TraceMessage(pong=pong))
            case "arm":
                self._reports.watch(order.arm)
            case "disarm":
                self._reports.forget(order.disarm.id)
            case "summarise" if self._summarising is None or self._summarising.done():
                self._summarising = asyncio.ensure_future(self._summarise())

    async def _summarise(self) -> None:
        ranks = []
        for summary in self._traces.summaries(SUMMARY_QUANTILE):
            ranks.append(summary)
            await asyncio.sleep(0)  # whoever rings goes first
        told = json.dumps({"host": self._host, "ranks": ranks})
        self._put(fabric_pb2.TraceMessage(slack=fabric_pb2.Slack(summary_json=told)))

    def _hello(self) -> fabric_pb2.TraceMessage:
        jobs = [fabric_pb2.JobRanks(job=job, ranks=ranks) for job, ranks in sorted(self._traces.jobs().items())]
        return fabric_pb2.TraceMessage(hello=fabric_pb2.TraceHello(host=self._host, jobs=jobs))

    def _put(self, message: fabric_pb2.TraceMessage) -> None:
        """While there is no daemon, nothing is kept: what is late about windows is wrong."""
        if self._outgoing is not None:
            self._outgoing.put_nowait(message)

    async def _repeat(self, every_s: float, work: Callable[[], None]) -> None:
        while True:
            work()
            await self._clock.sleep(every_s)


@contextlib.contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """Two agents of one host would take the doorbell, and each other's place at the daemon, in turns."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        opened = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise Permanent(f"{directory}: rings cannot be read there: {error.strerror}") from error
    try:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Permanent(f"{directory}: another agent reads the rings there already") from None
        yield
    finally:
        os.close(opened)


async def _drained(queue: "asyncio.Queue[fabric_pb2.TraceMessage]") -> AsyncIterator[fabric_pb2.TraceMessage]:
    while True:
        yield await queue.get()
