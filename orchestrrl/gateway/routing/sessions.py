"""Choose the engine for the next turn of a session: the engine whose KV cache holds the session's context, unless
another engine is expected to answer earlier although it must prefill the whole context. This module performs no I/O.

A session consists of turns. The prompt of each turn extends the prompt and the answer of the turn before, and between
turns the client runs tools. An engine frees the KV of a finished turn, but keeps it cached until it needs the space.
"""

from collections import Counter, OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from statistics import median
from typing import Generic

from orchestrrl.engines.handover import LeftKv
from orchestrrl.gateway.routing.strategies import EngineLoad, L, RoutingSnapshot, prefix_affinity, prefix_of, within

MOST_SESSIONS = 1 << 16
LOAD_FRACTION = 0.1  # assumed duration of a load of KV, as a fraction of the prefill's, until loads are measured
LEAST_TURNS = 8  # before this many later turns, no KV is saved
LEAST_GAIN = 0.1  # fraction of the expected time by which another engine must be faster, because estimates are rough


class SessionOutcome(StrEnum):
    """The kind of engine on which a turn begins."""

    NEW = "new"  # the session has no earlier turn here
    WARM = "warm"  # the engine has at least a part of the session's KV
    MOVED = "moved"  # another engine has the KV, but this engine was expected to answer earlier
    COLD = "cold"  # no engine that accepts requests has the KV


@dataclass(frozen=True, slots=True)
class KeptContext:
    """The KV that the latest turn of a session left in an engine's cache."""

    cache: int  # `EngineLoad.cache` of the engine
    context_tokens: int  # prompt and answer
    answer_tokens: int
    ended_s: float  # time of the last token
    free_tokens: float  # KV that running requests did not use then, this context included; inf: unknown
    computed_tokens: int  # `EngineLoad.computed_tokens` then
    saved: LeftKv | None = None  # an entry of the engines' KV connector with this KV


@dataclass(frozen=True, slots=True)
class SessionChoice(Generic[L]):
    """The engine for a turn, with the reason."""

    load: L
    outcome: SessionOutcome
    detail: str


@dataclass(frozen=True, slots=True)
class EngineTimes:
    """The measured times of an engine. A decode step takes `step_s` plus `step_s_per_request` for each request. To load
    saved KV takes `load_s` plus `load_s_per_token` for each token."""

    prefill_s_per_token: float
    load_s: float
    load_s_per_token: float
    step_s: float
    step_s_per_request: float


@dataclass(frozen=True, slots=True)
class KvAfterTurn:
    """The expected costs, in seconds, of three ways to keep the KV of a finished turn."""

    dropped_s: float
    kept_s: float
    offloaded_s: float

    @property
    def offload(self) -> bool:
        """Return whether the KV is to be saved outside the engine's cache as well."""
        return self.offloaded_s < min(self.kept_s, self.dropped_s)


def warm_tokens(kept: KeptContext, load: EngineLoad) -> int:
    """Return how many tokens of the session's context are expected in the engine's cache.

    An engine reuses the blocks that were freed first, and frees the end of a context first. The context therefore stays
    complete until the tokens computed since have filled the other free blocks, and is then lost from its end.
    """
    if kept.cache != load.cache:
        return 0
    left = kept.free_tokens - (load.computed_tokens - kept.computed_tokens)
    return int(max(0, min(left, kept.context_tokens)))


def expected_s(
    load: EngineLoad, times: EngineTimes, prefill_tokens: int, answer_tokens: int, load_tokens: int = 0
) -> float:
    """Return the expected time, in seconds, until the engine completes an answer of `answer_tokens` tokens after it has
    loaded the KV of `load_tokens` tokens and prefilled `prefill_tokens` tokens, plus the time by which this delays the
    running requests.

    The prefill waits for the prefills of the waiting requests. If the engine has no sequence slot left, the answer
    takes longer in proportion to the requests beyond the slots.
    """
    requests, seats = load.running + load.waiting + 1, load.max_sequences
    batch = min(requests, seats) if seats else requests
    prefill_s = prefill_tokens * times.prefill_s_per_token
    decode_s = answer_tokens * (times.step_s + batch * times.step_s_per_request) * requests / batch
    delays_s = load.running * (prefill_s + answer_tokens * times.step_s_per_request)
    load_s = times.load_s + load_tokens * times.load_s_per_token if load_tokens else 0.0
    return load.prefill_tokens * times.prefill_s_per_token + load_s + prefill_s + decode_s + delays_s


