"""Windows of whole jobs, from what the agents of all their hosts tell. The daemon's side of the Fabric service's Trace.

A host tells of its own ranks in its own clock, whose offset is measured over the same stream. A window is what all of
them have in common; a host that is gone while its ranks may live has none.
"""

import asyncio
import itertools
import json
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from orchestrrl.clock import Clock
from orchestrrl.rpc.channel import stop
from orchestrrl.rpc.pb import fabric_pb2 as pb
from planner.fabric.clocks import Exchange, OffsetEstimator
from planner.fabric.slack import Remaining
from planner.fabric.windows import HostWindows, Window, intersect
from planner.model import Hold

logger = logging.getLogger(__name__)

PING_EVERY_S = 2.0
FIRST_PINGS = 8  # at once, so that the first window finds the clock's offset known
FORGET_AFTER_S = 60.0  # a host without an agent: whatever it traced has ended, or is not to be known any more


@dataclass(eq=False)
class Host:
    """One agent's host. `said`: the latest word on each job that is watched, by the host's clock."""

    name: str
    jobs: dict[str, frozenset[int]] = field(default_factory=dict)
    clock: OffsetEstimator = field(default_factory=OffsetEstimator)
    said: dict[str, tuple[float, int, Remaining | Hold]] = field(default_factory=dict)
    orders: asyncio.Queue[pb.TraceOrder] | None = None  # None: nobody is attached
    gone_s: float = 0.0
    slack: str = ""

    @property
    def attached(self) -> bool:
        return self.orders is not None


class JobWatch:
    """Somebody waits for a job's traffic to pause: meanwhile its hosts tell of it at once."""

    def __init__(self, hub: "TraceHub", order: pb.Arm, ranks: frozenset[int]) -> None:
        self.order = order
        self.ranks = ranks
        self.changed = asyncio.Event()
        self._hub = hub

    def window(self) -> Window | Hold:
        return self._hub.window(self.order.job, self.ranks)

    def close(self) -> None:
        self._hub.close_watch(self)


