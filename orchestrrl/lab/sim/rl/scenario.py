"""Read a scenario of the cluster simulator from YAML, and report all of its faults at once, with path and value.

A scenario contains a daemon's configuration (`daemon`, and the fleet that follows from `generation`) and a workload.
stages.py can write the daemon's configuration to a file, so that the engines of a simulated cluster can be deployed.
GPUs are numbered from 0: the GPUs that train come first, then the GPUs that generate.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field, field_validator, model_validator

from orchestrrl.core.documents import parse_yaml
from orchestrrl.core.errors import shorten
from orchestrrl.engines.profiles import importer
from orchestrrl.lab.sim.net.fabrics.base import NOTHING, SimulatedFabric, SimulatedFailures
from orchestrrl.lab.sim.net.fabrics.registry import KINDS, build, options_of
from orchestrrl.lab.sim.net.model import Servers
from orchestrrl.lab.sim.rl.faults import ClusterFaultSchedule, ClusterFaultSection, FaultyPart
from orchestrrl.lab.sim.rl.loop import LoopRules, Number
from orchestrrl.lab.sim.rl.model import SCHEMES, Holds, LoopMode
from orchestrrl.lab.sim.scenario import (
    Arm,
    Count,
    GenerationControlSection,
    Name,
    NotNegative,
    Positive,
    ProfiledSection,
    ScenarioSection,
    WorkloadSection,
    one_of,
    scenario_text,
    validated,
)
from orchestrrl.lab.sim.train.compute import fault_of
from orchestrrl.lab.sim.train.model import MEGATRON, TrainConstants, TrainJob, TrainLayout
from orchestrrl.lab.sim.workload import mean_tokens
from planner.cost.engines import ENGINES, EngineModel
from planner.cost.hardware import GPUS, GpuModel, gpu_named
from planner.cost.models import MODELS, Model, model_named
from planner.cost.paper import paper_engine
from planner.cost.profile import Parallelism
from planner.fabric.generate import ImpossibleSite
from planner.solver.layouts import layouts

PAPER_ENGINE = "paper"
SIZES = ("servers_per_tor", "servers_per_pod")  # fields of the cluster that are also options of fabrics
_OF_THE_LOOP = ("steps", "warmup_steps", "gap_s")  # fields of a workload that the section `loop` replaces

_AFD = re.compile(r"afd(\d+)\+(\d+)(?:x(\d+))?(?:tp(\d+))?")


def layout_named(name: str) -> Parallelism:
    """Parse the name of a layout, such as `tp8`, `tp8ep8`, `tp1dp16ep16` or `afd24+16x3`. Names have the format of
    planner.cost.predict.identifier. Raises ValueError if `name` is not the name of a layout."""
    if match := _AFD.fullmatch(name):
        attention, ffn, micro_batches, tp = (int(number or 1) for number in match.groups())
        return Parallelism(tp=tp, attention_gpus=attention, ffn_gpus=ffn, micro_batches=micro_batches)
    try:
        return importer.layout_named(name)
    except ValueError as error:
        raise ValueError(f"{error}, or afd24+16x3") from None


def _is_layout(name: str) -> str:
    layout_named(name)
    return name


class ClusterSection(ScenarioSection):
    """The servers and GPUs of the cluster. If `shared` is true, the same GPUs train and generate alternately, and
    `gen_gpus` must be absent."""

    train_gpus: Count
    gen_gpus: Count | None = None
    shared: bool = False
    gpus_per_server: Count = 8
    nics_per_server: Count = 8
    nic_gbps: Positive = 200.0
    servers_per_tor: Count | None = None  # default for fabrics without this option
    servers_per_pod: Count | None = None
    gpu_usd: Positive | None = None  # price of a GPU, for throughput per dollar including GPUs

    @model_validator(mode="after")
    def _whole_servers(self) -> "ClusterSection":
        if self.shared != (self.gen_gpus is None):
            raise ValueError("must have either gen_gpus or shared: true")
        for name in ("train_gpus", "gen_gpus"):
            count = getattr(self, name)
            if count is not None and count % self.gpus_per_server:
                raise ValueError(f"{name} must be whole servers of {self.gpus_per_server} GPUs, got {count}")
        if self.gpus_per_server % self.nics_per_server:
            nics, gpus = self.nics_per_server, self.gpus_per_server
            raise ValueError(f"gpus_per_server must be a multiple of nics_per_server ({nics}), got {gpus}")
        return self

    @property
    def gpus(self) -> int:
        return self.train_gpus + (self.gen_gpus or 0)

    @property
    def generating(self) -> range:
        """The numbers of the GPUs that generate."""
        return range(self.train_gpus) if self.gen_gpus is None else range(self.train_gpus, self.gpus)


class ClusterFabricSection(ScenarioSection):
    """A fabric of the scenario. `options` are the options of the fabric's kind, e.g. the number of servers per ToR."""

    kind: Name
    name: Name | None = None  # by default the kind
    options: dict[str, Any] = Field(default_factory=dict)

    @property
    def title(self) -> str:
        return self.name or self.kind


