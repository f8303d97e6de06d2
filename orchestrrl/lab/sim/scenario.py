"""Read a scenario of the generation simulator from YAML, and report all of its faults at once.

The section `daemon` has the format of a daemon's configuration file. The other sections describe the engines, network
and workload, which a real daemon would observe.
"""

from collections.abc import Callable, Iterable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, model_validator

from orchestrrl.core.config.schema import Config
from orchestrrl.core.documents import dump_yaml, parse_yaml, read_text
from orchestrrl.core.errors import ProblemFaults, faults_of, shorten
from orchestrrl.daemon.configuration import parse_config
from orchestrrl.engines.profiles.store import read_profile
from orchestrrl.gateway.routing.strategies import DEFAULT_POLICY, STRATEGIES
from planner.cost.paper import PROFILES, named_profile
from planner.cost.profile import Profile

FOLDER = "scenarios"  # folder of the built-in scenarios, in orchestrrl/lab/sim/
EXAMPLE = "quickstart"

ARMS = (
    "verl_to",
    "verl_lo",
    "partial_rollout",
    "planning",
    "balancing_paper",
    "balancing",
    "both_paper",
    "both",
    "mean_only",
    "oracle",
    "packed_known",
    "prompts_known",
)

# KV bytes per token of a 14B model in bf16: 48 layers, 8 KV heads of 128.
KV_BYTES_PER_TOKEN = 196608.0

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
Name = Annotated[str, Field(min_length=1)]


def one_of(names: Iterable[str]) -> AfterValidator:
    """Return a validator that accepts only the given names."""
    known = list(names)

    def check(name: str) -> str:
        if name not in known:
            raise ValueError(f"must be one of {', '.join(known)}")
        return name

    return AfterValidator(check)


Arm = Annotated[str, one_of(ARMS)]


class ScenarioSection(BaseModel):
    """Base class of scenario sections, which are immutable and reject unknown fields."""

    model_config = ConfigDict(extra="forbid", frozen=True)


Checked = TypeVar("Checked", bound=ScenarioSection)


class LognormalLengths(ScenarioSection):
    kind: Literal["lognormal"]
    median_tokens: Positive
    sigma: NotNegative


class ParetoLengths(ScenarioSection):
    kind: Literal["pareto"]
    minimum_tokens: Positive
    exponent: Positive


class HistogramLengths(ScenarioSection):
    """A distribution of lengths, given by its quantiles. Lengths between two quantiles are interpolated
    log-linearly."""

    kind: Literal["histogram"]
    quantiles: Annotated[tuple[Annotated[float, Field(ge=0, le=1)], ...], Field(min_length=2)]
    tokens: Annotated[tuple[Positive, ...], Field(min_length=2)]

    @model_validator(mode="after")
    def _ascending(self) -> "HistogramLengths":
        if len(self.quantiles) != len(self.tokens):
            raise ValueError(
                f"quantiles and tokens must be equally long, got {len(self.quantiles)} and {len(self.tokens)}"
            )
        if self.quantiles[0] != 0 or self.quantiles[-1] != 1 or list(self.quantiles) != sorted(set(self.quantiles)):
            raise ValueError("quantiles must ascend from 0 to 1")
        if list(self.tokens) != sorted(self.tokens):
            raise ValueError("tokens must ascend")
        return self


class EmpiricalLengths(ScenarioSection):
    """Observed lengths, each with the same probability."""

    kind: Literal["empirical"]
    tokens: Annotated[tuple[Count, ...], Field(min_length=1)]


Lengths = Annotated[LognormalLengths | ParetoLengths | HistogramLengths | EmpiricalLengths, Field(discriminator="kind")]


class WorkloadSection(ScenarioSection):
    """The requests of each step. The first `warmup_steps` steps train the length forecast and are not measured."""

    prompts: Count
    samples: Count = 8
    prompt_tokens: tuple[Count, Count] = (64, 256)
    max_tokens: Count
    lengths: Lengths
    correlation: Annotated[float, Field(ge=0, le=1)] = 0.0
    drift_per_step: Annotated[float, Field(gt=-1, lt=10)] = 0.0
    steps: Count = 1
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    gap_s: NotNegative = 0.0  # pause between two steps, in which the fleet waits for weights

    @model_validator(mode="after")
    def _sane(self) -> "WorkloadSection":
        if self.prompt_tokens[0] > self.prompt_tokens[1]:
            raise ValueError(f"prompt_tokens must be [min, max], got {list(self.prompt_tokens)}")
        return self


class EngineConfiguration(ScenarioSection):
    """An engine configuration whose decode step takes alpha_s + beta_s * sequences + gamma_s * KV tokens.
    Configurations of a profile have curves instead."""

    id: Name
    gpus: Count
    alpha_s: Positive
    beta_s: NotNegative = 0.0
    gamma_s: NotNegative
    kv_capacity_tokens: Count
    max_sequences: Count
    prefill_tokens_per_s: Positive
    switch_s: NotNegative
    nic_gbps: NotNegative = 0.0  # traffic over the NICs of each node while it decodes (EP, AFD)


