"""What the fast loop decides in one tick: snapshot -> problem -> moves -> gate. Pure.

The policy is here in whole: `balance_problem` says what the balancer sees, `decide_balance` which moves it may make and
whether they are made. The daemon and the simulator call the same functions. Moves are chosen by when each engine will
end (balancer/packing.py) where the step times of all engines are known, else by the paper's rule
(balancer/migrate.py), as is any tick in which an engine is stalled.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from balancer.load import Problem, Request, Worker, problem_of
from balancer.migrate import Balance, Move, decide
from balancer.packing import Engine, Outlook, Packing, pack
from orchestrrl.config import FastPolicy, FastSettings
from orchestrrl.operations import RequestMove
from orchestrrl.room import UNKNOWN_MAX_SEQUENCES, Futures, future_room
from planner.model import (
    Act,
    Configuration,
    ConfigurationId,
    EngineHealth,
    EngineId,
    EngineView,
    Hold,
    Mode,
    RequestId,
    RequestState,
    Snapshot,
    Verdict,
)

# A running request is worth moving from an engine with this many times the requests of the emptiest, that one's
# newcomer counted in. Chosen in simulated steps (orchestrrl.sim): lower moves more for the same makespan.
FAR_MORE = 2
# An engine counts as slower than its configuration says if it takes this many times longer, against the median engine:
# rates are measured over windows with prefills in them.
FAR_SLOWER = 2.0


@dataclass(frozen=True, slots=True)
class Situation:
    """What the fast loop knows beside the snapshot."""

    mode: Mode
    moves_open: int = 0  # operations that move requests and have no result yet
    moves_ended_s: float | None = None  # when the last of them got its result
    planning: bool = False  # the slow loop is about to decide
    configurations: tuple[Configuration, ...] = ()
    # By request; whoever is missing, and everybody where there are none, leaves packing to the paper's rule.
    remaining_tokens: Mapping[RequestId, float] = field(default_factory=dict)
    futures: Futures | None = None  # how long requests may go on; None: room is judged by headroom


@dataclass(frozen=True, slots=True)
class BalanceDecision:
    """One tick: the indices, the moves that would help, and whether they are made."""

    decided_s: float
    theta: float
    balance: Balance
    verdict: Verdict
    inputs_age_s: float | None
    packing: Packing | None = None  # None: by the paper's rule

    @property
    def moves(self) -> tuple[RequestMove, ...]:
        return tuple(RequestMove(move.request, move.source, move.destination) for move in self.balance.moves)

    @property
    def load_index(self) -> Mapping[EngineId, float | None]:
        return self.balance.load_before


def balance_problem(snapshot: Snapshot, settings: FastSettings, headroom: bool = True) -> Problem:
    """What the balancer decides on: engines that are well, by news that is fresh, and the requests on them.

    An engine whose agent has fallen silent is left out, so that one dead node does not stop the others. Free KV is what
    is left once each running request has grown by `headroom_tokens`: room that is taken already.
    """
    engines = tuple(
        engine if engine.max_sequences else replace(engine, max_sequences=UNKNOWN_MAX_SEQUENCES)
        for engine in snapshot.engines
        if _usable(engine, settings)
    )
    problem = problem_of(replace(snapshot, engines=engines), settings.theta, settings.stall_grace_s)
    if not headroom:
        return problem
    return replace(problem, workers=tuple(_with_headroom(w, settings.headroom_tokens) for w in problem.workers))


def _usable(engine: EngineView, settings: FastSettings) -> bool:
    fresh = engine.age_s is not None and engine.age_s <= settings.stale_after_s
    return fresh and engine.health is EngineHealth.OK and not (engine.draining or engine.outdated)


def _with_headroom(worker: Worker, headroom_tokens: int) -> Worker:
    return replace(worker, kv_free_tokens=max(0, worker.kv_free_tokens - headroom_tokens * len(worker.running)))


def staying(problem: Problem) -> frozenset[RequestId]:
    """Running requests without a reason to leave. A waiting request moves for nothing, a running one costs a prefill.

    So a running request leaves only an engine that is out of room (requests wait there), stalled, or left with far
    more than the emptiest. Without this, rates that are measured a little too low or high move requests to and fro.
    """
    fewest = min((len(worker.running) + len(worker.waiting) for worker in problem.workers), default=0)
    return frozenset(
        request.id
        for worker in problem.workers
        if not worker.waiting and not worker.stalled and len(worker.running) < FAR_MORE * (fewest + 1)
        for request in worker.running
    )


def decide_balance(snapshot: Snapshot, settings: FastSettings, situation: Situation) -> BalanceDecision:
    """The decision of one tick. The moves are worked out even where the verdict is to hold, for people to see."""
    stuck = frozenset(
        request.id
        for request in snapshot.requests
        if not request.movable or request.moves >= settings.max_moves_per_request
    )
    problem = balance_problem(snapshot, settings, headroom=situation.futures is None)
    used = replace(snapshot, engines=tuple(engine for engine in snapshot.engines if _usable(engine, settings)))
    packing = None
    room = None if situation.futures is None else future_room(used, situation.futures, settings.preemption_risk)
    if settings.policy is FastPolicy.PACKING:
        engines = packing_engines(used, problem, situation, stuck)
        if engines:
            packing = pack(engines, max_moves=settings.max_moves_per_tick, tolerance=settings.tolerance, room=room)
    if packing is not None:
        balance = _packed(problem, packing)
    else:
        balance = decide(
            problem,
            max_moves=settings.max_moves_per_tick if settings.policy is not FastPolicy.NONE else 0,
            excluded=stuck | staying(problem),
            forget_stuck=True,
            room=room,
        )
    verdict = _judge(used, settings, situation, balance, packing)
    return BalanceDecision(snapshot.now_s, settings.theta, balance, verdict, used.inputs_age_s, packing)


def packing_engines(
    snapshot: Snapshot, problem: Problem, situation: Situation, stuck: frozenset[RequestId]
) -> tuple[Engine, ...]:
    """The usable engines as packing sees them. None at all where one's step time or a request's outlook is unknown, or
    one is stalled: nobody can say when that one will end."""
    known = {configuration.id: configuration for configuration in situation.configurations}
    outlooks: dict[EngineId, list[Outlook]] = {engine.id: [] for engine in snapshot.engines}
    for request in snapshot.requests:
        held = None if request.engine is None else outlooks.get(request.engine)
        if held is not None:
            name = request.id
            remaining_tokens = situation.remaining_tokens.get(name)
            if remaining_tokens is None:
                return ()
            tokens = request.prompt_tokens + request.generated_tokens
            held.append(Outlook(name, request.state, tokens, remaining_tokens, name not in stuck))
    workers = {worker.id: worker for worker in problem.workers}
    if any(worker.stalled for worker in problem.workers):
        return ()
    if any(engine.configuration not in known for engine in snapshot.engines):
        return ()
    alike: dict[tuple[ConfigurationId | None, int, int], Configuration] = {}
    for engine in snapshot.engines:
        kind = engine.configuration, engine.kv_capacity_tokens, engine.max_sequences
        if engine.configuration is not None and kind not in alike:
            alike[kind] = _with_own_limits(known[engine.configuration], engine)
    configurations = {
        engine.id: alike[engine.configuration, engine.kv_capacity_tokens, engine.max_sequences]
        for engine in snapshot.engines
    }
    slowdowns = _slowdowns(problem.workers, configurations)
    return tuple(
        Engine(
            id=engine.id,
            configuration=configurations[engine.id],
            requests=tuple(outlooks[engine.id]),
            kv_free_tokens=workers[engine.id].kv_free_tokens,
            slowdown=slowdowns.get(engine.id, 1.0),
        )
        for engine in snapshot.engines
    )


def _with_own_limits(configuration: Configuration, engine: EngineView) -> Configuration:
    return replace(
        configuration,
        kv_capacity_tokens=engine.kv_capacity_tokens or configuration.kv_capacity_tokens,
        max_sequences=engine.max_sequences or configuration.max_sequences,
    )


def _slowdowns(workers: Sequence[Worker], configurations: Mapping[EngineId, Configuration]) -> dict[EngineId, float]:
    """Of the engines that are far slower than their configurations say, against the median: how many times."""
    ratios = {}
    for worker in workers:
        kv_tokens = sum(request.context_tokens for request in worker.running)
        expected_s = configurations[worker.id].step_s(len(worker.running), kv_tokens)
        if worker.running and worker.decode_tokens_per_s and expected_s > 0:
            ratios[worker.id] = len(worker.running) / worker.decode_tokens_per_s / expected_s
    typical = median(ratios.values()) if ratios else 1.0
    return {engine: ratio / typical for engine, ratio in ratios.items() if ratio > FAR_SLOWER * typical}


def _packed(problem: Problem, packing: Packing) -> Balance:
    """The moves, with the load indices around them."""
    before = decide(problem, max_moves=0)
    after = decide(_carried_out(problem, packing.moves), max_moves=0) if packing.moves else before
    return Balance(
        load_before=before.load_before,
        load_after=after.load_before,
        spread_before=before.spread_before,
        spread_after=after.spread_before,
        moves=packing.moves,
        stopped_because=packing.stopped_because,
    )


def _carried_out(problem: Problem, moves: Sequence[Move]) -> Problem:
    """The fleet after the moves: who arrives runs where a seat and KV are free, and waits where not."""
    workers = {worker.id: worker for worker in problem.workers}
    for move in moves:
        source = workers[move.source]
        (request,) = (request for request in source.running + source.waiting if request.id == move.request)
        workers[move.source] = _without(source, request, move.state)
        workers[move.destination] = _with(workers[move.destination], request)
    return replace(problem, workers=tuple(workers[worker.id] for worker in problem.workers))


def _without(worker: Worker, request: Request, state: RequestState) -> Worker:
    if state is RequestState.WAITING:
        return replace(worker, waiting=tuple(other for other in worker.waiting if other is not request))
    return replace(
        worker,
        running=tuple(other for other in worker.running if other is not request),
        kv_free_tokens=worker.kv_free_tokens + request.context_tokens,
    )


def _with(worker: Worker, request: Request) -> Worker:
    if len(worker.running) >= worker.max_sequences or worker.kv_free_tokens < request.context_tokens:
        return replace(worker, waiting=(*worker.waiting, request))
    return replace(
        worker,
        running=(*worker.running, request),
        kv_free_tokens=worker.kv_free_tokens - request.context_tokens,
    )


def _judge(
    snapshot: Snapshot, settings: FastSettings, situation: Situation, balance: Balance, packing: Packing | None
) -> Verdict:
    """Of a snapshot of the usable engines. Codes, in the order in which they are looked for: nothing_to_do,
    stale_telemetry, moves_open, awaiting_telemetry, planning, no_policy, no_gain | within_theta | no_feasible_move,
    advise_only; to act: pack | spread.
    """
    if not snapshot.requests:
        return Hold("nothing_to_do", "no requests are in flight")
    hold = _stale(snapshot, settings) or _unsettled(snapshot, situation)
    if hold is not None:
        return hold
    if settings.policy is FastPolicy.NONE:
        return Hold("no_policy", "fast.policy is none")
    state, why, acted = _in_words(settings, balance, packing)
    if not balance.moves:
        return Hold(balance.stopped_because, f"{state}; {why}")
    case = f"{state}, {acted}: {len(balance.moves)} moves"
    if situation.mode is Mode.ADVISE:
        return Hold("advise_only", f"mode is advise: {case}")
    return Act("spread" if packing is None else "pack", case)


def _in_words(settings: FastSettings, balance: Balance, packing: Packing | None) -> tuple[str, str, str]:
    """How it is, why nothing is moved if nothing is, and what moves are for if there are any."""
    if packing is not None:
        ends = f"the last engine is expected to end in {packing.makespan_before_s:.1f} s"
        return (
            ends,
            f"no move helps, tolerance is {settings.tolerance:.0%}",
            f"{packing.makespan_after_s:.1f} s if packed",
        )
    spread = "an engine is stalled" if balance.spread_before is None else f"load differs by {balance.spread_before:.3g}"
    theta = f"theta is {settings.theta:.3g}"
    return (
        spread,
        theta if balance.stopped_because == "within_theta" else "no request can move to where it helps",
        theta,
    )


def _stale(snapshot: Snapshot, settings: FastSettings) -> Hold | None:
    limit_s = settings.stale_after_s
    if not snapshot.engines:
        return Hold("stale_telemetry", f"no engine is well by news of the last {limit_s:g} s")
    if snapshot.requests_age_s is None:
        return Hold("stale_telemetry", "no gateway has reported yet")
    if snapshot.requests_age_s > limit_s:
        return Hold("stale_telemetry", f"a gateway is {snapshot.requests_age_s:.1f} s old, limit {limit_s:g} s")
    return None


def _unsettled(snapshot: Snapshot, situation: Situation) -> Hold | None:
    """Moves change what the next decision rests on: first let them end, then look again."""
    if situation.moves_open:
        return Hold("moves_open", f"{situation.moves_open} earlier operations have no result yet")
    oldest_s = snapshot.now_s - (snapshot.inputs_age_s or 0.0)
    if situation.moves_ended_s is not None and oldest_s <= situation.moves_ended_s:
        return Hold("awaiting_telemetry", "not every engine and gateway has reported since the last moves")
    if situation.planning:
        return Hold("planning", "the slow loop is about to decide, on the fleet as it is")
    return None
