"""Connect the daemon to its fleet: receive reports and results, and send orders to attached nodes.

The daemon's decisions are made in control_plane.py.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from typing import Any

from balancer.move_limits import LastMoves
from orchestrrl.core.addresses import host_id
from orchestrrl.core.clock import Clock, stop
from orchestrrl.core.config.schema import Config
from orchestrrl.core.defects import MOVES
from orchestrrl.core.journal.store import EntryKind, Journal
from orchestrrl.core.nodes import Attachment, NodeHello, NodeKind, NodeRegistry
from orchestrrl.core.operation_runner import OperationRunner
from orchestrrl.core.operations import MoveRequests, MovesOutcome, Operation, OperationResult
from orchestrrl.daemon.mode import ModeSwitch
from orchestrrl.daemon.plan_book import PlanBook
from orchestrrl.daemon.planning import Planning
from orchestrrl.fleet.cancellation import Canceller
from orchestrrl.fleet.membership_changes import MembershipChanges, engine_facts
from orchestrrl.fleet.move_orders import MovedRequest, checked_move, moved_requests
from orchestrrl.fleet.pause_barrier import PauseBarrier
from orchestrrl.fleet.redeployment.turn import DeploymentTurn
from orchestrrl.fleet.reports import EngineReport, GatewayReport, ReportAck
from orchestrrl.fleet.routes import RoutingTable
from orchestrrl.fleet.state import FleetState, GenerationStep
from planner.model import ConfigurationId, EngineHealth, EngineId, NodeId, RequestId, RequestMove, Snapshot
from planner.move_methods import choose_move_methods

logger = logging.getLogger(__name__)

MOVES_SHOWN = 64  # the latest


class FleetCoordinator:
    """Manages the fleet's engines, gateways, requests, routes and pauses. The constructor recovers their state from the
    journal."""

    def __init__(
        self,
        config: Config,
        journal: Journal,
        clock: Clock,
        mode: ModeSwitch,
        turn: DeploymentTurn,
        plans: PlanBook,
        planning: Planning,
        restarted: Callable[[EngineId], None],
    ) -> None:
        """`restarted` is called with the id of an engine that has lost its weights because it was restarted."""
        self.config = config
        self.journal = journal
        self.clock = clock
        self.defects = mode.defects
        self.plans = plans
        self.planning = planning
        self.state = FleetState(engine_facts(config), capacity=config.limits, host=host_id())
        self.nodes = NodeRegistry(config.limits.nodes)
        self.runner = OperationRunner(journal, self.nodes, clock, self._closed)
        self.routes = RoutingTable(config, self.state, self.nodes, self.runner, journal, clock)
        self.barrier = PauseBarrier(
            self.runner, self.nodes, self.state, turn, journal, clock, self._barrier_changed, restarted
        )
        self.membership_changes = MembershipChanges(
            config, self.state, self.routes, journal, clock, self.start_moves, self.barrier.check_open
        )
        self.canceller = Canceller(self.runner, self.nodes, clock)
        self.latest_moves: deque[MovedRequest] = deque(maxlen=MOVES_SHOWN)
        self.last_moves = LastMoves()
        self.moves_ended_s: float | None = None
        self.step_began = asyncio.Event()  # set with each new step; the slow loop waits for it
        self._began_step: GenerationStep | None = None
        self._ended_step: GenerationStep | None = None  # the last step whose end is journalled
        self._health: dict[EngineId, EngineHealth] = {}
        self._remarks: dict[EngineId, tuple[str, ...]] = {}  # on engine names and reports, as last journalled
        self._doubles: dict[NodeId, NodeId] = {}  # nodes that share an id with another node, as last journalled
        plans.recover()
        planning.recover(journal)
        self.routes.recover()
        self.barrier.recover()
        operations = self.runner.recover()
        self.note(EntryKind.DAEMON_STARTED, "", {"mode": mode.current, "open_operations": operations})

    def reconfigure(self, config: Config) -> None:
        """Apply the parts of a reloaded configuration that may change at run time."""
        self.config = config
        self.routes.reconfigure(config)
        self.membership_changes.reconfigure(config)

    async def close(self, drain_s: float) -> None:
        """Wait up to `drain_s` seconds for the results of open operations, then end all streams to nodes. Operations
        that remain open are settled by the next daemon."""
        left = await self.runner.drain(drain_s)
        self.routes.close()
        await stop(*self.defects.tasks, *self.barrier.waiting, *self.canceller.waiting)
        self.nodes.end_all()
        self.plans.close()
        self.note(EntryKind.DAEMON_STOPPED, "", {"open_operations": left})

    # --- observe

    def engine_reported(self, report: EngineReport, stream: int) -> ReportAck:
        """Apply an agent's report to the fleet state and return the acknowledgement. Raises LimitReached if the report
        would exceed a configured limit."""
        now_s = self.clock.now_s()
        report = replace(report, agent=self.nodes.id_of(report.agent, report.incarnation, stream))
        self.state.check_engine_report(report, now_s)
        report = self.state.named(report, now_s)
        taken = self.state.fold_engine(report, now_s, stream)
        if taken:
            if report.sample is not None:
                self.barrier.sampled(report.engine, report.sample)
            # A paused engine yields no measurements.
            closed = self.barrier.state.lease is not None
            if self.state.configuration_of(report.engine) is None:
                self.planning.offered(report.engine, self.state.capabilities(report.engine))
            self.planning.observe(report, None if closed else self._configuration_of(report.engine))
        if taken and self._health.get(report.engine) is not report.health:
            before = self._health.get(report.engine)
            self._health[report.engine] = report.health
            if len(self._health) > 2 * self.config.limits.engines:  # drop engines that are forgotten
                self._health = {e: health for e, health in self._health.items() if self.state.reported(e)}
            detail = {"health": report.health, "before": before, "detail": report.health_detail, "url": report.url}
            self.note(EntryKind.ENGINE_HEALTH, report.engine, detail)
            why = f": {report.health_detail}" if report.health_detail else ""
            logger.info("engine %s is %s%s", report.engine, report.health, why)
            self.routes.changed(lost=report.health is not EngineHealth.OK)
        self._note_step_end()
        self.nodes.on_report(report.agent, now_s)
        return ReportAck(report.sequence, self.journal.generation, now_s)

    def gateway_reported(self, report: GatewayReport, stream: int) -> ReportAck:
        """Apply a gateway's report to the fleet state and return the acknowledgement. Raises LimitReached if the report
        would exceed a configured limit."""
        now_s = self.clock.now_s()
        report = replace(report, gateway=self.nodes.id_of(report.gateway, report.incarnation, stream))
        self.state.check_gateway_report(report, now_s)
        new_failovers = self.state.fold_gateway(report, now_s, stream)
        if enough := self.state.groups.take():
            self.canceller.redundant(self.state.gateways_of_groups(enough))
        for failovers in new_failovers:
            self.note(
                EntryKind.ENGINE_FAILOVERS, failovers.engine, {"gateway": report.gateway, **asdict(failovers.counts)}
            )
        self.barrier.reported(report.gateway, report.barrier)
        self._note_step_end()
        self.nodes.on_report(report.gateway, now_s)
        return ReportAck(report.sequence, self.journal.generation, now_s)

    def stream_ended(self, stream: int) -> None:
        """Record that no more reports will arrive on this stream."""
        self.state.stream_ended(stream)
        self.nodes.stream_ended(stream)

    def attach(self, hello: NodeHello) -> Attachment:
        """Attach a node to its stream of orders. A gateway's routes are sent first, then its open operations. Raises
        LimitReached if the node would exceed a configured limit."""
        now_s = self.clock.now_s()
        self.state.check_hello(hello, now_s)
        attachment = self.nodes.attach(hello, now_s)
        try:
            self._attach(attachment.hello, now_s)
        except BaseException:  # e.g. the journal cannot be written: undo
            self.nodes.detach(attachment, now_s)
            raise
        return attachment

    def _attach(self, hello: NodeHello, now_s: float) -> None:
        """Record the hello message of an attached node, and send its first orders."""
        self.state.fold_hello(hello, now_s)
        self.note(EntryKind.NODE_ATTACHED, hello.node, {"kind": hello.kind, "version": hello.version, "url": hello.url})
        logger.info("%s %s attached", hello.kind, hello.node)
        if hello.kind is NodeKind.GATEWAY:
            self.routes.attached(hello.node)
            self.routes.send(self.state.engines(now_s))
            self.barrier.attaching(hello.node)
        self.runner.attached(hello.node)
        if hello.kind is NodeKind.GATEWAY:
            self.barrier.attached(hello.node)

    def detach(self, attachment: Attachment) -> None:
        if self.nodes.detach(attachment, self.clock.now_s()):
            self.note(EntryKind.NODE_DETACHED, attachment.hello.node, {"kind": attachment.hello.kind})
            logger.info("%s %s detached", attachment.hello.kind, attachment.hello.node)
            if attachment.hello.kind is NodeKind.GATEWAY:
                self.barrier.detached(attachment.hello.node)

    def result_received(self, result: OperationResult) -> None:
        self.nodes.on_report(result.node, self.clock.now_s())
        self.runner.receive(result)

    # --- act

    async def move(self, request: RequestId, to_engine: EngineId) -> MovesOutcome:
        """Carry out a move that an operator orders. Raises ProblemFaults if an id is unknown, and Permanent if the
        pause barrier is closed or the request must not move."""
        self.barrier.check_open()
        snapshot = self.state.snapshot(self.clock.now_s())
        to_engine = self.state.engine_called(to_engine, snapshot.now_s)
        return await self.carry_out((checked_move(snapshot, request, to_engine),), snapshot)

    async def carry_out(self, moves: Sequence[RequestMove], snapshot: Snapshot) -> MovesOutcome:
        versions = self.routes.kv_versions(snapshot.engines)
        priced = choose_move_methods(moves, self.planning.identified(snapshot), self.planning.move_costing(versions))
        named = [replace(m, from_engine=self.state.own_name(m.request, m.from_engine)) for m in priced]
        return await self.runner.run_moves(named, self.state.gateway_of, self.config.fast.operation_expiry_s)

    def start_moves(self, moves: Sequence[RequestMove], snapshot: Snapshot) -> asyncio.Task[MovesOutcome]:
        return self.defects.begin(MOVES, self.carry_out(moves, snapshot))

    @property
    def moves_open(self) -> int:
        """Return the number of operations that move requests and have no result yet."""
        return sum(isinstance(opened.order.action, MoveRequests) for opened in self.runner.open)

    def _closed(self, operation: Operation, result: OperationResult) -> None:
        if isinstance(operation.action, MoveRequests):
            self.moves_ended_s = self.clock.now_s()
            carried_out = moved_requests(self.moves_ended_s, operation.action.moves, result.items)
            self.last_moves.moved(self.moves_ended_s, (moved.move.request for moved in carried_out))
            self.state.fold_result(result)
            self.planning.costs.moved(carried_out, self._configuration_of)
            self.latest_moves.extend(carried_out)

    # --- names

    def remarks(self, engines: Iterable[EngineId]) -> dict[EngineId, tuple[str, ...]]:
        """Return remarks on engines that have several names or are reported by several agents. Each remark is one
        sentence. Engines without remarks are omitted."""
        now_s = self.clock.now_s()
        others, found = self.state.names(now_s).others, {}
        for engine in engines:
            remarks = [f"{name} of {node} is the same server as {engine}" for node, name in others.get(engine, ())]
            if agents := self.state.reported_by(engine, now_s):
                second = ", ".join(agents[1:])
                remarks.insert(0, f"{len(agents)} agents report {engine}: {agents[0]}, which counts, and {second}")
            if remarks:
                found[engine] = tuple(remarks)
        return found

    def node_remarks(self) -> tuple[str, ...]:
        """Return one sentence for each pair of nodes that share an id."""
        return tuple(
            f"two nodes have the id {node}: the second is listed as {listed}"
            for listed, node in sorted(self.nodes.doubles().items())
        )

    def note_remarks(self, snapshot: Snapshot) -> None:
        """Journal and log changes in the remarks on engines (see `remarks`), and new nodes that share an id with
        another node."""
        remarks = self.remarks(engine.id for engine in snapshot.engines)
        for engine in sorted(remarks.keys() | self._remarks.keys()):
            now, before = remarks.get(engine, ()), self._remarks.get(engine, ())
            if now != before:
                self.note(EntryKind.ENGINE_REMARKS, engine, {"remarks": list(now)})
            for remark in now:
                if remark not in before:
                    logger.warning("%s", remark)
            for remark in before:
                if remark not in now:
                    logger.info("resolved: %s", remark)
        self._remarks = remarks
        doubles = self.nodes.doubles()
        for listed, node in doubles.items():
            if listed not in self._doubles:
                self.note(EntryKind.NODE_DOUBLE, node, {"listed": listed})
                logger.warning("two nodes have the id %s: the second is listed as %s", node, listed)
        self._doubles = doubles

    # --- inside

    def _barrier_changed(self) -> None:
        self.routes.send(self.state.engines(self.clock.now_s()))

    def _configuration_of(self, engine: EngineId) -> ConfigurationId | None:
        """Return the engine's configuration. If the engine has no configured one, return its implicit configuration, or
        None if it has neither."""
        return self.state.configuration_of(engine) or self.planning.implicit_configuration(engine)

    def _note_step_end(self) -> None:
        step = self.state.step
        if step is not None and step.ended_s is None and step is not self._began_step:
            self._began_step = step
            self.step_began.set()
        if step is None or step.ended_s is None or step is self._ended_step:
            return
        self._ended_step = step
        lengths = self.planning.lengths.step_ended(self.state.finished)
        self.note(EntryKind.STEP_ENDED, "", {"started_s": step.started_s, "ended_s": step.ended_s, "lengths": lengths})
        self.plans.step_ended(step, self.barrier.still_s)

    def note(self, kind: EntryKind, subject: str, body: dict[str, Any]) -> None:
        self.journal.append(self.clock.now_s(), kind, subject, body)
