"""A device in another process that serves OcsDriver passes the conformance suite, also if the connection breaks."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

import pytest

from ocs_drivers.base import OcsDriver
from ocs_drivers.conformance import DriverConformance
from ocs_drivers.faults import DeviceFault
from ocs_drivers.model import CrossConnect
from ocs_drivers.registry import make_driver

SCRIPT = Path(__file__).parents[1] / "ocs_drivers" / "virtual_process.py"


class TestOutOfProcess(DriverConformance):
    # These tests run in real time: mirrors are fast, and only faults that wait for a timeout take longer.
    options: ClassVar[dict[str, Any]] = {
        "ports": 320,
        "reconfiguration_s": 0.002,
        "command_timeout_s": 2.0,
        "link_timeout_s": 0.2,
        "lock_timeout_s": 50.0,
    }

    @pytest.fixture(autouse=True)
    async def _processes(self) -> AsyncIterator[None]:
        self.processes: list[asyncio.subprocess.Process] = []
        yield
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.close()
            await asyncio.wait_for(process.wait(), 30)

    async def make_driver(self) -> OcsDriver:
        return await self._served({})

    async def make_big(self, ports: int) -> OcsDriver:
        return await self._served({"ports": 2 * ports})

    async def make_foreign(self, driver: OcsDriver, pairs: Sequence[CrossConnect]) -> None:
        await self._said({"foreign": [[pair.ingress_port, pair.egress_port] for pair in pairs]})

    async def setters(self, driver: OcsDriver) -> Sequence[str]:
        answer: list[str] = json.loads(await self._said({"setters": True}))
        return answer

    async def _served(self, more: dict[str, Any]) -> OcsDriver:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            str(SCRIPT),
            json.dumps({**self.options, **more}),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=1 << 20,  # the setters of a large device are in one line
        )
        self.processes.append(process)
        assert process.stdout is not None
        port = int(await asyncio.wait_for(process.stdout.readline(), 30))
        patience = {"command_timeout_s": 60.0, "commit_timeout_s": 120.0}
        return make_driver("grpc", "lab1", {"target": f"127.0.0.1:{port}", **patience})

    async def inject(self, driver: OcsDriver, fault: DeviceFault) -> None:
        assert await self._said(asdict(fault)) == b"injected\n"

    async def _said(self, values: dict[str, Any]) -> bytes:
        process = self.processes[-1]
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(values).encode() + b"\n")
        return await asyncio.wait_for(process.stdout.readline(), 30)
