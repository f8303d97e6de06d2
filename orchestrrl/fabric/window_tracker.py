"""Track communication windows of whole jobs, from the reports of the agents on all their hosts.

Each agent reports on the ranks of its host, with times of the host's clock. The offset of this clock is measured over
the connection to the agent. A job's window is the intersection of its hosts' windows. If a host is disconnected while
its ranks may be running, neither the host nor the job has a window.
"""

import asyncio
import itertools
import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from orchestrrl.core.clock import Clock, within
from orchestrrl.core.errors import LimitReached, Permanent, few, number_runs, shorten
from planner.fabric.clocks import ClockExchange, OffsetEstimator
from planner.fabric.slack import RemainingQuiet
from planner.fabric.windows import ReportedQuiet, Window, intersect
from planner.model import Hold

logger = logging.getLogger(__name__)

QUANTILE = 0.05
LEAST_QUANTILE = 0.005  # of one rank: its history has no rarer events
PING_EVERY_S = 2.0
FIRST_PINGS = 8  # at once, so that the clock's offset is known when the first window opens
FIRST_PINGS_EVERY_S = 0.01
SLACK_WITHIN_S = 10.0  # for an agent with much to summarise
FORGET_AFTER_S = 60.0  # for a host without an agent, whose jobs have ended or can no longer be traced

MOST_LISTED = 8

Jobs = Mapping[str, frozenset[int]]  # ranks by job


@dataclass(frozen=True, slots=True)
class WatchWindows:
    """An order to an agent to report when windows of this job that last at least `need_s` seconds open and close.
    `quantile` is the quantile of the predicted length to compare with `need_s`."""

    id: int
    job: str
    need_s: float
    quantile: float


@dataclass(frozen=True, slots=True)
class StopWatching:
    id: int


@dataclass(frozen=True, slots=True)
class ClockPing:
    sent_s: float


@dataclass(frozen=True, slots=True)
class RequestSummary:
    """An order to an agent to report a summary of the iterations of all ranks on its host."""


Order = WatchWindows | StopWatching | ClockPing | RequestSummary


@dataclass(eq=False)
class TracedHost:
    """The host of one agent. `quiet_reports` contains the latest report for each watched job, as a tuple of the time by
    the host's clock, the rank and the prediction."""

    name: str
    jobs: Jobs = field(default_factory=dict)
    clock: OffsetEstimator = field(default_factory=OffsetEstimator)
    quiet_reports: dict[str, tuple[float, int, RemainingQuiet | Hold]] = field(default_factory=dict)
    stream: "AgentStream | None" = None  # None: no agent is attached
    gone_s: float = 0.0
    slack_json: str = ""
    slack_reported: asyncio.Event = field(default_factory=asyncio.Event)


class AgentStream:
    """The connection of one agent, which carries orders to the agent and reports from it."""

    def __init__(self, hub: "WindowTracker", host: TracedHost) -> None:
        self._hub = hub
        self._host = host
        self._orders: asyncio.Queue[Order | None] = asyncio.Queue()

    async def next_order(self) -> Order | None:
        """Wait for the next order and return it. Return None when the stream has ended, for example because another
        agent of the host has attached."""
        return await self._orders.get()

    def put(self, order: Order | None) -> None:
        self._orders.put_nowait(order)

    async def ping(self) -> None:
        """Send pings to the agent periodically, until cancelled, to measure the offset of the host's clock."""
        for number in itertools.count():
            self.put(ClockPing(self._hub.clock.now_s()))
            await self._hub.clock.sleep(PING_EVERY_S if number >= FIRST_PINGS else FIRST_PINGS_EVERY_S)

    @property
    def _is_the_hosts(self) -> bool:
        """True if this stream is the host's current stream. It is False after another agent of the host has attached or
        this agent has disconnected. Late reports of the stream are then ignored."""
        return self._host.stream is self

    def traces(self, jobs: Jobs) -> None:
        """Set the jobs and ranks whose recorders the agent reads now. They replace the previous jobs and ranks."""
        if not self._is_the_hosts:
            return
        before, self._host.jobs = self._host.jobs, jobs
        for job in [job for job in self._host.quiet_reports if jobs.get(job) != before.get(job)]:
            del self._host.quiet_reports[job]  # that report covered other ranks
        logger.info("%s traces %s", self._host.name, {job: len(ranks) for job, ranks in jobs.items()})
        self._hub.news(None)

    def on_remaining_quiet(self, job: str, reported_s: float, rank: int, prediction: RemainingQuiet | Hold) -> None:
        if self._is_the_hosts and job in self._host.jobs:  # agents also receive orders for jobs that they do not trace
            self._host.quiet_reports[job] = reported_s, rank, prediction
            self._hub.news(job)

    def answers(self, exchange: ClockExchange) -> None:
        if self._is_the_hosts:
            was_known = self._host.clock.offset(exchange.back_s) is not None
            self._host.clock.add(exchange)
            if not was_known:
                self._hub.news(None)  # with many hosts, answers arrive all the time: only the first wakes a watch

    def on_slack(self, slack_json: str) -> None:
        if self._is_the_hosts:
            self._host.slack_json = slack_json
        self._host.slack_reported.set()

    def end(self) -> None:
        self.put(None)
        if self._host.stream is self:
            self._host.stream, self._host.gone_s = None, self._hub.clock.now_s()
            self._hub.news(None)


