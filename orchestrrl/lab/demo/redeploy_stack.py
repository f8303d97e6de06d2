"""The processes of the demo of a redeployment: daemon and gateway. The daemon starts the engines, and may replace
them."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from orchestrrl.core.clock import WallClock
from orchestrrl.core.errors import Permanent
from orchestrrl.daemon.configuration import load_config
from orchestrrl.fleet.launch import deployer_of
from orchestrrl.lab.demo.redeploy_fabric import write_fabric
from orchestrrl.lab.demo.scenario import DemoScenario, DeploymentSection
from orchestrrl.lab.demo.stack import gateway_flags, loop_settings, write_lengths
from orchestrrl.lab.testbed.processes import flags_of
from orchestrrl.lab.testbed.stack import Stack, sped_up
from orchestrrl.rpc.control_client import ControlClient
from orchestrrl.rpc.pb import control_pb2
from orchestrrl.rpc.plain_values import plain
from planner.cost.paper import named_profile
from planner.model import Configuration

PORTS = (21_000, 21_999)


class RedeployStack(Stack):
    """A daemon that can deploy, and a gateway. No engine runs at first. Made by `redeploy_stack`."""

    deployment: DeploymentSection
    control: ControlClient

    async def begin_with(self, configuration: str, reason: str) -> None:
        """Bring the fleet to that configuration, ready for a step. Raises Permanent."""
        status = await self.status()
        if {worker.configuration for worker in status.workers} != {configuration}:
            target = control_pb2.RedeployTarget(configuration=configuration)
            order = control_pb2.RedeployRequest(targets=[target], reason=reason)
            report: dict[str, Any] = {"state": "refused", "detail": "the daemon did not say why"}
            async for message in self.control.watch(self.control.control.Redeploy, order):
                report = plain(message)
            if report["state"] != "done":
                raise Permanent(f"the fleet is not brought to {configuration}: {report['state']}, {report['detail']}")
        await self.until_reported(1, ("gateway",))

    async def pin(self) -> None:
        """The planner leaves the fleet as it is."""
        await self.control.call(self.control.control.PinPlan, control_pb2.PinPlanRequest(reason="for comparison"))

    async def release(self) -> None:
        await self.control.call(self.control.control.ReleasePlan, control_pb2.ReleasePlanRequest())


@contextlib.asynccontextmanager
async def redeploy_stack(scenario: DemoScenario, out_dir: Path) -> AsyncIterator[RedeployStack]:
    """Daemon and gateway; on leaving they end, and with them the engines that the daemon started."""
    deployment = scenario.deployment
    assert deployment is not None, "the scenario is of a fleet that the daemon starts"
    async with RedeployStack(out_dir) as stack:
        document = _daemon_config(scenario, deployment, stack.folder)
        stack.configure(document)
        await _end_engines(stack.config_path)  # of an earlier run that was killed
        stack.undo.push_async_callback(_end_engines, stack.config_path)
        await stack.start_daemon(document)
        await stack.start_gateway(*gateway_flags(scenario, "simulated"))
        async with ControlClient(stack.daemon_address) as control:
            stack.deployment, stack.control = deployment, control
            yield stack


async def _end_engines(config_path: Path) -> None:
    """Engines outlive their daemon, but not the demo."""
    deployer = deployer_of(load_config(config_path), WallClock())
    assert deployer is not None, "the configuration names one"
    try:
        engines = await deployer.list_engines()
        await asyncio.gather(*(deployer.stop(engine.engine) for engine in engines))
    finally:
        await deployer.close()


def modelled_switch_s(deployment: DeploymentSection, name: str) -> float:
    """What the profile says that engines of that configuration take to come up. Half of it is put on those that go to
    sleep in their place."""
    return _straight(deployment)[name].switch_s


def _straight(deployment: DeploymentSection) -> dict[str, Configuration]:
    return {str(engine.id): engine.configuration() for engine in named_profile(deployment.profile).configurations}


def _daemon_config(scenario: DemoScenario, deployment: DeploymentSection, folder: Path) -> dict[str, Any]:
    """All of it in seconds of the clock, as the daemon and everything that it sees have them: engines are as much
    faster as the scenario says."""
    speed, loops = scenario.speed, loop_settings(scenario)
    loops["slow"]["cooldown_s"] = deployment.cooldown_s
    asleep_s = modelled_switch_s(deployment, deployment.standby) / 2 / speed
    options = {"lengths": write_lengths(scenario, folder), "tick_s": scenario.tick_s, "sleep_s": asleep_s}
    straight = _straight(deployment)
    return {
        **loops,
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
        **write_fabric(deployment, folder),
    }
