"""A trainer in small: real TCP between its hosts in the place of collectives, recorded as a job's ranks record them."""

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from orchestrrl.integrations.instrument.rings import RingWriter
from orchestrrl.lab.box.traffic import Flow, running


class TestbedTrainer:
    """Iterations of one collective and one pause, as long as `run` is a task. `bursts`: when each collective began and
    ended, and its flows."""

    def __init__(
        self,
        rings: Path,
        job: str,
        ranks: Sequence[int],
        flows: Callable[[], list[Flow]],
        collective_s: float,
        pause_s: float,
    ) -> None:
        self.bursts: list[tuple[float, float, list[Flow]]] = []
        self._flows = flows
        self._collective_s = collective_s
        self._pause_s = pause_s
        self._writers = [RingWriter(rings, job=job) for _ in ranks]
        self._group = [writer.group(ranks, "all") for writer in self._writers]
        self._reduce = [writer.op("all_reduce") for writer in self._writers]
        for rank, writer in zip(ranks, self._writers, strict=True):
            writer.set_rank(rank)

    async def run(self) -> None:
        while True:
            await self._iterate()

    async def _iterate(self) -> None:
        for writer in self._writers:
            writer.moment("iteration", len(self.bursts))
        begun = [
            writer.begin(reduce, group, 1 << 20)
            for writer, reduce, group in zip(self._writers, self._reduce, self._group, strict=True)
        ]
        flows = self._flows()
        began_s = time.monotonic()
        try:
            async with running(flows):
                await asyncio.sleep(self._collective_s)
                ended_s = time.monotonic()
        finally:
            for writer, sequence in zip(self._writers, begun, strict=True):
                writer.end(sequence)
        self.bursts.append((began_s, ended_s, flows))
        await asyncio.sleep(self._pause_s)

    def close(self) -> None:
        for writer in self._writers:
            writer.close()
