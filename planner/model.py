"""Shared value types: ids, engines, requests, snapshots and decisions. All dataclasses are frozen."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import NamedTuple, NewType

EngineId = NewType("EngineId", str)
RequestId = NewType("RequestId", str)
NodeId = NewType("NodeId", str)
PeerId = NewType("PeerId", str)
ConfigurationId = NewType("ConfigurationId", str)
PlanId = NewType("PlanId", str)
GpuId = NewType("GpuId", int)


def check_at_least(value: object, least: float, *fields: str) -> None:
    """Raise ValueError for the first of the named fields of `value` that is less than `least` or is NaN."""
    for name in fields:
        if not getattr(value, name) >= least:
            raise ValueError(f"{name} must be >= {least}, got {getattr(value, name)}")


class RequestState(StrEnum):
    """The state of a request. `NEW` is used in offline problems only and means that the request is on no engine yet."""

    WAITING = "waiting"
    RUNNING = "running"
    NEW = "new"


class EngineHealth(StrEnum):
    OK = "ok"
    SLOW = "slow"
    GONE = "gone"
    NONSENSE = "nonsense"


class Mode(StrEnum):
    ADVISE = "advise"
    ACT = "act"


class FastPolicy(StrEnum):
    """The rule by which the fast loop chooses moves."""

    PACKING = "packing"  # by predicted end times of the engines; PAPER where step times are unknown
    PAPER = "paper"  # by the load index
    NONE = "none"  # requests are never moved


class Knowledge(StrEnum):
    """The source of the output lengths that a plan assumes. `MEAN` and `ORACLE` are baselines for the forecast."""

    FORECAST = "forecast"  # a distribution, conditioned on the tokens each request has generated
    MEAN = "mean"  # every output has the average length
    ORACLE = "oracle"  # exact lengths, supplied by the caller


@dataclass(frozen=True, slots=True)
class Parallelism:
    """The layout of one engine over its GPUs. With attention-FFN disaggregation (AFD), the engine has `attention_gpus +
    ffn_gpus` GPUs."""

    tp: int = 1
    dp: int = 1  # data-parallel attention replicas; with ep > 1 they share the experts
    ep: int = 1
    attention_gpus: int = 0  # AFD only
    ffn_gpus: int = 0  # AFD only
    micro_batches: int = 1  # AFD only: overlapped, to hide transfers
    pp: int = 1  # pipeline stages: engines can be started with them, but their step times are not modelled

    def __post_init__(self) -> None:
        check_at_least(self, 1, "tp", "dp", "ep", "micro_batches", "pp")
        if (self.attention_gpus > 0) != (self.ffn_gpus > 0):
            got = f"{self.attention_gpus} and {self.ffn_gpus}"
            raise ValueError(f"attention_gpus and ffn_gpus must both be 0 or both be > 0, got {got}")

    @property
    def afd(self) -> bool:
        return self.ffn_gpus > 0

    @property
    def gpus(self) -> int:
        return self.attention_gpus + self.ffn_gpus if self.afd else self.tp * self.pp * self.dp


@dataclass(frozen=True, slots=True)
class Configuration:
    """An engine configuration, whose decode step takes `alpha_s + beta_s*sequences + gamma_s*kv_tokens` seconds.
    `switch_s` is the time, in seconds, for replacing engines by an engine of this configuration."""

    id: ConfigurationId
    gpus: int
    alpha_s: float
    beta_s: float
    gamma_s: float
    kv_capacity_tokens: int
    max_sequences: int
    prefill_tokens_per_s: float
    switch_s: float

    def __post_init__(self) -> None:
        check_at_least(self, 1, "gpus", "kv_capacity_tokens", "max_sequences")
        check_at_least(self, 0, "alpha_s", "beta_s", "gamma_s", "switch_s")
        if not self.prefill_tokens_per_s > 0:
            raise ValueError(f"prefill_tokens_per_s must be > 0, got {self.prefill_tokens_per_s}")

    def step_s(self, sequences: int, kv_tokens: int) -> float:
        """Return the time, in seconds, of a decode step over `sequences` sequences with `kv_tokens` KV tokens before
        the step."""
        return self.alpha_s + self.beta_s * sequences + self.gamma_s * kv_tokens

    def work_s(self, context_tokens: int, remaining_tokens: int) -> float:
        """Return the decoding time, in seconds, that a request adds to its engine, independent of the other requests.

        The request's share of alpha is excluded, because that share depends on how many requests run together.
        """
        held_tokens = context_tokens * remaining_tokens + remaining_tokens * (remaining_tokens - 1) / 2
        return self.beta_s * remaining_tokens + self.gamma_s * held_tokens

    def limited_as(self, engine: "EngineView") -> "Configuration":
        """Return a copy with the KV capacity and the maximum number of sequences that the engine reports. Values that
        the engine does not report are unchanged."""
        return replace(
            self,
            kv_capacity_tokens=engine.kv_capacity_tokens or self.kv_capacity_tokens,
            max_sequences=engine.max_sequences or self.max_sequences,
        )


@dataclass(frozen=True, slots=True)
class RequestView:
    """One request in flight, as last reported by its gateway."""

    id: RequestId
    engine: EngineId | None  # None: held by the gateway
    state: RequestState
    prompt_tokens: int
    generated_tokens: int
    max_tokens: int | None = None
    group: str = ""
    tag: str = ""
    movable: bool = True
    moves: int = 0
    age_s: float = 0.0
    quiet_s: float = 0.0  # since its last token, or since it was sent to its engine
    movable_detail: str = ""  # why not movable
    policy_version: int | None = None  # that generated its oldest token
    group_enough: int = 0  # answers of its group that suffice; 0: all are required

    @property
    def context_tokens(self) -> int:
        return self.prompt_tokens + self.generated_tokens


@dataclass(frozen=True, slots=True)
class FinishedLength:
    """The length of a finished output. If `censored` is True, the output was cut at `max_tokens`, and `tokens` is a
    lower bound on its length."""

    tokens: int
    censored: bool = False
    tag: str = ""

    def __post_init__(self) -> None:
        if self.tokens < 0:
            raise ValueError(f"tokens must be >= 0, got {self.tokens}")


@dataclass(frozen=True, slots=True)
class EngineView:
    """One engine, as last reported by its agent. `None` means unknown, never zero."""

    id: EngineId
    url: str
    configuration: ConfigurationId | None
    health: EngineHealth
    running: int
    waiting: int
    kv_capacity_tokens: int
    kv_free_tokens: int
    max_sequences: int
    decode_tokens_per_s: float | None
    age_s: float | None  # since the sample was taken; None: never sampled
    gpus: tuple[GpuId, ...] = ()
    health_detail: str = ""
    preemptions_total: int = 0
    pool: str = ""  # a named set of engines, which request tags may prefer
    policy_version: int | None = None  # of its weights
    outdated: bool = False  # its weights are not the fleet's version: it receives no requests
    draining: bool = False  # an operator empties it: it receives no new requests


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All inputs of a decision at one instant. Ages are included, so that a decision does not have to read a clock."""

    now_s: float
    engines: tuple[EngineView, ...]  # by id
    requests: tuple[RequestView, ...]  # by id
    finished: tuple[FinishedLength, ...] = ()  # of this step, in order of completion
    requests_age_s: float | None = None  # of the oldest gateway report; None: no gateway yet
    step_started_s: float | None = None  # when the fleet last went from idle to busy

    @property
    def inputs_age_s(self) -> float | None:
        """The age of the oldest input; None if an input was never reported or no engine is usable.

        Engines that are gone or draining, or that report invalid values, are not inputs, because no decision is made
        for them.
        """
        answering = [engine for engine in self.engines if engine.health in (EngineHealth.OK, EngineHealth.SLOW)]
        readable = [engine for engine in answering if not engine.draining]
        ages = [engine.age_s for engine in readable] + [self.requests_age_s]
        if not readable or any(age is None for age in ages):
            return None
        return max(age for age in ages if age is not None)


