"""Simulate engines in virtual time. The module also defines the engines' configurations, and the client that
redeployments and gateways use."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from orchestrrl.core.errors import Permanent, Retryable
from orchestrrl.engines.base import AnswerExcerpt, EngineCapabilities, EngineSample, ReportedLayout
from orchestrrl.engines.serving import UNKNOWN_SERVING, ServingFacts
from orchestrrl.lab.sim.scenario import EngineConfiguration, GenerationScenario
from orchestrrl.lab.simulated_engine.scheduler import EngineShape, Scheduler, SequenceProgress
from planner.cost.profile import Curve, EngineProfile, Parallelism, ProfileSource, Provenance, StepTime
from planner.model import ConfigurationId, EngineId, GpuId

BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True)
class EngineKind:
    """An engine configuration in the simulator. `nic_gbps` is the traffic that an engine sends over the NICs of each
    node while it decodes. `most` limits the number of engines in a fleet, in addition to the limit by the number of
    GPUs."""

    profile: EngineProfile
    nic_gbps: float = 0.0
    prefix_caching: bool = False
    most: int | None = None
    serving: ServingFacts = UNKNOWN_SERVING  # reported by its engines

    @property
    def id(self) -> ConfigurationId:
        return self.profile.id

    @property
    def gpus(self) -> int:
        return self.profile.parallelism.gpus

    @property
    def shape(self) -> EngineShape:
        profile, step = self.profile, self.profile.step
        return EngineShape(
            0.0,
            0.0,
            step.kv_s_per_token,
            profile.max_sequences,
            profile.kv_capacity_tokens,
            1 / profile.prefill_tokens_per_s,
            BLOCK_TOKENS,
            step.base_s,
            profile.spill_capacity_tokens,
            step.spill_s_per_token,
            self.prefix_caching,
        )


def kinds_of(scenario: GenerationScenario) -> dict[ConfigurationId, EngineKind]:
    """Return the scenario's engine kinds by configuration id, in the order in which the scenario lists them."""
    profile = scenario.engines.profile_value
    kinds = [_kind(configuration) for configuration in scenario.engines.configurations]
    kinds += [EngineKind(engine) for engine in profile.configurations] if profile is not None else []
    return {kind.id: replace(kind, prefix_caching=scenario.engines.prefix_caching) for kind in kinds}


def _kind(section: EngineConfiguration) -> EngineKind:
    profile = EngineProfile(
        ConfigurationId(section.id),
        Parallelism(tp=section.gpus),
        StepTime(Curve.line(section.alpha_s, section.beta_s), section.gamma_s),
        section.prefill_tokens_per_s,
        section.kv_capacity_tokens,
        section.max_sequences,
        section.switch_s,
        Provenance(ProfileSource.MEASURED, "", "from the scenario"),
    )
    return EngineKind(profile, section.nic_gbps)


def fleet_section(scenario: GenerationScenario, kinds: Mapping[ConfigurationId, EngineKind]) -> dict[str, object]:
    """Return the section `fleet` of the daemon's configuration for the engine kinds `kinds`. Configurations that come
    from a profile are not included."""
    named = (ConfigurationId(configuration.id) for configuration in scenario.engines.configurations)
    written = [name for name in named if name in kinds]  # the others are unusable, see run.usable_kinds
    links = scenario.network
    kv_transfer = {  # bandwidth of idle links: the daemon observes congestion
        "inter_node_gbps_per_gpu": links.nic_gbps_per_node / scenario.gpus_per_node,
        "intra_node_gbps_per_gpu": links.nvlink_gbps_per_gpu,
        "latency_s": links.latency_s,
        "kv_bytes_per_token": scenario.engines.moved_bytes_per_token,
    }
    return {
        "gpus": {"count": scenario.gpus, "per_node": scenario.gpus_per_node},
        "configurations": [asdict(kinds[name].profile.configuration()) for name in written],
        "kv_transfer": kv_transfer if links.kv_transfer else None,
    }


