"""The optical fabric of the demo of a redeployment: its site of virtual switches, and what became of its circuits."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrrl.fabric.site import site_text
from orchestrrl.lab.demo.scenario import DeploymentSection
from orchestrrl.rpc.control_client import ControlClient
from orchestrrl.rpc.pb import control_pb2, fabric_pb2
from orchestrrl.rpc.plain_values import plain
from planner.fabric.generate import SiteShape, regular_site
from planner.fabric.model import port_pair
from planner.fabric.topology import Site, SwitchModel

SITE_FILE = "site.yaml"
GEN_POD = "gen0"
PORTS = 64  # of each switch
PERIODS_ASKED = 64


@dataclass(frozen=True, slots=True)
class ObservedFabric:
    """Circuits as the switches have them, by PoD (empty: the core) and endpoints; periods as the daemon reports them,
    newest first."""

    circuits: Mapping[tuple[str, str, str], int]
    periods: Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Followed:
    """How circuits followed one redeployment, in the form of the report."""

    state: str
    code: str
    moves: int  # cross-connects that were taken down, and those that were brought up
    stages: int
    wall_s: float  # from the announcement until all was in place and verified
    switches_wall_s: float  # of that, from each command until its circuits were usable
    said: str  # by the step admit


def write_fabric(deployment: DeploymentSection, out_dir: Path) -> dict[str, Any]:
    """Write the site's file; what goes into the daemon's configuration of that folder, nothing without a fabric."""
    site, fabric = site_of(deployment), deployment.fabric
    if site is None or fabric is None:
        return {}
    (out_dir / SITE_FILE).write_text(site_text(site), encoding="utf-8")
    options = {"connectivity": "any_to_any", "ports": PORTS, "reconfiguration_s": fabric.device_s}
    return {
        # The GPUs that generate come after those that train.
        "fabric": {"site": SITE_FILE, "model": fabric.model, "first_fleet_gpu": deployment.gpus},
        "ocs": [{"id": str(switch.id), "driver": "virtual", "options": options} for switch in site.switches],
    }


def site_of(deployment: DeploymentSection) -> Site | None:
    """A PoD that trains and one that generates. Each ToR has a lane to the core that is kept for responses."""
    fabric = deployment.fabric
    if fabric is None:
        return None
    servers = deployment.gpus // fabric.gpus_per_server
    device = SwitchModel("shown", fabric.device_s, PORTS)
    return regular_site(
        SiteShape(
            train_pods=1,
            gen_pods=1,
            servers_per_pod=servers,
            gpus_per_server=fabric.gpus_per_server,
            nics_per_server=fabric.gpus_per_server,
            rails=1,
            servers_per_tor=1,
            tor_uplinks=fabric.tor_fibres,
            core_lanes=2 * servers,
            response_lanes=servers,
            agg_device=device,
            core_device=device,
        )
    )


async def fabric_now(control: ControlClient, site: Site | None) -> ObservedFabric | None:
    """None: there is none."""
    if site is None:
        return None
    message = await control.call(control.fabric.GetFabric, fabric_pb2.GetFabricRequest(limit=PERIODS_ASKED))
    counts: Counter[tuple[str, str, str]] = Counter()
    for switch in site.switches:  # as they are at this moment, whatever the daemon believes
        shown = await control.call(control.switches.ShowSwitch, control_pb2.ShowSwitchRequest(switch_id=switch.id))
        for each in shown.cross_connects:
            ends = site.cabling.ends(port_pair(switch.id, each.ingress_port, each.egress_port))
            if ends is not None:
                counts[switch.pod or "", ends[0], ends[1]] += 1
    return ObservedFabric(counts, plain(message)["periods"])


def followed(redeployment: Mapping[str, Any], fabric: ObservedFabric | None) -> Followed | None:
    """What was announced while the redeployment let requests in. None: nothing was. Pure."""
    for step in redeployment["steps"]:
        if step["kind"] != "admit" or fabric is None or step["began_unix_s"] is None:
            continue
        ended_s = step["began_unix_s"] + step["elapsed_s"]
        for period in fabric.periods:
            if step["began_unix_s"] <= period["announced_unix_s"] <= ended_s and period["ended_unix_s"] is not None:
                return Followed(
                    period["state"],
                    period["code"],
                    period["moves"],
                    period["stages"],
                    period["ended_unix_s"] - period["announced_unix_s"],
                    sum(each["usable_unix_s"] - each["commanded_unix_s"] for each in period["commits"]),
                    step["detail"],
                )
    return None