class TrainingSection(ScenarioSection):
    """The parallelism and the recipe of a training step. The data-parallel degree follows from the number of GPUs."""

    tp: Count = 1
    cp: Count = 1
    pp: Count = 1
    ep: Count = 1
    vpp: Count = 1  # stages of each pipeline rank, interleaved
    micro_sequences: Count = 1
    recompute: bool = False
    log_prob_passes: Number = 1  # forward passes before: under the policy, and optionally under a reference (KL)
    updates: Count = 1  # optimiser steps per batch, each on its part of the samples (mini-batches)
    epochs: Count = 1  # passes over the batch
    recovery_s: NotNegative = 120.0  # time to replace a failed server and restart the iteration

    def shares(self, samples: int) -> tuple[tuple[int, int], ...]:
        """Return pairs (number of samples in an optimiser step, number of steps of this size), larger steps first. The
        samples are divided evenly among the updates of an epoch. If there are fewer samples than updates, each step has
        one sample."""
        updates = min(self.updates, samples)
        each, more = divmod(samples, updates)
        found = ((each + 1, more * self.epochs), (each, (updates - more) * self.epochs))
        return tuple((size, times) for size, times in found if times)


class GenerationSection(ProfiledSection):
    """The workload of each step and the engines. By default, all plausible layouts are considered. Without a profile,
    the step times of engines are predicted from the model and the GPU, and, for engines that span servers, from the
    fabric's bandwidth."""

    workload: WorkloadSection
    layouts: tuple[Annotated[str, AfterValidator(_is_layout)], ...] = ()  # excludes profile
    engine: Annotated[str, one_of([*ENGINES, PAPER_ENGINE])] = "vllm"
    arms: Annotated[tuple[Arm, ...], Field(min_length=1)] = ("both",)
    partial_share: Annotated[float, Field(gt=0, le=1)] = 0.9
    kv_transfer: bool = True  # engines can transfer KV; otherwise a moved request is recomputed
    control: GenerationControlSection = GenerationControlSection()

    @model_validator(mode="after")
    def _one_source(self) -> "GenerationSection":
        if self.profile is not None and self.layouts:
            raise ValueError("must have either profile or layouts")
        if given := [name for name in _OF_THE_LOOP if name in self.workload.model_fields_set]:
            raise ValueError(f"workload must not have {', '.join(given)}; the section loop has them")
        return self


class WeightSyncSection(ScenarioSection):
    """The distribution of new weights to engines. `holds` names the sides (trainer, engines) that pause during a weight
    sync."""

    scheme: Annotated[str, one_of(SCHEMES)] = "tree"
    holds: Holds = Holds.ENGINES


class LoopSection(ScenarioSection):
    """The rules of the RL loop. The first `warmup_steps` steps fill the pipeline and train the forecast, and are
    excluded from rates."""

    mode: LoopMode = LoopMode.ONE_STEP_ASYNC
    staleness: Number | None = None  # bound in versions, for bounded_staleness
    steps: Count = 4
    warmup_steps: Number = 1
    batch_samples: Count | None = None  # per training step; by default all samples of a generation step
    buffer_samples: Count | None = None  # limit of samples before training, including the running step; default: none

    @model_validator(mode="after")
    def _sane(self) -> "LoopSection":
        if self.warmup_steps >= self.steps:
            raise ValueError(f"warmup_steps must be < steps ({self.steps}), got {self.warmup_steps}")
        self.rules(Holds.ENGINES, shared=False)
        return self

    def rules(self, holds: Holds, *, shared: bool) -> LoopRules:
        """Return the rules of the loop. Raises ValueError if the options are inconsistent."""
        return LoopRules(self.mode, self.staleness, self.batch_samples, self.buffer_samples, holds, shared)


