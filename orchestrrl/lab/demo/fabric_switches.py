"""Run the virtual switches of the fabric demo in a separate process: `python -m orchestrrl.lab.demo.fabric_switches
OPTIONS ID ...`.

OPTIONS are the options of the driver `virtual` as JSON. The process prints a line of JSON with the port at which each
switch serves `OcsDriver`. For each line of standard input, it prints a line with the times at which each switch has
received commands and has begun to move mirrors. It exits when its standard input is closed.
"""

import asyncio
import json
import sys
import time
from typing import Any

from ocs_drivers.model import CircuitDiff, CommitResult, EventKind
from ocs_drivers.virtual import VirtualSwitch
from orchestrrl.rpc.ocs_server import serve_driver


class NotingSwitch(VirtualSwitch):
    """A virtual switch that records the Unix times at which it receives changes and at which its mirrors start to
    move."""

    def __init__(self, device: str, **options: Any) -> None:
        super().__init__(device, **options)
        self._happened = self.model.listen()
        self._received_s: list[float] = []
        self._set_s: list[float] = []

    async def commit(self, diff: CircuitDiff, expect_revision: int, revert_in_s: float | None = None) -> CommitResult:
        self._received_s.append(time.time())
        return await super().commit(diff, expect_revision, revert_in_s)

    def noted(self) -> dict[str, list[float]]:
        while not self._happened.empty():
            event = self._happened.get_nowait()
            if event.kind is EventKind.CIRCUIT:
                self._set_s.append(event.at_s)
        return {"received_s": self._received_s, "set_s": self._set_s}


async def main(options: str, ids: list[str]) -> None:
    switches = [NotingSwitch(id, **json.loads(options)) for id in ids]
    served = [await serve_driver(switch, "127.0.0.1:0") for switch in switches]
    print(json.dumps(dict(zip(ids, (port for _, port in served), strict=True))), flush=True)  # noqa: T201
    while await asyncio.to_thread(sys.stdin.readline):
        noted = {id: switch.noted() for id, switch in zip(ids, switches, strict=True)}
        print(json.dumps(noted), flush=True)  # noqa: T201
    for server, _ in served:
        await server.stop(None)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2:]))
