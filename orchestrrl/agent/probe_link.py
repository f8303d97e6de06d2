"""The agent's side of windows: a stream to the daemon, told of quiet and of traffic the moment it is known.

While nothing is armed, rings are read now and then. While something is, their processes ring a doorbell whenever they
go quiet or communicate again: nothing polls, and what is told was seen less than a millisecond before.
"""

import asyncio
import json
import logging
import random
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import grpc

from orchestrrl.agent.probes import Announced, HostTraces, Quiet
from orchestrrl.clock import Clock
from orchestrrl.instrument.rings import Doorbell
from orchestrrl.rpc.channel import Backoff, Established, first_of, stay_connected
from orchestrrl.rpc.pb import fabric_pb2, fabric_pb2_grpc
from planner.model import Hold

logger = logging.getLogger(__name__)

READ_EVERY_S = 0.1  # while nobody rings
LOOK_EVERY_S = 0.5  # for processes that have come or gone
SUMMARY_EVERY_S = 2.0
SUMMARY_QUANTILE = 0.05
AGAIN_AFTER_S = 0.4  # a window that lasts is told again, so that it does not look forgotten


@dataclass(slots=True)
class _Watched:
    """What the daemon waits for, and what it was told last."""

    id: int
    job: str
    need_s: float
    quantile: float
    told: Quiet | str | None = None  # a hold by its code; None: nothing yet
    told_s: float = 0.0


class Probe:
    """Runs until cancelled, through losses of the daemon."""

    def __init__(
        self,
        directory: Path,
        host: str,
        daemon: str,
        *,
        clock: Clock,
        rng: random.Random,
        backoff: Backoff | None = None,
    ) -> None:
        self._traces = HostTraces(directory)
        self._directory = directory
        self._host = host
        self._daemon = daemon
        self._clock = clock
        self._rng = rng
        self._backoff = backoff or Backoff()
        self._watched: dict[int, _Watched] = {}
        self._outgoing: asyncio.Queue[fabric_pb2.TraceMessage] | None = None

    async def run(self) -> None:
        doorbell = Doorbell(self._directory)
        loop = asyncio.get_running_loop()
        loop.add_reader(doorbell.fileno(), self._rung, doorbell)
        try:
            self._traces.look()
            await first_of(
                self._repeat(LOOK_EVERY_S, self._look),
                self._repeat(READ_EVERY_S, self._read),
                self._repeat(SUMMARY_EVERY_S, self._summarise),
                stay_connected(
                    self._daemon,
                    self._converse,
                    clock=self._clock,
                    rng=self._rng,
                    backoff=self._backoff,
                    name="probe",
                ),
            )
        finally:
            loop.remove_reader(doorbell.fileno())
            doorbell.close()
            self._traces.close()

    # --- what the rings say

    def _rung(self, doorbell: Doorbell) -> None:
        while doorbell.rung() is not None:
            pass
        # A rank alone does not make a window: the others are looked at before anything is read.
        busy = {watched.job for watched in self._watched.values() if self._traces.busy(watched.job)}
        if len(busy) < len({watched.job for watched in self._watched.values()}):
            self._read()
        else:
            self._assess(busy)

    def _read(self) -> None:
        for each in self._traces.read():
            self._put(fabric_pb2.TraceMessage(announcement=_announcement_to_pb(each)))
        self._assess(frozenset())

    def _assess(self, busy: "set[str] | frozenset[str]") -> None:
        for watched in self._watched.values():
            if watched.job in busy:
                self._tell(watched, Hold("traffic", "a rank has a collective in flight"))
            else:
                self._tell(watched, self._traces.assess(watched.job, watched.quantile))

    def _tell(self, watched: _Watched, found: Quiet | Hold) -> None:
        """Only what is news: a window that is long enough, its end, or another reason why there is none."""
        now_s = time.monotonic()
        if isinstance(found, Quiet) and found.until_s - now_s < watched.need_s:
            left_ms = (found.until_s - now_s) * 1e3
            found = Hold(
                "short",
                f"quiet at position {found.position} for {left_ms:.1f} ms more, by what rank {found.rank} did before",
            )
        if isinstance(found, Quiet):
            same = isinstance(watched.told, Quiet) and watched.told.since_s == found.since_s
            if same and now_s < watched.told_s + AGAIN_AFTER_S:
                return
            watched.told, watched.told_s = found, now_s
            quiet = fabric_pb2.Quiet(
                since_s=found.since_s,
                until_s=found.until_s,
                rank=found.rank,
                position=found.position,
                armed=watched.id,
                told_s=now_s,
                job=watched.job,
                risk=found.risk,
                samples=found.samples,
            )
            self._put(fabric_pb2.TraceMessage(quiet=quiet))
        elif watched.told != found.code:
            watched.told = found.code
            traffic = fabric_pb2.Traffic(
                at_s=now_s, why=f"{found.code}: {found.detail}", armed=watched.id, job=watched.job
            )
            self._put(fabric_pb2.TraceMessage(traffic=traffic))

    def _look(self) -> None:
        if self._traces.look():
            self._put(self._hello())

    def _summarise(self) -> None:
        summary = json.dumps({"host": self._host, "ranks": self._traces.summaries(SUMMARY_QUANTILE)})
        self._put(fabric_pb2.TraceMessage(slack=fabric_pb2.Slack(summary_json=summary)))

    # --- the stream

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
            self._watched.clear()
            self._traces.arm(frozenset())
            call.cancel()

    def _obey(self, order: fabric_pb2.TraceOrder) -> None:
        received_s = time.monotonic()
        match order.WhichOneof("order"):
            case "ping":
                pong = fabric_pb2.Pong(sent_s=order.ping.sent_s, received_s=received_s, answered_s=time.monotonic())
                self._put(fabric_pb2.TraceMessage(pong=pong))
            case "arm":
                arm = order.arm
                self._watched[arm.id] = _Watched(arm.id, arm.job, arm.need_s, arm.quantile)
                self._arm()
                self._read()
            case "disarm":
                self._watched.pop(order.disarm.id, None)
                self._arm()

    def _arm(self) -> None:
        self._traces.arm(frozenset(watched.job for watched in self._watched.values()))

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


async def _drained(queue: "asyncio.Queue[fabric_pb2.TraceMessage]") -> AsyncIterator[fabric_pb2.TraceMessage]:
    while True:
        yield await queue.get()


def _announcement_to_pb(each: Announced) -> fabric_pb2.Announcement:
    return fabric_pb2.Announcement(rank=each.rank, period=each.period, intent_json=each.intent_json, job=each.job)
