"""The process inside the namespaces: `python -m orchestrrl.lab.box.inside ORDER`, ORDER a `BoxOrder` as JSON.

Prints lines of JSON: what it is at, and last what the shows returned. Ends with its standard input.
"""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

from ocs_drivers.errors import DriverError
from orchestrrl.core.errors import OrchestrRLError
from orchestrrl.lab.box import shows
from orchestrrl.lab.box.cycle import cycle
from orchestrrl.lab.box.enter import end_with_input
from orchestrrl.lab.box.run import BoxOrder
from orchestrrl.lab.box.testbed import Testbed, standing


async def _weights(box: Testbed, order: BoxOrder) -> dict[str, Any]:
    from orchestrrl.lab.box.weights import weights  # it plans, which takes a while to import

    return await weights(box, order)


SHOWS: dict[str, Callable[[Testbed, BoxOrder], Awaitable[dict[str, Any]]]] = {
    "circuits": shows.rates_by_circuits,
    "transition": shows.transfer_through_changes,
    "failed_port": shows.failed_port,
    "wrong_cable": shows.wrong_cable,
    "cycle": cycle,
    "weights": _weights,
}


def report(**what: Any) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


async def main(order: BoxOrder) -> None:
    mine = asyncio.current_task()
    assert mine is not None
    end_with_input(partial(asyncio.get_running_loop().call_soon_threadsafe, mine.cancel))
    async with standing(order) as box:
        results: dict[str, Any] = {
            "hosts": len(box.plan.hosts),
            "tors": len(box.plan.tors),
            "switches": {id: switch.protocol for id, switch in box.switches.items()},
        }
        for name in order.shows:
            report(at=name)
            results[name] = await SHOWS[name](box, order)
    report(results=results)


if __name__ == "__main__":
    subprocess.run(["mount", "-t", "tmpfs", "none", "/run"], check=True)
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    Path("/run/netns").mkdir()
    try:
        asyncio.run(main(BoxOrder(**json.loads(sys.argv[1]))))
    except (OrchestrRLError, DriverError) as error:
        report(failed=str(error))
        os._exit(1)
