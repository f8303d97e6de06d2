"""The process inside the namespaces: `python -m orchestrrl.lab.box.inside ORDER`, where ORDER is a `BoxOrder` as JSON.

The process runs the shows that the order selects. A show measures TCP traffic in one situation: different numbers of
circuits, the cycle of an RL job, changes during a transfer, a failed port, swapped cables, or weight syncs. The process
prints lines of JSON: the name of each show as it starts, and finally the results. It exits when its standard input is
closed.
"""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

from ocs_drivers.errors import DriverError
from ocs_drivers.faults import DeviceFaultKind
from orchestrrl.core.errors import OrchestrRLError
from orchestrrl.fabric.client import FabricClient
from orchestrrl.lab.box import intents
from orchestrrl.lab.box.cycle import cycle
from orchestrrl.lab.box.enter import end_with_input
from orchestrrl.lab.box.run import BoxOrder
from orchestrrl.lab.box.testbed import TOOK_WITHIN_S, Testbed, standing
from orchestrrl.lab.box.traffic import Flow, mbps, running
from orchestrrl.lab.testbed.processes import until
from orchestrrl.lab.testbed.ranks import print_json
from planner.fabric.light import interfaces_at, links_up
from planner.fabric.model import EndpointId, PortPair, port_pair
from planner.fabric.topology import PodRole

COUNTS = (1, 2, 3)  # numbers of circuits
SETTLING_S = 1.0  # until TCP reaches its rate
TRANSFER_WINDOW_BYTES = 32_768  # Linux doubles this value


def tor_pair(box: Testbed, role: PodRole = PodRole.TRAIN) -> tuple[EndpointId, EndpointId]:
    """Return the two ToRs between which one switch can make the most circuits. Both ToRs have hosts and are in the same
    PoD, which has the role `role`."""
    with_hosts = {tor for server in box.site.servers for tor in server.tors}
    tors = [tor for tor in box.site.tors if tor.id in with_hosts and box.site.pod[tor.pod].role is role]
    pairs = [(one.id, other.id) for one, other in combinations(tors, 2) if one.pod == other.pod]
    return max(pairs, key=lambda pair: len(circuits_between(box, *pair)))


def circuits_between(box: Testbed, one: EndpointId, other: EndpointId) -> list[PortPair]:
    """Return the largest set of circuits that one switch can make between two ToRs."""
    by_switch = (
        [
            port_pair(switch.id, a, b)
            for a, b in zip(switch.ports.get(one, ()), switch.ports.get(other, ()), strict=False)
        ]
        for switch in box.site.switches
    )
    return max(by_switch, key=len)


def nics_at(box: Testbed, tor: EndpointId) -> list[tuple[str, str]]:
    return [
        (box.plan.hosts[server.id], nic.address)
        for server in box.site.servers
        for nic in box.plan.nics[server.id]
        if nic.tor == tor
    ]


async def rates_by_circuits(box: Testbed, order: BoxOrder) -> dict[str, Any]:
    """Measure the rate between two ToRs for each number of circuits. The number of flows is the same in all
    measurements. Each flow has its own pair of hosts and is pinned to a circuit by a route."""
    one, other = tor_pair(box)
    circuits = circuits_between(box, one, other)[: max(COUNTS)]
    sources, sinks = nics_at(box, one), nics_at(box, other)
    flows_count = min(len(sources), len(sinks), max(COUNTS))
    rows: list[dict[str, Any]] = []
    up: list[PortPair] = []
    for count in COUNTS:
        more = circuits[len(up) : count]
        await box.connect(more)
        up += more
        links = links_up(box.site, up, interfaces_at(box.site, box.plan.interfaces))
        hosts_there = [address for _, address in sinks[:flows_count]]
        hosts_here = [address for _, address in sources[:flows_count]]
        await box.pin(one, other, hosts_there, [_interface(lit.link.ends, one) for lit in links])
        await box.pin(other, one, hosts_here, [_interface(lit.link.ends, other) for lit in links])
        flows = [Flow(source, sink) for source, sink in zip(sources, sinks, strict=False)][:flows_count]
        async with running(flows):
            await asyncio.sleep(SETTLING_S)
            rows.append({"circuits": count, "mbps": await _rate(flows, order.seconds)})
    await box.unpin(one, hosts_there)
    await box.unpin(other, hosts_here)
    await box.connect(up, ups=False)
    base = rows[0]["mbps"] / rows[0]["circuits"]
    line = box.site.link_gbps * box.plan.bps_per_gbps * 1e-6
    return {"tors": [one, other], "line_mbps": line, "rows": [{**row, "ratio": row["mbps"] / base} for row in rows]}