class ClusterScenario(ScenarioSection):
    """A scenario of `orchestrrl sim run`: a cluster, its fabrics, and the RL job on it."""

    name: Name
    seeds: Annotated[tuple[Number, ...], Field(min_length=1)] = (1,)
    model: Annotated[str, one_of(MODELS)]
    gpu: Annotated[str, one_of(GPUS)] = "h800"
    cluster: ClusterSection
    fabrics: Annotated[tuple[ClusterFabricSection, ...], Field(min_length=1)]
    training: TrainingSection = TrainingSection()
    generation: GenerationSection
    weight_sync: WeightSyncSection = WeightSyncSection()
    loop: LoopSection = LoopSection()
    faults: tuple[ClusterFaultSection, ...] = ()
    daemon: dict[str, Any] = Field(default_factory=dict)

    @field_validator("fabrics", mode="before")
    @classmethod
    def _by_kind(cls, fabrics: Any) -> Any:
        """Accept a bare name such as `rfabric` as a fabric without options."""
        if not isinstance(fabrics, list | tuple):
            return fabrics
        return tuple({"kind": each} if isinstance(each, str) else each for each in fabrics)

    @property
    def model_value(self) -> Model:
        return model_named(self.model)

    @property
    def gpu_value(self) -> GpuModel:
        return gpu_named(self.gpu)

    @property
    def samples(self) -> int:
        """The number of samples that a generation step begins."""
        return self.generation.workload.prompts * self.generation.workload.samples

    @property
    def engine_value(self) -> EngineModel:
        name = self.generation.engine
        return paper_engine(self.model_value) if name == PAPER_ENGINE else ENGINES[name]

    @property
    def engine_layouts(self) -> tuple[Parallelism, ...]:
        named = tuple(layout_named(name) for name in self.generation.layouts)
        size = self.cluster.gpus_per_server
        return named or tuple(layouts(self.model_value, len(self.cluster.generating), size))

    @property
    def servers(self) -> Servers:
        cluster = self.cluster
        return Servers(
            count=cluster.gpus // cluster.gpus_per_server,
            gpus_per_server=cluster.gpus_per_server,
            nics_per_server=cluster.nics_per_server,
            nic_gbps=cluster.nic_gbps,
            nvlink_bytes_per_s=self.gpu_value.nvlink_bytes_per_s,
        )

    def fabric_options(self, section: ClusterFabricSection) -> dict[str, Any]:
        """Return the section's options. Options that are missing in the section, but supported by the fabric's kind,
        are taken from the cluster."""
        cluster = self.cluster
        usual = {name: getattr(cluster, name) for name in SIZES} | {
            "train_servers": None if cluster.shared else cluster.train_gpus // cluster.gpus_per_server
        }
        known = options_of(section.kind) if section.kind in KINDS else ()
        given = {name: value for name, value in usual.items() if value is not None and name in known}
        return given | section.options

    def fabric(self, section: ClusterFabricSection, **made: object) -> SimulatedFabric:
        """Build the fabric of a section. `made` contains options that are computed instead of configured, such as
        `demand` (see stages.job_demand). Raises ImpossibleSite with all faults of the options."""
        return build(section.kind, self.servers, **(self.fabric_options(section) | made))

    @property
    def train_layout(self) -> TrainLayout:
        part = self.training
        dp = self.cluster.train_gpus // (part.tp * part.cp * part.pp)
        return TrainLayout(tp=part.tp, cp=part.cp, dp=dp, pp=part.pp, ep=part.ep, vpp=part.vpp)

    def train_job(
        self, sequences: int, tokens: float, length_cv: float = 0.0, constants: TrainConstants = MEGATRON
    ) -> TrainJob:
        """Return the training job on `sequences` samples. `tokens` is the mean length of a sample including its
        prompt."""
        return TrainJob(
            model=self.model_value,
            gpu=self.gpu_value,
            layout=self.train_layout,
            sequences=sequences,
            tokens=tokens,
            micro_sequences=self.training.micro_sequences,
            recompute=self.training.recompute,
            length_cv=length_cv,
            constants=constants,
        )

    def narrowed(self, fabrics: Sequence[str], arms: Sequence[str], seeds: Sequence[int]) -> "ClusterScenario":
        """Return the scenario with only these fabrics (by title), arms and seeds. Its digest equals the digest of a
        scenario file that contains only these fabrics, arms and seeds."""
        by_title = {section.title: section for section in self.fabrics}
        return self.model_copy(
            update={
                "fabrics": tuple(by_title[title] for title in fabrics),
                "generation": self.generation.model_copy(update={"arms": tuple(arms)}),
                "seeds": tuple(seeds),
            }
        )

    def rules(self) -> LoopRules:
        """Return the rules of the loop. Raises ValueError if the options are inconsistent."""
        return self.loop.rules(self.weight_sync.holds, shared=self.cluster.shared)

    @property
    def schedule(self) -> ClusterFaultSchedule:
        return ClusterFaultSchedule(self.faults)

    def document(self) -> dict[str, Any]:
        """Return the scenario's document with all defaults filled in. Parsing the document gives the same scenario,
        provided that the name of a profile file is still taken relative to the scenario's folder."""
        return self.model_dump(mode="json", exclude={"generation": {"workload": set(_OF_THE_LOOP)}})