def engine_for(
    snapshot: RoutingSnapshot[L], kept: KeptContext | None, loading: Collection[int] = ()
) -> SessionChoice[L]:
    """Return the engine for the next turn of a session. `kept` is what its latest turn left, or None if no turn is
    known. `loading` are the caches of the engines that can load `kept.saved`. An overloaded engine is never chosen, see
    `within`.

    A session without cached KV goes to the engine that ranks highest for its id or, if the routing strategy uses
    prefixes, for its prefix. Gateways thus choose the same engine, unless its load differs too much from the others'.
    """
    if kept is None:
        return SessionChoice(_ranked_highest(snapshot), SessionOutcome.NEW, "no earlier turn is known")
    home = next((load for load in snapshot.loads if load.cache == kept.cache), None)
    warm = 0 if home is None else warm_tokens(kept, home)
    if home is None or not warm:
        gone = "the earlier engine accepts no requests or lost its cache" if home is None else "its KV was replaced"
        return SessionChoice(_ranked_highest(snapshot), SessionOutcome.COLD, gone)
    able = within(snapshot)
    typical, overloaded = typical_times(snapshot.loads), all(load is not home for load in able)
    if typical is None:
        if not overloaded:
            return SessionChoice(home, SessionOutcome.WARM, f"{warm} tokens are cached")
        return SessionChoice(_ranked_highest(snapshot), SessionOutcome.MOVED, f"{home.id} is overloaded")
    context = max(snapshot.newcomer.context_tokens, kept.context_tokens)

    def takes_s(load: L) -> float:
        times = times_of(load, typical)
        if load is home:
            return expected_s(load, times, max(1, context - warm), kept.answer_tokens)
        computed_s = expected_s(load, times, context, kept.answer_tokens)
        if load.cache not in loading:
            return computed_s
        tokens = kept.context_tokens
        return min(computed_s, expected_s(load, times, max(1, context - tokens), kept.answer_tokens, tokens))

    best = min(able, key=lambda load: (takes_s(load), load.id))
    home_s, best_s = takes_s(home), takes_s(best)
    if not overloaded and best_s >= (1 - LEAST_GAIN) * home_s:
        return SessionChoice(
            home,
            SessionOutcome.WARM,
            f"{warm} tokens are cached; costs {home_s:.3g} s",
        )
    detail = f"costs {best_s:.3g} s, and {home_s:.3g} s on {home.id} with {warm} cached tokens"
    return SessionChoice(best, SessionOutcome.MOVED, detail)


def _ranked_highest(snapshot: RoutingSnapshot[L]) -> L:
    if snapshot.newcomer.prefix:
        return prefix_affinity(snapshot)
    # The session's later turns follow this one, so the load must be even from the start.
    newcomer = replace(snapshot.newcomer, prefix=prefix_of(snapshot.newcomer.session, {}))
    return prefix_affinity(replace(snapshot, newcomer=newcomer, slack=0))


def after_turn(context_tokens: int, elsewhere: float, times: EngineTimes) -> KvAfterTurn:
    """Decide how the KV of a context is kept until the session's next turn. `elsewhere` is the probability that the
    turn begins on an engine without the KV.

    The KV stays in the engine's cache in any case, which is free, because the engine replaces it when it needs the
    space. To drop it at once would cost a whole prefill. To save it as well costs about as much as to load it.
    """
    dropped_s = context_tokens * times.prefill_s_per_token
    kept_s = elsewhere * dropped_s
    load_s = times.load_s + context_tokens * times.load_s_per_token
    return KvAfterTurn(dropped_s, kept_s, load_s + elsewhere * min(load_s, dropped_s))


