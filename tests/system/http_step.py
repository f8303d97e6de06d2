"""A generation step over sockets in virtual time: engines and gateway over HTTP, daemon and agent over gRPC.

All components are real, in one process and on one clock. Time advances only while the daemon's view of the fleet is
fresh, so that a slow machine makes the test longer but does not change the step. If no view arrives, as after a scrape
that timed out, time advances slightly, because the next scrape waits for it."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from orchestrrl.agent.sidecar import Agent
from orchestrrl.agent.watch import HealthLimits as AgentLimits
from orchestrrl.core.clock import VirtualClock
from orchestrrl.core.config.schema import Config, EngineSettings, ListenSettings
from orchestrrl.core.journal.store import Journal
from orchestrrl.core.operations import EngineRoute
from orchestrrl.daemon.control_plane import ControlPlane, run_loops
from orchestrrl.daemon.wiring import build_daemon
from orchestrrl.engines.base import connect
from orchestrrl.gateway.core import Gateway
from orchestrrl.gateway.http.server import GatewayServer
from orchestrrl.gateway.link import GatewayLink
from orchestrrl.gateway.relay import RelayLimits
from orchestrrl.gateway.routing.backends import EngineBackends
from orchestrrl.lab.sim.scenario import GenerationControlSection
from orchestrrl.lab.simulated_engine.options import SimulatedOptions
from orchestrrl.lab.simulated_engine.server import SimulatedServer
from orchestrrl.rpc.server import DaemonServer
from orchestrrl.rpc.switches_service import SwitchesService
from planner.model import EngineHealth, EngineId, NodeId

TICK_S = 0.1  # virtual seconds
FRESH_WITHIN_S = 240.0  # real seconds: a deadline for hanging tests
AGAIN_AFTER_S = 3.0  # real
NO_END_S = 1e9


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request. The engine determines the length of its response."""

    id: str
    group: str
    prompt_ids: tuple[int, ...]
    max_tokens: int
    to: int | None = None  # index of an engine; None: the gateway's choice


@dataclass(slots=True)
class HttpStep:
    """The outcome of a step. Times are virtual seconds from the start of the step."""

    finish_s: dict[str, float] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    moves: int = 0

    @property
    def makespan_s(self) -> float:
        return max(self.finish_s.values())


@dataclass(slots=True)
class Harness:
    """The running components and their clock. `fresh_s` is the maximum age of the daemon's view."""

    clock: VirtualClock
    engines: list[SimulatedServer]
    gateway_url: str = ""
    plane: ControlPlane | None = None
    fresh_s: float = NO_END_S
    tasks: list[asyncio.Task[Any]] = field(default_factory=list)

    async def pass_time(self, until: Callable[[], bool]) -> None:
        while not until():
            await self.clock.advance(TICK_S)
            async with asyncio.timeout(FRESH_WITHIN_S):
                await asyncio.sleep(0.001)
                asked_s = time.monotonic()
                while not self._fresh():
                    await asyncio.sleep(0.001)
                    if time.monotonic() - asked_s > AGAIN_AFTER_S:
                        await self.clock.advance(TICK_S)
                        asked_s = time.monotonic()
            for task in self.tasks:
                if task.done():
                    task.result()

    def _fresh(self) -> bool:
        if self.plane is None:
            return True
        age_s = self.plane.fleet.state.snapshot(self.clock.now_s()).inputs_age_s
        return age_s is None or age_s <= self.fresh_s

    async def run_step(self, prompts: Sequence[Prompt]) -> HttpStep:
        """Send all requests at once and run the step."""
        step, started_s = HttpStep(), self.clock.now_s()
        moved = 0 if self.plane is None else self.plane.fleet.state.totals.moves_done
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:

            async def ask(prompt: Prompt) -> None:
                url = self.gateway_url if prompt.to is None else self.engines[prompt.to].url
                body = {"prompt": list(prompt.prompt_ids), "max_tokens": prompt.max_tokens, "return_token_ids": True}
                headers = {"X-Request-Id": prompt.id, "X-Group-Id": prompt.group}
                async with session.post(f"{url}/v1/completions", json=body, headers=headers) as response:
                    answer = await response.json()
                    assert response.status == 200, answer
                step.finish_s[prompt.id] = self.clock.now_s() - started_s
                step.tokens[prompt.id] = len(answer["choices"][0]["token_ids"])

            asking = [asyncio.create_task(ask(prompt)) for prompt in prompts]
            await self._all_accepted(len(prompts))
            await self.pass_time(lambda: all(task.done() for task in asking))
            await asyncio.gather(*asking)
        if self.plane is not None:
            step.moves = self.plane.fleet.state.totals.moves_done - moved
        return step

    async def _all_accepted(self, count: int) -> None:
        """Wait until all requests are accepted, before time advances."""
        async with asyncio.timeout(FRESH_WITHIN_S):
            while sum(engine.runtime.running + engine.runtime.waiting for engine in self.engines) < count:
                await asyncio.sleep(0.001)


