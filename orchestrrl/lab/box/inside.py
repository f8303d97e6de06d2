"""The process inside the namespaces: `python -m orchestrrl.lab.box.inside ORDER`, ORDER as JSON; see `main`.

Prints lines of JSON: what it is at, and last what the shows returned. Ends with its standard input.
"""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from ocs_drivers.errors import DriverError
from orchestrrl.core.errors import OrchestrRLError
from orchestrrl.fabric.site import read_site
from orchestrrl.lab.box import shows
from orchestrrl.lab.box.cycle import cycle
from orchestrrl.lab.box.enter import end_with_input
from orchestrrl.lab.box.plan import Rates
from orchestrrl.lab.box.testbed import SITE_FILE, Testbed, standing


async def _weights(box: Testbed, order: dict[str, Any]) -> dict[str, Any]:
    from orchestrrl.lab.box.weights import weights  # it plans, which takes a while to import

    words = {"transport": order["transport"], "python": order["python"]}
    return await weights(box, order["sync_bytes"], order["sync_rounds"], order["sync_ways"], **words)


SHOWS: dict[str, Callable[[Testbed, dict[str, Any]], Awaitable[dict[str, Any]]]] = {
    "circuits": lambda box, order: shows.rates_by_circuits(box, seconds=order["seconds"]),
    "transition": lambda box, order: shows.transfer_through_changes(box, order["changes"]),
    "failed_port": lambda box, order: shows.failed_port(box, order["seconds"]),
    "wrong_cable": lambda box, order: shows.wrong_cable(box),
    "cycle": lambda box, order: cycle(
        box, **{name: order[name] for name in ("seconds", "iterations", "collective_s", "pause_s")}
    ),
    "weights": _weights,
}


def report(**what: Any) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


async def main(order: dict[str, Any]) -> None:
    loop, mine = asyncio.get_running_loop(), asyncio.current_task()
    assert mine is not None

    def stop() -> None:
        loop.call_soon_threadsafe(mine.cancel)

    end_with_input(stop)
    folder = Path(order["folder"])
    site = read_site(folder / SITE_FILE)
    rates = Rates(order["mbps"] * 1e6 / site.link_gbps)
    async with standing(folder, site, rates, order["protocols"]) as box:
        results: dict[str, Any] = {
            "hosts": len(box.plan.hosts),
            "tors": len(box.plan.tors),
            "switches": {switch.id: switch.protocol for switch in box.switches.values()},
        }
        for name in order["shows"]:
            report(at=name)
            results[name] = await SHOWS[name](box, order)
    report(results=results)


if __name__ == "__main__":
    subprocess.run(["mount", "-t", "tmpfs", "none", "/run"], check=True)
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    Path("/run/netns").mkdir()
    try:
        asyncio.run(main(json.loads(sys.argv[1])))
    except (OrchestrRLError, DriverError) as error:
        report(failed=str(error))
        os._exit(1)