def typical_times(loads: Sequence[EngineLoad]) -> EngineTimes | None:
    """Return the median times of the engines, or None if no prefill has been measured. If no load has been measured, it
    is assumed to take `LOAD_FRACTION` of the prefill."""
    prefills = [load.prefill_times.fitted[1] for load in loads if load.prefill_times.fitted is not None]
    if not prefills:
        return None
    prefill_s = median(prefills)
    loading = _median_line([load.load_times.fitted for load in loads]) or (0.0, LOAD_FRACTION * prefill_s)
    return EngineTimes(prefill_s, *loading, *(_median_line([load.step_times.fitted for load in loads]) or (0.0, 0.0)))


def _median_line(lines: Sequence[tuple[float, float] | None]) -> tuple[float, float] | None:
    known = [line for line in lines if line is not None]
    return (median(base for base, _ in known), median(slope for _, slope in known)) if known else None


def times_of(load: EngineLoad, typical: EngineTimes) -> EngineTimes:
    """Return the engine's own times, and the typical times where it has none."""
    prefill = load.prefill_times.fitted
    return EngineTimes(
        typical.prefill_s_per_token if prefill is None else prefill[1],
        *(load.load_times.fitted or (typical.load_s, typical.load_s_per_token)),
        *(load.step_times.fitted or (typical.step_s, typical.step_s_per_request)),
    )


class SessionTable:
    """The latest turn of each session. A session is forgotten `ttl_s` seconds after its last token, or earlier if
    `MOST_SESSIONS` sessions have had a later turn."""

    def __init__(self, ttl_s: float, most: int = MOST_SESSIONS) -> None:
        self.ttl_s = ttl_s
        self._most = most
        self._kept: OrderedDict[str, KeptContext] = OrderedDict()  # in the order of `ended_s`
        self.turns: Counter[SessionOutcome] = Counter()
        self.warm_tokens_total = 0

    def known(self, now_s: float) -> int:
        """Return the number of sessions that are not forgotten."""
        while self._kept and next(iter(self._kept.values())).ended_s + self.ttl_s <= now_s:
            self._kept.popitem(last=False)
        return len(self._kept)

    def get(self, session: str, now_s: float) -> KeptContext | None:
        self.known(now_s)
        return self._kept.get(session)

    @property
    def elsewhere(self) -> float:
        """The fraction of later turns that began on an engine without the KV, or 0 if there were too few turns."""
        left = self.turns[SessionOutcome.MOVED] + self.turns[SessionOutcome.COLD]
        later = left + self.turns[SessionOutcome.WARM]
        return left / later if later >= LEAST_TURNS else 0.0

    def begin(self, session: str, load: EngineLoad, loads: Sequence[EngineLoad], now_s: float, *, first: bool) -> int:
        """Return how many tokens of the session's context engine `load` is expected to have in its cache, at the
        begin of an attempt of a turn there. `loads` are the engines that accept requests. If `first` is set, the turn
        is counted."""
        kept = self.get(session, now_s)
        warm = 0 if kept is None else warm_tokens(kept, load)
        if first:
            elsewhere = kept is not None and any(warm_tokens(kept, other) for other in loads)
            outcome = SessionOutcome.NEW if kept is None else SessionOutcome.MOVED if elsewhere else SessionOutcome.COLD
            self.turns[SessionOutcome.WARM if warm else outcome] += 1
            self.warm_tokens_total += warm
        return warm

    def keep(
        self,
        session: str,
        load: EngineLoad,
        context_tokens: int,
        answer_tokens: int | None,
        now_s: float,
        saved: LeftKv | None = None,
    ) -> None:
        """Remember that engine `load` has the KV of the session's context, and that it is saved as `saved`.
        `answer_tokens` is the length of the turn's answer, or None if the turn has not ended; the length of the turn
        before is then kept."""
        before = self._kept.pop(session, None)
        if answer_tokens is None:
            answer_tokens = 0 if before is None else before.answer_tokens
        known = load.kv_capacity_tokens > 0
        free_tokens = max(context_tokens, min(load.kv_free_tokens, load.kv_capacity_tokens)) if known else float("inf")
        self._kept[session] = KeptContext(
            load.cache, context_tokens, answer_tokens, now_s, free_tokens, load.computed_tokens, saved
        )
        if len(self._kept) > self._most:
            self._kept.popitem(last=False)
