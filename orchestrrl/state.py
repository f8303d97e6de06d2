"""Fold what agents and gateways report into immutable snapshots that know how old everything is.

Holds values and nothing else: no clock, no socket. Ages run from when a report was received, since the reporter's
clock may differ from ours. Reports are ordered by (stream, sequence): a late or repeated one changes nothing.
"""

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from orchestrrl.engines.base import Capabilities
from orchestrrl.gate import GateState
from orchestrrl.groups import Groups
from orchestrrl.operations import OperationResult
from orchestrrl.reports import (
    EngineReport,
    EngineSample,
    FinishedRequest,
    GateReport,
    GatewayReport,
    NodeHello,
    NodeKind,
)
from planner.model import (
    ConfigurationId,
    EngineHealth,
    EngineId,
    EngineView,
    FinishedLength,
    GpuId,
    NodeId,
    RequestId,
    RequestState,
    RequestView,
    Snapshot,
)

# Finished requests remembered per gateway, to count a repeated one once. A gateway repeats only what was not
# acknowledged, which is far less.
FINISHED_REMEMBERED = 65536
# The newest responses of a step that tell how long responses are. Some jobs never go idle, so their step never ends.
LENGTHS_REMEMBERED = 65536
# The stream of who reports an engine while its agent does not: such reports are ordered as they come, and those of an
# agent among themselves, whatever was reported in its stead.
STAND_IN = -1
# Endings that say nothing about how long responses are.
CUT_SHORT = frozenset({"abort", "error"})
# The ending of an output that `max_tokens` cut: it only tells that it would have been longer.
CENSORED = "length"


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What the configuration or an operator says of an engine; it stands where the engine itself does not tell."""

    id: EngineId
    url: str
    configuration: ConfigurationId | None = None
    gpus: tuple[GpuId, ...] = ()
    max_sequences: int | None = None
    kv_capacity_tokens: int | None = None
    pool: str = ""


@dataclass(frozen=True, slots=True)
class Step:
    """One generation step: from the fleet's going busy to its going idle."""

    started_s: float
    ended_s: float | None = None


@dataclass(frozen=True, slots=True)
class Totals:
    """Since the daemon's start."""

    finished: int = 0
    moves_done: int = 0
    moves_failed: int = 0
    tokens_recomputed: int = 0
    tokens_loaded: int = 0


@dataclass(slots=True)
class _EngineRecord:
    order: tuple[int, int] = (-1, -1)  # (stream, sequence)
    remembered_url: str = ""
    report: EngineReport | None = None
    received_s: float = 0.0
    sample: EngineSample | None = None  # the latest, also while the engine cannot be read
    sample_received_s: float = 0.0
    decode_tokens_per_s: float | None = None
    capabilities: Capabilities | None = None


@dataclass(slots=True)
class _GatewayRecord:
    order: tuple[int, int] = (-1, -1)
    received_s: float = 0.0  # its latest word of any kind
    url: str = ""
    engines: tuple[EngineId, ...] = ()  # from its hello
    in_flight: tuple[RequestView, ...] = ()
    in_flight_ids: frozenset[RequestId] = frozenset()
    reported_s: float | None = None  # when that was received; None: not yet
    gate: GateReport = field(default_factory=GateReport)
    finished: dict[FinishedRequest, None] = field(default_factory=dict)  # as values: an id may be used again