FOLDER = "clusters"  # folder of the built-in scenarios, in orchestrrl/lab/sim/
SMALLEST = "cluster64"


def load_cluster_scenario(source: str) -> ClusterScenario:
    """Load a scenario from a file, or the built-in scenario named `source`. Raises ProblemFaults with all faults of the
    scenario."""
    text, folder = scenario_text(source, FOLDER)
    return scenario_of(parse_yaml(text), folder)


def scenario_of(document: Any, folder: Path = Path()) -> ClusterScenario:
    """Return the scenario in a parsed document. The name of a profile file is relative to `folder`. Raises
    ProblemFaults with all faults of the document."""
    return validated(document, folder, ClusterScenario, "generation", _CHECKS)


def faults_between_sections(scenario: ClusterScenario) -> list[str]:
    """Return the faults of a scenario whose sections are valid individually but not in combination."""
    return [fault for check in _CHECKS for fault in check(scenario)]


def _layout_faults(scenario: ClusterScenario) -> Iterable[str]:
    part, gpus = scenario.training, scenario.cluster.train_gpus
    if gpus % (part.tp * part.cp * part.pp):
        degrees = f"tp {part.tp}, cp {part.cp}, pp {part.pp}"
        yield f"training: tp * cp * pp must divide cluster.train_gpus ({gpus}), got {degrees}"
        return
    samples = scenario.loop.batch_samples or scenario.samples
    if part.updates > samples:
        yield f"training.updates: must be at most the {samples} samples of a training step, got {part.updates}"
        return
    found: list[str] = []
    for share in {samples: None, **dict(scenario.training.shares(samples))}:
        try:
            scenario.train_job(share, 1.0)
        except ValueError as error:
            found += (f"training: {fault}" for fault in str(error).split("; "))
    yield from dict.fromkeys(found)


def _memory_faults(scenario: ClusterScenario) -> Iterable[str]:
    """Yield a fault if the largest optimiser step, with samples of the expected length, cannot fit into GPU memory."""
    if any(_layout_faults(scenario)):
        return
    size = scenario.training.shares(scenario.loop.batch_samples or scenario.samples)[0][0]
    if fault := fault_of(scenario.train_job(size, mean_tokens(scenario.generation.workload))):
        yield f"training: {fault}"


def _engine_layout_faults(scenario: ClusterScenario) -> Iterable[str]:
    names, heads = scenario.generation.layouts, scenario.model_value.q_heads
    size, most = scenario.cluster.gpus_per_server, len(scenario.cluster.generating)
    for index, name in enumerate(names):
        gpus = layout_named(name).gpus
        if gpus > most:
            yield f"generation.layouts[{index}]: must have at most the {most} GPUs that generate, got {name!r}"
        elif gpus > size and gpus % size:
            yield f"generation.layouts[{index}]: must take whole servers of {size} GPUs, got {name!r}"
        if heads % layout_named(name).tp:
            yield f"generation.layouts[{index}]: tp must divide the {heads} heads of {scenario.model}, got {name!r}"
    initial, profile = scenario.generation.initial, scenario.generation.profile_value
    known = [str(engine.id) for engine in profile.configurations] if profile else list(names)
    if initial is not None and known and initial not in known:
        yield f"generation.initial: must be one of {', '.join(known)}, got {initial!r}"


