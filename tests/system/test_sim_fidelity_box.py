"""The flow-level network simulator against TCP over rate-limited lines in network namespaces: shares and transfer times
agree within 10 %. docs/fidelity.md has the figures.

    h0 h1 h2 - ToR 0 --- ToR 1 - h3 h4 h5

Lines use fair queueing, as the simulator assumes; the FIFO of a plain line does not.
"""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orchestrrl.lab.box import enter
from orchestrrl.lab.sim.net.fluid import finish_s, rates
from orchestrrl.lab.sim.net.model import FlowRoutes, GpuFlows, Ints, LinkNetwork, LinkTier, Servers

pytestmark = pytest.mark.timeout(600)

WITHIN = 0.10
# If the machine stalls, it sends less than its lines allow.
TRIES = 3
INSIDE = "tests.system.flows_in_a_box"
ROOT = Path(__file__).parents[2]
ANSWER_WITHIN_S = 180.0
PER_TOR, HOST_MBPS, TRUNK_MBPS = 3, 20.0, 12.0
# Payload of an Ethernet frame of 1514 bytes without the headers of IPv4 (20), TCP (20) and its time stamps (12).
PAYLOAD_SHARE = 1448 / 1514

# [source, sink]
RATES = {
    "two flows share a line": [(0, 2), (1, 2)],
    "incast over lines of two rates": [(0, 1), (2, 1), (3, 1)],
    "spare rate goes to the other flow": [(0, 3), (1, 4), (2, 5), (4, 3)],
}
# [source, sink, bytes]
TRANSFERS = {
    "incast of unequal messages": [(0, 1, 2e6), (2, 1, 4e6)],
    "a phase of a tree, near and far": [(0, 1, 6e6), (0, 3, 3e6), (2, 4, 3e6)],
}


def network() -> LinkNetwork:
    """Return the network with its lines in order: up from each host, down to each, ToR 0 to 1 and back."""
    hosts = 2 * PER_TOR
    bytes_per_s = np.array([HOST_MBPS] * 2 * hosts + [TRUNK_MBPS] * 2) * 1e6 / 8 * PAYLOAD_SHARE

    def route(src: Ints, dst: Ints) -> FlowRoutes:
        ways = [_way(int(source), int(sink)) for source, sink in zip(src, dst, strict=True)]
        begin = np.cumsum([0, *(len(way) for way in ways)])
        link = np.array([each for way in ways for each in way])
        return FlowRoutes(begin, link, np.ones(len(link)), np.zeros(len(ways)))

    servers = Servers(hosts, gpus_per_server=1, nics_per_server=1)
    tiers = (LinkTier.NIC,) * 2 * hosts + (LinkTier.CORE,) * 2
    return LinkNetwork(servers, bytes_per_s, tiers, route, "box")


def _way(source: int, sink: int) -> list[int]:
    hosts, (here, there) = 2 * PER_TOR, (source // PER_TOR, sink // PER_TOR)
    return [source, *([2 * hosts + here] if here != there else []), hosts + sink]


async def measured(folder: Path) -> dict[str, Any]:
    order = {
        "per_tor": PER_TOR,
        "host_mbps": HOST_MBPS,
        "trunk_mbps": TRUNK_MBPS,
        "congestion": "cubic",
        "seconds": 3.0,
        "rates": RATES,
        "transfers": TRANSFERS,
    }
    async with enter.start("flows", ("-m", INSIDE, json.dumps(order)), folder) as box:
        found: dict[str, Any] = json.loads(await box.next_line(ANSWER_WITHIN_S))
        return found


def flows_of(rows: Sequence[tuple[float, ...]]) -> GpuFlows:
    return GpuFlows.of([(int(source), int(sink), of[0] if of else 1.0) for source, sink, *of in rows])


def expected() -> dict[str, list[float]]:
    box = network()
    mbps = {name: (rates(box, flows_of(rows)) * 8e-6).tolist() for name, rows in RATES.items()}
    return mbps | {name: finish_s(box, flows_of(rows)).tolist() for name, rows in TRANSFERS.items()}


def test_simulator_matches_hand_computed_rates() -> None:
    shown, line, trunk = expected(), HOST_MBPS * PAYLOAD_SHARE, TRUNK_MBPS * PAYLOAD_SHARE
    assert shown["two flows share a line"] == pytest.approx([line / 2] * 2)
    assert shown["incast over lines of two rates"] == pytest.approx([line / 3] * 3)
    assert shown["spare rate goes to the other flow"] == pytest.approx([trunk / 3] * 3 + [line - trunk / 3])
    assert shown["incast of unequal messages"] == pytest.approx([32 / line, 48 / line])
    far_s = 24 / (trunk / 2)
    assert shown["a phase of a tree, near and far"] == pytest.approx([48 / (line - trunk / 2), far_s, far_s])


@pytest.mark.alone  # rates are compared
async def test_simulated_shares_and_times_match_tcp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if why := enter.lacking():
        pytest.skip(f"no fabric in a box here: {why}")
    monkeypatch.chdir(ROOT)
    shown = expected()
    for attempt in range(TRIES):
        found = await measured(tmp_path)
        off = {name: max(abs(a / b - 1) for a, b in zip(found[name], shown[name], strict=True)) for name in shown}
        print(f"try {attempt + 1}: off by {json.dumps(off)}, measured {json.dumps(found)}")
        if max(off.values()) <= WITHIN:
            break
    assert max(off.values()) <= WITHIN, off
