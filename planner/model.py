"""The vocabulary of the whole house: ids, engines, requests, snapshots, decisions. Frozen, self-checking values."""

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
    """Raise ValueError for the first of the value's fields that is less, or not a number."""
    for name in fields:
        if not getattr(value, name) >= least:
            raise ValueError(f"{name} must be >= {least}, got {getattr(value, name)}")


class RequestState(StrEnum):
    """Where a request stands. `NEW` exists in offline problems only: not on any engine yet."""

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
    """How the fast loop chooses moves."""

    PACKING = "packing"  # by when each engine will end; the paper's rule where engines' step times are unknown
    PAPER = "paper"  # by the load index
    NONE = "none"  # it does not move requests


class Knowledge(StrEnum):
    """What a plan knows of lengths: `MEAN` and `ORACLE` show what the forecast is worth, and what it misses."""

    FORECAST = "forecast"  # a distribution, conditioned on how far each request has come
    MEAN = "mean"  # every output is as long as the average
    ORACLE = "oracle"  # each length, told from outside


@dataclass(frozen=True, slots=True)
class Parallelism:
    """How one engine is laid out over its GPUs. `attention_gpus + ffn_gpus` are the engine's GPUs under AFD."""

    tp: int = 1
    dp: int = 1  # data-parallel attention replicas; with ep > 1 they share the experts
    ep: int = 1
    attention_gpus: int = 0  # AFD only
    ffn_gpus: int = 0  # AFD only
    micro_batches: int = 1  # AFD only: overlapped, hiding transfers
    pp: int = 1  # pipeline stages: engines can be started with them, their step times are not modelled

    def __post_init__(self) -> None:
        check_at_least(self, 1, "tp", "dp", "ep", "micro_batches", "pp")
        if (self.attention_gpus > 0) != (self.ffn_gpus > 0):
            raise ValueError("AFD needs both attention and FFN GPUs")

    @property
    def afd(self) -> bool:
        return self.ffn_gpus > 0

    @property
    def gpus(self) -> int:
        return self.attention_gpus + self.ffn_gpus if self.afd else self.tp * self.pp * self.dp


@dataclass(frozen=True, slots=True)
class Configuration:
    """One way to run an engine, with its decode step time `alpha_s + beta_s*sequences + gamma_s*kv_tokens`."""

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
        """Seconds of one decode iteration over `sequences` that hold `kv_tokens` before it."""
        return self.alpha_s + self.beta_s * sequences + self.gamma_s * kv_tokens

    def work_s(self, context_tokens: int, remaining_tokens: int) -> float:
        """Seconds that a request adds to its engine's decoding, whatever runs beside it and in whatever order: all but
        its share of alpha, which depends on how many run together."""
        held_tokens = context_tokens * remaining_tokens + remaining_tokens * (remaining_tokens - 1) / 2
        return self.beta_s * remaining_tokens + self.gamma_s * held_tokens

    def limited_as(self, engine: "EngineView") -> "Configuration":
        """Return it with the KV capacity and slots that an engine reports of itself."""
        return replace(
            self,
            kv_capacity_tokens=engine.kv_capacity_tokens or self.kv_capacity_tokens,
            max_sequences=engine.max_sequences or self.max_sequences,
        )


@dataclass(frozen=True, slots=True)
class RequestView:
    """One request in flight, as its gateway last reported it."""

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
    policy_version: int | None = None  # under which its oldest token was generated
    group_enough: int = 0  # answers of its group that suffice; 0: all are wanted

    @property
    def context_tokens(self) -> int:
        return self.prompt_tokens + self.generated_tokens


@dataclass(frozen=True, slots=True)
class FinishedLength:
    """How long an output became. `censored`: its `max_tokens` cut it, so it only tells of being at least so long."""

    tokens: int
    censored: bool = False
    tag: str = ""

    def __post_init__(self) -> None:
        if self.tokens < 0:
            raise ValueError(f"tokens must be >= 0, got {self.tokens}")


@dataclass(frozen=True, slots=True)
class EngineView:
    """One engine, as its agent last saw it. `None` is unknown, never zero."""

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
    pool: str = ""  # engines of a kind, which requests' tags may prefer
    policy_version: int | None = None  # of its weights
    outdated: bool = False  # they are not the fleet's: nothing goes there
    draining: bool = False  # an operator wants it empty: nothing new goes there


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything a decision may know, at one instant. Ages are inside; nothing is read later."""

    now_s: float
    engines: tuple[EngineView, ...]  # by id
    requests: tuple[RequestView, ...]  # by id
    finished: tuple[FinishedLength, ...] = ()  # this step's, in order of finishing
    requests_age_s: float | None = None  # of the oldest gateway report; None: no gateway yet
    step_started_s: float | None = None  # when the fleet last went from idle to busy

    @property
    def inputs_age_s(self) -> float | None:
        """Age of the oldest input, None while something was never reported. An engine that is known to be gone, or to
        answer nonsense, or is drained, is no input: nothing is decided for it."""
        answering = [engine for engine in self.engines if engine.health in (EngineHealth.OK, EngineHealth.SLOW)]
        readable = [engine for engine in answering if not engine.draining]
        ages = [engine.age_s for engine in readable] + [self.requests_age_s]
        if not readable or any(age is None for age in ages):
            return None
        return max(age for age in ages if age is not None)


@dataclass(frozen=True, slots=True)
class Hold:
    """A decision not to act, with its reason. `code` is stable; `detail` is for people."""

    code: str
    detail: str


@dataclass(frozen=True, slots=True)
class Act:
    """A decision to act, with its reason."""

    code: str
    detail: str


Verdict = Act | Hold


@dataclass(frozen=True, slots=True)
class FleetPart:
    """So many instances of one configuration."""

    configuration: ConfigurationId
    instances: int


@dataclass(frozen=True, slots=True)
class Alternative:
    """One fleet that was considered, with its seconds as expected over the sampled lengths.

    `configuration` is None where configurations are mixed. The fleet ends after `total_s`; `low_s` and `high_s` are
    that in the luckiest and the unluckiest of the samples.
    """

    configuration: ConfigurationId | None
    instances: int
    makespan_s: float  # decoding alone
    redeploy_cost_s: float  # by how much switching engines delays the end
    infeasible_because: str = ""
    name: str = ""
    decision: str = ""  # reconfigure | rebalance | keep
    migration_cost_s: float = 0.0  # by how much moving running requests delays the end
    low_s: float = 0.0
    high_s: float = 0.0
    parts: tuple[FleetPart, ...] = ()  # by configuration

    @property
    def total_s(self) -> float:
        return self.makespan_s + self.redeploy_cost_s + self.migration_cost_s


@dataclass(frozen=True, slots=True)
class PlannedInstance:
    """One engine of the fleet that a plan wants, with its seconds as expected.

    `requests` are named, in order of admission, only in a plan that acts.
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
    """How a running request comes by its context at the destination."""

    RECOMPUTE = "recompute"  # prefilled again from its tokens
    TRANSFER = "transfer"  # its KV is handed over