def _fabric_faults(scenario: ClusterScenario) -> Iterable[str]:
    titles: list[str] = []
    for index, section in enumerate(scenario.fabrics):
        if section.title in titles:
            yield f"fabrics[{index}].name: must be unique, got {section.title!r}"
        titles.append(section.title)
        try:
            scenario.fabric(section)
        except ImpossibleSite as error:
            for fault in error.faults:
                where, name = f"fabrics[{index}]", fault.parameter
                message = f"{fault.message}, got {shorten(fault.value)}"
                if name in SIZES and name not in section.options and getattr(scenario.cluster, name) is not None:
                    yield f"cluster.{name}: in {where} ({section.kind}): {message}"
                else:
                    yield f"{where}.{name if name == 'kind' else f'options.{name}'}: {message}"


def _tor_and_pod_faults(scenario: ClusterScenario) -> Iterable[str]:
    """Yield a fault for each size (`servers_per_tor`, `servers_per_pod`) that the cluster section sets for all fabrics
    although some fabric has no such option."""
    for name in SIZES:
        without = [
            f"fabrics[{index}] ({section.kind})"
            for index, section in enumerate(scenario.fabrics)
            if section.kind in KINDS and name not in options_of(section.kind)
        ]
        value = getattr(scenario.cluster, name)
        if value is not None and without:
            yield f"cluster.{name}: is not an option of {', '.join(without)}; set it in the others, got {value}"


def _loop_faults(scenario: ClusterScenario) -> Iterable[str]:
    try:
        scenario.rules()
    except ValueError as error:
        yield f"loop: {error}"


def _fault_faults(scenario: ClusterScenario) -> Iterable[str]:
    servers = scenario.servers
    most = {
        FaultyPart.NIC: servers.nics,
        FaultyPart.SERVER: servers.count,
        FaultyPart.ENGINE: len(scenario.cluster.generating),
    }
    for index, fault in enumerate(scenario.faults):
        limit = most.get(fault.fail)
        beyond = [number for number in fault.of if limit is not None and number >= limit]
        if beyond:
            yield f"faults[{index}].of: must be less than {limit}, the number of {fault.fail}s, got {beyond[0]}"
        if fault.fail not in (FaultyPart.TOR_UPLINKS, FaultyPart.POD_UPLINKS) and fault.share != 1:
            yield f"faults[{index}].share: must be set only for uplinks, got {fault.share:g}"
        yield from (f"faults[{index}].of: {message}" for message in _uplink_faults(scenario, fault))


def _uplink_faults(scenario: ClusterScenario, fault: ClusterFaultSection) -> Iterable[str]:
    """Yield an error message for each fabric that lacks a ToR or PoD named in `fault`. Each fabric is checked by
    simulating a failure that loses none of the uplinks of the highest-numbered ToR or PoD in `fault`."""
    none_lost = {max(fault.of): 0.0}
    failures, parts = {
        FaultyPart.TOR_UPLINKS: (SimulatedFailures(tor_uplinks=none_lost), "ToRs"),
        FaultyPart.POD_UPLINKS: (SimulatedFailures(pod_uplinks=none_lost), "PoDs"),
    }.get(fault.fail, (None, ""))
    for index, section in enumerate(scenario.fabrics if failures is not None else ()):
        try:
            fabric = scenario.fabric(section)
        except ImpossibleSite:
            continue  # reported by _fabric_faults
        try:
            fabric.without(failures or NOTHING).network()
        except ValueError:
            yield f"must be less than the number of {parts} of fabrics[{index}] ({section.title}), got {max(fault.of)}"


_CHECKS: tuple[Callable[[ClusterScenario], Iterable[str]], ...] = (
    _layout_faults,
    _memory_faults,
    _engine_layout_faults,
    _fabric_faults,
    _tor_and_pod_faults,
    _loop_faults,
    _fault_faults,
)