class TraceHub:
    """Every host that has an agent which reads recorders. `quantile`: of a window's length, that is counted on."""

    QUANTILE = 0.05

    def __init__(self, clock: Clock, quantile: float = QUANTILE) -> None:
        self.quantile = quantile
        self.hosts: dict[str, Host] = {}
        self._clock = clock
        self._watches: dict[int, JobWatch] = {}
        self._numbers = itertools.count(1)

    # --- who waits for windows

    def watch(self, job: str, ranks: frozenset[int], need_s: float) -> JobWatch:
        order = pb.Arm(id=next(self._numbers), need_s=need_s, quantile=self.quantile, job=job)
        made = self._watches[order.id] = JobWatch(self, order, ranks)
        for host in self.hosts.values():
            host.said.pop(job, None)  # of an earlier watch, perhaps long ago
            self._order(host, pb.TraceOrder(arm=order))
        return made

    def close_watch(self, watch: JobWatch) -> None:
        self._watches.pop(watch.order.id, None)
        for host in self.hosts.values():
            self._order(host, pb.TraceOrder(disarm=pb.Disarm(id=watch.order.id)))

    def window(self, job: str, ranks: frozenset[int]) -> Window | Hold:
        """What the job's hosts have in common now; `ranks` must be among those that are traced."""
        now_s = self._clock.now_s()
        hosts = [host for host in self._known(now_s) if job in host.jobs]
        traced = frozenset[int]().union(*(host.jobs[job] for host in hosts))
        if missing := sorted(ranks - traced):
            listing = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
            return Hold("untraced", f"no recorder is read of rank {listing} of job {job!r}")
        told: list[HostWindows] = []
        for host in hosts:
            if not host.attached:
                return Hold("host_gone", f"{host.name}: its agent is gone for {now_s - host.gone_s:.1f} s")
            if job not in host.said:
                return Hold("host_silent", f"{host.name}: has said nothing yet")
            said_s, rank, word = host.said[job]
            if isinstance(word, Hold):
                return Hold(word.code, f"{host.name}: {word.detail}")
            told.append(HostWindows(host.name, said_s, ((rank, word),), host.clock.offset(now_s)))
        return intersect(told, now_s)

    def slack_json(self) -> str:
        """What every attached host knows of its ranks."""
        return json.dumps([json.loads(host.slack) for host in self._known(self._clock.now_s()) if host.slack])

    # --- agents

    async def converse(
        self,
        hello: pb.TraceHello,
        messages: AsyncIterator[pb.TraceMessage],
        announced: Callable[[pb.Announcement], None],
    ) -> AsyncIterator[pb.TraceOrder]:
        """Orders for one agent, until its stream ends. A second agent of the same host takes the first one's place."""
        host = self.hosts.setdefault(hello.host, Host(hello.host))
        orders: asyncio.Queue[pb.TraceOrder | None] = asyncio.Queue()
        host.orders = orders  # type: ignore[assignment]  # None is only ever put here
        host.clock = OffsetEstimator()  # the host may have been started anew
        host.said.clear()
        self._greeted(host, hello)
        for watch in self._watches.values():
            orders.put_nowait(pb.TraceOrder(arm=watch.order))
        tasks = [
            asyncio.ensure_future(self._receive(host, messages, announced, orders)),
            asyncio.ensure_future(self._ping(orders)),
        ]
        try:
            while (order := await orders.get()) is not None:
                yield order
        finally:
            await stop(*tasks)
            if host.orders is orders:
                host.orders, host.gone_s = None, self._clock.now_s()
                self._news(None)

    async def _receive(
        self,
        host: Host,
        messages: AsyncIterator[pb.TraceMessage],
        announced: Callable[[pb.Announcement], None],
        orders: "asyncio.Queue[pb.TraceOrder | None]",
    ) -> None:
        try:
            async for message in messages:
                if host.orders is not orders:
                    return
                self._take(host, message, announced)
        finally:
            orders.put_nowait(None)

    def _take(self, host: Host, message: pb.TraceMessage, announced: Callable[[pb.Announcement], None]) -> None:
        match message.WhichOneof("message"):
            case "hello":
                self._greeted(host, message.hello)
            case "quiet":
                quiet = message.quiet
                word = Remaining(quiet.position, quiet.since_s, quiet.until_s, quiet.samples, quiet.risk)
                host.said[quiet.job] = quiet.told_s, quiet.rank, word
                self._news(quiet.job)
            case "traffic":
                code, _, why = message.traffic.why.partition(": ")
                host.said[message.traffic.job] = message.traffic.at_s, -1, Hold(code, why)
                self._news(message.traffic.job)
            case "pong":
                pong, back_s = message.pong, self._clock.now_s()
                try:
                    host.clock.add(Exchange(pong.sent_s, pong.received_s, pong.answered_s, back_s))
                except ValueError as error:
                    logger.warning("%s answered what makes no sense: %s", host.name, error)
            case "slack":
                host.slack = message.slack.summary_json
            case "announcement":
                announced(message.announcement)

    def _greeted(self, host: Host, hello: pb.TraceHello) -> None:
        host.jobs = {each.job: frozenset(each.ranks) for each in hello.jobs}
        for job in host.said.keys() - host.jobs.keys():
            del host.said[job]
        logger.info("%s traces %s", host.name, {job: len(ranks) for job, ranks in host.jobs.items()})
        self._news(None)

    async def _ping(self, orders: "asyncio.Queue[pb.TraceOrder | None]") -> None:
        for number in itertools.count():
            orders.put_nowait(pb.TraceOrder(ping=pb.Ping(sent_s=self._clock.now_s())))
            await self._clock.sleep(PING_EVERY_S if number >= FIRST_PINGS else 0.01)

    def _news(self, job: str | None) -> None:
        for watch in self._watches.values():
            if job is None or watch.order.job == job:
                watch.changed.set()

    def _known(self, now_s: float) -> list[Host]:
        """By name; those without an agent for long are forgotten."""
        for name, host in list(self.hosts.items()):
            if not host.attached and now_s - host.gone_s > FORGET_AFTER_S:
                del self.hosts[name]
        return [host for _, host in sorted(self.hosts.items())]

    @staticmethod
    def _order(host: Host, order: pb.TraceOrder) -> None:
        if host.orders is not None:
            host.orders.put_nowait(order)