@dataclass(frozen=True, slots=True)
class Hold:
    """A decision not to act, with its reason. `code` is a stable identifier of the reason; `detail` is a message for
    operators."""

    code: str
    detail: str


@dataclass(frozen=True, slots=True)
class Act:
    """A decision to act, with its reason. `code` is a stable identifier of the reason; `detail` is a message for
    operators."""

    code: str
    detail: str


Verdict = Act | Hold


@dataclass(frozen=True, slots=True)
class FleetPart:
    """A number of instances of one configuration."""

    configuration: ConfigurationId
    instances: int


@dataclass(frozen=True, slots=True)
class Alternative:
    """A fleet that the planner considered, with its expected durations over the sampled lengths.

    `configuration` is None if configurations are mixed. `total_s` is the time until the fleet's last request ends.
    `low_s` and `high_s` are the total time in the best and in the worst sample.
    """

    configuration: ConfigurationId | None
    instances: int
    makespan_s: float  # decoding alone
    redeploy_cost_s: float  # delay of the end caused by replacing engines
    infeasible_because: str = ""
    name: str = ""
    decision: str = ""  # reconfigure | rebalance | keep
    migration_cost_s: float = 0.0  # delay of the end caused by moving running requests
    low_s: float = 0.0
    high_s: float = 0.0
    parts: tuple[FleetPart, ...] = ()  # by configuration

    @property
    def total_s(self) -> float:
        return self.makespan_s + self.redeploy_cost_s + self.migration_cost_s


