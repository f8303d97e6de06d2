"""A clock for tests over real sockets on a loaded machine."""

from ocs_drivers.base import SystemClock

# A longer gap between two readings of the clock is attributed to the machine.
STALL_S = 0.02


class SteadyClock(SystemClock):
    """Real time without the machine's stalls. A limit expires after the time in which this process ran or slept, so a
    process that was not scheduled is not late."""

    def __init__(self) -> None:
        super().__init__()
        self._seen_s = self._steady_s = super().now_s()

    def now_s(self) -> float:
        now_s = super().now_s()
        self._steady_s += min(now_s - self._seen_s, STALL_S)
        self._seen_s = now_s
        return self._steady_s

    async def sleep(self, duration_s: float) -> None:
        until_s = self.now_s() + duration_s
        await super().sleep(duration_s)
        self.now_s()
        self._steady_s = max(self._steady_s, until_s)
