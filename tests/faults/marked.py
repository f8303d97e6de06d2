"""Processes that kill or stop themselves at a mark, and are started again."""

import asyncio
import signal

import psutil
from front import until

from orchestrrl.lab.testbed.processes import LabProcess


class MarkedProcess(LabProcess):
    async def until_ended(self) -> int:
        return await asyncio.to_thread(self.process.wait, 120)

    async def until_still(self) -> None:
        """Wait until the process was stopped by a mark."""

        async def still() -> bool:
            assert self.running, f"{self.name} has ended"
            return psutil.Process(self.pid).status() == psutil.STATUS_STOPPED

        await until(still, 0.005)

    def go_on(self) -> None:
        self.signal(signal.SIGCONT)

    def end(self) -> None:
        """Kill the process in any state."""
        if self.running:
            self.kill()

    async def stop(self, grace_s: float = 60.0) -> int:
        return await super().stop(grace_s)
