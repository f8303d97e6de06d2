"""What the daemon is told of windows while it waits for one: each change once, the moment it is known. No asyncio."""

import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from orchestrrl.agent.probes import HostQuiet, HostTraces, RecordedAnnouncement
from orchestrrl.rpc.pb import fabric_pb2
from planner.fabric.windows import SHORT
from planner.model import Hold

AGAIN_AFTER_S = 0.4  # a window that lasts is told again, so that it does not look forgotten


@dataclass(slots=True)
class _Watched:
    """What the daemon waits for, and what it was told last."""

    id: int
    job: str
    need_s: float
    quantile: float
    reported: HostQuiet | str | None = None  # a hold by its code; None: nothing yet
    reported_s: float = 0.0


class WindowReports:
    """`put` takes what is to be told; `clock_s` is the monotonic clock of this host."""

    def __init__(
        self,
        traces: HostTraces,
        put: Callable[[fabric_pb2.TraceMessage], None],
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._traces = traces
        self._put = put
        self._clock_s = clock_s
        self._watched: dict[int, _Watched] = {}

    def watch(self, arm: fabric_pb2.Arm) -> None:
        self._watched[arm.id] = _Watched(arm.id, arm.job, arm.need_s, arm.quantile)
        self._arm()
        self.read()

    def forget(self, arm_id: int) -> None:
        self._watched.pop(arm_id, None)
        self._arm()

    def forget_all(self) -> None:
        self._watched.clear()
        self._arm()

    def report_all_again(self) -> None:
        """What was told is not known any more where it is heard."""
        for watched in self._watched.values():
            watched.reported = None

    def rung(self) -> bool:
        """Somebody has gone quiet or communicates again. Whether there is traffic, so that `catch_up` has time."""
        jobs = {watched.job for watched in self._watched.values()}
        # A rank alone does not make a window: the others are looked at before anything is read.
        busy = {job for job in jobs if self._traces.busy(job)}
        if len(busy) < len(jobs) or not jobs:  # something was announced
            self.read()
        else:
            self._assess(busy)
            # While the last is waited for, so that there is as little as possible to read when it goes quiet.
            self._pass_on(self._traces.read(quiet_only=True))
        return bool(busy)

    def catch_up(self) -> None:
        """What has begun is read, and what the next windows will ask is worked out before they open."""
        self.read()
        self._traces.prepare()

    def read(self) -> None:
        self._pass_on(self._traces.read())
        self._assess(())

    def _pass_on(self, announced: Iterable[RecordedAnnouncement]) -> None:
        for each in announced:
            self._put(fabric_pb2.TraceMessage(announcement=_announcement_to_pb(each)))

    def _assess(self, busy: Collection[str]) -> None:
        for watched in self._watched.values():
            if watched.job in busy:
                self._report(watched, Hold("traffic", "a rank has a collective in flight"))
            else:
                self._report(watched, self._traces.assess(watched.job, watched.quantile))

    def _report(self, watched: _Watched, found: HostQuiet | Hold) -> None:
        """Only what is news: a window that is long enough, its end, or another reason why there is none."""
        now_s, told = self._clock_s(), watched.reported
        # It may have become shorter by the time that has passed, which whoever was told knows; but no promise may end
        # earlier than was told.
        same = (
            isinstance(found, HostQuiet)
            and isinstance(told, HostQuiet)
            and (told.since_s == found.since_s and told.until_s <= found.until_s)
        )
        if same and now_s < watched.reported_s + AGAIN_AFTER_S:
            return
        if isinstance(found, HostQuiet) and not same and found.until_s - now_s < watched.need_s:
            left_ms = (found.until_s - now_s) * 1e3
            found = Hold(
                SHORT,
                f"quiet at position {found.position} for {left_ms:.1f} ms more, by what rank {found.rank} did before",
            )
        if isinstance(found, HostQuiet):
            watched.reported, watched.reported_s = found, now_s
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
        elif watched.reported != found.code:
            watched.reported = found.code
            traffic = fabric_pb2.Traffic(
                at_s=now_s, code=found.code, detail=found.detail, armed=watched.id, job=watched.job
            )
            self._put(fabric_pb2.TraceMessage(traffic=traffic))

    def _arm(self) -> None:
        quantiles: dict[str, frozenset[float]] = {}
        for watched in self._watched.values():
            quantiles[watched.job] = quantiles.get(watched.job, frozenset()) | {watched.quantile}
        self._traces.arm(quantiles)


def _announcement_to_pb(each: RecordedAnnouncement) -> fabric_pb2.Announcement:
    return fabric_pb2.Announcement(rank=each.rank, period=each.period, intent_json=each.intent_json, job=each.job)
