"""Make the decisions of one tick of the fast loop. Has no side effects.

`balanced_workers` selects the engines that take part. `decide_balance` chooses the moves and decides whether to make
them. The daemon and the simulator call the same functions. If all step times and remaining lengths are known and no
engine is stalled, moves are chosen by the predicted finish times of the engines (packing.py). Otherwise, or if the
configuration requires it, moves are chosen by the paper's rule (load_index_moves.py). Both methods require free KV at
the destination (kv_headroom.py) and apply the limits of move_limits.py.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Protocol

from balancer.kv_headroom import ForecastKvHeadroom, LengthDistributions
from balancer.load_index import Worker
from balancer.load_index_moves import WITHIN_THETA, Balance, balance_of, decide
from balancer.move_limits import MoveLimits, resting
from balancer.packing import Packing, pack
from planner.model import (
    Act,
    Configuration,
    ConfigurationId,
    EngineHealth,
    EngineId,
    EngineView,
    FastPolicy,
    Hold,
    Mode,
    RequestId,
    RequestMove,
    RequestState,
    RequestView,
    Snapshot,
    StepTimeEstimates,
    Verdict,
    unknown_step_times,
)

MOST_SOURCES = 3  # sources of step times listed in a reason
UNKNOWN_MAX_SEQUENCES = 1 << 20  # assumed if an engine does not report its limit: only KV limits it then
# An engine is slow if the ratio of its measured to its configured step time is this many times the median engine's.
# The comparison is with the median because rates are measured over windows that include prefills.
FAR_SLOWER = 2.0
CROWDED_RATIO = 2.0  # of an engine's running requests to the requests of the emptiest engine
PREEMPTION_RISK = 0.1  # accepted probability, by the length forecast, that a move causes a preemption


class BalanceSettings(Protocol):
    """The fields of section `fast` of the configuration that the balancer uses. The configuration schema documents
    them."""

    policy: FastPolicy
    tolerance: float
    theta: float
    max_moves_per_tick: int
    max_moves_to_engine: int
    max_moves_per_request: int
    rest_after_move_s: float
    headroom_tokens: int
    stale_after_s: float
    stall_grace_s: float


@dataclass(frozen=True, slots=True)
class BalanceSituation:
    """The inputs of one tick of the fast loop that the snapshot does not contain."""

    mode: Mode
    moves_open: int = 0  # operations that move requests and have no result yet
    moves_ended_s: float | None = None  # when the latest of them received its result
    planning: bool = False  # the slow loop is about to decide
    configurations: tuple[Configuration, ...] = ()
    # If the value of a request in flight is missing, the paper's rule decides instead of packing.
    remaining_tokens: Mapping[RequestId, float] = field(default_factory=dict)
    distributions: LengthDistributions | None = None  # None: room is judged by `headroom_tokens`
    moved_s: Mapping[RequestId, float] = field(default_factory=dict)  # when requests last moved; old moves are left out
    step_times: Mapping[EngineId, StepTimeEstimates] = field(default_factory=dict)  # sources, for the reason
    move_fixed_s: float = 0.0  # pause of a running request that moves, its prefill not included


@dataclass(frozen=True, slots=True)
class PolicyInForce:
    """The policy that chose the moves of a tick, with the reason for its use. `name` is packing, load_index (the
    paper's rule), or none."""

    name: str
    reason: str


NO_POLICY = PolicyInForce("none", "nothing was decided")


@dataclass(frozen=True, slots=True)
class BalanceDecision:
    """The result of one tick: the load indices, the beneficial moves, and the decision whether to make them."""

    decided_s: float
    theta: float
    balance: Balance
    verdict: Verdict
    inputs_age_s: float | None
    packing: Packing | None = None  # None: the paper's rule was used
    policy: PolicyInForce = NO_POLICY

    @property
    def moves(self) -> tuple[RequestMove, ...]:
        return self.balance.moves

    @property
    def load_index(self) -> Mapping[EngineId, float | None]:
        return self.balance.load_before


def balanced_workers(snapshot: Snapshot, settings: BalanceSettings, headroom: bool = True) -> tuple[Worker, ...]:
    """Return a worker, with its requests, for each engine that is healthy, has fresh reports, and is neither draining
    nor outdated.

    An engine without fresh reports is omitted, so that a failed node does not prevent balancing of the other engines.
    If `headroom` is True, the free KV of an engine is reduced by `headroom_tokens` per running request, as a reserve
    for its growth. A rate of 0 during the first `stall_grace_s` seconds of a step is treated as unknown, because the
    engine may still be prefilling.
    """
    queues: dict[EngineId, tuple[list[RequestView], list[RequestView]]] = {
        engine.id: ([], []) for engine in snapshot.engines if _usable(engine, settings)
    }
    for request in snapshot.requests:
        held = queues.get(request.engine) if request.engine is not None else None
        if held is not None:
            held[request.state is not RequestState.RUNNING].append(request)
    in_grace = snapshot.step_started_s is None or snapshot.now_s - snapshot.step_started_s < settings.stall_grace_s
    growth_tokens = settings.headroom_tokens if headroom else 0
    workers = []
    for engine in snapshot.engines:
        if engine.id not in queues:
            continue
        running, waiting = queues[engine.id]
        rate = engine.decode_tokens_per_s
        workers.append(
            Worker(
                id=engine.id,
                running=tuple(running),
                waiting=tuple(waiting),
                kv_capacity_tokens=engine.kv_capacity_tokens,
                kv_free_tokens=max(0, engine.kv_free_tokens - growth_tokens * len(running)),
                max_sequences=engine.max_sequences or UNKNOWN_MAX_SEQUENCES,
                decode_tokens_per_s=None if rate == 0 and in_grace else rate,
            )
        )
    return tuple(workers)


def _usable(engine: EngineView, settings: BalanceSettings) -> bool:
    fresh = engine.age_s is not None and engine.age_s <= settings.stale_after_s
    return fresh and engine.health is EngineHealth.OK and not (engine.draining or engine.outdated)


def staying(workers: Sequence[Worker]) -> frozenset[RequestId]:
    """Return the running requests that have no reason to leave their engine.

    Moving a waiting request costs nothing, but moving a running request costs a prefill. A running request therefore
    leaves its engine only if the engine has waiting requests, is stalled or is crowded. An engine is crowded if it runs
    at least CROWDED_RATIO times as many requests as the emptiest engine would have with one more request. Without this
    rule, small errors in measured rates would cause requests to move back and forth.
    """
    fewest = min((len(worker.requests) for worker in workers), default=0)
    return frozenset(
        request.id
        for worker in workers
        if not worker.waiting and not worker.stalled and len(worker.running) < CROWDED_RATIO * (fewest + 1)
        for request in worker.running
    )


def decide_balance(snapshot: Snapshot, settings: BalanceSettings, situation: BalanceSituation) -> BalanceDecision:
    """Return the decision of one tick. The moves are computed even if the verdict is Hold, so that operators can see
    them."""
    used = replace(snapshot, engines=tuple(engine for engine in snapshot.engines if _usable(engine, settings)))
    workers = balanced_workers(snapshot, settings, headroom=situation.distributions is None)
    stuck = resting(used, workers, situation.moved_s, settings.rest_after_move_s) | {
        request.id
        for request in snapshot.requests
        if not request.movable or request.moves >= settings.max_moves_per_request
    }
    own = packing_configurations(workers, used.engines, settings, situation)
    lengths = situation.distributions
    room = MoveLimits(
        workers,
        None if lengths is None else ForecastKvHeadroom(workers, lengths, PREEMPTION_RISK),
        max_to_engine=settings.max_moves_to_engine,
        # By the paper's rule a move to an idle engine looks like a gain; packing compares the ends of both engines.
        keep_last=isinstance(own, Hold),
    )
    packing: Packing | None = None
    if isinstance(own, Hold):
        policy = PolicyInForce("none" if settings.policy is FastPolicy.NONE else "load_index", own.detail)
        most = 0 if settings.policy is FastPolicy.NONE else settings.max_moves_per_tick
        excluded = stuck | staying(workers)
        balance = decide(settings.theta, workers, max_moves=most, excluded=excluded, forget_stuck=True, room=room)
    else:
        policy = PolicyInForce("packing", _sources(used, situation.step_times))
        packing = pack(
            workers,
            own,
            situation.remaining_tokens,
            stuck=stuck,
            max_moves=settings.max_moves_per_tick,
            tolerance=settings.tolerance,
            move_fixed_s=situation.move_fixed_s,
            room=room,
        )
        balance = balance_of(workers, packing.moves, packing.stopped_because)
    verdict = _judge(used, settings, situation, balance, packing)
    return BalanceDecision(snapshot.now_s, settings.theta, balance, verdict, used.inputs_age_s, packing, policy)


def _sources(used: Snapshot, step_times: Mapping[EngineId, StepTimeEstimates]) -> str:
    """Return a message that lists the sources of the step times, the most frequent first."""
    details = Counter(step_times[engine.id].detail for engine in used.engines if engine.id in step_times)
    shown = [f"{count} x {detail}" for detail, count in details.most_common(MOST_SOURCES)]
    more = [f"and {len(details) - MOST_SOURCES} more sources"] if len(details) > MOST_SOURCES else []
    return "; ".join(["step times of all engines are known", *shown, *more])


def _judge(
    used: Snapshot, settings: BalanceSettings, situation: BalanceSituation, balance: Balance, packing: Packing | None
) -> Verdict:
    """Return Act if the moves of the tick should be made, and Hold otherwise. `used` contains only usable engines.

    The codes of Hold, in the order of the checks, are nothing_to_do, stale_telemetry, moves_open, awaiting_telemetry,
    planning, no_policy, the reason why no move was found (no_gain, within_theta or no_feasible_move), and advise_only.
    The codes of Act are pack and spread.
    """
    if not used.requests:
        return Hold("nothing_to_do", "no requests are in flight")
    hold = _stale(used, settings) or _unsettled(used, situation)
    if hold is not None:
        return hold
    if settings.policy is FastPolicy.NONE:
        return Hold("no_policy", "fast.policy is none")
    theta = f"theta is {settings.theta:.3g}"
    if packing is not None:
        code, state = "pack", f"the last engine is expected to finish in {packing.makespan_before_s:.1f} s"
        aim = f"{packing.makespan_after_s:.1f} s after packing"
        stopped = f"no move shortens that, tolerance is {settings.tolerance:.0%}"
    else:
        code, spread, aim = "spread", balance.spread_before, theta
        state = "an engine is stalled" if spread is None else f"load indices differ by {spread:.3g}"
        stopped = theta if balance.stopped_because == WITHIN_THETA else "no possible move reduces the difference"
    if not balance.moves:
        return Hold(balance.stopped_because, f"{state}; {stopped}")
    case = f"{state}, {aim}: {len(balance.moves)} moves"
    return Hold("advise_only", f"mode is advise: {case}") if situation.mode is Mode.ADVISE else Act(code, case)


def _stale(snapshot: Snapshot, settings: BalanceSettings) -> Hold | None:
    limit_s = settings.stale_after_s
    if not snapshot.engines:
        return Hold("stale_telemetry", f"no healthy engine has reported in the last {limit_s:g} s")
    if snapshot.requests_age_s is None:
        return Hold("stale_telemetry", "no gateway has reported yet")
    if snapshot.requests_age_s > limit_s:
        return Hold("stale_telemetry", f"a gateway report is {snapshot.requests_age_s:.1f} s old, limit {limit_s:g} s")
    return None


def _unsettled(snapshot: Snapshot, situation: BalanceSituation) -> Hold | None:
    """Return a Hold if earlier moves have not ended, if their effect has not been reported yet, or if the slow loop is
    about to decide. Return None otherwise."""
    if situation.moves_open:
        return Hold("moves_open", f"{situation.moves_open} earlier operations have no result yet")
    oldest_s = snapshot.now_s - (snapshot.inputs_age_s or 0.0)
    if situation.moves_ended_s is not None and oldest_s <= situation.moves_ended_s:
        return Hold("awaiting_telemetry", "not every engine and gateway has reported since the last moves")
    if situation.planning:
        return Hold("planning", "the slow loop is about to decide for the current fleet")
    return None


def packing_configurations(
    workers: Sequence[Worker], engines: Sequence[EngineView], settings: BalanceSettings, situation: BalanceSituation
) -> dict[EngineId, Configuration] | Hold:
    """Return the configuration of each engine, with the KV capacity and slots that the engine reports, and with the
    step times of slow engines scaled up.

    `engines` are the engines of the workers. Return a Hold if the paper's rule must decide instead of packing. This is
    the case if the settings require it, if there are no engines, if a step time or a request's remaining length is
    unknown, or if an engine is stalled. The finish time of a stalled engine cannot be predicted.
    """
    if settings.policy is not FastPolicy.PACKING:
        return Hold("configured", f"fast.policy is {settings.policy}")
    step_times = situation.step_times
    if not engines:
        return Hold("no_engines", "no healthy engine has fresh reports")
    known = {configuration.id: configuration for configuration in situation.configurations}
    unknown = {
        engine.id: step_times[engine.id].detail if engine.id in step_times else "its configuration is unknown"
        for engine in engines
        if engine.configuration not in known
    }
    if unknown:
        return Hold("no_step_times", unknown_step_times(unknown))
    stalled = [worker.id for worker in workers if worker.stalled]
    if stalled:
        return Hold("stalled", f"the end times of stalled engines cannot be predicted: {', '.join(stalled)}")
    held = [request.id for worker in workers for request in worker.requests]
    if missing := [request for request in held if request not in situation.remaining_tokens]:
        return Hold("no_lengths", f"the remaining length of request {min(missing)} is unknown")
    alike: dict[tuple[ConfigurationId | None, int, int], Configuration] = {}
    own = {}
    for engine in engines:
        kind = engine.configuration, engine.kv_capacity_tokens, engine.max_sequences
        if engine.configuration is not None and kind not in alike:
            alike[kind] = known[engine.configuration].limited_as(engine)
        own[engine.id] = alike[kind]
    return own | {engine: _slowed(own[engine], times) for engine, times in _slowdowns(workers, own).items()}


def _slowed(configuration: Configuration, times: float) -> Configuration:
    return replace(
        configuration,
        alpha_s=configuration.alpha_s * times,
        beta_s=configuration.beta_s * times,
        gamma_s=configuration.gamma_s * times,
        prefill_tokens_per_s=configuration.prefill_tokens_per_s / times,
    )


def _slowdowns(workers: Sequence[Worker], configurations: Mapping[EngineId, Configuration]) -> dict[EngineId, float]:
    """Return the slowdown factor of each slow engine, relative to the median engine. An engine is slow if its ratio of
    measured to configured step time is more than FAR_SLOWER times the median ratio."""
    ratios = {}
    for worker in workers:
        kv_tokens = sum(request.context_tokens for request in worker.running)
        expected_s = configurations[worker.id].step_s(len(worker.running), kv_tokens)
        if worker.running and worker.decode_tokens_per_s and expected_s > 0:
            ratios[worker.id] = len(worker.running) / worker.decode_tokens_per_s / expected_s
    typical = median(ratios.values()) if ratios else 1.0
    return {engine: ratio / typical for engine, ratio in ratios.items() if ratio > FAR_SLOWER * typical}
