"""The processes of the redeployment demo: a daemon, which starts and replaces engines, and a gateway."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrrl.core.clock import WallClock
from orchestrrl.core.errors import Permanent
from orchestrrl.daemon.configuration import load_config
from orchestrrl.fabric.site import site_text
from orchestrrl.fleet.launch import deployer_of
from orchestrrl.lab.demo.scenario import DemoScenario, DeploymentSection
from orchestrrl.lab.demo.stack import daemon_settings, gateway_flags, write_lengths
from orchestrrl.lab.testbed.processes import flags_of
from orchestrrl.lab.testbed.stack import Stack, sped_up
from orchestrrl.rpc.control_client import ControlClient
from orchestrrl.rpc.pb import control_pb2, fabric_pb2
from orchestrrl.rpc.plain_values import plain
from planner.cost.paper import named_profile
from planner.fabric.generate import SiteShape, regular_site
from planner.fabric.model import port_pair
from planner.fabric.topology import Site, SwitchModel
from planner.model import Configuration

PORTS = (21_000, 21_999)  # port range of engines
SITE_FILE = "site.yaml"
GEN_POD = "gen0"
SWITCH_PORTS = 64  # ports per switch
PERIODS_ASKED = 64


class RedeployStack(Stack):
    """A daemon with a deployer, and a gateway, created by `redeploy_stack`. Initially no engine runs."""

    deployment: DeploymentSection
    control: ControlClient

    async def begin_with(self, configuration: str, reason: str) -> None:
        """Redeploy the fleet to a configuration and wait until the fleet is ready for a step. Raises Permanent if the
        redeployment fails."""
        status = await self.status()
        if {worker.configuration for worker in status.workers} != {configuration}:
            target = control_pb2.RedeployTarget(configuration=configuration)
            order = control_pb2.RedeployRequest(targets=[target], reason=reason)
            report: dict[str, Any] = {"state": "refused", "detail": "the daemon gave no reason"}
            async for message in self.control.watch(self.control.control.Redeploy, order):
                report = plain(message)
            if report["state"] != "done":
                raise Permanent(f"redeployment to {configuration} failed: {report['state']}, {report['detail']}")
        await self.until_reported(1, ("gateway",))

    async def pin(self) -> None:
        """Pin the planner to the current fleet, so that it does not redeploy."""
        await self.control.call(self.control.control.PinPlan, control_pb2.PinPlanRequest(reason="for comparison"))

    async def release(self) -> None:
        await self.control.call(self.control.control.ReleasePlan, control_pb2.ReleasePlanRequest())


@contextlib.asynccontextmanager
async def redeploy_stack(scenario: DemoScenario, out_dir: Path) -> AsyncIterator[RedeployStack]:
    """Start a daemon and a gateway. On exit, stop both processes and all engines that the daemon started."""
    deployment = scenario.deployment
    assert deployment is not None, "the daemon starts the fleet of this scenario"
    async with RedeployStack(out_dir) as stack:
        document = _daemon_config(scenario, deployment, stack.folder)
        stack.configure(document)
        await _end_engines(stack.config_path)  # engines of an earlier run that was killed
        stack.undo.push_async_callback(_end_engines, stack.config_path)
        await stack.start_daemon(document)
        await stack.start_gateway(*gateway_flags(scenario, "simulated"))
        async with ControlClient(stack.daemon_address) as control:
            stack.deployment, stack.control = deployment, control
            yield stack


async def _end_engines(config_path: Path) -> None:
    """Stop all engines that the deployer started, because engines outlive the daemon."""
    deployer = deployer_of(load_config(config_path), WallClock())
    assert deployer is not None, "the configuration has a deployer"
    try:
        engines = await deployer.list_engines()
        await asyncio.gather(*(deployer.stop(engine.engine) for engine in engines))
    finally:
        await deployer.close()


def modelled_switch_s(deployment: DeploymentSection, name: str) -> float:
    """Return the duration, in engine seconds, that the profile states for a redeployment to the configuration `name`.
    In the first half, the replaced engines go to sleep. In the second half, the new engines wake up."""
    return _straight(deployment)[name].switch_s


def _straight(deployment: DeploymentSection) -> dict[str, Configuration]:
    return {str(engine.id): engine.configuration() for engine in named_profile(deployment.profile).configurations}


def _daemon_config(scenario: DemoScenario, deployment: DeploymentSection, folder: Path) -> dict[str, Any]:
    """Return the daemon's configuration, with times in wall-clock seconds. The scenario's `speed` is the factor by
    which engines run faster than real time."""
    speed = scenario.speed
    asleep_s = modelled_switch_s(deployment, deployment.standby) / 2 / speed
    options = {"lengths": write_lengths(scenario, folder), "tick_s": scenario.tick_s, "sleep_s": asleep_s}
    straight = _straight(deployment)
    return {
        **daemon_settings(scenario),
        "fleet": {
            "gpus": {"count": deployment.gpus, "per_node": deployment.per_node},
            "configurations": [
                sped_up(straight[name], speed, deployment.overhead_s)
                for name in (deployment.initial, deployment.standby)
            ],
            "launch": {
                "engine": "simulated",
                "ports": list(PORTS),
                "arguments": ["--enable-sleep-mode", *flags_of(options)],
            },
            "deployer": {
                "product": "local",
                "name": "orchestrrl-demo",
                "folder": str(folder / "engines"),
                "standby": "keep",
            },
        },
        **_write_fabric(deployment, folder),
    }


# --- the optical fabric: its site of virtual switches and the state of its circuits


@dataclass(frozen=True, slots=True)
class ObservedFabric:
    """The state of the optical fabric at one time. `circuits` is the number of circuits on the switches, by PoD (empty
    for the core) and pair of endpoints. `periods` are the daemon's reports of periods, newest first."""

    circuits: Mapping[tuple[str, str, str], int]
    periods: Sequence[Mapping[str, Any]]