def _interface(ends: tuple[tuple[EndpointId, str], ...], tor: EndpointId) -> str:
    return next(interface for name, interface in ends if name == tor)


async def transfer_through_changes(box: Testbed, order: BoxOrder) -> dict[str, Any]:
    """Measure one transfer between ToRs of a generation PoD while circuits change from those for generation to those
    for a weight sync and back. The receive window keeps all queues short, so that any retransmitted segment was lost
    because of a change."""
    one, other = tor_pair(box, PodRole.GEN)
    flow = Flow(nics_at(box, one)[0], nics_at(box, other)[0], window_bytes=TRANSFER_WINDOW_BYTES)
    delay_s = max(switch.device.reconfiguration_s for switch in box.site.switches)
    rows: list[dict[str, Any]] = []
    async with FabricClient(box.daemon_address) as client:
        await client.announce("generation", intents.generation(box.site), boundary=True)
        async with running([flow]):
            await asyncio.sleep(SETTLING_S)
            for number in range(order.changes):
                period = "generation" if number % 2 else "weights"
                intent = intents.generation(box.site) if number % 2 else intents.weights(box.site)
                before, since_s = flow.retransmitted, time.monotonic()
                report = await client.announce(period, intent, boundary=True)
                await asyncio.sleep(SETTLING_S)
                until_s = time.monotonic()
                rows.append(
                    {
                        "period": period,
                        "state": str(report.state),
                        "detail": report.detail,
                        "circuits": len(circuits_of(box, one, other)),
                        "moves": sum(commit.moves for commit in report.commits),
                        "elapsed_s": sum(commit.usable_s - commit.commanded_s for commit in report.commits),
                        "longest_pause_s": flow.longest_pause_s(since_s, until_s),
                        "retransmitted": flow.retransmitted - before,
                        "mbps": mbps([flow], since_s, until_s),
                    }
                )
    return {"tors": [one, other], "device_delay_s": delay_s, "rows": rows}


async def failed_port(box: Testbed, order: BoxOrder) -> dict[str, Any]:
    """Fail a port that carries the traffic of a generation PoD. Measure the rate before the failure, after the daemon
    has rerouted the packets, and after the next period, which avoids the port."""
    one, other = tor_pair(box, PodRole.GEN)
    intent = intents.generation(box.site)
    # Enough flows that their hashes use all circuits.
    flows = [Flow(source, sink) for source in nics_at(box, one) for sink in nics_at(box, other)]
    async with FabricClient(box.daemon_address) as client:
        await client.announce("generation", intent, boundary=True)
        up = circuits_of(box, one, other)
        port = (up[0].switch, up[0].ports[0])
        async with running(flows):
            await asyncio.sleep(SETTLING_S)
            before = await _rate(flows, order.seconds)
            box.inject(DeviceFaultKind.FAIL_PORT, port)
            failed_s = time.monotonic()
            await _until_left_out(box)
            around_s = time.monotonic() - failed_s
            after = await _rate(flows, order.seconds)
            await client.announce("generation", intent, boundary=True)
            masked = await _rate(flows, order.seconds)
    now = circuits_of(box, one, other)
    box.inject(DeviceFaultKind.MEND_PORT, port)
    return {
        "tors": [one, other],
        "port": f"{port[0]}:{port[1]}",
        "circuits": [len(up), len(now)],
        "is_masked": all(port[1] not in pair.ports for pair in now if pair.switch == port[0]),
        "around_s": around_s,
        "mbps": [before, after, masked],
    }