class ProfiledSection(ScenarioSection):
    """Base class of sections whose engines may come from a profile. `profile` is the name of a built-in profile, or of
    a file relative to the scenario's folder."""

    profile: Name | None = None
    initial: str | None = None  # initial configuration of OrchestrRL's arms; by default the tuned static baseline's
    prefix_caching: bool = False  # samples of one prompt on one engine share the prompt's KV
    _profile: Profile | None = PrivateAttr(None)  # the profile named by `profile`, after it has been read

    @property
    def profile_value(self) -> Profile | None:
        """The profile named by `profile`, with its curves, or None if the section names no profile."""
        return self._profile


class EnginesSection(ProfiledSection):
    """The engine configurations of a scenario, given inline or by a profile."""

    configurations: tuple[EngineConfiguration, ...] = ()
    kv_bytes_per_token: Positive | None = None  # by default the profile's

    @model_validator(mode="after")
    def _one_source(self) -> "EnginesSection":
        if (self.profile is None) == (not self.configurations):
            raise ValueError("must have either profile or configurations")
        return self

    @classmethod
    def of(cls, profile: Profile, **options: Any) -> "EnginesSection":
        """Build the section from a profile object. `options` contains other fields of the section."""
        section = cls(profile=profile.model, **options)
        section._profile = profile
        return section

    @property
    def moved_bytes_per_token(self) -> float:
        """The number of bytes transferred per token when KV moves to another engine."""
        moves = self._profile.moves if self._profile is not None else None
        return self.kv_bytes_per_token or (moves.kv_bytes_per_token if moves else KV_BYTES_PER_TOKEN)

    @property
    def ids(self) -> list[str]:
        profiled = self._profile.configurations if self._profile is not None else ()
        return [*(configuration.id for configuration in self.configurations), *(str(engine.id) for engine in profiled)]


class NetworkSection(ScenarioSection):
    """The network of a node. The node's NICs carry moved KV, new weights, and the traffic of EP and AFD."""

    nic_gbps_per_node: Positive = 1600.0
    nvlink_gbps_per_gpu: Positive = 1600.0
    kv_transfer: bool = False  # engines can transfer KV; otherwise a moved request is recomputed
    latency_s: NotNegative = 0.002
    weight_gbytes: NotNegative = 0.0  # new weights per engine, sent from a step's start on while it generates


class GenerationControlSection(ScenarioSection):
    """The intervals at which agents and gateways measure and report, in virtual seconds."""

    scrape_interval_s: Positive = 1.0
    rate_window_s: Positive = 4.0
    report_interval_s: Positive = 1.0


class GatewaySection(ScenarioSection):
    """The gateway's routing, for arms in which the gateway routes requests. If `queue_depth` is 0, requests do not wait
    in the gateway."""

    policy: Annotated[str, one_of(STRATEGIES)] = DEFAULT_POLICY
    queue_depth: Annotated[int, Field(ge=0)] = 0


class GenerationFaultSection(ScenarioSection):
    """An engine failure at a given time of the run."""

    at_s: NotNegative
    kill_engine: Name  # engine id (e0, e1, ...); affects OrchestrRL's arms only
    back_after_s: NotNegative | None = None  # None: it does not restart


class GenerationScenario(ScenarioSection):
    """A scenario of `orchestrrl sim gen`: workload, engines, network, and the arms to compare."""

    name: Name
    seeds: Annotated[tuple[int, ...], Field(min_length=1)] = (1, 2, 3)
    arms: Annotated[tuple[Arm, ...], Field(min_length=1)] = ARMS
    partial_share: Annotated[float, Field(gt=0, le=1)] = 0.9  # fraction of requests for which partial rollout waits
    gpus: Count
    gpus_per_node: Count = 8
    workload: WorkloadSection
    engines: EnginesSection
    network: NetworkSection = NetworkSection()
    control: GenerationControlSection = GenerationControlSection()
    gateway: GatewaySection = GatewaySection()
    faults: tuple[GenerationFaultSection, ...] = ()
    daemon: dict[str, Any] = Field(default_factory=dict)
    paper: dict[str, float] = Field(default_factory=dict)  # gains reported by a paper, by arm, for comparison

    def daemon_config(self, fleet: dict[str, Any]) -> Config:
        """Return the daemon's configuration with the section `fleet` added. Engines of a profile have the profile's
        curves."""
        return parse_config(dump_yaml({**self.daemon, "fleet": fleet}), profile=self.engines.profile_value)


def load_scenario(source: str) -> GenerationScenario:
    """Load a scenario from a file, or the built-in scenario named `source`. Raises ProblemFaults with all faults of the
    scenario, including those of its profile."""
    return parse_scenario(*scenario_text(source, FOLDER))


