"""Talks to `ray_driver.py`: a process that is started with the first call, and again where it was lost. Every call has
a limit; a driver that does not keep one is ended, so that nothing hangs."""

import asyncio
import contextlib
import itertools
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from orchestrrl.core.errors import OutcomeUnknown, Permanent, Retryable

RETRY_AFTER_S = 5.0
FOLDER = Path(__file__).parent
# Packages that are no more than folders: the interpreter need not have what OrchestrRL needs, nor OrchestrRL.
RUN = """\
import sys, types
for name, folder in zip(("orchestrrl", "orchestrrl.fleet", "orchestrrl.fleet.deployers"), sys.argv[1:], strict=True):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [folder]
from orchestrrl.fleet.deployers.ray_driver import main
main()
"""
LINE_BYTES = 64 * 1024 * 1024


class RayConnectionLost(Exception):
    """The driver or its cluster is gone or hangs: what was asked may or may not have happened."""


class RayDriver:
    """One connection of a fleet to its Ray cluster. `settings` are those of `ray_cluster.Cluster`."""

    def __init__(self, python: str, settings: Mapping[str, Any], log_path: Path, connect_within_s: float) -> None:
        self._python = python
        self._settings = settings
        self._log_path = log_path
        self._connect_within_s = connect_within_s
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._connecting = asyncio.Lock()

    async def call(self, name: str, limit_s: float, **arguments: Any) -> Any:
        """The value of the call. Raises Retryable where there is no cluster, Lost where it was lost on the way, and
        what the driver says."""
        async with self._connecting:
            if self._process is None or self._process.returncode is not None:
                await self._connect()
        return await self._exchange(name, limit_s, arguments)

    async def close(self) -> None:
        """End the driver; Ray's actors go on."""
        process, self._process = self._process, None
        reader, self._reader = self._reader, None
        if process is not None:
            if process.stdin is not None:
                process.stdin.close()
            try:
                await asyncio.wait_for(process.wait(), RETRY_AFTER_S)
            except TimeoutError:
                await _kill(process)
        if reader is not None:
            await reader

    async def _connect(self) -> None:
        await self.close()
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        with self._log_path.open("ab") as log:
            try:
                self._process = await asyncio.create_subprocess_exec(
                    *(self._python, "-c", RUN, *map(str, (FOLDER.parents[1], FOLDER.parent, FOLDER))),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=log,
                    env={"RAY_USAGE_STATS_ENABLED": "0", **os.environ, "PYTHONUNBUFFERED": "1"},
                    start_new_session=True,  # a Ctrl-C for the daemon is none for its calls
                    limit=LINE_BYTES,
                )
            except OSError as error:
                raise Permanent(f"{self._python} cannot be run: {error}") from error
        self._reader = asyncio.create_task(self._read(self._process))
        try:
            await self._exchange("open", self._connect_within_s, {"settings": dict(self._settings)})
        except RayConnectionLost as error:
            raise Retryable(f"no connection to Ray: {error}; see {self._log_path}", RETRY_AFTER_S) from error

    async def _exchange(self, name: str, limit_s: float, arguments: Mapping[str, Any]) -> Any:
        process, number = self._process, next(self._numbers)
        if process is None or process.stdin is None:
            raise RayConnectionLost("the driver was closed")
        future = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        try:
            process.stdin.write(json.dumps({"id": number, "call": name, **arguments}).encode() + b"\n")
            await process.stdin.drain()
            answer = await asyncio.wait_for(future, limit_s)
        except TimeoutError:
            await _kill(process)
            raise RayConnectionLost(f"`{name}` took longer than {limit_s:g} s") from None
        except OSError as error:
            raise RayConnectionLost(f"the driver has ended: {error}") from error
        finally:
            self._waiting.pop(number, None)
        return _value_of(answer)

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            answer = json.loads(line)
            future = self._waiting.get(answer["id"])
            if future is not None and not future.done():
                future.set_result(answer)
        await process.wait()
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(RayConnectionLost(f"the driver has ended with status {process.returncode}"))


def _value_of(answer: Mapping[str, Any]) -> Any:
    error = answer.get("error")
    if error is None:
        return answer["value"]
    match error["kind"]:
        case "retryable":
            raise Retryable(error["message"], RETRY_AFTER_S)
        case "permanent":
            raise Permanent(error["message"])
        case "unknown":
            raise OutcomeUnknown(error["message"])
        case _:
            raise RayConnectionLost(error["message"])


async def _kill(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.wait()
