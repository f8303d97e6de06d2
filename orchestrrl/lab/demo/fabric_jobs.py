"""The other side of fabric_job.py: starts it, and its jobs, with an environment that has torch."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import orchestrrl.integrations.instrument
from orchestrrl.lab.testbed.processes import REPOSITORY, LabProcess

RANKS = 8
INSTRUMENT = Path(orchestrrl.integrations.instrument.__file__).parent
WORD_BYTES = 8
ANSWER_WITHIN_S = 300.0
STOP_WITHIN_S = 30.0


@dataclass(frozen=True, slots=True)
class JobSpec:
    """How a job is to be. With `rings` it is recorded there; with `stamps` it says in that file when pauses begin."""

    name: str
    window_s: float
    rings: Path | None = None
    stamps: Path | None = None


class Launcher:
    """Use as `async with`; `folder` is for its log and its jobs' rendezvous. Jobs that run are stopped at the end."""

    def __init__(self, folder: Path, python: Path) -> None:
        self.folder = folder
        environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{INSTRUMENT}"}
        words = (python, "-m", "orchestrrl.lab.demo.fabric_job")
        self._process = LabProcess("torch", words, folder, environment=environment, cwd=folder, takes_input=True)

    async def __aenter__(self) -> Self:
        self._process.spawn()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._process.stop(STOP_WITHIN_S)

    async def start(self, job: JobSpec) -> None:
        if job.stamps is not None:
            job.stamps.write_bytes(bytes(2 * RANKS * WORD_BYTES))
        await self._request(
            start=job.name,
            ranks=RANKS,
            window_s=job.window_s,
            store=str(self.folder / f"{job.name}.store"),
            rings=None if job.rings is None else str(job.rings),
            stamps=None if job.stamps is None else str(job.stamps),
        )

    async def turn(self, name: str, iterations: int) -> list[float]:
        """Seconds of each iteration: of its slowest rank."""
        taken_s: list[float] = await self._request(turn=name, iterations=iterations)
        return taken_s

    async def stop(self, name: str) -> list[int | None]:
        """The ranks' exit statuses."""
        statuses: list[int | None] = await self._request(stop=name)
        return statuses

    async def _request(self, **order: Any) -> Any:
        return await self._process.request(order, ANSWER_WITHIN_S)
