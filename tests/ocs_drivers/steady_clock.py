"""A clock for tests over real sockets, on a machine with much else to do."""

from ocs_drivers.base import SystemClock

# Longer than that between two looks at the clock is the machine's doing.
STALL_S = 0.02


class SteadyClock(SystemClock):
    """Real time without the stalls: a limit runs out after so much of what this process did or slept, so a process that
    did not get its turn is not late."""

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
