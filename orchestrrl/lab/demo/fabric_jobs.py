"""The other side of fabric_job.py: starts it, and its jobs, with an environment that has torch."""

import asyncio
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orchestrrl.integrations.instrument
from orchestrrl.core.errors import Permanent

RANKS = 8
PROGRAM = Path(__file__).parent / "fabric_job.py"
INSTRUMENT = Path(orchestrrl.integrations.instrument.__file__).parent
WORD_BYTES = 8
ANSWER_WITHIN_S = 300.0


@dataclass(frozen=True, slots=True)
class JobSpec:
    """How a job is to be. With `rings` it is recorded there; with `stamps` it says in that file when pauses begin."""

    name: str
    window_s: float
    rings: Path | None = None
    stamps: Path | None = None


@dataclass(slots=True)
class Launcher:
    """Use as `async with`; `folder` is for its log and its jobs' rendezvous. Jobs that run are stopped at the end."""

    folder: Path
    python: Path
    _process: asyncio.subprocess.Process | None = field(default=None, init=False)

    async def __aenter__(self) -> "Launcher":
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                self.python,
                PROGRAM,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env={
                    **{name: value for name, value in os.environ.items() if not name.startswith("ORCHESTRRL_")},
                    "OMP_NUM_THREADS": "1",
                    "PYTHONPATH": str(INSTRUMENT),
                },
                cwd=self.folder,
            )
        return self

    async def __aexit__(self, *_: object) -> None:
        process = self._process
        if process is None or process.returncode is not None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), 30.0)
        except TimeoutError:
            process.kill()
            await process.wait()

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

    @property
    def _log(self) -> Path:
        return self.folder / "torch.log"

    async def _request(self, **order: Any) -> Any:
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        answer = await asyncio.wait_for(self._process.stdout.readline(), ANSWER_WITHIN_S)
        if not answer:
            raise Permanent(f"the jobs have ended: {self._log.read_text()[-2000:]}")
        return json.loads(answer)
