"""A scenario of the generation simulator: read from YAML and checked, every fault at once.

`daemon` is a daemon's own configuration file; what a daemon would find out about its engines stands beside it.
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

FOLDER = "scenarios"  # of the built-in ones, in orchestrrl/lab/sim/
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

# Of a 14B model in bf16: 48 layers, 8 KV heads of 128.
KV_BYTES_PER_TOKEN = 196608.0

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
Name = Annotated[str, Field(min_length=1)]


def one_of(names: Iterable[str]) -> AfterValidator:
    """Return the check that a text is one of these."""
    known = list(names)

    def check(name: str) -> str:
        if name not in known:
            raise ValueError(f"must be one of {', '.join(known)}")
        return name

    return AfterValidator(check)


Arm = Annotated[str, one_of(ARMS)]


class ScenarioSection(BaseModel):
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
    """Tokens at quantiles, log-linear in between."""

    kind: Literal["histogram"]
    quantiles: Annotated[tuple[Annotated[float, Field(ge=0, le=1)], ...], Field(min_length=2)]
    tokens: Annotated[tuple[Positive, ...], Field(min_length=2)]

    @model_validator(mode="after")
    def _ascending(self) -> "HistogramLengths":
        if len(self.quantiles) != len(self.tokens):
            raise ValueError(f"quantiles and tokens must be as many, {len(self.quantiles)} and {len(self.tokens)} are")
        if self.quantiles[0] != 0 or self.quantiles[-1] != 1 or list(self.quantiles) != sorted(set(self.quantiles)):
            raise ValueError("quantiles must ascend from 0 to 1")
        if list(self.tokens) != sorted(self.tokens):
            raise ValueError("tokens must ascend")
        return self


class EmpiricalLengths(ScenarioSection):
    """Lengths as they were seen, each as likely as the other."""

    kind: Literal["empirical"]
    tokens: Annotated[tuple[Count, ...], Field(min_length=1)]


Lengths = Annotated[LognormalLengths | ParetoLengths | HistogramLengths | EmpiricalLengths, Field(discriminator="kind")]


class WorkloadSection(ScenarioSection):
    """What each step asks for. The first `warmup_steps` teach the forecast and are not measured."""

    prompts: Count
    samples: Count = 8
    prompt_tokens: tuple[Count, Count] = (64, 256)
    max_tokens: Count
    lengths: Lengths
    correlation: Annotated[float, Field(ge=0, le=1)] = 0.0
    drift_per_step: Annotated[float, Field(gt=-1, lt=10)] = 0.0
    steps: Count = 1
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    gap_s: NotNegative = 0.0  # between two steps: the fleet waits for weights

    @model_validator(mode="after")
    def _sane(self) -> "WorkloadSection":
        if self.prompt_tokens[0] > self.prompt_tokens[1]:
            raise ValueError(f"prompt_tokens must be [least, most], got {list(self.prompt_tokens)}")
        return self


class EngineConfiguration(ScenarioSection):
    """One way to run an engine. A decode step takes alpha_s + beta_s * sequences + gamma_s * KV tokens; a profile has
    curves."""

    id: Name
    gpus: Count
    alpha_s: Positive
    beta_s: NotNegative = 0.0
    gamma_s: NotNegative
    kv_capacity_tokens: Count
    max_sequences: Count
    prefill_tokens_per_s: Positive
    switch_s: NotNegative
    nic_gbps: NotNegative = 0.0  # what it sends over NICs while it decodes (EP, AFD), per node


class ProfiledSection(ScenarioSection):
    """Engines that a profile may describe: a built-in one, or a file, from the scenario's folder."""

    profile: Name | None = None
    initial: str | None = None  # what our arms begin with; by default the tuned static baseline's
    prefix_caching: bool = False  # samples of one prompt that run on one engine have its KV in common
    _profile: Profile | None = PrivateAttr(None)  # what `profile` names, once it is read

    @property
    def profile_value(self) -> Profile | None:
        """The profile that `profile` names, with its curves."""
        return self._profile


class EnginesSection(ProfiledSection):
    """The ways to run engines: inline, or from a profile."""

    configurations: tuple[EngineConfiguration, ...] = ()
    kv_bytes_per_token: Positive | None = None  # by default the profile's

    @model_validator(mode="after")
    def _one_source(self) -> "EnginesSection":
        if (self.profile is None) == (not self.configurations):
            raise ValueError("needs either a profile or configurations")
        return self

    @classmethod
    def of(cls, profile: Profile, **options: Any) -> "EnginesSection":
        """Of a profile that is there already."""
        section = cls(profile=profile.model, **options)
        section._profile = profile
        return section

    @property
    def moved_bytes_per_token(self) -> float:
        """Of KV that goes to another engine."""
        moves = self._profile.moves if self._profile is not None else None
        return self.kv_bytes_per_token or (moves.kv_bytes_per_token if moves else KV_BYTES_PER_TOKEN)

    @property
    def ids(self) -> list[str]:
        profiled = self._profile.configurations if self._profile is not None else ()
        return [*(configuration.id for configuration in self.configurations), *(str(engine.id) for engine in profiled)]


class NetworkSection(ScenarioSection):
    """What a node's NICs carry together: moved KV, new weights, traffic of EP and AFD."""

    nic_gbps_per_node: Positive = 1600.0
    nvlink_gbps_per_gpu: Positive = 1600.0
    kv_transfer: bool = False  # engines can hand KV over; otherwise a moved request is recomputed
    latency_s: NotNegative = 0.002
    weight_gbytes: NotNegative = 0.0  # of new weights for each engine, from a step's start on, while it generates


class GenerationControlSection(ScenarioSection):
    """How often agents and gateways speak, in virtual seconds."""

    scrape_interval_s: Positive = 1.0
    rate_window_s: Positive = 4.0
    report_interval_s: Positive = 1.0