@dataclass(frozen=True, slots=True)
class PlannedInstance:
    """One engine of the fleet that a plan proposes, with its expected times in seconds.

    `requests` lists its requests in order of admission; it is empty unless the plan is carried out.
    """

    id: EngineId
    configuration: ConfigurationId
    gpus: tuple[GpuId, ...]
    kept: bool
    requests_count: int
    decode_s: float
    migration_s: float
    switch_s: float
    requests: tuple[RequestId, ...] = ()

    @property
    def finish_s(self) -> float:
        return self.decode_s + self.migration_s + self.switch_s


class MoveMethod(StrEnum):
    """The method by which a running request's context is restored at its destination."""

    RECOMPUTE = "recompute"  # prefill again from its tokens
    TRANSFER = "transfer"  # copy its KV cache


@dataclass(frozen=True, slots=True)
class RequestMove:
    """A command to continue a request on another engine.

    `hold_s` is the time, in seconds, for which the gateway keeps the request if the destination is not in its routes
    yet. If `from_engine` is empty, the request is in the gateway's queue.

    `method` is the cheaper method by the current cost estimates; the gateway falls back to recomputation if the KV
    cache cannot be transferred. A predicted time of 0 seconds means that there is no prediction, or that the other
    method is not available.
    """

    request: RequestId
    from_engine: EngineId
    to_engine: EngineId
    hold_s: float = 0.0
    method: MoveMethod = MoveMethod.RECOMPUTE
    predicted_s: float = 0.0  # until the request resumes, its next decode step not counted
    other_s: float = 0.0  # the same by the other method
    fixed_s: float = 0.0  # the part of predicted_s that does not depend on the context's size
    state: RequestState = RequestState.RUNNING  # at the source


@dataclass(frozen=True, slots=True)
class PlannedMove:
    """A request that moves to another engine. A waiting request only changes queues, at no cost."""

    request: RequestId
    source: EngineId
    destination: EngineId
    method: str  # transfer | recompute | queue
    cost_s: float


