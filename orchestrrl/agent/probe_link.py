"""Report quiet periods and traffic of training jobs to the daemon, each as soon as it is detected. A window is a quiet
period in which circuits may change. It is armed while the daemon waits for it.

While no window is armed, the ring buffers of the traced processes are read periodically. While a window is armed, the
traced processes also send a notification (the doorbell) when they go quiet or communicate again. A report therefore
does not wait for the next periodic reading, and is less than a millisecond old.
"""

import asyncio
import contextlib
import fcntl
import json
import os
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from orchestrrl.agent.probes import HostTraces
from orchestrrl.core.clock import Clock
from orchestrrl.core.errors import Permanent
from orchestrrl.integrations.instrument.rings import RingDoorbell
from orchestrrl.rpc.channel import Established, first_of, stay_connected
from orchestrrl.rpc.pb import fabric_pb2, fabric_pb2_grpc
from planner.fabric.windows import SHORT
from planner.model import Hold

READ_EVERY_S = 0.1  # while no process rings
POLL_EVERY_S = 0.5  # for new and ended processes
AGAIN_AFTER_S = 0.4  # an unchanged window is reported again, as a sign of life
CATCH_UP_AFTER_S = 0.001
SUMMARY_QUANTILE = 0.05
LOCK = "agent.lock"


@dataclass(slots=True)
class _Watched:
    """A window that the daemon waits for, and the last report about it."""

    arm: fabric_pb2.Arm
    reported: fabric_pb2.Quiet | str | None = None  # the code of a hold; None: nothing yet
    reported_s: float = 0.0


@dataclass(slots=True, eq=False)
class WindowReports:
    """Reports each change of a window as soon as it is detected. The class does not use asyncio. `_put` is called with
    each message. `_clock_s` is the monotonic clock of this host."""

    _traces: HostTraces
    _put: Callable[[fabric_pb2.TraceMessage], None]
    _clock_s: Callable[[], float] = time.monotonic
    _watched: dict[int, _Watched] = field(default_factory=dict)

    def watch(self, arm: fabric_pb2.Arm) -> None:
        self._watched[arm.id] = _Watched(arm)
        self._arm()
        self.read()

    def forget(self, arm_id: int) -> None:
        self._watched.pop(arm_id, None)
        self._arm()

    def forget_all(self) -> None:
        self._watched.clear()
        self._arm()

    def report_all_again(self) -> None:
        """Report every window again at the next assessment, because the daemon no longer has the earlier reports."""
        for watched in self._watched.values():
            watched.reported = None

    def rung(self) -> bool:
        """Handle a ring of the doorbell: a rank has gone quiet, communicates again, or has announced a period. Return
        whether any job communicates, in which case there is time for `catch_up`."""
        jobs = {watched.arm.job for watched in self._watched.values()}
        # One quiet rank does not make a window, so check the others before reading anything.
        busy = {job for job in jobs if self._traces.busy(job)}
        if len(busy) < len(jobs) or not jobs:  # an announcement rang the doorbell
            self.read()
        else:
            self._assess(busy)
            # Read while the last rank is still busy, so that little is left to read when it goes quiet.
            self._pass_on(self._traces.read(quiet_only=True))
        return bool(busy)

    def catch_up(self) -> None:
        """Read new events, and prepare the assessment of the next windows before they open."""
        self.read()
        self._traces.prepare()

    def read(self) -> None:
        self._pass_on(self._traces.read())
        self._assess(())

    def _pass_on(self, announced: Iterable[fabric_pb2.Announcement]) -> None:
        for each in announced:
            self._put(fabric_pb2.TraceMessage(announcement=each))

    def _assess(self, busy: Collection[str]) -> None:
        for watched in self._watched.values():
            if watched.arm.job in busy:
                self._report(watched, Hold("traffic", "a rank has a collective in flight"))
            else:
                self._report(watched, self._traces.assess(watched.arm.job, watched.arm.quantile))

    def _report(self, watched: _Watched, found: fabric_pb2.Quiet | Hold) -> None:
        """Report `found`, the assessment of a window, if it differs from the last report. A quiet period is reported
        again after AGAIN_AFTER_S even if it is unchanged. A new quiet period that is too short for the daemon is
        reported as a Hold, with the reason."""
        now_s, earlier = self._clock_s(), watched.reported
        # The time that has passed shortens a window for the receiver too; but no window may end earlier than reported.
        same = (
            isinstance(found, fabric_pb2.Quiet)
            and isinstance(earlier, fabric_pb2.Quiet)
            and (earlier.since_s == found.since_s and earlier.until_s <= found.until_s)
        )
        if same and now_s < watched.reported_s + AGAIN_AFTER_S:
            return
        if isinstance(found, fabric_pb2.Quiet) and not same and found.until_s - now_s < watched.arm.need_s:
            left_ms = (found.until_s - now_s) * 1e3
            found = Hold(
                SHORT,
                f"rank {found.rank}, position {found.position}: links are predicted to stay quiet for only"
                f" {left_ms:.1f} ms more",
            )
        if isinstance(found, fabric_pb2.Quiet):
            watched.reported, watched.reported_s = found, now_s
            found.armed, found.told_s = watched.arm.id, now_s
            self._put(fabric_pb2.TraceMessage(quiet=found))
        elif watched.reported != found.code:
            watched.reported = found.code
            traffic = fabric_pb2.Traffic(
                at_s=now_s, code=found.code, detail=found.detail, armed=watched.arm.id, job=watched.arm.job
            )
            self._put(fabric_pb2.TraceMessage(traffic=traffic))

    def _arm(self) -> None:
        quantiles: dict[str, frozenset[float]] = {}
        for watched in self._watched.values():
            quantiles[watched.arm.job] = quantiles.get(watched.arm.job, frozenset()) | {watched.arm.quantile}
        self._traces.arm(quantiles)