class TrafficWatch:
    """Watches jobs until their traffic pauses at the same time. During the watch, the jobs' hosts report every change
    at once, and each report sets `changed`."""

    def __init__(
        self, hub: "WindowTracker", jobs: Mapping[WatchWindows, frozenset[int]], changed: asyncio.Event
    ) -> None:
        self.jobs = jobs  # by job, with the ranks that must be traced
        self.changed = changed
        self._hub = hub
        self._opening: asyncio.Task[None] | None = None

    def window(self) -> Window | Hold:
        """Return the window that all hosts share, or a Hold with the reason if there is none. If the window opens later
        because of the uncertainty of the hosts' clocks, `changed` is set when it opens."""
        if self._opening is not None:
            self._opening.cancel()
            self._opening = None
        window = self._hub.window({arm.job: ranks for arm, ranks in self.jobs.items()})
        if isinstance(window, Window) and (opens_in_s := window.opened_s - self._hub.clock.now_s()) > 0:
            self._opening = asyncio.ensure_future(self._open_in(opens_in_s))
        return window

    def close(self) -> None:
        if self._opening is not None:
            self._opening.cancel()
        self._hub.forget(self)

    async def _open_in(self, duration_s: float) -> None:
        await self._hub.clock.sleep(duration_s)
        self._opening = None
        self.changed.set()


