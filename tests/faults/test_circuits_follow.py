"""Tests that circuits follow the deployment of real processes without losing a request. The switches are virtual and
part of the daemon: a starting daemon finds them without circuits."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from front import until
from redeploying_fleet import WIDE, Harness

from orchestrrl.fabric.site import site_text
from orchestrrl.rpc.control_client import ControlClient
from orchestrrl.rpc.pb import control_pb2, fabric_pb2
from planner.fabric.generate import SiteShape, regular_site
from planner.fabric.model import EndpointId, port_pair
from planner.fabric.topology import SwitchModel

FOUR = (("tp1", 4),)
PORTS = 32
DEVICE = SwitchModel("tested", 0.025, PORTS)
# Four servers of one GPU, each below a ToR of its own. The training PoD comes first.
SITE = regular_site(
    SiteShape(1, 1, 4, 1, 1, servers_per_tor=1, tor_uplinks=4, core_lanes=8, response_lanes=4, agg_device=DEVICE)
)
GEN_POD = EndpointId("gen0")
TORS = tuple(f"gen0/b{server}-r0" for server in range(4))
MESH = {(a, b): 1 for n, a in enumerate(TORS) for b in TORS[n + 1 :]}
PAIRS = {TORS[:2]: 3, TORS[2:]: 3}  # engines of two GPUs
LONG = 12_000  # tokens: longer than any start of a daemon


class LitHarness(Harness):
    """A fleet whose engines are below an optical fabric."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        (folder / "site.yaml").write_text(site_text(SITE))
        path = folder / "orchestrrl.yaml"
        document = yaml.safe_load(path.read_text())
        options = {"connectivity": "any_to_any", "ports": PORTS, "reconfiguration_s": DEVICE.reconfiguration_s}
        document["fabric"] = {"site": "site.yaml", "model": "qwen2.5-14b", "first_fleet_gpu": 4}
        document["ocs"] = [{"id": str(each.id), "driver": "virtual", "options": options} for each in SITE.switches]
        path.write_text(yaml.safe_dump(document, sort_keys=False))

    async def circuits(self) -> dict[tuple[str, str], int]:
        """Return the circuits between ToRs of the generating PoD, by its switches."""
        found: Counter[tuple[str, str]] = Counter()
        cabling = SITE.cabling
        async with ControlClient(self.daemon_address) as client:
            for switch in (each for each in SITE.switches if each.pod == GEN_POD):
                wanted = control_pb2.ShowSwitchRequest(switch_id=switch.id)
                shown = await client.call(client.switches.ShowSwitch, wanted)
                for each in shown.cross_connects:
                    ends = cabling.ends(port_pair(switch.id, each.ingress_port, each.egress_port))
                    if ends is not None and set(ends) <= set(TORS):
                        found[ends] += 1
        return dict(found)

    async def periods(self) -> list[str]:
        """Return the periods that are over, oldest first."""
        async with ControlClient(self.daemon_address) as client:
            reported = await client.call(client.fabric.GetFabric, fabric_pb2.GetFabricRequest(limit=100))
        over = [each for each in reversed(reported.periods) if each.HasField("ended_unix_s")]
        return [f"{each.period} {each.state} {each.code}" for each in over]


@pytest.fixture(scope="module")
def whole_harness(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LitHarness]:
    harness = LitHarness(tmp_path_factory.mktemp("lit"))
    try:
        asyncio.run(harness.open())
        yield harness
    finally:
        asyncio.run(harness.close())


@pytest.fixture
async def harness(whole_harness: LitHarness) -> LitHarness:
    whole_harness.unmark()
    await whole_harness.become(FOUR)
    return whole_harness


async def test_redeployment_under_load_changes_circuits(harness: LitHarness) -> None:
    assert await harness.circuits() == MESH
    async with harness.step():
        report = await harness.until_over(await harness.begin(WIDE))
    assert report.state == "done", report.detail
    (message,) = (step.detail for step in report.steps if step.kind == "admit")
    assert "circuits committed" in message
    assert await harness.circuits() == PAIRS


async def test_failed_redeployment_restores_the_previous_circuits(harness: LitHarness) -> None:
    async with harness.step():
        report = await harness.until_over(await harness.begin((("fails", 2),)))
    assert report.state == "rolled_back", report.detail
    assert await harness.circuits() == MESH


async def test_daemon_started_under_load_waits_until_no_request_is_in_flight(harness: LitHarness) -> None:
    before = len(await harness.periods())

    async def reported() -> list[str]:
        return (await harness.periods())[before:]

    async with harness.step(tokens=LONG) as step:
        harness.daemon.kill()
        await harness.daemon.start()
        assert await until(reported, 0.1) == ["generation kept no_boundary"]
        assert await harness.circuits() == {}
        await step.leave(*(question.id for question in step.questions))

        async def left() -> bool:
            return not (await step.shown())["in_flight"]

        await until(left, 0.1)

    async def again() -> list[str]:
        return (await reported())[1:]

    assert await until(again, 0.1) == ["generation committed committed"]
    assert await harness.circuits() == MESH
