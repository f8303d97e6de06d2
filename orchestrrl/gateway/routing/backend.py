"""The state of one engine as seen by a gateway: its route, the requests on it, and whether it may accept more requests.
This module performs no I/O."""

import asyncio
from dataclasses import dataclass, field

from orchestrrl.core.operations import EngineRoute
from orchestrrl.engines.base import PATHS, CompletionEndpoint, Engine, EngineCapabilities
from orchestrrl.gateway.ledger.ledger import RequestRecord
from orchestrrl.gateway.routing.strategies import EngineLoad, concurrency_cap, new_cache
from planner.model import EngineHealth, RequestId, RequestState


@dataclass(slots=True, kw_only=True)
class EngineBackend(EngineLoad):
    """One engine and the gateway's requests on it. The class extends EngineLoad because routing reads the load of every
    engine."""

    engine: Engine
    route: EngineRoute
    routed: bool = True  # False: it left the routes and only finishes its requests
    suspect_because: str = ""  # why the engine is suspected dead; empty: it counts as alive
    rechecking: bool = False  # a task probes its health
    capabilities: EngineCapabilities | None = None
    learning: "asyncio.Task[None] | None" = None  # the latest task that reads the capabilities; may have ended
    unlearnable: bool = False  # it does not report its capabilities
    tying_field: str = ""  # an answer field that a continued answer would have only in part; empty: none seen
    whole_field: str = ""  # a field of non-streamed answers that its streams lack; empty: none seen
    server: str = ""  # identity of the server process when last read; empty: unknown
    records: dict[RequestId, RequestRecord] = field(default_factory=dict)
    reserved: dict[RequestId, int] = field(default_factory=dict)  # context tokens of requests with a reserved place
    waiting_of_others: int = 0  # waiting requests of other clients
    waited_most: int = 0  # the most waiting requests of this gateway since the last route ...
    waited_most_before: int = 0  # ... and in the interval before
    progressed_s: float = 0.0  # time of the last token of any request
    failures_total: int = 0
    detokenize_failed_s: float | None = None  # time of the last failed call; None: the last call succeeded, or no call
    own_pool: str = ""  # the pool if the daemon assigns none
    policy_version: int | None = None  # version of its weights; None: unknown
    mixed: bool = False  # a lease expired during a weight change, so the version is uncertain
    outdated: bool = False  # it lacks the fleet's weights and receives no requests until its version is reported
    paused: bool = False  # this gateway paused it, or tried to, and must resume it
    resuming: bool = False  # a task retries the resume
    still: bool = False  # the pause succeeded: its requests make no progress
    loads_open: int = 0  # this gateway's requests that load KV there and are not yet counted
    loads_before: "asyncio.Task[int | None] | None" = None  # the engine's loaded tokens before the first of these
    loads_found_tokens: int = 0  # tokens loaded since then by counted requests

    @property
    def usable(self) -> bool:
        """Return whether the engine accepts new requests. A caller that makes the engine usable must call
        `EngineBackends.announce`."""
        return (
            self.routed
            and not self.route.draining
            and not self.suspect_because
            and not self.outdated
            and self.route.health is not EngineHealth.NONSENSE
        )

    def offers(self, endpoint: CompletionEndpoint) -> bool:
        """Return whether the engine offers the endpoint, as far as its capabilities are known."""
        return endpoint is not CompletionEndpoint.GENERATE or self.has_path(PATHS[endpoint])

    def has_path(self, path: str) -> bool:
        """Return whether the engine's HTTP API has the path. Return True if its paths are unknown."""
        return self.capabilities is None or path in self.capabilities.paths

    @property
    def in_use(self) -> bool:
        """Return whether the engine runs requests of this gateway, has places reserved for them, or is paused by this
        gateway."""
        return bool(self.records or self.reserved or self.paused)

    @property
    def context_limit_tokens(self) -> float:
        """The maximum number of tokens of one request, prompt plus answer, or infinity if the limit is unknown."""
        known = None if self.capabilities is None else self.capabilities.max_model_len_tokens
        return float("inf") if known is None else known

    @property
    def models(self) -> tuple[str, ...]:
        """The models that the engine serves, or () if they are unknown."""
        return () if self.capabilities is None else self.capabilities.models

    @property
    def kv_version(self) -> str:
        """The version of configuration and weights to which the engine's KV belongs, or "" if the engine's KV cannot be
        transferred."""
        version = "" if self.mixed else self.route.kv_version
        return version if not version or self.policy_version is None else f"{version}@{self.policy_version}"

    def has(self, policy_version: int) -> None:
        """Record that the engine has weights of version `policy_version`."""
        if policy_version != self.policy_version:
            self.lose_cache()
        self.policy_version, self.mixed = policy_version, False

    def lose_cache(self) -> None:
        """Record that the engine's KV cache no longer has the KV of earlier requests."""
        self.cache = new_cache()

    def forget_offers(self) -> None:
        """Discard everything that was read from the server, because the server may have been replaced."""
        if self.learning is not None:
            self.learning.cancel()
        self.lose_cache()
        self.capabilities = self.learning = None
        self.unlearnable = False
        self.tying_field = self.whole_field = ""

    def follow(self, route: EngineRoute) -> None:
        """Apply a newer route of this engine, received from the daemon."""
        if route.health is EngineHealth.GONE and self.route.health is not EngineHealth.GONE:
            self.suspect_because = self.suspect_because or "the daemon reports it as gone"
        if route.kv_version != self.route.kv_version:
            self.lose_cache()
        self.route = route
        self.routed = True
        if route.policy_version is not None:
            self.has(route.policy_version)
        if route.newest_policy_version is not None:
            self.outdated = self.policy_version != route.newest_policy_version
        self.kv_capacity_tokens = route.kv_capacity_tokens
        self.kv_free_tokens = route.kv_free_tokens
        self.max_sequences = route.max_sequences
        self.pool = route.pool or self.own_pool
        self.seconds_per_token = None
        if route.load_index and self.records:
            # The daemon's index implies the decode rate. The gateway's present counts approximate the daemon's.
            mean_tokens = max(1.0, (self.running_tokens + self.waiting_tokens) / len(self.records))
            cap = concurrency_cap(self, mean_tokens)
            self.seconds_per_token = route.load_index * cap / len(self.records)

        # Requests that waited when the daemon sampled the engine may run now. Subtract the recent maximum of this
        # gateway's waiting requests, so that none of them counts as another client's.
        ours = max(self.waited_most, self.waited_most_before)
        self.waiting_of_others = max(0, (route.waiting or 0) - ours)
        self.waited_most_before, self.waited_most = self.waited_most, self.waiting

    def has_room(self, queue_depth: int, context_tokens: int) -> bool:
        """Return whether the engine may accept one more request, which has `context_tokens` tokens. Up to `queue_depth`
        requests may wait on the engine. Further requests are accepted only if the engine is known to have enough free
        sequence slots and KV for the new request and all waiting requests."""
        # One request may always wait, so that other clients cannot lock this gateway out.
        return self.waiting < max(1, queue_depth - self.waiting_of_others) or (
            self.running + self.waiting < self.max_sequences
            and context_tokens + self.waiting_tokens <= self.kv_free_tokens
            and not self.waiting_of_others
        )

    def reserve(self, record: RequestRecord) -> None:
        """Reserve a place for the record. The record is counted as waiting until it enters the engine."""
        self.reserved[record.id] = record.context_tokens
        self._await(record, record.context_tokens)

    def unreserve(self, record: RequestRecord) -> bool:
        tokens = self.reserved.pop(record.id, None)
        if tokens is None:
            return False
        self._await_no_longer(record, tokens)
        return True

    def enter(self, record: RequestRecord, now_s: float) -> None:
        if not self.unreserve(record):
            record.cached_tokens = 0  # e.g. it was moved here
        self.records[record.id] = record
        self._await(record, record.context_tokens)
        record.begin_attempt(self.id, now_s)

    def _await(self, record: RequestRecord, tokens: int) -> None:
        self.waiting += 1
        self.waiting_tokens += tokens
        self.cached_waiting_tokens += record.cached_tokens
        if self.waiting > self.waited_most:
            self.waited_most = self.waiting

    def _await_no_longer(self, record: RequestRecord, tokens: int) -> None:
        self.waiting -= 1
        self.waiting_tokens -= tokens
        self.cached_waiting_tokens -= record.cached_tokens

    def advance(self, record: RequestRecord, context_before: int, was: RequestState, now_s: float) -> None:
        """Update the counts after the record has grown. Before the growth, the record had state `was` and a context of
        `context_before` tokens."""
        self.progressed_s = now_s
        if was is RequestState.RUNNING:
            self._run(record.context_tokens - context_before)
            self.computed_tokens += record.context_tokens - context_before
        elif record.state is RequestState.RUNNING:
            self.running += 1
            self._await_no_longer(record, context_before)
            self._run(record.context_tokens)
            self.computed_tokens += max(0, record.context_tokens - record.cached_tokens)
        else:
            self.waiting_tokens += record.context_tokens - context_before

    def run_whole(self, record: RequestRecord) -> None:
        """Count the record of a non-streamed answer as running if the engine is known to have a free sequence slot for
        it. The count is an estimate, because the first token of such an answer is not visible."""
        seats = self.max_sequences or (self.capabilities.max_sequences if self.capabilities is not None else 0) or 0
        if record.state is RequestState.WAITING and self.running < seats:
            record.state = RequestState.RUNNING
            self.advance(record, record.context_tokens, RequestState.WAITING, self.progressed_s)

    def _run(self, tokens: int) -> None:
        self.running_tokens += tokens
        self.kv_free_tokens -= tokens

    def leave(self, record: RequestRecord) -> None:
        if self.records.pop(record.id, None) is None:
            return
        if record.state is RequestState.RUNNING:
            self.running -= 1
            self._run(-record.context_tokens)
        else:
            self._await_no_longer(record, record.context_tokens)