def homogeneous(kind: EngineKind, gpus_count: int, per_node: int) -> dict[EngineId, tuple[GpuId, ...]]:
    """Return the GPUs of each engine of a fleet with as many engines of one kind as fit on `gpus_count` GPUs. An engine
    is inside one node of `per_node` GPUs or occupies whole nodes. If neither is possible, return no engines."""
    size, nodes_gpus = kind.gpus, -(-kind.gpus // per_node) * per_node
    if size > per_node and size != nodes_gpus:
        return {}
    starts = [
        start
        for node in range(0, gpus_count, nodes_gpus)
        for start in range(node, node + nodes_gpus - size + 1, size)
        if start + size <= gpus_count
    ]
    return {
        EngineId(f"e{index}"): tuple(map(GpuId, range(start, start + size)))
        for index, start in enumerate(starts[: kind.most])
    }


@dataclass(slots=True)
class VirtualEngine:
    """A simulated engine process, which runs its requests with a simulated scheduler."""

    id: EngineId
    kind: EngineKind
    gpus: tuple[GpuId, ...]
    url: str
    started_s: float
    scheduler: Scheduler = field(init=False)
    stopped_s: float | None = None
    capabilities_sent: bool = False
    prompt_tokens_total: int = 0
    running_at: list[tuple[float, int]] = field(default_factory=list)  # (time, running sequences) at each change

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.kind.shape, self.started_s)

    def advance(self, now_s: float) -> Sequence[SequenceProgress]:
        made = self.scheduler.advance(now_s)
        running = len(self.scheduler.running)
        if not self.running_at or self.running_at[-1][1] != running:
            self.running_at.append((now_s, running))
        return made

    def reading(self) -> EngineSample:
        scheduler = self.scheduler
        capacity_tokens = scheduler.shape.blocks * scheduler.shape.block_tokens
        return EngineSample(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            kv_usage_fraction=scheduler.kv_used_tokens / capacity_tokens,
            kv_capacity_tokens=capacity_tokens,
            generation_tokens_total=scheduler.generated_tokens_total,
            prompt_tokens_total=self.prompt_tokens_total,
            preemptions_total=scheduler.preemptions_total,
        )

    @property
    def features(self) -> EngineCapabilities:
        return EngineCapabilities(
            "simulated", "virtual", ("sim",), max_sequences=self.kind.profile.max_sequences, serving=self.kind.serving
        )


RETRY_S = 0.1


class VirtualManaged:
    """A client of the engine at a URL, for redeployments and gateways. `find` returns the engine that was last started
    at a URL, or None if no engine responds there."""

    def __init__(self, url: str, find: Callable[[str], VirtualEngine | None]) -> None:
        self.url = url
        self._find = find
        self._policy_version: int | None = None

    async def capabilities(self) -> EngineCapabilities:
        return self._engine().features

    async def metrics(self) -> EngineSample:
        return self._engine().reading()

    async def healthy(self) -> bool:
        engine = self._find(self.url)
        return engine is not None and engine.stopped_s is None

    async def probe(self) -> float:
        self._engine()
        return 0.0

    async def layout(self) -> ReportedLayout:
        return ReportedLayout()

    async def weight_version(self) -> int | None:
        return self._policy_version

    async def name_weights(self, policy_version: int | None) -> None:
        self._policy_version = policy_version

    async def excerpt(self, prompt_ids: Sequence[int], tokens: int) -> AnswerExcerpt:
        self._engine()
        return AnswerExcerpt(tuple(prompt_ids), (0,) * tokens, (0.0,) * tokens)

    async def score(self, excerpt: AnswerExcerpt) -> tuple[float, ...]:
        self._engine()
        return excerpt.logprobs

    async def sleep(self) -> None:
        raise Permanent(f"{self.url}: simulated engines do not support sleep")

    async def wake(self) -> None:
        raise Permanent(f"{self.url}: simulated engines do not support sleep")

    async def asleep(self) -> bool:
        return False

    async def scale(self, dp: int) -> None:
        raise Permanent(f"{self.url}: simulated engines do not support scaling")

    async def close(self) -> None:
        """Do nothing, because the client holds no connection."""

    def _engine(self) -> VirtualEngine:
        engine = self._find(self.url)
        if engine is None:
            raise Retryable(f"{self.url}: connection refused", RETRY_S)
        return engine