class WindowTracker:
    """Tracks every host whose agent reads recorders. The length of a window is the given `quantile` of the distribution
    of its predicted length."""

    def __init__(self, clock: Clock, quantile: float = QUANTILE, most_hosts: int = 8192) -> None:
        self.quantile = quantile
        self._most_hosts = most_hosts
        self.clock = clock
        self.hosts: dict[str, TracedHost] = {}
        self._watches: dict[WatchWindows, TrafficWatch] = {}
        self._numbers = itertools.count(1)

    def watch(
        self, jobs: Mapping[str, frozenset[int]], need_s: float, changed: asyncio.Event | None = None
    ) -> TrafficWatch:
        """Start to watch jobs for windows of at least `need_s` seconds. `jobs` maps each job to the ranks that must be
        traced. Each report sets `changed`."""
        arms: dict[WatchWindows, frozenset[int]] = {}
        for job, ranks in jobs.items():
            traced = sum(len(host.jobs[job]) for host in self.current_hosts() if job in host.jobs)
            # Any rank may break the window, so the risks of all ranks add up.
            quantile = max(self.quantile / max(1, traced), min(self.quantile, LEAST_QUANTILE))
            arms[WatchWindows(next(self._numbers), job, need_s, quantile)] = ranks
        made = TrafficWatch(self, arms, changed or asyncio.Event())
        for arm in arms:
            self._watches[arm] = made
            for host in self.hosts.values():
                host.quiet_reports.pop(arm.job, None)  # from an earlier watch, perhaps long ago
                if host.stream is not None:
                    host.stream.put(arm)
        return made

    def hosts_of_jobs(self) -> dict[str, frozenset[str]]:
        """Return, by job, the hosts that have ranks whose recorders are read now or were read until recently."""
        found: dict[str, set[str]] = {}
        for host in self.current_hosts():
            for job in host.jobs:
                found.setdefault(job, set()).add(host.name)
        return {job: frozenset(hosts) for job, hosts in found.items()}

    def forget(self, watch: TrafficWatch) -> None:
        for arm in watch.jobs:
            self._watches.pop(arm, None)
            for host in self.hosts.values():
                if host.stream is not None:
                    host.stream.put(StopWatching(arm.id))

    def window(self, jobs: Jobs) -> Window | Hold:
        """Return the window that the hosts of these jobs share. Return a Hold with the reason if there is none, or if
        one of the given ranks is not traced."""
        now_s = self.clock.now_s()
        predictions: list[tuple[TracedHost, tuple[float, int, RemainingQuiet]]] = []
        for job, ranks in jobs.items():
            hosts = [host for host in self.current_hosts() if job in host.jobs]
            traced = frozenset[int]().union(*(host.jobs[job] for host in hosts))
            if missing := sorted(ranks - traced):
                wanted = f"no agent reads the recorder of rank {_listed(missing)}{f' of {job}' if job else ''}"
                return Hold("untraced", f"{wanted}; recorders that are read: {self._read_reports()}")
            if not hosts:  # it was traced when the watch began
                return Hold("no_ranks", f"no agent reads the recorders{f' of {job}' if job else ''} any longer")
            for host in hosts:
                if host.stream is None:
                    return Hold(
                        "host_gone", f"{host.name}: its agent has been disconnected for {now_s - host.gone_s:.1f} s"
                    )
                if job not in host.quiet_reports:
                    return Hold("host_silent", f"{host.name}: has not reported yet")
                at_s, rank, prediction = host.quiet_reports[job]
                if isinstance(prediction, Hold):
                    return Hold(prediction.code, f"{host.name}: {prediction.detail}")
                predictions.append((host, (at_s, rank, prediction)))
        # Clock offsets take most of the time, so they are computed only if every host has a window.
        reports = (ReportedQuiet(host.name, *report, host.clock.offset(now_s)) for host, report in predictions)
        return intersect(reports, now_s)

    def _read_reports(self) -> str:
        ranks: dict[str, set[int]] = {}
        for host in self.current_hosts():
            for job, some in host.jobs.items():
                ranks.setdefault(job, set()).update(some)
        listed = [f"{job or 'an unnamed job'} (rank {_listed(sorted(ranks[job]))})" for job in sorted(ranks)]
        return few(listed, MOST_LISTED, ", ") or "none"

    async def slack_json(self) -> str:
        """Request from each attached agent a summary of the slack of the ranks on its host, and return the summaries as
        a JSON array. If an agent does not report in time, its previous summary, if any, is returned. Summaries are
        expensive for agents, so only operator commands request them."""
        attached = [host for host in self.current_hosts() if host.stream is not None]
        for host in attached:
            host.slack_reported.clear()
            if host.stream is not None:
                host.stream.put(RequestSummary())
        answers = asyncio.gather(*(host.slack_reported.wait() for host in attached))
        with suppress(Permanent):  # raised for late ones
            await within(self.clock, SLACK_WITHIN_S, answers)
        return json.dumps([json.loads(host.slack_json) for host in attached if host.slack_json])

    def attach(self, name: str, jobs: Jobs) -> AgentStream:
        """Create and return the stream of a host's agent. It replaces the stream of an earlier agent of the same host.
        Raises LimitReached if too many other hosts are traced."""
        if (
            name not in self.hosts
            and len(self.hosts) >= self._most_hosts
            and len(self.current_hosts()) >= self._most_hosts
        ):
            raise LimitReached(
                f"hello.host: cannot trace {shorten(name)}: at most {self._most_hosts} hosts can be traced at a time"
                " (limits.nodes)"
            )
        host = self.hosts.setdefault(name, TracedHost(name))
        if host.stream is not None:
            host.stream.put(None)
        host.stream = stream = AgentStream(self, host)
        host.clock = OffsetEstimator()  # the host may have been restarted
        host.quiet_reports.clear()
        for arm in self._watches:
            stream.put(arm)
        stream.traces(jobs)
        return stream

    def news(self, job: str | None) -> None:
        """Set the event `changed` of all watches of this job, or of all watches if `job` is None."""
        for arm, watch in self._watches.items():
            if job is None or arm.job == job:
                watch.changed.set()

    def current_hosts(self) -> list[TracedHost]:
        """Drop hosts that have been without an agent for `FORGET_AFTER_S` seconds, and return the remaining hosts in
        order of their names."""
        now_s = self.clock.now_s()
        for name, host in list(self.hosts.items()):
            if host.stream is None and now_s - host.gone_s > FORGET_AFTER_S:
                del self.hosts[name]
        return [host for _, host in sorted(self.hosts.items())]


def _listed(ranks: Sequence[int]) -> str:
    """Format ranks as a list of ranges, for example `0-7, 9`."""
    return few(number_runs(ranks), MOST_LISTED, ", ")