class WindowReporter:
    """Reports this host's windows until cancelled, and reconnects to the daemon when the connection is lost."""

    def __init__(self, directory: Path, host: str, daemon: str, *, clock: Clock) -> None:
        self._traces = HostTraces(directory)
        self._reports = WindowReports(self._traces, self._put)
        self._directory = directory
        self._host = host
        self._daemon = daemon
        self._clock = clock
        self._outgoing: asyncio.Queue[fabric_pb2.TraceMessage] | None = None
        self._catching_up: asyncio.TimerHandle | None = None
        self._summarising: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Report windows until cancelled. Raises Permanent if the ring buffers cannot be read, or another agent already
        reads them."""
        with _alone(self._directory):
            await self._run()

    async def _run(self) -> None:
        try:
            doorbell = RingDoorbell(self._directory)
        except OSError as error:  # e.g. a path too long for a socket
            raise Permanent(f"{self._directory}: cannot create the doorbell socket in this folder: {error}") from error
        loop = asyncio.get_running_loop()
        loop.add_reader(doorbell.fileno(), self._rung, doorbell)
        try:
            await first_of(
                self._repeat(POLL_EVERY_S, self._poll),
                self._repeat(READ_EVERY_S, self._reports.read),
                stay_connected(self._daemon, self._converse, clock=self._clock, name="probe"),
            )
        finally:
            loop.remove_reader(doorbell.fileno())
            for later in (self._catching_up, self._summarising):
                if later is not None:
                    later.cancel()
            doorbell.close()
            self._traces.close()

    def _rung(self, doorbell: RingDoorbell) -> None:
        while doorbell.rung():
            pass
        if not self._reports.rung():
            if self._catching_up is not None:  # everything is read
                self._catching_up.cancel()
                self._catching_up = None
        elif self._catching_up is None:
            self._catching_up = asyncio.get_running_loop().call_later(CATCH_UP_AFTER_S, self._catch_up)

    def _catch_up(self) -> None:
        self._catching_up = None
        self._reports.catch_up()

    def _poll(self) -> None:
        if self._traces.poll():
            self._put(self._hello())
            self._reports.report_all_again()  # the daemon drops its reports of a job whose ranks changed
        self._reports.read()  # include new processes before any assessment

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
            await asyncio.sleep(0)  # let doorbells run first
        summary_json = json.dumps({"host": self._host, "ranks": ranks})
        self._put(fabric_pb2.TraceMessage(slack=fabric_pb2.Slack(summary_json=summary_json)))

    def _hello(self) -> fabric_pb2.TraceMessage:
        jobs = [fabric_pb2.JobRanks(job=job, ranks=ranks) for job, ranks in sorted(self._traces.jobs().items())]
        return fabric_pb2.TraceMessage(hello=fabric_pb2.TraceHello(host=self._host, jobs=jobs))

    def _put(self, message: fabric_pb2.TraceMessage) -> None:
        """Send the message. If no daemon is connected, drop it, because a late report about a window would be wrong."""
        if self._outgoing is not None:
            self._outgoing.put_nowait(message)

    async def _repeat(self, every_s: float, work: Callable[[], None]) -> None:
        while True:
            work()
            await self._clock.sleep(every_s)


@contextlib.contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """Lock the directory during the block, so that only one agent per host uses it. Two agents would take the doorbell
    and the connection to the daemon from each other. Raises Permanent if another agent holds the lock."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        opened = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise Permanent(f"{directory}: cannot create the folder or its lock file: {error.strerror}") from error
    try:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Permanent(
                f"{directory}: another agent already reads the ring buffers in this folder; run only one agent per host"
            ) from None
        yield
    finally:
        os.close(opened)


async def _drained(queue: "asyncio.Queue[fabric_pb2.TraceMessage]") -> AsyncIterator[fabric_pb2.TraceMessage]:
    while True:
        yield await queue.get()
