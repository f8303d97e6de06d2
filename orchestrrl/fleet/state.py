"""Combine the reports of agents and gateways into immutable snapshots in which every value has an age.

This module uses no clock and no socket. The age of a sample counts from when it was taken, by its sender's clock
(sender_clocks.py), and at the latest from its receipt. Reports of one sender are ordered by (stream, sequence): a late
or repeated report changes nothing. If several senders report one subject, only the reports of one sender count
(reporters.py). An engine for which nodes use several ids is one engine here (same_servers.py).
"""

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from orchestrrl.core.addresses import server_address
from orchestrrl.core.config.schema import LimitSettings
from orchestrrl.core.errors import LimitReached, shorten
from orchestrrl.core.nodes import GatewayEngine, NodeHello, NodeKind
from orchestrrl.core.operations import OperationResult
from orchestrrl.engines.base import EngineCapabilities, EngineSample
from orchestrrl.fleet.pause_lease import PauseState
from orchestrrl.fleet.reporters import Reporters
from orchestrrl.fleet.reports import (
    BarrierReport,
    EngineFailovers,
    EngineReport,
    FailoverCounts,
    FinishedRequest,
    GatewayReport,
)
from orchestrrl.fleet.request_groups import FinishedGroups, keep_newest
from orchestrrl.fleet.same_servers import CONFIGURATION, ServerClaim, ServerNames, find_names
from orchestrrl.fleet.sender_clocks import SenderClock
from planner.model import (
    Configuration,
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

# Finished requests remembered per gateway, to count a repeated one once. A gateway repeats only unacknowledged ones,
# which are far fewer.
FINISHED_REMEMBERED = 65536
# Response lengths kept per step, the newest. Some jobs are never idle, so their step never ends.
LENGTHS_REMEMBERED = 65536
# The stream of a source that reports an engine while its agent does not. Such reports count in order of arrival; the
# order of an agent's own reports does not depend on them.
STAND_IN = -1
# Finish reasons that carry no information about response lengths.
CUT_SHORT = frozenset({"abort", "error", "passed"})
# The finish reason of an output cut by `max_tokens`: its length is only a lower bound.
CENSORED = "length"
# Engine ids are compared again after this time even if none has changed, since nodes attach and detach.
NAMES_LAST_S = 30.0
HOSTS_REMEMBERED = 65_536  # also the limit for senders' clocks
CLAIMS_PER_ENGINE = 4  # nodes may use ids of their own for each engine
CLOCKS_REMEMBERED_S = 600.0  # of senders that have stopped reporting


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """Facts about an engine from the configuration or an operator. The engine's own reports take precedence."""

    id: EngineId
    url: str
    configuration: ConfigurationId | None = None
    gpus: tuple[GpuId, ...] = ()
    max_sequences: int | None = None
    kv_capacity_tokens: int | None = None
    pool: str = ""

    def of(self, configuration: Configuration | None) -> "EngineFacts":
        """Return these facts with the id of `configuration`. Limits that these facts lack are taken from
        `configuration`. Return the facts unchanged if `configuration` is None."""
        if configuration is None:
            return self
        sequences = self.max_sequences or configuration.max_sequences
        tokens = self.kv_capacity_tokens or configuration.kv_capacity_tokens
        return replace(self, configuration=configuration.id, max_sequences=sequences, kv_capacity_tokens=tokens)


@dataclass(frozen=True, slots=True)
class GenerationStep:
    """One generation step, which lasts from when the fleet becomes busy until it is idle."""

    started_s: float
    ended_s: float | None = None


@dataclass(slots=True)
class TokenTotals:
    """Counts since the daemon's start: finished requests, moves, and the tokens that were recomputed or loaded for
    moves."""

    finished: int = 0
    moves_done: int = 0
    moves_failed: int = 0
    tokens_recomputed: int = 0
    tokens_loaded: int = 0


@dataclass(slots=True)
class _EngineRecord:
    reporters: Reporters = field(default_factory=Reporters)
    remembered_url: str = ""
    report: EngineReport | None = None
    received_s: float = 0.0
    sample: EngineSample | None = None  # the latest; kept while the engine cannot be read
    sample_taken_s: float = 0.0
    capabilities: EngineCapabilities | None = None


@dataclass(slots=True)
class _GatewayRecord:
    reporters: Reporters = field(default_factory=Reporters)
    received_s: float = 0.0  # its latest message of any kind
    engines: tuple[EngineId, ...] = ()  # from its hello
    in_flight: tuple[RequestView, ...] = ()
    in_flight_ids: frozenset[RequestId] = frozenset()
    on_engines: frozenset[EngineId] = frozenset()  # engines of the requests in flight
    reported_s: float | None = None  # the time of these; None: no report yet
    barrier: BarrierReport = field(default_factory=BarrierReport)
    finished: dict[FinishedRequest, None] = field(default_factory=dict)  # keyed by value, since an id may be reused
    failovers: dict[EngineFailovers, None] = field(default_factory=dict)


class FleetState:
    """The reported state of the fleet. A node or engine that has not reported for `forget_after_s` is left out of
    snapshots. However, an engine that is configured, or that another node names, remains with health GONE."""

    def __init__(
        self,
        facts: Iterable[EngineFacts] = (),
        forget_after_s: float = 60.0,
        capacity: LimitSettings | None = None,
        host: str = "",
    ) -> None:
        """Create a state without reports. `host` is the host to which loopback addresses in the configuration file
        refer, as returned by addresses.host_id."""
        self._capacity = capacity or LimitSettings()
        self._facts = {fact.id: fact for fact in facts}
        self._host = host
        self._deployed: dict[EngineId, EngineFacts] = {}  # deployed since the daemon's start
        self._removed: set[EngineId] = set()
        self._back_again: set[EngineId] = set()  # removed, then reported healthy by an agent only
        self._barred: frozenset[EngineId] = frozenset()  # removed by an operator; reports are ignored
        self._draining: frozenset[EngineId] = frozenset()  # drained by an operator
        self._forget_after_s = forget_after_s
        self._engines: dict[EngineId, _EngineRecord] = {}
        self._gateways: dict[NodeId, _GatewayRecord] = {}
        self._clocks: dict[tuple[NodeId, str | int], SenderClock] = {}  # by sender
        self._hosts: dict[NodeId, str] = {}  # of attached nodes
        self._claims: dict[tuple[NodeId, EngineId], ServerClaim] = {}  # ids that nodes use for engines
        self._names = ServerNames()  # derived from the claims
        self._named_s = float("-inf")  # when they were derived; -inf: derive them again
        self._finished: deque[FinishedLength] = deque(maxlen=LENGTHS_REMEMBERED)
        self.earlier_output_tokens: tuple[int, ...] = ()  # of the previous step
        self.step: GenerationStep | None = None  # the current or the last step
        self.weights = PauseState()  # weight versions of engines; written by the pause barrier
        self.groups = FinishedGroups()  # finished answers per group, over all gateways
        self.totals = TokenTotals()
        self.failovers: dict[EngineId, FailoverCounts] = {}  # since the daemon's start, by the engine that failed

    def set_roster(
        self,
        configured: Iterable[EngineFacts],
        added: Iterable[EngineFacts] = (),
        draining: Iterable[EngineId] = (),
        removed: Iterable[EngineId] = (),
    ) -> None:
        """Set the engines of the configuration, and the engines that operators added, drained and removed. If an engine
        is listed more than once, the facts from an operator take precedence over those of the deployed engine, which
        take precedence over those from the configuration. A removed engine is not part of the fleet, even if an agent
        reports it healthy."""
        self._draining, self._barred = frozenset(draining), frozenset(removed)
        for engine in self._barred:
            self._deployed.pop(engine, None)
            if engine in self._engines:  # capabilities are reported only once
                self._engines[engine] = _EngineRecord(capabilities=self._engines[engine].capabilities)
        by_operators = {facts.id: facts for facts in added}
        self._removed.difference_update(by_operators)
        self._back_again.difference_update(by_operators)
        by_configuration = {facts.id: facts for facts in configured if facts.id not in self._removed | self._barred}
        self._facts = {**by_configuration, **self._deployed, **by_operators}
        self._named_s = float("-inf")

    def add_engine(self, facts: EngineFacts) -> None:
        """Add a deployed engine, unless an operator has removed it."""
        if facts.id in self._barred:
            return
        self._removed.discard(facts.id)
        self._back_again.discard(facts.id)
        self._deployed[facts.id] = self._facts[facts.id] = facts
        self._named_s = float("-inf")

    def barred(self, engine: EngineId) -> bool:
        """Return whether an operator has removed the engine. A removed engine is not part of the fleet even while it
        runs."""
        return engine in self._barred

    def remove_engine(self, engine: EngineId) -> None:
        """Remove a stopped engine. The engine is added again if an agent reports it healthy."""
        self._removed.add(engine)
        self._deployed.pop(engine, None)
        self._facts.pop(engine, None)
        self._engines.pop(engine, None)
        self._named_s = float("-inf")

    def remember_engine(self, engine: EngineId, url: str, at_s: float) -> None:
        """Add an engine that the routes of an earlier daemon contain. The engine is dropped if no agent reports it for
        `forget_after_s`."""
        record = self._engines.setdefault(engine, _EngineRecord())
        record.remembered_url, record.received_s = url, max(record.received_s, at_s)

    def fold_hello(self, hello: NodeHello, received_s: float) -> None:
        """Record a node's hello message. The hello message of a gateway lists its engines before its first report
        arrives."""
        self._hosts[hello.node] = hello.host
        keep_newest(self._hosts, HOSTS_REMEMBERED)
        if hello.kind is not NodeKind.GATEWAY:
            return
        record = self._gateways.setdefault(hello.node, _GatewayRecord())
        record.engines = hello.engines
        record.received_s = max(record.received_s, received_s)
        self._claim_all(hello.node, hello.addresses, received_s)

    def stream_ended(self, stream: int) -> None:
        """Mark the stream as ended, so that another sender can become the leader."""
        for engine in self._engines.values():
            engine.reporters.stream_ended(stream)
        for gateway in self._gateways.values():
            gateway.reporters.stream_ended(stream)

    def fold_engine(self, report: EngineReport, received_s: float, stream: int = 0) -> bool:
        """Apply an agent's report to the state, unless a report at least as new has been applied or another agent's
        reports are used instead. Return whether the report was applied.

        The report must have the engine id that `named` returns.
        """
        if report.engine in self._barred:
            if report.capabilities is not None:
                self._engines[report.engine] = _EngineRecord(capabilities=report.capabilities)
            return False
        if report.engine in self._removed:
            if report.health is not EngineHealth.OK:
                return False
            self._removed.discard(report.engine)
            self._back_again.add(report.engine)
        record = self._engines.setdefault(report.engine, _EngineRecord())
        taken_s = None
        if report.sample is not None:
            taken_s = self._taken_s(report.agent, report, stream, report.sample.sampled_s, received_s)
        if stream == STAND_IN:
            record.reporters.stand_in()
        elif not record.reporters.admit(
            report.agent, report.incarnation, stream, report.sequence, received_s, report.sample is not None
        ):
            if report.capabilities is not None and record.capabilities is None:
                record.capabilities = report.capabilities
            return False
        if report.engine in self._back_again and report.health is EngineHealth.GONE:
            # A late report from before the stop, or a process outside the fleet used the address for a while.
            self._back_again.discard(report.engine)
            self.remove_engine(report.engine)
            return False
        record.report, record.received_s = report, received_s
        if report.capabilities is not None:
            record.capabilities = report.capabilities
        if report.sample is not None and taken_s is not None:
            record.sample, record.sample_taken_s = report.sample, taken_s
        self._mark_step(received_s)
        return True

    def fold_gateway(self, report: GatewayReport, received_s: float, stream: int = 0) -> list[EngineFailovers]:
        """Apply a gateway's report to the state, unless a report at least as new has been applied. Return the failovers
        in the report that were not counted before.

        Finished requests and failovers are counted once per gateway, even if they arrive in a late report.
        """
        record = self._gateways.setdefault(report.gateway, _GatewayRecord())
        fresh = [finished for finished in report.finished if finished not in record.finished]
        taken_s = self._taken_s(report.gateway, report, stream, report.sampled_s, received_s)
        newer = record.reporters.admit(report.gateway, report.incarnation, stream, report.sequence, received_s)
        if newer:
            record.received_s = received_s
        if newer and report.engines is not None:
            self._claim_all(report.gateway, report.engines, received_s)
            record.engines = tuple(engine.known_as or engine.engine for engine in report.engines)
        if newer and taken_s is not None:
            record.reported_s = taken_s
            record.in_flight, record.barrier = report.in_flight, report.barrier
            record.in_flight_ids = frozenset(request.id for request in report.in_flight)
            record.on_engines = engines_of(report)
        failovers = self._count_failovers(record, report.gateway, report.failovers)
        if fresh:
            # They were in flight between two reports.
            self._start_step(received_s)
            self._count_finished(record, fresh)
        if newer or fresh:
            self._mark_step(received_s)
        return failovers

    def fold_result(self, result: OperationResult) -> None:
        """Add the moves of a completed operation, and the tokens that were recomputed or loaded for these moves, to the
        totals."""
        done = sum(item.done for item in result.items)
        self.totals.moves_done += done
        self.totals.moves_failed += len(result.items) - done
        self.totals.tokens_recomputed += sum(item.recomputed_tokens for item in result.items)
        self.totals.tokens_loaded += sum(item.loaded_tokens for item in result.items)

    def engines(self, now_s: float) -> tuple[EngineView, ...]:
        """Return every known engine, sorted by id. This is cheaper than a snapshot."""
        return tuple(self._view(engine, now_s) for engine in sorted(self._known_engines(now_s)))

    def snapshot(self, now_s: float) -> Snapshot:
        gateways = self._live_gateways(now_s)
        ages = [now_s - record.reported_s for record in gateways.values() if record.reported_s is not None]
        stepping = self.step is not None and self.step.ended_s is None
        return Snapshot(
            now_s=now_s,
            engines=self.engines(now_s),
            requests=self._requests(now_s),
            finished=self.finished,
            requests_age_s=max(ages, default=None),
            step_started_s=self.step.started_s if stepping and self.step else None,
        )

    @property
    def finished(self) -> tuple[FinishedLength, ...]:
        """Return the response lengths of the current step, or of the last step until the next step begins, sorted by
        the time at which the responses finished."""
        return tuple(self._finished)

    def gateway_of(self, request: RequestId) -> NodeId | None:
        """Return the gateway that has the request in flight, according to the newest report that contains the request.
        Return None if no gateway has it."""
        holders = [
            (record.reported_s, node)
            for node, record in self._gateways.items()
            if record.reported_s is not None and request in record.in_flight_ids
        ]
        return max(holders)[1] if holders else None

    def gateways_of_groups(self, groups: frozenset[str]) -> dict[NodeId, tuple[str, ...]]:
        """Return, for each gateway, the groups in `groups` that had requests in flight at the gateway's last report.
        Gateways without requests of these groups are left out."""
        found: dict[NodeId, tuple[str, ...]] = {}
        for node, record in self._gateways.items():
            there = {request.group for request in record.in_flight} & groups
            if there:
                found[node] = tuple(sorted(there))
        return found

    @property
    def barriers(self) -> dict[NodeId, BarrierReport]:
        """Return the last reported state of each gateway's pause barrier, regardless of its age."""
        return {node: record.barrier for node, record in self._gateways.items() if record.reported_s is not None}

    def last_report_s(self, node: NodeId) -> float | None:
        """Return the time of the latest report of an agent or gateway, or None if it has not reported."""
        gateway = self._gateways.get(node)
        if gateway and gateway.reported_s is not None:
            return gateway.reported_s
        reports = ((record.report, record.received_s) for record in self._engines.values())
        return max((received_s for report, received_s in reports if report and report.agent == node), default=None)

    def configuration_of(self, engine: EngineId) -> ConfigurationId | None:
        facts = self._facts.get(engine)
        return facts.configuration if facts else None

    def capabilities(self, engine: EngineId) -> EngineCapabilities | None:
        record = self._engines.get(engine)
        return record.capabilities if record else None

    def reported(self, engine: EngineId) -> bool:
        """Return whether an agent has ever reported the engine. The health of an engine that was never reported is an
        assumption."""
        record = self._engines.get(engine)
        return record is not None and record.report is not None

    # --- limits

    def check_engine_report(self, report: EngineReport, now_s: float) -> None:
        """Raise LimitReached if the report would add an engine, or a name of an engine, beyond the limit."""
        most = CLAIMS_PER_ENGINE * self._capacity.engines
        is_new = (report.agent, report.engine) not in self._claims
        if is_new and sum(claim.rank == 1 for claim in self._claims.values()) >= most:
            raise LimitReached(
                f"engine_id: cannot add {shorten(report.engine)}: agents can use at most {most} names for engines"
                f" ({CLAIMS_PER_ENGINE} times limits.engines)"
            )
        self._make_room(frozenset({self._names.engine(report.agent, report.engine)}), None, now_s)

    def check_gateway_report(self, report: GatewayReport, now_s: float) -> None:
        """Raise LimitReached if the report would add a gateway, engines or requests beyond the limits."""
        others = [record for node, record in self._live_gateways(now_s).items() if node != report.gateway]
        count = sum(len(record.in_flight) for record in others) + len(report.in_flight)
        if count > self._capacity.requests:
            raise LimitReached(
                f"in_flight: must have at most {self._capacity.requests} requests across all gateways (limits.requests)"
                f", got {count}, of which {len(report.in_flight)} are on this gateway"
            )
        self._make_room(self._meant(report.gateway, engines_of(report), report.engines or ()), report.gateway, now_s)

    def check_hello(self, hello: NodeHello, now_s: float) -> None:
        """Raise LimitReached if a gateway's hello would add a gateway or engines beyond the limits."""
        if hello.kind is NodeKind.GATEWAY:
            self._make_room(self._meant(hello.node, hello.engines, hello.addresses), hello.node, now_s)

    def _meant(
        self, gateway: NodeId, engines: Iterable[EngineId], own: Iterable[GatewayEngine] = ()
    ) -> frozenset[EngineId]:
        """Return the engines to which these ids of a gateway refer. `own` are the engines on the command line of the
        gateway, whose ids are included."""
        names = {*engines, *(engine.known_as or engine.engine for engine in own)}
        return frozenset(self._names.engine(gateway, name) for name in names)

    def _make_room(self, engines: frozenset[EngineId], gateway: NodeId | None, now_s: float) -> None:
        """Drop nodes and engines that have not reported for `forget_after_s`, if the limits would be exceeded
        otherwise. Raises LimitReached if the limits are still exceeded."""
        record = None if gateway is None else self._gateways.get(gateway)
        new = frozenset(engine for engine in engines if engine not in self._facts and engine not in self._engines)
        if new and gateway is not None and record is not None:
            new -= self._meant(gateway, record.on_engines.union(record.engines))
        if not new and (gateway is None or record is not None):
            return
        if self._overfull(new, gateway):
            self._forget(now_s, gateway)
        if fault := self._overfull(new, gateway):
            raise LimitReached(fault)

    def _overfull(self, new: frozenset[EngineId], gateway: NodeId | None) -> str:
        """Return an error message about the limit that would be exceeded with these new engines and this gateway.
        Return an empty string if no limit would be exceeded."""
        capacity = self._capacity
        if gateway is not None and len(self._gateways.keys() | {gateway}) > capacity.gateways:
            limit = f"at most {capacity.gateways} gateways can be registered (limits.gateways)"
            return f"gateway_id: {limit}, got {shorten(gateway)} in addition"
        known = set(new).union(self._facts, self._engines)
        for node, record in self._gateways.items():
            known |= self._meant(node, record.on_engines.union(record.engines))
        if new and len(known) > capacity.engines:
            limit = f"at most {capacity.engines} engines can be registered (limits.engines)"
            return f"engine_id: {limit}, got {len(known)} with {shorten(min(new))}"
        return ""

    def _forget(self, now_s: float, but: NodeId | None) -> None:
        for engine, record in list(self._engines.items()):
            if now_s - record.received_s > self._forget_after_s and engine not in self._barred:
                del self._engines[engine]
        live = self._live_gateways(now_s)
        for node in [node for node in self._gateways if node not in live and node != but]:
            del self._gateways[node]

    # --- names and senders

    def names(self, now_s: float) -> ServerNames:
        """Return the mapping from the ids that each node uses to engines. The mapping is derived again if any id has
        changed or the mapping is older than NAMES_LAST_S."""
        if now_s - self._named_s > NAMES_LAST_S:
            self._named_s = now_s
            live = self._live_gateways(now_s)
            self._claims = {
                key: claim
                for key, claim in self._claims.items()
                if (claim.source in live if claim.rank == 2 else now_s - claim.last_report_s <= self._forget_after_s)
            }
            self._clocks = {
                key: clock for key, clock in self._clocks.items() if now_s - clock.last_report_s <= CLOCKS_REMEMBERED_S
            }
            facts = [ServerClaim(CONFIGURATION, f.id, 0, f.url, self._host) for f in self._facts.values() if f.url]
            self._names = find_names((*facts, *self._claims.values()), now_s)
        return self._names

    def named(self, report: EngineReport, received_s: float) -> EngineReport:
        """Return the report with the engine's canonical id and its capabilities. The capabilities are added because an
        agent reports them only once, perhaps before the engine's other names were known. A new id is treated as a
        separate engine until the next call of `names`, so that a starting fleet does not compare all ids with each
        other for each report."""
        claim = self._claim(report.agent, report.engine, 1)
        claim.last_report_s = received_s
        claim.capabilities = report.capabilities or claim.capabilities
        if claim.follow(report.url, self._hosts.get(report.agent, ""), report.server, None, received_s):
            self._named_s = float("-inf")
        engine = self._names.engine(report.agent, report.engine)
        return replace(report, engine=engine, capabilities=claim.capabilities)

    def engine_called(self, name: EngineId, now_s: float) -> EngineId:
        """Return the canonical id of the engine that an operator names, by its id or by an alias that only nodes
        use."""
        return self.names(now_s).by_other_name(name) or name

    def engine_at(self, url: str, now_s: float) -> EngineId | None:
        """Return the engine at this URL as seen from the daemon's host, or None if no known address matches. A server
        is assumed to listen on both IPv4 and IPv6 loopback addresses."""
        address, names = server_address(url), self.names(now_s)
        if address is None:
            return None
        known = [(names.engine(c.source, c.engine), c.url, c.host) for c in self._claims.values()]
        known = [each for each in known if each[0] not in self._removed | self._barred]
        for view in self.engines(now_s):
            record = self._engines.get(view.id)
            agent = record.report.agent if record is not None and record.report is not None else None
            known.append((view.id, view.url, self._host if agent is None else self._hosts.get(agent, "")))
        for engine, other, host in known:
            elsewhere = address.local and host and self._host and host != self._host
            theirs = server_address(other)
            if theirs is not None and theirs.by_ipv4 == address.by_ipv4 and not elsewhere:
                return engine
        return None

    def own_name(self, request: RequestId, engine: EngineId) -> EngineId:
        """Return the id that the request's gateway uses for the engine, which is `engine` itself unless the gateway
        uses an alias."""
        gateway = self.gateway_of(request)
        if gateway is None or gateway not in self._names.of:
            return engine
        record = self._gateways[gateway]
        own = next((view.engine for view in record.in_flight if view.id == request), None)
        return own if own is not None and self._names.engine(gateway, own) == engine else engine

    def urls_for(self, gateway: NodeId, engines: Iterable[EngineView]) -> dict[EngineId, str]:
        """Return the URLs on the gateway's own command line for engines whose reported URL is a loopback address on
        another host, which the gateway cannot reach. Other engines are left out."""
        own = {
            self._names.engine(gateway, claim.engine): claim
            for claim in self._claims.values()
            if claim.source == gateway and claim.url
        }
        host = self._hosts.get(gateway, "")
        urls = {}
        for engine in engines if own else ():
            claim, record = own.get(engine.id), self._engines.get(engine.id)
            address = server_address(engine.url)
            if claim is None or address is None or not address.local or record is None or record.report is None:
                continue
            there = self._hosts.get(record.report.agent, "")
            server = record.report.server
            if there and host and there != host and server and server in claim.identities(self._named_s):
                urls[engine.id] = claim.url
        return urls

    def reported_by(self, engine: EngineId, now_s: float) -> tuple[str, ...]:
        """Return the agents that report the engine at the same time, starting with the agent whose reports are used.
        Return an empty tuple if fewer than two agents report it."""
        record = self._engines.get(engine)
        return () if record is None else record.reporters.side_by_side(now_s)

    def _claim_all(self, gateway: NodeId, engines: Iterable[GatewayEngine], now_s: float) -> None:
        """Replace the set of ids that a gateway uses for engines."""
        named = {engine.engine: engine for engine in engines}
        for key in [key for key in self._claims if key[0] == gateway and key[1] not in named]:
            del self._claims[key]
            self._named_s = float("-inf")
        for engine in named.values():
            claim = self._claim(gateway, engine.engine, 2)
            if claim.follow(engine.url, self._hosts.get(gateway, ""), engine.server, engine.known_as, now_s):
                self._named_s = float("-inf")

    def _claim(self, source: NodeId, engine: EngineId, rank: int) -> ServerClaim:
        if (source, engine) not in self._claims:
            self._claims[source, engine] = ServerClaim(source, engine, rank, "")
        return self._claims[source, engine]

    def _taken_s(
        self, node: NodeId, report: EngineReport | GatewayReport, stream: int, sampled_s: float, received_s: float
    ) -> float | None:
        """Return when a sample was taken, in the daemon's time. Return None if the time cannot be determined yet."""
        sender = (node, report.incarnation or stream)
        clock = self._clocks.get(sender)
        if clock is None:
            clock = self._clocks[sender] = SenderClock()
            keep_newest(self._clocks, HOSTS_REMEMBERED)
        return clock.taken_s(sampled_s, report.times, received_s)

    # --- steps

    def _mark_step(self, at_s: float) -> None:
        if self._busy(at_s):
            self._start_step(at_s)
        elif self.step is not None and self.step.ended_s is None:
            self.step = replace(self.step, ended_s=at_s)

    def _start_step(self, at_s: float) -> None:
        if self.step is None or self.step.ended_s is not None:
            self.step = GenerationStep(at_s)
            self.earlier_output_tokens = tuple(length.tokens for length in self._finished) or self.earlier_output_tokens
            self._finished.clear()
            self.groups.forget()

    def _busy(self, now_s: float) -> bool:
        """Return whether any request is in flight, according to the gateways or, if no gateway has reported, to the
        engines' own samples."""
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
        keep_newest(record.finished, FINISHED_REMEMBERED)
        self.totals.finished += len(fresh)

    def _count_failovers(
        self, record: _GatewayRecord, gateway: NodeId, reported: Iterable[EngineFailovers]
    ) -> list[EngineFailovers]:
        fresh = [failovers for failovers in dict.fromkeys(reported) if failovers not in record.failovers]
        for failovers in fresh:
            record.failovers[failovers] = None
            engine = self._names.engine(gateway, failovers.engine)
            if engine not in self.failovers and len(self.failovers) >= self._capacity.engines:
                engine = EngineId("")  # all further engines together
            self.failovers[engine] = self.failovers.get(engine, FailoverCounts()) + failovers.counts
        keep_newest(record.failovers, FINISHED_REMEMBERED)
        return fresh

    # --- views

    def _live_gateways(self, now_s: float) -> dict[NodeId, _GatewayRecord]:
        return {
            node: record for node, record in self._gateways.items() if now_s - record.received_s <= self._forget_after_s
        }

    def _known_engines(self, now_s: float) -> set[EngineId]:
        names = self.names(now_s)
        known = {e for e, record in self._engines.items() if now_s - record.received_s <= self._forget_after_s}
        # Exclude reports folded under an id that turned out to be an alias.
        known = {engine for engine in known if not names.is_other(engine)} | set(self._facts)
        for node, record in self._live_gateways(now_s).items():
            there = record.on_engines.union(record.engines)
            known.update(names.engine(node, engine) for engine in there)
        return known - self._removed - self._barred

    def _requests(self, now_s: float) -> tuple[RequestView, ...]:
        newest: dict[RequestId, tuple[float, NodeId, RequestView]] = {}
        for node, record in self._live_gateways(now_s).items():
            if record.reported_s is None:
                continue
            for request in record.in_flight:
                held = newest.get(request.id)
                if held is None or (record.reported_s, node) > held[:2]:
                    if request.engine is not None and node in self._names.of:
                        request = replace(request, engine=self._names.engine(node, request.engine))
                    newest[request.id] = (record.reported_s, node, request)
        reported = (
            request if reported_s == now_s else replace(request, quiet_s=request.quiet_s + now_s - reported_s)
            for _, (reported_s, _, request) in sorted(newest.items())
        )
        return self._with_preempted(tuple(reported), now_s)

    def _with_preempted(self, requests: tuple[RequestView, ...], now_s: float) -> tuple[RequestView, ...]:
        """Return the requests, with the state WAITING for requests that their engine has preempted. A gateway cannot
        distinguish a preempted request from a slow running request, but the engine counts it as waiting. If an engine
        counts more waiting requests than the gateways do, the excess is assigned to the requests that have been quiet
        for longest. Requests that have produced a token since the engine's last sample are excluded."""
        excess = Counter(
            {e: r.sample.waiting for e, r in self._engines.items() if r.sample is not None and r.sample.waiting}
        )
        excess.subtract(Counter(r.engine for r in requests if r.engine and r.state is RequestState.WAITING))
        sample_age_s = {e: now_s - self._engines[e].sample_taken_s for e, count in excess.items() if count > 0}
        quiet: dict[EngineId, list[tuple[float, RequestId]]] = {}
        for request in requests if sample_age_s else ():
            engine = request.engine
            running = request.state is RequestState.RUNNING
            if running and engine in sample_age_s and request.quiet_s > sample_age_s[engine]:
                quiet.setdefault(engine, []).append((-request.quiet_s, request.id))
        preempted = {request for engine, those in quiet.items() for _, request in sorted(those)[: excess[engine]]}
        if not preempted:
            return requests
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
            # From the newest report only: it has no rate e.g. during a first prefill.
            decode_tokens_per_s=report.sample.decode_tokens_per_s if report and report.sample else None,
            age_s=now_s - record.sample_taken_s if sample else None,
            gpus=facts.gpus,
            health_detail=detail,
            preemptions_total=sample.preemptions_total if sample else 0,
            pool=facts.pool,
            draining=engine in self._draining,
            policy_version=self.weights.versions.get(engine),
            outdated=not self.weights.serves(engine),
        )

    def _health(self, record: _EngineRecord, now_s: float) -> tuple[EngineHealth, str]:
        """Return the health from the agent's latest report, or GONE if no report has arrived for `forget_after_s`.
        Without this limit, decisions for other engines would wait forever for telemetry from a failed host."""
        if record.report is None:
            return EngineHealth.GONE, "no agent has reported the engine yet"
        if now_s - record.received_s > self._forget_after_s:
            return EngineHealth.GONE, f"no report from its agent for {now_s - record.received_s:.0f} s"
        return record.report.health, record.report.health_detail


def engines_of(report: GatewayReport) -> frozenset[EngineId]:
    """Return the engines of the report's requests in flight."""
    return frozenset(request.engine for request in report.in_flight if request.engine is not None)