def scenario_text(source: str, built_in: str) -> tuple[str, Path]:
    """Return the text of a scenario, and the folder to which file names in the scenario are relative. `source` is a
    .yaml file, or the name of a scenario in the folder `built_in`. Raises ProblemFaults if the file cannot be read or
    the name is unknown."""
    path = Path(source)
    if path.suffix in (".yaml", ".yml"):
        return read_text(path), path.parent
    names = scenario_names(built_in)
    if source not in names:
        raise ProblemFaults([f"(scenario): must be a .yaml file or one of {', '.join(names)}, got {source!r}"])
    return files("orchestrrl.lab.sim").joinpath(built_in, f"{source}.yaml").read_text(encoding="utf-8"), Path()


def scenario_names(built_in: str) -> list[str]:
    """Return the names of the built-in scenarios in the folder `built_in`."""
    folder = files("orchestrrl.lab.sim").joinpath(built_in)
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def with_steps(scenario: GenerationScenario, steps: int | None) -> GenerationScenario:
    """Return the scenario with its number of steps set to `steps`. If `steps` is None, return the scenario unchanged.
    Raises ProblemFaults unless `steps` exceeds the number of warm-up steps."""
    if steps is None:
        return scenario
    if steps <= scenario.workload.warmup_steps:
        least = f"must be > the scenario's warmup_steps ({scenario.workload.warmup_steps})"
        raise ProblemFaults([f"--steps: {least}, got {steps}"])
    return scenario.model_copy(update={"workload": scenario.workload.model_copy(update={"steps": steps})})


def parse_scenario(text: str, folder: Path = Path()) -> GenerationScenario:
    """Parse the text of a scenario. The file name of a profile is relative to `folder`. Raises ProblemFaults with all
    faults of the scenario, including those of its profile."""
    return validated(parse_yaml(text), folder, GenerationScenario, "engines", _CHECKS)


def validated(
    document: Any,
    folder: Path,
    model: type[Checked],
    engines: str,
    checks: Sequence[Callable[[Checked], Iterable[str]]],
) -> Checked:
    """Return the scenario in `document` as a `model` object. `engines` is the name of the section that may name a
    profile, whose file name is relative to `folder`. `checks` compare sections, and run only if each section is valid.
    Raises ProblemFaults with all faults of the document and the profile."""
    if not isinstance(document, dict):
        raise ProblemFaults([f"(document): must be a mapping, got {shorten(document)}"])
    faults: list[str] = []
    scenario: Checked | None = None
    try:
        scenario = model.model_validate(document)
    except ValidationError as error:
        faults += faults_of(error, model)
    profile, profile_faults = _read_profile(document.get(engines), engines, folder)
    faults += profile_faults + daemon_faults(document.get("daemon"))
    if scenario is not None:
        getattr(scenario, engines)._profile = profile
        faults += [fault for check in checks for fault in check(scenario)]
    if scenario is None or faults:
        raise ProblemFaults(faults)
    return scenario


def _read_profile(section: Any, path: str, folder: Path) -> tuple[Profile | None, list[str]]:
    """Return the profile that `section` names, and the faults of the profile. The profile is None if it has faults, or
    the section names no profile."""
    name = section.get("profile") if isinstance(section, dict) else None
    if not isinstance(name, str) or not name:
        return None, []  # the scenario's own validation reports this, or there is no profile
    if name in PROFILES:
        return named_profile(name), []
    if Path(name).suffix not in (".yaml", ".yml", ".json"):
        known = ", ".join(sorted(PROFILES))
        return None, [f"{path}.profile: must be a .yaml or .json file or one of {known}, got {name!r}"]
    try:
        return read_profile(folder / name), []
    except ProblemFaults as error:
        # The fault of an unreadable file already contains its path.
        named = (fault if fault.startswith(str(folder / name)) else f"{name}: {fault}" for fault in error.faults)
        return None, [f"{path}.profile: {fault}" for fault in named]


def daemon_faults(section: Any) -> list[str]:
    """Return the faults of a scenario's section `daemon`, a daemon's configuration that must not contain a section
    `fleet`."""
    if not isinstance(section, dict):
        return []  # the scenario's own validation reports this, or there is no section
    faults = ["daemon.fleet: must be absent, it is derived from gpus and engines"] if "fleet" in section else []
    try:
        parse_config(dump_yaml(section))
    except ProblemFaults as error:
        faults += [f"daemon.{fault}" for fault in error.faults]
    return faults


def _engine_faults(scenario: GenerationScenario) -> Iterable[str]:
    configurations = scenario.engines.configurations
    ids = [configuration.id for configuration in configurations]
    for index, name in enumerate(ids):
        if name in ids[:index]:
            yield f"engines.configurations[{index}].id: must be unique, got {name!r}"
    initial = scenario.engines.initial
    known = scenario.engines.ids
    if known and initial is not None and initial not in known:
        yield f"engines.initial: must be one of {', '.join(known)}, got {initial!r}"


def _step_faults(scenario: GenerationScenario) -> Iterable[str]:
    workload = scenario.workload
    if workload.warmup_steps >= workload.steps:
        yield f"workload.warmup_steps: must be < steps ({workload.steps}), got {workload.warmup_steps}"


_CHECKS: tuple[Callable[[GenerationScenario], Iterable[str]], ...] = (_engine_faults, _step_faults)