@dataclass(frozen=True, slots=True)
class Histogram:
    """A histogram of remaining tokens: `counts[i]` requests have `bin_tokens*i < remaining <= bin_tokens*(i+1)`.

    The upper edge of a bin is used as the length of all its requests.
    """

    bin_tokens: int
    counts: tuple[float, ...]

    def __post_init__(self) -> None:
        check_at_least(self, 1, "bin_tokens")
        if any(count < 0 for count in self.counts):
            raise ValueError(f"counts must be >= 0, got {min(self.counts)}")

    @property
    def total(self) -> float:
        return sum(self.counts)


@dataclass(frozen=True, slots=True)
class Plan:
    """A proposal of the slow loop, with the numbers that explain it.

    Times in seconds are expected values over the sampled lengths. `current_makespan_s` assumes that nothing is changed.
    """

    id: PlanId
    created_s: float
    decision: str  # reconfigure | rebalance | keep
    verdict: Verdict
    current_configuration: ConfigurationId | None  # None: none, a mixed or an unknown one
    proposed_configuration: ConfigurationId | None  # None: none or a mixed one
    proposed_instances: int
    current_makespan_s: float | None
    proposed_makespan_s: float | None  # decoding alone
    redeploy_cost_s: float
    lower_bound_s: float  # proven for the sampled lengths; 0: none
    solve_s: float
    alternatives: tuple[Alternative, ...]
    inputs_age_s: float | None
    requests_running: int
    requests_waiting: int
    remaining: Histogram
    forecast_method: str
    actual_makespan_s: float | None = field(default=None)
    acted: bool = False
    acted_detail: str = ""  # the outcome of acting on it
    migration_cost_s: float = 0.0
    gap: float | None = None  # relative gap of the best fleet to lower_bound_s, both for the sampled lengths
    instances: tuple[PlannedInstance, ...] = ()  # the proposed fleet
    moves: tuple[PlannedMove, ...] = ()  # filled only in a plan that acts
    moves_count: int = 0
    forgone: Hold | None = None  # why a better change is not made
    knowledge: str = "forecast"  # assumed lengths: forecast | mean | oracle
    scenarios: int = 0  # number of length samples that the seconds are averaged over
    correction: float = 1.0  # factor on decoding seconds, learned from earlier plans
    notes: tuple[str, ...] = ()  # inputs that the planner could not read or use

    @property
    def proposed_total_s(self) -> float | None:
        """The predicted time, in seconds, until all requests end under the proposal, including the costs of the change;
        None if unknown."""
        if self.proposed_makespan_s is None:
            return None
        return self.proposed_makespan_s + self.redeploy_cost_s + self.migration_cost_s

    @property
    def predicted_s(self) -> float | None:
        """The predicted time, in seconds, until all requests end; None if unknown. It refers to the proposal if the
        proposal was carried out, otherwise to the unchanged fleet."""
        return self.proposed_total_s if self.acted else self.current_makespan_s


MOST_NAMES = 4  # engine names listed in one message
MOST_REASONS = 3  # reasons listed in one message


class StepTimeEstimates(NamedTuple):
    """The source of an engine's step-time estimates, or the reason why there are none."""

    source: str  # configured | prior | observed; empty: unknown
    detail: str  # a description of the source, or the reason why the step times are unknown


def unknown_step_times(why: Mapping[EngineId, str]) -> str:
    """Return a message that lists the engines without step times, grouped by reason. `why` contains the reason for each
    of these engines. The message is empty if `why` is empty."""
    engines: dict[str, list[EngineId]] = {}
    for engine, reason in sorted(why.items()):
        engines.setdefault(reason, []).append(engine)
    reasons = [f"no step times for {listed(names)}: {reason}" for reason, names in engines.items()]
    more = [f"and {len(reasons) - MOST_REASONS} more reasons"] if len(reasons) > MOST_REASONS else []
    return "; ".join(reasons[:MOST_REASONS] + more)


def listed(names: Sequence[str]) -> str:
    """Return the first `MOST_NAMES` names, separated by commas, followed by the number of omitted names, if any."""
    return ", ".join(names[:MOST_NAMES]) + (f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else "")
