"""What the fast loop decides in one tick: snapshot -> problem -> moves -> gate. Pure.

The policy is here in whole: `balance_problem` says what the balancer sees, `decide_balance` which moves it may make and
whether they are made. The daemon and the simulator call the same functions.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from balancer.load import Problem, Worker, problem_of
from balancer.migrate import Balance, decide
from orchestrrl.config import FastSettings
from orchestrrl.operations import RequestMove
from planner.model import Act, EngineHealth, EngineId, EngineView, Hold, Mode, RequestId, Snapshot, Verdict

# Stands in for an engine whose limit nobody knows: its KV cache is then what limits it.
UNKNOWN_MAX_SEQUENCES = 1 << 20
# A running request is worth moving from an engine with this many times the requests of the emptiest, that one's
# newcomer counted in. Chosen in simulated steps (orchestrrl.sim): lower moves more for the same makespan.
FAR_MORE = 2


@dataclass(frozen=True, slots=True)
class Situation:
    """What the fast loop knows beside the snapshot."""

    mode: Mode
    moves_open: int = 0  # operations that move requests and have no result yet
    moves_ended_s: float | None = None  # when the last of them got its result
    planning: bool = False  # the slow loop is about to decide


@dataclass(frozen=True, slots=True)
class BalanceDecision:
    """One tick: the indices, the moves that would help, and whether they are made."""

    decided_s: float
    theta: float
    balance: Balance
    verdict: Verdict
    inputs_age_s: float | None

    @property
    def moves(self) -> tuple[RequestMove, ...]:
        return tuple(RequestMove(move.request, move.source, move.destination) for move in self.balance.moves)

    @property
    def load_index(self) -> Mapping[EngineId, float | None]:
        return self.balance.load_before


def balance_problem(snapshot: Snapshot, settings: FastSettings) -> Problem:
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
    return replace(problem, workers=tuple(_with_headroom(w, settings.headroom_tokens) for w in problem.workers))


def _usable(engine: EngineView, settings: FastSettings) -> bool:
    return engine.health is EngineHealth.OK and engine.age_s is not None and engine.age_s <= settings.stale_after_s


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
    problem = balance_problem(snapshot, settings)
    balance = decide(
        problem,
        max_moves=settings.max_moves_per_tick,
        excluded=stuck | staying(problem),
        forget_stuck=True,
    )
    used = replace(snapshot, engines=tuple(engine for engine in snapshot.engines if _usable(engine, settings)))
    verdict = _judge(used, settings, situation, balance)
    return BalanceDecision(snapshot.now_s, settings.theta, balance, verdict, used.inputs_age_s)


def _judge(snapshot: Snapshot, settings: FastSettings, situation: Situation, balance: Balance) -> Verdict:
    """Of a snapshot of the usable engines. Codes, in the order in which they are looked for: nothing_to_do,
    stale_telemetry, moves_open, awaiting_telemetry, planning, within_theta | no_feasible_move, advise_only; to act:
    spread.
    """
    if not snapshot.requests:
        return Hold("nothing_to_do", "no requests are in flight")
    hold = _stale(snapshot, settings) or _unsettled(snapshot, situation)
    if hold is not None:
        return hold
    spread = "an engine is stalled" if balance.spread_before is None else f"load differs by {balance.spread_before:.3g}"
    if not balance.moves:
        why = "no request can move to where it helps"
        if balance.stopped_because == "within_theta":
            why = f"theta is {settings.theta:.3g}"
        return Hold(balance.stopped_because, f"{spread}; {why}")
    case = f"{spread}, theta is {settings.theta:.3g}: {len(balance.moves)} moves"
    if situation.mode is Mode.ADVISE:
        return Hold("advise_only", f"mode is advise: {case}")
    return Act("spread", case)


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