@asynccontextmanager
async def engines(options: SimulatedOptions, count: int) -> AsyncIterator[Harness]:
    """Start engines without OrchestrRL."""
    clock = VirtualClock()
    async with AsyncExitStack() as stack:
        started = [await stack.enter_async_context(SimulatedServer(options, clock=clock)) for _ in range(count)]
        yield Harness(clock, started)


@asynccontextmanager
async def controlled(
    options: SimulatedOptions, count: int, config: Config, control: GenerationControlSection, folder: Path
) -> AsyncIterator[Harness]:
    """Start engines with an agent, a gateway and a daemon, as wired by `orchestrrl daemon`, `agent` and `gateway`."""
    async with engines(options, count) as harness, AsyncExitStack() as stack:
        clock, ids = harness.clock, [EngineId(f"e{index}") for index in range(count)]
        journal = stack.enter_context(Journal(folder / "journal.sqlite", clock.now_s()))
        parts = build_daemon(_with_engines(config, harness.engines), journal, clock)
        plane = parts.control_plane
        plane.plans.pin("engines stay as they are", 0.0)
        server = await DaemonServer.start(
            parts, ListenSettings(address="127.0.0.1:0"), SwitchesService({}, parts.circuits)
        )
        stack.push_async_callback(server.stop, 0.5)
        stack.push_async_callback(plane.fleet.close, 0.0)
        fleet = EngineBackends(lambda url: connect("simulated", url), clock=clock)
        stack.push_async_callback(fleet.close)
        gateway = Gateway(NodeId("gateway"), fleet, limits=RelayLimits(stall_s=NO_END_S))
        door = GatewayServer(gateway)
        harness.gateway_url = gateway.url = await door.start("127.0.0.1", 0)
        stack.push_async_callback(door.close)
        gateway.set_routes(
            tuple(EngineRoute(id, each.url, EngineHealth.OK) for id, each in zip(ids, harness.engines, strict=True))
        )
        clients = {id: connect("simulated", each.url) for id, each in zip(ids, harness.engines, strict=True)}
        for client in clients.values():
            stack.push_async_callback(client.close)
        agent = Agent(
            NodeId("agent"),
            clients,
            server.address,
            clock=clock,
            interval_s=control.scrape_interval_s,
            limits=AgentLimits(rate_window_s=control.rate_window_s),
        )
        link = GatewayLink(gateway, server.address, report_interval_s=control.report_interval_s)
        works: list[Awaitable[Any]] = [agent.run(), link.run(), gateway.watch(), run_loops(plane, clock)]
        harness.tasks = [asyncio.ensure_future(work) for work in works]
        stack.push_async_callback(_end, harness.tasks)
        harness.plane, harness.fresh_s = plane, max(control.scrape_interval_s, control.report_interval_s) + 2 * TICK_S
        await harness.pass_time(lambda: plane.fleet.state.snapshot(clock.now_s()).inputs_age_s is not None)
        yield harness


def _with_engines(config: Config, servers: Sequence[SimulatedServer]) -> Config:
    (configuration,) = config.fleet.configurations
    shown = tuple(
        EngineSettings(id=f"e{place}", url=server.url, configuration=configuration.id, gpus=(place,))
        for place, server in enumerate(servers)
    )
    return config.model_copy(update={"fleet": config.fleet.model_copy(update={"engines": shown})})


async def _end(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
