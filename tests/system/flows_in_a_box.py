"""TCP flows inside network namespaces: hosts below two ToRs that are joined by a line. `main` describes the orders.

Started by `orchestrrl.lab.box.enter`. It prints one line of JSON and ends with its standard input.
"""

import asyncio
import json
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrrl.lab.box.enter import end_with_input
from orchestrrl.lab.box.namespaces import Script
from orchestrrl.lab.box.traffic import CHUNK, Flow, running

HOST_INDEX, TRUNK_INDEX = 20_000, 30_000
QUEUE_PACKETS = 80
BEGIN_S = 1.0  # until flows reach their steady shares


@dataclass(slots=True)
class Transfer(Flow):
    """A flow of a given size with a given congestion control."""

    most_bytes: float = float("inf")
    congestion: str = "cubic"

    async def send(self, out: socket.socket) -> None:
        out.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, self.congestion.encode())
        left = self.most_bytes
        while left > 0:
            chunk = CHUNK[: int(min(left, len(CHUNK)))]
            await asyncio.get_running_loop().sock_sendall(out, chunk)
            left -= len(chunk)
        out.shutdown(socket.SHUT_WR)


def room(host: int) -> str:
    return f"h{host}"


def address(host: int, per_tor: int) -> str:
    return f"10.0.{host // per_tor}.{2 + host % per_tor}"


def line(device: str, mbps: float, pairs: Sequence[tuple[str, str]]) -> Iterator[str]:
    """Return tc commands of a line with fair queueing: each (source, destination) pair has its own queue, and packets
    are sent round robin. Acknowledgements share one queue."""
    bps = int(mbps * 1e6)
    yield f"qdisc add dev {device} root handle 1: htb default 2"
    yield f"class add dev {device} parent 1: classid 1:1 htb rate {bps} ceil {bps} burst 8000 cburst 8000 quantum 1514"
    for place, pair in enumerate(("", *pairs)):
        # Traffic below its own small rate has priority; the remaining rate is shared round robin.
        own = f"rate {bps // 100} ceil {bps} burst 1600 cburst 8000 quantum 1514"
        yield f"class add dev {device} parent 1:1 classid 1:{2 + place} htb {own}"
        yield f"qdisc add dev {device} parent 1:{2 + place} pfifo limit {QUEUE_PACKETS}"
        if pair:
            match = f"match ip src {pair[0]}/32 match ip dst {pair[1]}/32"
            yield f"filter add dev {device} parent 1: protocol ip u32 {match} flowid 1:{2 + place}"


async def build(per_tor: int, host_mbps: float, trunk_mbps: float, flows: Sequence[tuple[int, int]]) -> None:
    """Create the namespaces and lines. A line has its rate in each direction."""
    script = Script()
    pairs = sorted({(address(source, per_tor), address(sink, per_tor)) for source, sink in flows})

    def add(where: str, device: str, mbps: float) -> None:
        for each in line(device, mbps, pairs):
            script.tc(where, each)

    for tor in (0, 1):
        script.room(f"t{tor}")
        script.ip(f"t{tor}", "link add hosts type bridge forward_delay 0")
        script.ip(f"t{tor}", f"addr add 10.0.{tor}.1/24 dev hosts")
        script.ip(f"t{tor}", "link set hosts up")
    script.cable("t0", "trunk0", "t1", "trunk1", TRUNK_INDEX)
    for tor in (0, 1):
        script.ip(f"t{tor}", f"addr add 10.1.0.{tor + 1}/24 dev trunk{tor}")
        script.ip(f"t{tor}", f"link set trunk{tor} up")
        script.ip(f"t{tor}", f"route add 10.0.{1 - tor}.0/24 via 10.1.0.{2 - tor}")
        add(f"t{tor}", f"trunk{tor}", trunk_mbps)
    for host in range(2 * per_tor):
        above, here = f"t{host // per_tor}", script.room(room(host))
        script.cable(here, "eth0", above, f"host{host}", HOST_INDEX + host)
        script.ip(above, f"link set host{host} master hosts up")
        add(above, f"host{host}", host_mbps)
        script.ip(here, f"addr add {address(host, per_tor)}/24 dev eth0")
        script.ip(here, "link set eth0 up gso_max_segs 1")
        script.ip(here, f"route add default via 10.0.{host // per_tor}.1")
        add(here, "eth0", host_mbps)
    await script.run()


async def rates_of(flows: list[Flow], seconds: float) -> list[float]:
    """Return the steady rate of each flow in Mbit/s."""
    async with running(flows):
        while not all(flow.arrivals for flow in flows):
            await asyncio.sleep(0.01)
        began_s = max(flow.arrivals[0][0] for flow in flows) + BEGIN_S
        while min(flow.arrivals[-1][0] for flow in flows) < began_s + seconds:
            await asyncio.sleep(0.05)
    ended_s = began_s + seconds
    return [(flow.bytes_at(ended_s) - flow.bytes_at(began_s)) * 8e-6 / seconds for flow in flows]


async def ends_of(flows: list[Flow]) -> list[float]:
    """Return the seconds until each flow has arrived, from the start of the first one."""
    await asyncio.gather(*(flow.run() for flow in flows))
    began_s = min(flow.arrivals[0][0] for flow in flows)
    return [flow.arrivals[-1][0] - began_s for flow in flows]


async def main(order: dict[str, Any]) -> None:
    """Measure `rates`, flows as [source, sink] by name, and `transfers`, flows as [source, sink, bytes] by name."""
    per_tor = order["per_tor"]
    every = [each for flows in (*order["rates"].values(), *order["transfers"].values()) for each in flows]
    await build(per_tor, order["host_mbps"], order["trunk_mbps"], [(source, sink) for source, sink, *_ in every])

    def flow(source: int, sink: int, most_bytes: float = float("inf")) -> Flow:
        one, other = ((room(host), address(host, per_tor)) for host in (source, sink))
        return Transfer(one, other, most_bytes=most_bytes, congestion=order["congestion"])

    found = {}
    for name, flows in order["rates"].items():
        found[name] = await rates_of([flow(*each) for each in flows], order["seconds"])
    for name, flows in order["transfers"].items():
        found[name] = await ends_of([flow(*each) for each in flows])
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    loop = asyncio.new_event_loop()
    end_with_input(lambda: None)
    subprocess.run(["mount", "-t", "tmpfs", "none", "/run"], check=True)
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    Path("/run/netns").mkdir()
    loop.run_until_complete(main(json.loads(sys.argv[1])))