class State:
    """The fleet as reported. Whoever has not reported for `forget_after_s` is left out of snapshots, or counts as gone
    where something else names it."""

    def __init__(self, facts: Iterable[EngineFacts] = (), forget_after_s: float = 60.0) -> None:
        self._facts = {fact.id: fact for fact in facts}
        self._deployed: dict[EngineId, EngineFacts] = {}  # since the start, by us
        self._added: dict[EngineId, EngineFacts] = {}  # by an operator
        self._removed: set[EngineId] = set()
        self._back_again: set[EngineId] = set()  # removed, and reported well since, by nobody's word but their agent's
        self._barred: frozenset[EngineId] = frozenset()  # by an operator: whoever reports them, they are none
        self._draining: frozenset[EngineId] = frozenset()  # by an operator
        self._forget_after_s = forget_after_s
        self._engines: dict[EngineId, _EngineRecord] = {}
        self._gateways: dict[NodeId, _GatewayRecord] = {}
        self._finished: deque[FinishedLength] = deque(maxlen=LENGTHS_REMEMBERED)
        self.earlier_output_tokens: tuple[int, ...] = ()  # of the step before
        self.step: Step | None = None  # the current or the last one
        self.weights = GateState()  # whose versions are which
        self.groups = Groups()  # how many answers of each have finished, over all gateways
        self.totals = Totals()

    def set_facts(self, facts: Iterable[EngineFacts]) -> None:
        """What the configuration says, as far as no deployment and no operator has overtaken it."""
        configured = {fact.id: fact for fact in facts if fact.id not in self._removed | self._barred}
        self._facts = {**configured, **self._deployed, **self._added}

    def set_roster(
        self, added: Iterable[EngineFacts], draining: Iterable[EngineId], removed: Iterable[EngineId]
    ) -> None:
        """The operators' word, for the facts that are set next. Who is removed is none of ours, also while an agent
        reports it well."""
        self._draining, self._barred = frozenset(draining), frozenset(removed)
        for engine in self._barred:
            self._deployed.pop(engine, None)
            if engine in self._engines:  # what it offers is told once
                self._engines[engine] = _EngineRecord(capabilities=self._engines[engine].capabilities)
        self._added = {facts.id: facts for facts in added}
        self._removed.difference_update(self._added)
        self._back_again.difference_update(self._added)

    def add_engine(self, facts: EngineFacts) -> None:
        """An engine that was deployed, unless an operator has removed it since."""
        if facts.id in self._barred:
            return
        self._removed.discard(facts.id)
        self._back_again.discard(facts.id)
        self._deployed[facts.id] = self._facts[facts.id] = facts

    def barred(self, engine: EngineId) -> bool:
        """An operator has removed it: it is none of the fleet's, also while it runs."""
        return engine in self._barred

    def remove_engine(self, engine: EngineId) -> None:
        """An engine that was stopped: it is none any more, unless an agent reports it well again."""
        self._removed.add(engine)
        self._deployed.pop(engine, None)
        self._facts.pop(engine, None)
        self._engines.pop(engine, None)

    def remember_engine(self, engine: EngineId, url: str, at_s: float) -> None:
        """An engine that an earlier daemon routed to, until its agent reports it again or it is forgotten."""
        record = self._engines.setdefault(engine, _EngineRecord())
        record.remembered_url, record.received_s = url, max(record.received_s, at_s)

    def fold_hello(self, hello: NodeHello, received_s: float) -> None:
        """A gateway names the engines that it routes to, before it has reported anything."""
        if hello.kind is not NodeKind.GATEWAY:
            return
        record = self._gateways.setdefault(hello.node, _GatewayRecord())
        record.engines, record.url = hello.engines, hello.url
        record.received_s = max(record.received_s, received_s)

    def fold_engine(self, report: EngineReport, received_s: float, stream: int = 0) -> bool:
        """Take a report in, unless one at least as new is held. True: it was taken."""
        if report.engine in self._barred:
            if report.capabilities is not None:
                self._engines[report.engine] = _EngineRecord(capabilities=report.capabilities)
            return False
        if report.engine in self._removed:
            if report.health is not EngineHealth.OK:
                return False
            self._removed.discard(report.engine)
            self._back_again.add(report.engine)
        elif report.engine in self._back_again and report.health is EngineHealth.GONE:
            # Its agent's word from before it was stopped came late, or it was somebody's for a while.
            self._back_again.discard(report.engine)
            self.remove_engine(report.engine)
            return False
        record = self._engines.setdefault(report.engine, _EngineRecord())
        if stream != STAND_IN:
            if (stream, report.sequence) <= record.order:
                return False
            record.order = (stream, report.sequence)
        record.report, record.received_s = report, received_s
        if report.capabilities is not None:
            record.capabilities = report.capabilities
        # The agent's word alone: where it gives no rate, there is none, e.g. while a first prefill lasts.
        record.decode_tokens_per_s = report.sample.decode_tokens_per_s if report.sample else None
        if report.sample is not None:
            record.sample, record.sample_received_s = report.sample, received_s
        self._mark_step(received_s)
        return True

    def fold_gateway(self, report: GatewayReport, received_s: float, stream: int = 0) -> bool:
        """Take a report in, unless one at least as new is held. True: it was taken.

        Finished requests count once per gateway, also those of a report that came late.
        """
        record = self._gateways.setdefault(report.gateway, _GatewayRecord())
        fresh = [finished for finished in report.finished if finished not in record.finished]
        newer = (stream, report.sequence) > record.order
        if newer:
            record.order, record.received_s, record.reported_s = (stream, report.sequence), received_s, received_s
            record.in_flight, record.url = report.in_flight, report.url or record.url
            record.gate = report.gate
            record.in_flight_ids = frozenset(request.id for request in report.in_flight)
        if fresh:
            # They were in flight, if only between two reports.
            self._start_step(received_s)
            self._count_finished(record, fresh)
        if newer or fresh:
            self._mark_step(received_s)
        return newer

    def fold_result(self, result: OperationResult) -> None:
        """Count the items of a closed operation that moved requests."""
        done = sum(item.done for item in result.items)
        self.totals = replace(
            self.totals,
            moves_done=self.totals.moves_done + done,
            moves_failed=self.totals.moves_failed + len(result.items) - done,
            tokens_recomputed=self.totals.tokens_recomputed + sum(item.recomputed_tokens for item in result.items),
            tokens_loaded=self.totals.tokens_loaded + sum(item.loaded_tokens for item in result.items),
        )

    def engines(self, now_s: float) -> tuple[EngineView, ...]:
        """Every engine that is known, by id; the part of a snapshot that is cheap."""
        return tuple(self._view(engine, now_s) for engine in sorted(self._known_engines(now_s)))

    def snapshot(self, now_s: float) -> Snapshot:
        gateways = self._live_gateways(now_s)
        ages = [now_s - record.reported_s for record in gateways.values() if record.reported_s is not None]
        stepping = self.step is not None and self.step.ended_s is None
        return Snapshot(
            now_s=now_s,
            engines=self.engines(now_s),
            requests=self._requests(now_s),
            finished_output_tokens=tuple(length.tokens for length in self._finished),
            requests_age_s=max(ages, default=None),
            step_started_s=self.step.started_s if stepping and self.step else None,
            finished=self.finished,
        )

    @property
    def finished(self) -> tuple[FinishedLength, ...]:
        """Lengths of the current step, or of the last one until the next begins, in order of finishing."""
        return tuple(self._finished)

    def gateway_of(self, request: RequestId) -> NodeId | None:
        """The gateway that last reported the request in flight; with several, the newest report's."""
        holders = [
            (record.reported_s, node)
            for node, record in self._gateways.items()
            if record.reported_s is not None and request in record.in_flight_ids
        ]
        return max(holders)[1] if holders else None

    def gateways_of_groups(self, groups: frozenset[str]) -> dict[NodeId, tuple[str, ...]]:
        """Which gateways have requests of these groups in flight, as they last said."""
        found: dict[NodeId, tuple[str, ...]] = {}
        for node, record in self._gateways.items():
            there = {request.group for request in record.in_flight} & groups
            if there:
                found[node] = tuple(sorted(there))
        return found

    @property
    def gates(self) -> dict[NodeId, GateReport]:
        """How the gate of each gateway stood when it reported last, however long ago."""
        return {node: record.gate for node, record in self._gateways.items() if record.reported_s is not None}

    def heard_s(self, node: NodeId) -> float | None:
        """When the node's latest report was received; None: it has not reported."""
        gateway = self._gateways.get(node)
        if gateway and gateway.reported_s is not None:
            return gateway.reported_s
        heard = [
            record.received_s for record in self._engines.values() if record.report and record.report.agent == node
        ]
        return max(heard, default=None)

    def configuration_of(self, engine: EngineId) -> ConfigurationId | None:
        facts = self._facts.get(engine)
        return facts.configuration if facts else None

    def capabilities(self, engine: EngineId) -> Capabilities | None:
        record = self._engines.get(engine)
        return record.capabilities if record else None

    def reported(self, engine: EngineId) -> bool:
        """Whether an agent has ever reported the engine: without that its health is only a presumption."""
        record = self._engines.get(engine)
        return record is not None and record.report is not None

    # --- steps

    def _mark_step(self, at_s: float) -> None:
        if self._busy(at_s):
            self._start_step(at_s)
        elif self.step is not None and self.step.ended_s is None:
            self.step = replace(self.step, ended_s=at_s)

    def _start_step(self, at_s: float) -> None:
        if self.step is None or self.step.ended_s is not None:
            self.step = Step(at_s)
            self.earlier_output_tokens = tuple(length.tokens for length in self._finished) or self.earlier_output_tokens
            self._finished.clear()
            self.groups.forget()

    def _busy(self, now_s: float) -> bool:
        """Gateways know; without any, what engines say must do."""
        gateways = [record for record in self._live_gateways(now_s).values() if record.reported_s is not None]
        if gateways:
            return any(record.in_flight for record in gateways)
        samples = [record.sample for record in self._engines.values() if record.report and record.report.sample]
        return any(sample.running + sample.waiting > 0 for sample in samples if sample)

    def _count_finished(self, record: _GatewayRecord, fresh: list[FinishedRequest]) -> None:
        for finished in fresh:
            record.finished[finished] = None
            if finished.finish_reason not in CUT_SHORT:
                censored = finished.finish_reason == CENSORED
                self._finished.append(FinishedLength(finished.generated_tokens, censored, finished.tag))
        self.groups.count(fresh)
        while len(record.finished) > FINISHED_REMEMBERED:
            del record.finished[next(iter(record.finished))]
        self.totals = replace(self.totals, finished=self.totals.finished + len(fresh))

    # --- views

    def _live_gateways(self, now_s: float) -> dict[NodeId, _GatewayRecord]:
        return {
            node: record for node, record in self._gateways.items() if now_s - record.received_s <= self._forget_after_s
        }

    def _known_engines(self, now_s: float) -> set[EngineId]:
        known = set(self._facts)
        known |= {e for e, record in self._engines.items() if now_s - record.received_s <= self._forget_after_s}
        for record in self._live_gateways(now_s).values():
            known.update(record.engines)
            known.update(request.engine for request in record.in_flight if request.engine is not None)
        return known - self._removed - self._barred

    def _requests(self, now_s: float) -> tuple[RequestView, ...]:
        newest: dict[RequestId, tuple[float, NodeId, RequestView]] = {}
        for node, record in self._live_gateways(now_s).items():
            if record.reported_s is None:
                continue
            for request in record.in_flight:
                held = newest.get(request.id)
                if held is None or (record.reported_s, node) > held[:2]:
                    newest[request.id] = (record.reported_s, node, request)
        reported = (
            request if reported_s == now_s else replace(request, quiet_s=request.quiet_s + now_s - reported_s)
            for _, (reported_s, _, request) in sorted(newest.items())
        )
        return self._with_preempted(tuple(reported), now_s)

    def _with_preempted(self, requests: tuple[RequestView, ...], now_s: float) -> tuple[RequestView, ...]:
        """Put requests that their engine has preempted back among the waiting.

        To its gateway a preempted request looks like a slow running one; the engine counts it as waiting. Where an
        engine counts more than the gateways do, the requests that have been quiet for longest are meant: none of those
        that made a token since the engine was last read.
        """
        excess = Counter(
            {e: r.sample.waiting for e, r in self._engines.items() if r.sample is not None and r.sample.waiting}
        )
        excess.subtract(Counter(r.engine for r in requests if r.engine and r.state is RequestState.WAITING))
        preempted: set[RequestId] = set()
        for engine, count in excess.items():
            if count <= 0:
                continue
            sample_age_s = now_s - self._engines[engine].sample_received_s
            quiet = [
                (-request.quiet_s, request.id)
                for request in requests
                if request.engine == engine and request.state is RequestState.RUNNING and request.quiet_s > sample_age_s
            ]
            preempted.update(request for _, request in sorted(quiet)[:count])
        return tuple(replace(r, state=RequestState.WAITING) if r.id in preempted else r for r in requests)

    def _view(self, engine: EngineId, now_s: float) -> EngineView:
        record = self._engines.get(engine, _EngineRecord())
        facts = self._facts.get(engine, EngineFacts(engine, ""))
        report, sample = record.report, record.sample
        capacity_tokens = (sample.kv_capacity_tokens if sample else 0) or facts.kv_capacity_tokens or 0
        health, detail = self._health(record, now_s)
        told_sequences = record.capabilities.max_sequences if record.capabilities else None
        return EngineView(
            id=engine,
            url=(report.url if report else "") or facts.url or record.remembered_url,
            configuration=facts.configuration,
            health=health,
            running=sample.running if sample else 0,
            waiting=sample.waiting if sample else 0,
            kv_capacity_tokens=capacity_tokens,
            kv_free_tokens=round(capacity_tokens * (1.0 - sample.kv_usage_fraction)) if sample else 0,
            max_sequences=told_sequences or facts.max_sequences or 0,
            decode_tokens_per_s=record.decode_tokens_per_s,
            age_s=now_s - record.sample_received_s if sample else None,
            gpus=facts.gpus,
            health_detail=detail,
            preemptions_total=sample.preemptions_total if sample else 0,
            pool=facts.pool,
            draining=engine in self._draining,
            policy_version=self.weights.versions.get(engine),
            outdated=not self.weights.serves(engine),
        )

    def _health(self, record: _EngineRecord, now_s: float) -> tuple[EngineHealth, str]:
        """The agent's word, unless it has been silent for long: a machine that died would else be well for ever, and
        what is decided for the others would wait for its telemetry."""
        if record.report is None:
            return EngineHealth.GONE, "no agent has reported it yet"
        if now_s - record.received_s > self._forget_after_s:
            return EngineHealth.GONE, f"its agent has not reported it for {now_s - record.received_s:.0f} s"
        return record.report.health, record.report.health_detail
