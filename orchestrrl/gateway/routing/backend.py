"""One engine as a gateway has it: its route, the requests on it, and whether it may take more. Pure."""

import asyncio
from dataclasses import dataclass, field

from orchestrrl.core.operations import EngineRoute
from orchestrrl.engines.base import Engine, EngineCapabilities
from orchestrrl.gateway.ledger.ledger import RequestRecord
from orchestrrl.gateway.routing.strategies import EngineLoad, concurrency_cap
from planner.model import EngineHealth, RequestId, RequestState


@dataclass(slots=True, kw_only=True)
class EngineBackend(EngineLoad):
    """One engine, and the gateway's requests on it. It is its own load, since a choice reads those of every engine."""

    engine: Engine
    route: EngineRoute
    routed: bool = True  # False: left the routes, and only finishes what it has
    suspect_because: str = ""  # empty: believed alive
    rechecking: bool = False  # it is being asked whether it lives
    capabilities: EngineCapabilities | None = None
    learning: "asyncio.Task[None] | None" = None  # asks for these; the last one, which may have ended
    unlearnable: bool = False  # it answered that it does not tell them
    tying_field: str = ""  # of its answers, which a continued one would lack in part; empty: none has been seen
    whole_field: str = ""  # of its whole answers, which its streams lack; empty: none has been seen
    server: str = ""  # identifies the server's process, as it was last read; empty: unknown
    records: dict[RequestId, RequestRecord] = field(default_factory=dict)
    reserved: dict[RequestId, int] = field(default_factory=dict)  # context tokens of those who are about to enter
    waiting_of_others: int = 0  # requests that others have waiting there
    waited_most: int = 0  # of ours, since the last route, and before
    waited_most_before: int = 0
    progressed_s: float = 0.0  # last token of any request
    failures_total: int = 0
    detokenize_failed_s: float | None = None  # None: its last call succeeded, or there was none
    own_pool: str = ""  # where the daemon names none
    policy_version: int | None = None  # of its weights; None: nobody has told
    mixed: bool = False  # a lease ended by itself while weights were being changed: nobody knows which it has
    outdated: bool = False  # it did not get the fleet's weights, and gets no requests until its version is told
    paused: bool = False  # by us, or it was tried: it is to be resumed
    resuming: bool = False  # it did not resume at once, and is asked again
    still: bool = False  # it has been paused, and what it has stands still
    loads_open: int = 0  # requests of ours that load KV there and whose tokens were not counted yet
    loads_before: "asyncio.Task[int | None] | None" = None  # tokens that it had loaded before the first of these
    loads_found_tokens: int = 0  # since then, by requests that were counted

    @property
    def usable(self) -> bool:
        """May take a request that is new to it. Whoever lets it become so announces it to the fleet."""
        return (
            self.routed
            and not self.route.draining
            and not self.suspect_because
            and not self.outdated
            and self.route.health is not EngineHealth.NONSENSE
        )

    @property
    def in_use(self) -> bool:
        """It has something of ours, or stands still for us."""
        return bool(self.records or self.reserved or self.paused)

    @property
    def context_limit_tokens(self) -> float:
        """Of one request, prompt and answer; inf where it is not known."""
        known = None if self.capabilities is None else self.capabilities.max_model_len_tokens
        return float("inf") if known is None else known

    @property
    def kv_version(self) -> str:
        """What KV on it depends on; empty: it hands none over."""
        version = "" if self.mixed else self.route.kv_version
        return version if not version or self.policy_version is None else f"{version}@{self.policy_version}"

    def has(self, policy_version: int) -> None:
        """Weights of this version, as somebody who knows tells."""
        self.policy_version, self.mixed = policy_version, False

    def forget_offers(self) -> None:
        """The server may be another one from now on."""
        if self.learning is not None:
            self.learning.cancel()
        self.capabilities = self.learning = None
        self.unlearnable = False
        self.tying_field = self.whole_field = ""

    def follow(self, route: EngineRoute) -> None:
        """Take the daemon's newer word on this engine."""
        if route.health is EngineHealth.GONE and self.route.health is not EngineHealth.GONE:
            self.suspect_because = self.suspect_because or "the daemon says that it is gone"
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
            # The daemon's index holds the rate; our own counts at this moment stand in for those behind it.
            mean_tokens = max(1.0, (self.running_tokens + self.waiting_tokens) / len(self.records))
            cap = concurrency_cap(self, mean_tokens)
            self.seconds_per_token = route.load_index * cap / len(self.records)

        # What waited when the daemon's word was sampled may run by now. The most of ours that waited lately is taken
        # off, so that ours are never taken for others'.
        ours = max(self.waited_most, self.waited_most_before)
        self.waiting_of_others = max(0, (route.waiting or 0) - ours)
        self.waited_most_before, self.waited_most = self.waited_most, self.waiting

    def has_room(self, queue_depth: int, context_tokens: int) -> bool:
        """Whether one more may be sent there. `queue_depth` is of those who have to wait: where seats and KV are known
        to be free for all who were sent, nobody does for longer than prefill takes."""
        # One of ours always may wait: others who fill the engine would keep us out.
        return self.waiting < max(1, queue_depth - self.waiting_of_others) or (
            self.running + self.waiting < self.max_sequences
            and context_tokens + self.waiting_tokens <= self.kv_free_tokens
            and not self.waiting_of_others
        )

    def reserve(self, record: RequestRecord) -> None:
        """The record will enter; until then it counts as waiting."""
        self.reserved[record.id] = record.context_tokens
        self._await(record.context_tokens)

    def unreserve(self, record: RequestRecord) -> bool:
        tokens = self.reserved.pop(record.id, None)
        if tokens is None:
            return False
        self.waiting -= 1
        self.waiting_tokens -= tokens
        return True

    def enter(self, record: RequestRecord, now_s: float) -> None:
        self.unreserve(record)
        self.records[record.id] = record
        self._await(record.context_tokens)
        record.begin_attempt(self.id, now_s)

    def _await(self, tokens: int) -> None:
        self.waiting += 1
        self.waiting_tokens += tokens
        if self.waiting > self.waited_most:
            self.waited_most = self.waiting

    def advance(self, record: RequestRecord, context_before: int, was: RequestState, now_s: float) -> None:
        """The record has grown from `context_before`, and was in state `was`."""
        self.progressed_s = now_s
        if was is RequestState.RUNNING:
            self._run(record.context_tokens - context_before)
        elif record.state is RequestState.RUNNING:
            self.running += 1
            self.waiting -= 1
            self.waiting_tokens -= context_before
            self._run(record.context_tokens)
        else:
            self.waiting_tokens += record.context_tokens - context_before

    def run_whole(self, record: RequestRecord) -> None:
        """The record is sent for an answer that comes as a whole and shows no first token. It counts as running, where
        the engine is known to have a seat for it."""
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
            self.waiting -= 1
            self.waiting_tokens -= record.context_tokens