class GatewaySection(ScenarioSection):
    """How our arms route, where requests are not dealt; `queue_depth` 0: none wait in the gateway."""

    policy: Annotated[str, one_of(STRATEGIES)] = DEFAULT_POLICY
    queue_depth: Annotated[int, Field(ge=0)] = 0


class GenerationFaultSection(ScenarioSection):
    """Something that goes wrong, at a time of the whole run."""

    at_s: NotNegative
    kill_engine: Name  # an engine of our arms, by its id (e0, e1, ...)
    back_after_s: NotNegative | None = None  # None: it stays away


class GenerationScenario(ScenarioSection):
    name: Name
    seeds: Annotated[tuple[int, ...], Field(min_length=1)] = (1, 2, 3)
    arms: Annotated[tuple[Arm, ...], Field(min_length=1)] = ARMS
    partial_share: Annotated[float, Field(gt=0, le=1)] = 0.9  # of a step's requests that partial rollout waits for
    gpus: Count
    gpus_per_node: Count = 8
    workload: WorkloadSection
    engines: EnginesSection
    network: NetworkSection = NetworkSection()
    control: GenerationControlSection = GenerationControlSection()
    gateway: GatewaySection = GatewaySection()
    faults: tuple[GenerationFaultSection, ...] = ()
    daemon: dict[str, Any] = Field(default_factory=dict)
    paper: dict[str, float] = Field(default_factory=dict)  # what a paper reports, by arm, to stand beside ours

    def daemon_config(self, fleet: dict[str, Any]) -> Config:
        """The daemon's configuration with this fleet put in. Engines of a profile it knows by their curves."""
        return parse_config(dump_yaml({**self.daemon, "fleet": fleet}), profile=self.engines.profile_value)


def load_scenario(source: str) -> GenerationScenario:
    """The scenario in a file, or the built-in one of that name. Raises ProblemFaults with every fault, those of a
    profile that it names included."""
    return parse_scenario(*scenario_text(source, FOLDER))


def scenario_text(source: str, built_in: str) -> tuple[str, Path]:
    """Return the text of a file, or of the scenario of that name in the folder `built_in`, and the folder that its own
    files are found from. Raises ProblemFaults."""
    path = Path(source)
    if path.suffix in (".yaml", ".yml"):
        return read_text(path), path.parent
    names = scenario_names(built_in)
    if source not in names:
        raise ProblemFaults([f"(scenario): is neither a .yaml file nor one of {', '.join(names)}, got {source!r}"])
    return files("orchestrrl.lab.sim").joinpath(built_in, f"{source}.yaml").read_text(encoding="utf-8"), Path()


def scenario_names(built_in: str) -> list[str]:
    """Return the names of the built-in scenarios in that folder."""
    folder = files("orchestrrl.lab.sim").joinpath(built_in)
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def with_steps(scenario: GenerationScenario, steps: int | None) -> GenerationScenario:
    """The scenario with so many steps; None: as it is. Raises ProblemFaults."""
    if steps is None:
        return scenario
    if steps <= scenario.workload.warmup_steps:
        least = f"must be more than the scenario's warmup_steps ({scenario.workload.warmup_steps})"
        raise ProblemFaults([f"--steps: {least}, got {steps}"])
    return scenario.model_copy(update={"workload": scenario.workload.model_copy(update={"steps": steps})})


def parse_scenario(text: str, folder: Path = Path()) -> GenerationScenario:
    """As load_scenario, from text; a profile's file is found from `folder`."""
    return validated(parse_yaml(text), folder, GenerationScenario, "engines", _CHECKS)


def validated(
    document: Any,
    folder: Path,
    model: type[Checked],
    engines: str,
    checks: Sequence[Callable[[Checked], Iterable[str]]],
) -> Checked:
    """Return a document as a scenario, with the profile that its section `engines` names, found from `folder`. Raises
    ProblemFaults with every fault; `checks`, between sections, need sound ones."""
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
    """The profile that the section names, or what is wrong with it."""
    name = section.get("profile") if isinstance(section, dict) else None
    if not isinstance(name, str) or not name:
        return None, []  # the scenario's own check has said so, or there is none
    if name in PROFILES:
        return named_profile(name), []
    if Path(name).suffix not in (".yaml", ".yml", ".json"):
        known = ", ".join(sorted(PROFILES))
        return None, [f"{path}.profile: is neither a .yaml or .json file nor one of {known}, got {name!r}"]
    try:
        return read_profile(folder / name), []
    except ProblemFaults as error:
        # A file that cannot be read names itself.
        named = (fault if fault.startswith(str(folder / name)) else f"{name}: {fault}" for fault in error.faults)
        return None, [f"{path}.profile: {fault}" for fault in named]


def daemon_faults(section: Any) -> list[str]:
    """Of a daemon's configuration without its fleet."""
    if not isinstance(section, dict):
        return []  # Scenario's own check has said so, or there is none
    faults = ["daemon.fleet: follows from gpus and engines, got a section"] if "fleet" in section else []
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
            yield f"engines.configurations[{index}].id: is used already, got {name!r}"
    initial = scenario.engines.initial
    known = scenario.engines.ids
    if known and initial is not None and initial not in known:
        yield f"engines.initial: must be one of {', '.join(known)}, got {initial!r}"


def _step_faults(scenario: GenerationScenario) -> Iterable[str]:
    workload = scenario.workload
    if workload.warmup_steps >= workload.steps:
        yield f"workload.warmup_steps: must be less than steps ({workload.steps}), got {workload.warmup_steps}"


_CHECKS: tuple[Callable[[GenerationScenario], Iterable[str]], ...] = (_engine_faults, _step_faults)