def _write_fabric(deployment: DeploymentSection, out_dir: Path) -> dict[str, Any]:
    """Write the site file. Return the sections of the daemon's configuration that describe the fabric and its
    switches."""
    site, fabric = site_of(deployment), deployment.fabric
    (out_dir / SITE_FILE).write_text(site_text(site), encoding="utf-8")
    options = {"connectivity": "any_to_any", "ports": SWITCH_PORTS, "reconfiguration_s": fabric.device_s}
    return {
        # The GPUs that generate come after those that train.
        "fabric": {"site": SITE_FILE, "model": fabric.model, "first_fleet_gpu": deployment.gpus},
        "ocs": [{"id": str(switch.id), "driver": "virtual", "options": options} for switch in site.switches],
    }


def site_of(deployment: DeploymentSection) -> Site:
    """Return the site of a deployment, with one training and one generation PoD. For each of its ToRs, the generation
    PoD reserves one lane to the core for response traffic."""
    fabric = deployment.fabric
    servers = deployment.gpus // fabric.gpus_per_server
    device = SwitchModel("shown", fabric.device_s, SWITCH_PORTS)
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


async def fabric_now(control: ControlClient, site: Site) -> ObservedFabric:
    message = await control.call(control.fabric.GetFabric, fabric_pb2.GetFabricRequest(limit=PERIODS_ASKED))
    counts: Counter[tuple[str, str, str]] = Counter()
    for switch in site.switches:  # read from the switches, not from the daemon's state
        shown = await control.call(control.switches.ShowSwitch, control_pb2.ShowSwitchRequest(switch_id=switch.id))
        for each in shown.cross_connects:
            ends = site.cabling.ends(port_pair(switch.id, each.ingress_port, each.egress_port))
            if ends is not None:
                counts[switch.pod or "", ends[0], ends[1]] += 1
    return ObservedFabric(counts, plain(message)["periods"])


def followed(redeployment: Mapping[str, Any], fabric: ObservedFabric) -> dict[str, Any] | None:
    """Return the report of the circuit change that was announced in the step `admit` of a redeployment, or None if no
    change was announced. `switches_wall_s` is the time from each command until its circuits were usable, summed over
    commands. The function has no side effects."""
    for step in redeployment["steps"]:
        if step["kind"] != "admit" or step["began_unix_s"] is None:
            continue
        ended_s = step["began_unix_s"] + step["elapsed_s"]
        for period in fabric.periods:
            if step["began_unix_s"] <= period["announced_unix_s"] <= ended_s and period["ended_unix_s"] is not None:
                commits = period["commits"]
                return {
                    **{name: period[name] for name in ("state", "code", "moves", "stages")},
                    "wall_s": period["ended_unix_s"] - period["announced_unix_s"],
                    "switches_wall_s": sum(each["usable_unix_s"] - each["commanded_unix_s"] for each in commits),
                    "said": step["detail"],
                }
    return None