def circuits_of(box: Testbed, one: EndpointId, other: EndpointId) -> list[PortPair]:
    """Return the circuits that carry packets between two ToRs."""
    return [pair for pair in sorted(box.panel.joined) if set(box.ends_of(pair)) == {one, other}]


async def _rate(flows: Sequence[Flow], seconds: float) -> float:
    since_s = time.monotonic()
    await asyncio.sleep(seconds)
    return mbps(flows, since_s, time.monotonic())


async def _until_left_out(box: Testbed) -> None:
    """Wait until the daemon's routes avoid at least one link. Raises Permanent if the wait times out."""

    async def left_out() -> bool:
        return bool((await box.fabric()).routes.left_out)

    await until(left_out, "packets avoid the failed port", TOOK_WITHIN_S, 0.02)


async def wrong_cable(box: Testbed, order: BoxOrder) -> dict[str, Any]:
    """Swap two cables of a switch, one of which is in use, and later swap them back. Run `orchestrrl ocs verify` before
    the swap, twice after it (without and with `--walk`), and once more after the cables have been swapped back."""
    one, other = tor_pair(box, PodRole.GEN)
    most = circuits_between(box, one, other)[-1]
    spare = [f"port:{most.switch}:{port}" for port in most.ports]  # an unused fibre of each ToR
    await box.run("fabric", "mask", *spare, "--reason", "spare")
    async with FabricClient(box.daemon_address) as client:
        await client.announce("generation", intents.generation(box.site), boundary=True)
    await box.run("fabric", "mask")
    cabling = interfaces_at(box.site, box.plan.interfaces)
    used = {(pair.switch, port) for pair in circuits_of(box, one, other) for port in pair.ports}
    first = min(port for port in used if port[0] == most.switch and cabling[port][0] == one)
    second = next((most.switch, port) for port in most.ports if cabling[most.switch, port][0] == one)
    sound = await _verify(box)
    box.panel.swap(first, second)
    await asyncio.sleep(SETTLING_S)
    looked = await _verify(box)
    await box.run("fabric", "pause", "--reason", "checking cables")
    walked = await _verify(box, "--walk")
    box.panel.swap(first, second)
    await asyncio.sleep(SETTLING_S)
    await box.run("fabric", "resume")
    mended = await _verify(box)
    return {
        "swapped": [f"{switch}:{port}" for switch, port in (first, second)],
        "sound": sound,
        "looked": looked,
        "walked": walked,
        "mended": mended,
        "faults": walked["faults"],
    }


async def _verify(box: Testbed, *flags: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(await box.run("ocs", "verify", "--json", *flags))
    return found


async def _weights(box: Testbed, order: BoxOrder) -> dict[str, Any]:
    from orchestrrl.lab.box.weights import weights  # imported here: the planner is slow to import

    return await weights(box, order)


SHOWS: dict[str, Callable[[Testbed, BoxOrder], Awaitable[dict[str, Any]]]] = {
    "circuits": rates_by_circuits,
    "transition": transfer_through_changes,
    "failed_port": failed_port,
    "wrong_cable": wrong_cable,
    "cycle": cycle,
    "weights": _weights,
}


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
            print_json({"at": name})
            results[name] = await SHOWS[name](box, order)
    print_json({"results": results})


if __name__ == "__main__":
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=100%", "none", "/run"], check=True)
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    Path("/run/netns").mkdir()
    try:
        asyncio.run(main(BoxOrder(**json.loads(sys.argv[1]))))
    except (OrchestrRLError, DriverError) as error:
        sys.stderr.write(f"{error}\n")
        sys.stderr.flush()
        os._exit(1)  # do not wait for threads of libraries