@dataclass(frozen=True, slots=True)
class RequestMove:
    """The order to continue a request on another engine.

    `hold_s`: for so long the gateway keeps the request for a destination that is not in its routes yet. An empty
    `from_engine`: the gateway holds it, and it goes from there.

    `method` is the cheaper one, by what is believed of costs; the gateway falls back to recompute where KV cannot be
    had. 0 seconds: nothing was predicted, or the other method was not to be had.
    """

    request: RequestId
    from_engine: EngineId
    to_engine: EngineId
    hold_s: float = 0.0
    method: MoveMethod = MoveMethod.RECOMPUTE
    predicted_s: float = 0.0  # until the request goes on, its next decode step not counted
    other_s: float = 0.0  # the same by the other method
    fixed_s: float = 0.0  # the part of predicted_s that no size of the context changes
    state: RequestState = RequestState.RUNNING  # the queue of the source that the request stands in


@dataclass(frozen=True, slots=True)
class PlannedMove:
    """A request that changes engine. A waiting one is queued elsewhere for nothing."""

    request: RequestId
    source: EngineId
    destination: EngineId
    method: str  # transfer | recompute | queue
    cost_s: float


@dataclass(frozen=True, slots=True)
class Histogram:
    """counts[i] requests with `bin_tokens*i < remaining <= bin_tokens*(i+1)`; a bin counts as its upper edge."""

    bin_tokens: int
    counts: tuple[float, ...]

    def __post_init__(self) -> None:
        check_at_least(self, 1, "bin_tokens")
        if any(count < 0 for count in self.counts):
            raise ValueError("counts must be >= 0")

    @property
    def total(self) -> float:
        return sum(self.counts)


@dataclass(frozen=True, slots=True)
class Plan:
    """What the slow loop proposes, and everything it takes to explain it. Seconds are expected ones, over the sampled
    lengths; `current_makespan_s` is of the fleet and the requests as they stand.
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
    lower_bound_s: float  # with lengths as sampled, proven; 0: none
    solve_s: float
    alternatives: tuple[Alternative, ...]
    inputs_age_s: float | None
    requests_running: int
    requests_waiting: int
    remaining: Histogram
    forecast_method: str
    actual_makespan_s: float | None = field(default=None)
    acted: bool = False
    acted_detail: str = ""  # what became of it
    migration_cost_s: float = 0.0
    gap: float | None = None  # of the best fleet found over the bound, both with lengths as sampled
    instances: tuple[PlannedInstance, ...] = ()  # the fleet that is proposed
    moves: tuple[PlannedMove, ...] = ()  # named only in a plan that acts
    moves_count: int = 0
    forgone: Hold | None = None  # why something better than the decision is not done
    knowledge: str = "forecast"  # of lengths: forecast | mean | oracle
    scenarios: int = 0  # samples of the lengths that the seconds are means over
    correction: float = 1.0  # decoding seconds were multiplied with it, from how earlier plans came out
    notes: tuple[str, ...] = ()  # what the planner could not see or use

    @property
    def proposed_total_s(self) -> float | None:
        """Seconds to the end under the proposal, its costs paid."""
        if self.proposed_makespan_s is None:
            return None
        return self.proposed_makespan_s + self.redeploy_cost_s + self.migration_cost_s

    @property
    def predicted_s(self) -> float | None:
        """What was expected to happen: the proposal where it was acted on, else the fleet as it stood."""
        return self.proposed_total_s if self.acted else self.current_makespan_s


MOST_NAMES = 4  # of engines, in a text
MOST_REASONS = 3


class StepTimeEstimates(NamedTuple):
    """Where an engine's step times come from."""

    source: str  # configured | prior | observed; empty: they are not known
    detail: str  # as a sentence; why they are not known


def unknown_step_times(why: Mapping[EngineId, str]) -> str:
    """The engines without step times, by reason; empty where there are none."""
    engines: dict[str, list[EngineId]] = {}
    for engine, reason in sorted(why.items()):
        engines.setdefault(reason, []).append(engine)
    reasons = [f"no step times for {listed(names)}: {reason}" for reason, names in engines.items()]
    more = [f"and {len(reasons) - MOST_REASONS} more reasons"] if len(reasons) > MOST_REASONS else []
    return "; ".join(reasons[:MOST_REASONS] + more)


def listed(names: Sequence[str]) -> str:
    """Return the first names, and the number of the others."""
    return ", ".join(names[:MOST_NAMES]) + (f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else "")
