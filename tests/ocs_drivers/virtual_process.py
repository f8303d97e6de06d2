"""Serve one virtual switch as OcsDriver in a process of its own: `python virtual_process.py '{"ports": 32}'`.

The process prints its port. Each line on standard input is JSON: a fault for the device, answered with a line once it
is injected; `{"foreign": [[1, 17]]}`, circuits to be made by another client; or `{"setters": true}`, answered with the
setters that reached the device. The process ends when standard input is closed.
"""

import asyncio
import json
import sys

from steady_clock import SteadyClock

from ocs_drivers.faults import DeviceFault, DeviceFaultKind
from ocs_drivers.model import CrossConnect
from ocs_drivers.virtual import VirtualSwitch
from orchestrrl.rpc.ocs_server import serve_driver


async def main() -> None:
    switch = VirtualSwitch("served", clock=SteadyClock(), **json.loads(sys.argv[1]))
    server, port = await serve_driver(switch, "127.0.0.1:0")
    print(port, flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        values = json.loads(line)
        if "setters" in values:
            print(json.dumps(switch.model.setters), flush=True)
            continue
        if "foreign" in values:
            switch.model.add([CrossConnect(*pair) for pair in values["foreign"]])
            print("injected", flush=True)
            continue
        switch.model.inject(DeviceFault(DeviceFaultKind(values.pop("kind")), **values))
        print("injected", flush=True)
    await server.stop(None)


asyncio.run(main())
