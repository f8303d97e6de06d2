"""Simulate a fleet under the real control plane: engines, agents, a gateway and a deployer on a virtual clock.

The control plane is the production code and is constructed by the same function as in the daemon.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from orchestrrl.agent.watch import EngineTrack, HealthLimits, fold, judge
from orchestrrl.core.clock import VirtualClock
from orchestrrl.core.config.schema import Config, FleetSettings
from orchestrrl.core.errors import Permanent, Retryable
from orchestrrl.core.journal.store import Journal
from orchestrrl.core.nodes import Attachment, NodeHello, NodeKind
from orchestrrl.daemon.control_plane import run_loops
from orchestrrl.daemon.wiring import DaemonEdges, build_daemon
from orchestrrl.fleet.deployers.base import DeployedInstance
from orchestrrl.fleet.deployers.command_line import EngineSpec
from orchestrrl.fleet.redeployment.actions import FleetDeployment
from orchestrrl.fleet.reports import EngineReport
from orchestrrl.gateway.routing.strategies import RoutingPolicy
from orchestrrl.lab.deployers.simulated import SimulatedDeployer
from orchestrrl.lab.sim.engines import EngineKind, VirtualEngine, VirtualManaged
from orchestrrl.lab.sim.gateway import CountedRecord, VirtualGateway
from orchestrrl.lab.sim.network import Node, NodeNetwork
from orchestrrl.lab.sim.scenario import GenerationFaultSection, GenerationScenario
from orchestrrl.lab.sim.workload import SimRequest
from planner.model import ConfigurationId, EngineId, GpuId, NodeId, RequestId

GATEWAY = NodeId("gateway")
STREAM = 1
# A step without progress for this long is considered stuck.
STUCK_AFTER_S = 3600.0


@dataclass(slots=True)
class StepRecord:
    """The results of one generation step."""

    started_s: float
    requests: int
    finish_s: list[float] = field(default_factory=list)  # completion time of each answer, from the run's start
    output_tokens: int = 0

    @property
    def makespan_s(self) -> float:
        return max(self.finish_s) - self.started_s


@dataclass(slots=True)
class _Agent:
    """The state that an engine's agent keeps between two scrapes."""

    node: NodeId
    track: EngineTrack = field(default_factory=EngineTrack)


