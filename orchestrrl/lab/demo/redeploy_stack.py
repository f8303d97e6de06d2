"""The processes of the demo of a redeployment: daemon and gateway. The daemon starts the engines, and may replace
them."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from orchestrrl.core.clock import WallClock
from orchestrrl.core.errors import OutcomeUnknown, Permanent
from orchestrrl.daemon.configuration import load_config
from orchestrrl.fleet.configured_deployer import deployer_of
from orchestrrl.lab.demo.redeploy_fabric import site_of, write_fabric
from orchestrrl.lab.demo.scenario import DemoScenario, DeploymentSection
from orchestrrl.lab.demo.stack import EPSILON_S, READY_WITHIN_S, Process
from orchestrrl.rpc.control_client import ControlClient
from orchestrrl.rpc.pb import control_pb2
from orchestrrl.rpc.plain_values import plain
from planner.cost.paper import named_profile
from planner.fabric.topology import Site
from planner.model import Configuration

LOOK_S = 0.1
PORTS = (21_000, 21_999)


@dataclass(slots=True)
class RedeployStack:
    """A daemon that can deploy, and a gateway. No engine runs at first."""

    deployment: DeploymentSection
    control: ControlClient
    gateway_url: str
    site: Site | None  # of the fabric that it drives

    async def begin_with(self, configuration: str, reason: str) -> None:
        """Bring the fleet to that configuration, ready for a step. Raises Permanent."""
        status = await self._status()
        if {worker.configuration for worker in status.workers} != {configuration}:
            target = control_pb2.RedeployTarget(configuration=configuration)
            order = control_pb2.RedeployRequest(targets=[target], reason=reason)
            report: dict[str, Any] = {"state": "refused", "detail": "the daemon did not say why"}
            async for message in self.control.watch(self.control.control.Redeploy, order):
                report = plain(message)
            if report["state"] != "done":
                raise Permanent(f"the fleet is not brought to {configuration}: {report['state']}, {report['detail']}")
        await self._until_all_are_reported()

    async def pin(self) -> None:
        """The planner leaves the fleet as it is."""
        await self.control.call(self.control.control.PinPlan, control_pb2.PinPlanRequest(reason="for comparison"))

    async def release(self) -> None:
        await self.control.call(self.control.control.ReleasePlan, control_pb2.ReleasePlanRequest())

    async def _status(self) -> control_pb2.Status:
        return await self.control.call(self.control.control.GetStatus, control_pb2.GetStatusRequest())

    async def _until_all_are_reported(self) -> None:
        deadline_s = time.monotonic() + READY_WITHIN_S
        while time.monotonic() < deadline_s:
            status = await self._status()
            attached = any(node.kind == "gateway" and node.attached for node in status.nodes)
            if attached and status.workers and all(_is_reported(worker) for worker in status.workers):
                return
            await asyncio.sleep(LOOK_S)
        raise OutcomeUnknown(f"the daemon did not hear of every engine and the gateway in {READY_WITHIN_S:g} s")


def _is_reported(worker: control_pb2.Worker) -> bool:
    """How it does, and what it can do: one of which nobody knows that it can sleep is stopped by a redeployment."""
    return worker.HasField("age_s") and worker.HasField("capabilities")


@contextlib.asynccontextmanager
async def redeploy_stack(scenario: DemoScenario, out_dir: Path) -> AsyncIterator[RedeployStack]:
    """Daemon and gateway; on leaving they end, and with them the engines that the daemon started."""
    deployment = scenario.deployment
    assert deployment is not None, "the scenario is of a fleet that the daemon starts"
    out_dir.mkdir(parents=True, exist_ok=True)
    config_path = out_dir / "daemon.yaml"
    config_path.write_text(yaml.safe_dump(_daemon_config(scenario, deployment, out_dir), sort_keys=False))
    await _end_engines(config_path)  # of an earlier run that was killed
    for path in out_dir.glob("journal.sqlite*"):
        path.unlink()
    async with contextlib.AsyncExitStack() as undo:
        undo.push_async_callback(_end_engines, config_path)
        daemon = Process("daemon", ["daemon", "-c", str(config_path)], out_dir)
        undo.push_async_callback(daemon.stop)
        daemon_address = await daemon.address()
        flags = ["--daemon", daemon_address, "--engine-kind", "simulated", "--id", "gateway"]
        flags += ["--report-interval-s", str(scenario.control.report_interval_s)]
        gateway = Process("gateway", ["gateway", "--listen", "127.0.0.1:0", *flags], out_dir)
        undo.push_async_callback(gateway.stop)
        gateway_url = await gateway.address()
        control = await undo.enter_async_context(ControlClient(daemon_address))
        yield RedeployStack(deployment, control, gateway_url, site_of(deployment))


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


def _daemon_config(scenario: DemoScenario, deployment: DeploymentSection, out_dir: Path) -> dict[str, Any]:
    """All of it in seconds of the clock, as the daemon and everything that it sees have them: engines are as much
    faster as the scenario says."""
    control, speed = scenario.control, scenario.speed
    lengths_path = (out_dir / "lengths.yaml").absolute()
    lengths_path.write_text(yaml.safe_dump(scenario.lengths.model_dump(mode="json")))
    asleep_s = modelled_switch_s(deployment, deployment.standby) / 2 / speed
    flags = ["--lengths", str(lengths_path), "--tick-s", str(scenario.tick_s)]
    flags += ["--enable-sleep-mode", "--sleep-s", str(asleep_s)]
    return {
        "mode": "act",
        "listen": {"address": "127.0.0.1:0"},
        "journal": {"path": str(out_dir / "journal.sqlite")},
        "fast": {
            "interval_s": control.fast_interval_s,
            "max_moves_per_tick": control.max_moves_per_tick,
            "max_moves_per_request": control.max_moves_per_request,
        },
        "slow": {
            "interval_s": control.slow_interval_s,
            "epsilon_s": EPSILON_S / speed,
            "cooldown_s": deployment.cooldown_s,
            "max_output_tokens": scenario.max_tokens,
        },
        "fleet": {
            "gpus": {"count": deployment.gpus, "per_node": deployment.per_node},
            "configurations": _configurations(deployment, speed),
            "launch": {"engine": "simulated", "ports": list(PORTS), "arguments": flags},
            "deployer": {
                "product": "local",
                "name": "orchestrrl-demo",
                "folder": str((out_dir / "engines").absolute()),
                "standby": "keep",
            },
        },
        **write_fabric(deployment, out_dir),
    }


def _configurations(deployment: DeploymentSection, speed: float) -> list[dict[str, Any]]:
    straight = _straight(deployment)
    names: Sequence[str] = (deployment.initial, deployment.standby)
    return [
        {
            "id": name,
            "gpus": straight[name].gpus,
            "alpha_s": straight[name].alpha_s / speed,
            "beta_s": straight[name].beta_s / speed,
            "gamma_s": straight[name].gamma_s / speed,
            "kv_capacity_tokens": straight[name].kv_capacity_tokens,
            "max_sequences": straight[name].max_sequences,
            "prefill_tokens_per_s": straight[name].prefill_tokens_per_s * speed,
            "switch_s": straight[name].switch_s / speed + deployment.overhead_s,
        }
        for name in names
    ]
