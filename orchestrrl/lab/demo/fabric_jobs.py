"""The other side of fabric_job.py: starts it, and its jobs, with an environment that has torch."""

import os
from pathlib import Path
from typing import Any, Self

import orchestrrl.integrations.instrument
from orchestrrl.lab.testbed.processes import REPOSITORY, LabProcess

RANKS = 8
INSTRUMENT = Path(orchestrrl.integrations.instrument.__file__).parent
WORD_BYTES = 8
ANSWER_WITHIN_S = 300.0
STOP_WITHIN_S = 30.0


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

    async def start(self, name: str, window_s: float, rings: Path | None = None, stamps: Path | None = None) -> None:
        """Start a job. It is recorded in `rings`, and writes into `stamps` when its pauses begin."""
        if stamps is not None:
            stamps.write_bytes(bytes(2 * RANKS * WORD_BYTES))
        files = {"store": self.folder / f"{name}.store", "rings": rings, "stamps": stamps}
        paths = {what: None if path is None else str(path) for what, path in files.items()}
        await self._request(start=name, ranks=RANKS, window_s=window_s, **paths)

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
