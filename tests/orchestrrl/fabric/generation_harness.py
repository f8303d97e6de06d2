"""Run the redeployment harness with an optical fabric of virtual switches, in virtual time: four servers of one GPU
generate, each below its own ToR."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from redeployment_harness import Harness

from ocs_drivers.virtual import VirtualSwitch
from orchestrrl.core.config.schema import FabricSettings
from orchestrrl.daemon.control_plane import ControlPlane
from orchestrrl.fabric.circuit_executor import CircuitExecutor
from orchestrrl.fabric.coordinator import CircuitCoordinator
from orchestrrl.fabric.generation_circuits import GenerationCircuits
from orchestrrl.fabric.switch_reader import SwitchReader
from orchestrrl.fabric.window_tracker import WindowTracker
from orchestrrl.fleet.redeployment.controller import RedeploymentController
from orchestrrl.fleet.redeployment.steps import (
    StepKind,
)
from planner.cost.models import model_named
from planner.fabric.generate import SiteShape, regular_site
from planner.fabric.materialize import materialize
from planner.fabric.model import port_pair
from planner.fabric.topology import SwitchModel
from planner.fabric.windows import CommitTimes

FIRST_GPU = 4  # earlier ones belong to the PoD that trains
TORS = tuple(f"gen0/b{server}-r0" for server in range(4))
MESH = {(a, b): 1 for n, a in enumerate(TORS) for b in TORS[n + 1 :]}
PAIRS = {TORS[:2]: 3, TORS[2:]: 3}  # needed by two engines of two GPUs
PORTS = 32


class FabricHarness:
    """A redeployment harness whose circuits follow the deployment."""

    def __init__(
        self, harness: Harness, *, device_s: float = 0.025, within_s: float = 10.0, first_gpu: int = FIRST_GPU
    ):
        self.harness = harness
        self.clock = harness.clock
        device = SwitchModel("tested", device_s, PORTS)
        shape = SiteShape(
            1, 1, 4, 1, 1, servers_per_tor=1, tor_uplinks=4, core_lanes=8, response_lanes=4, agg_device=device
        )
        self.site = regular_site(shape)
        options: dict[str, Any] = {"ports": PORTS, "connectivity": "any_to_any", "reconfiguration_s": device_s}
        self.switches = {each.id: VirtualSwitch(each.id, clock=self.clock, **options) for each in self.site.switches}
        self.agg = self.switches[next(each.id for each in self.site.switches if each.pod == "gen0")]
        self.within_s = within_s
        self.first_gpu = first_gpu
        self.let_in_under: list[dict[tuple[str, str], int]] = []  # circuits at each admission of an engine
        self.fabric: Any = None
        self.gen: Any = None

    def _circuits(self, plane: ControlPlane) -> GenerationCircuits:
        settings = FabricSettings(site="site.yaml", first_fleet_gpu=self.first_gpu)
        circuits = CircuitExecutor({str(id): switch for id, switch in self.switches.items()}, plane.journal, self.clock)
        self.fabric = CircuitCoordinator(
            self.site,
            SwitchReader(self.site, dict(self.switches), self.clock, circuits.owners),
            circuits,
            WindowTracker(self.clock),
            plane.pause_registry,
            plane.journal,
            self.clock,
            materialise=lambda intent, state: materialize(self.site, intent, state),
            mode=lambda: plane.mode.current,
            times=CommitTimes({switch.id: switch.device.reconfiguration_s for switch in self.site.switches}),
            settings=settings,
        )
        self.gen = GenerationCircuits(self.fabric, model_named("qwen2.5-14b"), settings, self.clock, self.within_s)
        return self.gen

    @asynccontextmanager
    async def daemon(self) -> AsyncIterator[RedeploymentController]:
        async with self.harness.daemon(self._circuits) as redeployer:
            plane, fabric = self.harness.plane, self.fabric
            add_engine = plane.fleet.state.add_engine

            def added(facts: Any) -> None:
                self.let_in_under.append(self.circuits())
                add_engine(facts)

            plane.fleet.state.add_engine = added
            running = asyncio.create_task(fabric.run())
            try:
                await self.clock.advance(0.1)
                yield redeployer
            finally:
                running.cancel()
                with suppress(asyncio.CancelledError):
                    await running

    def circuits(self) -> dict[tuple[str, str], int]:
        """Return the circuits between ToRs of the PoD that generates, as the devices show them."""
        found: Counter[tuple[str, str]] = Counter()
        for id, switch in self.switches.items():
            for each in switch.model.circuits():
                pair = each.cross_connect
                ends = self.site.cabling.ends(port_pair(id, pair.ingress_port, pair.egress_port))
                if ends is not None and all(end in TORS for end in ends):
                    found[ends] += 1
        return dict(found)

    def admitted(self) -> str:
        """Return the detail of the last redeployment's admit step."""
        steps = self.harness.redeployer.report().steps
        return str([each.detail for each in steps if each.step.kind is StepKind.ADMIT and each.detail][-1])