class World:
    """A simulated fleet and its control plane. Enter it with `async with`, then call `run_step` for each generation
    step."""

    def __init__(
        self,
        config: Config,
        kinds: Mapping[ConfigurationId, EngineKind],
        scenario: GenerationScenario,
        journal_path: Path,
        *,
        share_network: bool = True,
        known_output_tokens: Mapping[RequestId, int] | None = None,
    ) -> None:
        """Construct the fleet and the daemon. If `share_network` is false, concurrent transfers do not slow each other
        down. With `known_output_tokens`, the planner uses exact output lengths."""
        self.clock = VirtualClock()
        self.kinds = kinds
        self.control = control = scenario.control
        self.per_node = scenario.gpus_per_node
        self.links = scenario.network
        self.kv_bytes_per_token = scenario.engines.moved_bytes_per_token
        self.engines: dict[EngineId, VirtualEngine] = {}
        self.past_engines: list[VirtualEngine] = []
        self._by_url: dict[str, VirtualEngine] = {}
        self._agents: dict[EngineId, _Agent] = {}
        self._limits = HealthLimits(rate_window_s=control.rate_window_s)
        self._sequence = 0
        nic_gbps = scenario.network.nic_gbps_per_node
        self.network = NodeNetwork(self.clock, nic_gbps, share_network, self._links_changed)
        self.transfers = 0
        self._under_way: set[asyncio.Task[None]] = set()
        self.machines = SimulatedDeployer(
            self.clock,
            {kind.id: kind.profile.switch_s for kind in kinds.values()},
            self._engine_started,
            self._engine_stopped,
        )
        self.gateway = VirtualGateway(
            GATEWAY,
            self.clock,
            self._by_url.__getitem__,
            self._arrive,
            self._answered,
            routing=RoutingPolicy(scenario.gateway.policy, queue_depth=scenario.gateway.queue_depth),
        )
        self.journal = Journal(journal_path, self.clock.now_s())
        deployment = FleetDeployment(
            self.machines,
            lambda url: VirtualManaged(url, self._live_engine),
            config.fleet.gpus.count if config.fleet.gpus else 0,
            self.per_node,
            _spec_of,
        )
        edges = DaemonEdges(
            deployment=deployment,
            left_for_moves=self.network.left_for_moves,
            known_output_tokens=known_output_tokens,
            # Decisions take no simulated time, and measured time would differ between runs.
            stopwatch=lambda: 0.0,
        )
        self.daemon = daemon = build_daemon(config, self.journal, self.clock, edges)
        assert daemon.redeployer is not None
        self.control_plane, self.fleet, self.deployment = daemon.control_plane, daemon.fleet, daemon.redeployer
        self._make_spec = partial(_spec_of, config.fleet)
        self.steps: list[StepRecord] = []
        self._tasks: list[asyncio.Task[None]] = []

    def deploy(self, configuration: ConfigurationId, fleet: Mapping[EngineId, tuple[GpuId, ...]]) -> None:
        """Place the initial engines on their GPUs, all with the same configuration."""
        for engine, gpus in fleet.items():
            self.machines.place(self._make_spec(engine, configuration, gpus))

    async def __aenter__(self) -> "World":
        await self.deployment.recover()
        attachment = self.fleet.attach(NodeHello(GATEWAY, NodeKind.GATEWAY, tuple(self.engines), "sim"))
        self._tasks = [
            asyncio.create_task(work)
            for work in (self._pump(), self._perform_orders(attachment), run_loops(self.control_plane, self.clock))
        ]
        await self.advance(2 * self.control.report_interval_s)
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        outcomes = await asyncio.gather(*self._tasks, return_exceptions=True)
        for transfer in self._under_way:
            transfer.cancel()
        self.network.close()
        await self.control_plane.fleet.close(0.0)
        await self.deployment.close()
        self.machines.shut_down()
        await self.gateway.fleet.close()
        self.journal.close()
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome

    async def advance(self, duration_s: float) -> None:
        """Advance the virtual clock by `duration_s`. Raises the first exception of a failed task or of the control
        plane."""
        await self.clock.advance(duration_s)
        for task in self._tasks:
            if task.done() and not task.cancelled():
                task.result()
        for error in self.control_plane.defects.errors:  # errors of moves and plans, which run outside the loops
            raise error

    def schedule(self, faults: Sequence[GenerationFaultSection]) -> None:
        self._tasks += [asyncio.create_task(self._inject(fault)) for fault in faults]

    async def run_step(
        self,
        requests: Sequence[SimRequest],
        dealt_to: Sequence[EngineId] | None = None,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> StepRecord:
        """Submit the requests and advance the clock until each request has its answer. `dealt_to` contains the engine
        for each request. If it is None, the gateway routes the requests. Raises Permanent if no request finishes for
        `STUCK_AFTER_S` seconds of simulated time."""
        step = StepRecord(self.clock.now_s(), len(requests))
        self.steps.append(step)
        self._send_weights()
        self.gateway.submit(requests, dealt_to)
        last = (self.clock.now_s(), len(requests))
        while self.gateway.records:
            await self.advance(self.control.report_interval_s)
            left = len(self.gateway.records)
            progress(len(requests) - left, len(requests))
            if left < last[1]:
                last = (self.clock.now_s(), left)
            elif self.clock.now_s() - last[0] > STUCK_AFTER_S:
                raise Permanent(f"no request finished for {STUCK_AFTER_S:g} s of simulated time; {left} are unfinished")
        # Agents and gateway report the end in their next reports.
        await self.advance(2 * self.control.report_interval_s)
        return step

    # --- the edges

    def _live_engine(self, url: str) -> VirtualEngine | None:
        """Return the running engine at a URL, advanced to the current time. Return None if no engine runs there."""
        engine = self._by_url.get(url)
        if engine is None or engine.stopped_s is not None:
            return None
        self._catch_up(engine, self.clock.now_s())
        return engine

    def _engine_started(self, deployed: DeployedInstance) -> None:
        kind = self.kinds[deployed.configuration]
        engine = VirtualEngine(deployed.engine, kind, deployed.gpus, deployed.url, self.clock.now_s())
        self.engines[deployed.engine] = self._by_url[deployed.url] = engine
        node = NodeId(f"agent-{deployed.gpus[0] // self.per_node}")
        self._agents[deployed.engine] = _Agent(node)

    def _engine_stopped(self, engine_id: EngineId) -> None:
        engine, now_s = self.engines.pop(engine_id), self.clock.now_s()
        del self._agents[engine_id]
        self._catch_up(engine, now_s)
        engine.stopped_s = now_s
        self.past_engines.append(engine)
        self.gateway.engine_died(engine)

    def _arrive(self, record: CountedRecord, engine: VirtualEngine, source: VirtualEngine | None) -> None:
        """Submit a request to an engine. If the request comes from the engine `source`, and a transfer is faster than
        recomputation, the request's KV is transferred from `source`. Otherwise, its context is prefilled."""
        if source is not None and self.links.kv_transfer:
            passed, wish_gbps = self._path(source, engine)
            gbytes = record.context_tokens * self.kv_bytes_per_token / 1e9
            transfer_s = gbytes * 8 / wish_gbps + self.links.latency_s
            if transfer_s < record.context_tokens / engine.kind.profile.prefill_tokens_per_s:
                self.transfers += 1
                transfer = partial(self.network.transfer, passed, wish_gbps, gbytes)
                self._in_background(self._bring_kv(record, engine, record.attempt, transfer))
                return
        if source is not None:
            cached = engine.scheduler.cached_tokens(record.group, record.prompt_tokens_estimate)
            self.gateway.tokens_recomputed += record.context_tokens - cached
        self._submit(record, engine, prefilled=False)

    def _submit(self, record: CountedRecord, engine: VirtualEngine, *, prefilled: bool) -> None:
        now_s = self.clock.now_s()
        self._catch_up(engine, now_s)
        engine.prompt_tokens_total += 0 if prefilled else record.context_tokens
        engine.scheduler.submit(
            now_s,
            record.id,
            record.context_tokens,
            record.left_tokens,
            prefilled,
            group=record.group,
            prompt_tokens=record.prompt_tokens_estimate,
        )

    async def _bring_kv(
        self, record: CountedRecord, engine: VirtualEngine, attempt: int, transfer: Callable[[], Awaitable[None]]
    ) -> None:
        await self.clock.sleep(self.links.latency_s)
        await transfer()
        if record.attempt == attempt and record.engine == engine.id and engine.stopped_s is None:
            self._submit(record, engine, prefilled=True)

    def _path(self, source: VirtualEngine, target: VirtualEngine) -> tuple[tuple[Node, ...], float]:
        """Return the nodes whose NICs a transfer uses, and the maximum bandwidth of the transfer in Gbit/s. The engine
        with fewer GPUs determines the bandwidth. A transfer within a node uses no NICs."""
        gpus = min(len(source.gpus), len(target.gpus))
        nodes = (source.gpus[0] // self.per_node, target.gpus[0] // self.per_node)
        if nodes[0] == nodes[1]:
            return (), gpus * self.links.nvlink_gbps_per_gpu
        return nodes, gpus * self.links.nic_gbps_per_node / self.per_node

    def _send_weights(self) -> None:
        """Start the transfer of the next weight version to all engines. The transfer runs concurrently with the current
        step."""
        if not self.links.weight_gbytes:
            return
        for engine in self.engines.values():
            for node in sorted(self._nodes_of(engine)):
                gpus = sum(gpu // self.per_node == node for gpu in engine.gpus)
                wish_gbps = gpus * self.links.nic_gbps_per_node / self.per_node
                gbytes = self.links.weight_gbytes * gpus / len(engine.gpus)
                self._in_background(self.network.transfer((node,), wish_gbps, gbytes, "weight sync"))

    def _links_changed(self) -> None:
        """Slow down engines that communicate over congested NICs, and report to the planner the bandwidth that is left
        for moves."""
        now_s = self.clock.now_s()
        self.control_plane.planning.share_nics(self.network.left_for_moves())
        for engine in self.engines.values():
            if engine.kind.nic_gbps:
                crowding = max(self.network.crowding(node) for node in self._nodes_of(engine))
                on_wire = min(1.0, engine.kind.nic_gbps / self.links.nic_gbps_per_node)
                self._catch_up(engine, now_s)
                engine.scheduler.slowdown = 1 + on_wire * max(0.0, crowding - 1)

    def _nodes_of(self, engine: VirtualEngine) -> set[Node]:
        return {gpu // self.per_node for gpu in engine.gpus}

    def _engines_traffic(self) -> dict[Node, float]:
        traffic: dict[Node, float] = {}
        for engine in self.engines.values():
            if engine.kind.nic_gbps and engine.scheduler.running:
                for node in self._nodes_of(engine):
                    traffic[node] = traffic.get(node, 0.0) + engine.kind.nic_gbps
        return traffic

    def _in_background(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)

    def _answered(self, record: CountedRecord) -> None:
        assert record.finished_s is not None
        self.steps[-1].finish_s.append(record.finished_s)
        self.steps[-1].output_tokens += record.generated

    def _catch_up(self, engine: VirtualEngine, now_s: float) -> None:
        self.gateway.progressed(engine, engine.advance(now_s), now_s)

    async def _pump(self) -> None:
        """Advance the engines, and send the reports of the agents and the gateway at their intervals, until
        cancelled."""
        next_scrape_s = next_report_s = self.clock.now_s()
        while True:
            now_s = self.clock.now_s()
            for engine in self.engines.values():
                self._catch_up(engine, now_s)
            self.network.engines_send(self._engines_traffic())
            if now_s >= next_scrape_s:
                next_scrape_s += self.control.scrape_interval_s
                self._scrape(now_s)
            if now_s >= next_report_s:
                next_report_s += self.control.report_interval_s
                ack = self.fleet.gateway_reported(self.gateway.report(), STREAM)
                self.gateway.ledger.acknowledge(ack.sequence)
            await self.clock.sleep(min(next_scrape_s, next_report_s) - now_s)

    def _scrape(self, now_s: float) -> None:
        for engine_id, agent in self._agents.items():
            engine = self.engines.get(engine_id)
            reading = replace(engine.reading(), sampled_s=now_s) if engine else None
            health, detail = judge(reading or Retryable("connection refused", 1.0), 0.0, self._limits)
            agent.track, sample = fold(agent.track, reading, self._limits)
            is_sent = engine is None or engine.capabilities_sent
            if engine is not None:
                engine.capabilities_sent = True
            self._sequence += 1
            self.fleet.engine_reported(
                EngineReport(
                    agent.node,
                    self._sequence,
                    engine_id,
                    f"http://{engine_id}.sim",
                    health,
                    detail,
                    sample,
                    None if is_sent or engine is None else engine.features,
                ),
                STREAM,
            )

    async def _perform_orders(self, attachment: Attachment) -> None:
        """Carry out the daemon's orders at the gateway, and send their results to the daemon."""
        async for operation in attachment.orders():
            self.fleet.result_received(self.gateway.perform(operation))

    async def _inject(self, fault: GenerationFaultSection) -> None:
        await self.clock.sleep(fault.at_s - self.clock.now_s())
        engine = self.engines.get(EngineId(fault.kill_engine))
        if engine is None:
            return
        agent = self._agents[engine.id]
        self.machines.remove(engine.id)
        self._agents[engine.id] = agent  # the agent remains, and reports that the engine does not respond
        if fault.back_after_s is not None:
            await self.clock.sleep(fault.back_after_s)
            with suppress(Permanent):  # another engine may use its GPUs now
                self.machines.place(self._make_spec(engine.id, engine.kind.id, engine.gpus))


def _spec_of(
    fleet: FleetSettings, engine: EngineId, configuration: ConfigurationId, gpus: Sequence[GpuId]
) -> EngineSpec:
    return EngineSpec(engine, configuration, fleet.layouts()[configuration], tuple(gpus))
