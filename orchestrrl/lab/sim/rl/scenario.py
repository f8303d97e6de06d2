"""A scenario of the cluster simulator, as scenario_file.py reads it.

It is also a daemon's configuration (`daemon`, and the fleet that follows from `generation`) plus a workload: what was
simulated can be deployed, see deployable.py. GPUs are numbered through: those that train, then those that generate.
"""

import re
from typing import Annotated, Any

from pydantic import AfterValidator, Field, PrivateAttr, field_validator, model_validator

from orchestrrl.lab.sim.net.fabrics.base import SimulatedFabric
from orchestrrl.lab.sim.net.fabrics.registry import KINDS, build, options_of
from orchestrrl.lab.sim.net.model import Servers
from orchestrrl.lab.sim.rl.faults import ClusterFaultSchedule, ClusterFaultSection
from orchestrrl.lab.sim.rl.loop_rules import LoopRules
from orchestrrl.lab.sim.rl.model import Holds, LoopMode
from orchestrrl.lab.sim.rl.training import Recipe
from orchestrrl.lab.sim.scenario import (
    Arm,
    Count,
    GenerationControlSection,
    Name,
    NotNegative,
    Positive,
    ScenarioSection,
    WorkloadSection,
    one_of,
)
from orchestrrl.lab.sim.train.model import TrainJob, TrainLayout
from planner.cost.engines import ENGINES, EngineModel
from planner.cost.hardware import GPUS, GpuModel, gpu_named
from planner.cost.models import MODELS, Model, model_named
from planner.cost.paper import paper_engine
from planner.cost.profile import Parallelism, Profile
from planner.solver.layouts import layouts

PAPER_ENGINE = "paper"
SIZES = ("servers_per_tor", "servers_per_pod")  # of the cluster, that are options of fabrics
_OF_THE_LOOP = ("steps", "warmup_steps", "gap_s")  # that a workload of `sim gen` has, and this one's loop says

Number = Annotated[int, Field(ge=0)]


_LAYOUT = re.compile(r"(?:tp(\d+))?(?:dp(\d+))?(?:ep(\d+))?")
_AFD = re.compile(r"afd(\d+)\+(\d+)(?:x(\d+))?(?:tp(\d+))?")


def layout_named(name: str) -> Parallelism:
    """`tp8`, `tp8ep8`, `tp1dp16ep16`, `afd24+16x3`: as planner.cost.predict.identifier writes it. Raises ValueError."""
    if match := _AFD.fullmatch(name):
        attention, ffn, micro_batches, tp = (int(number or 1) for number in match.groups())
        return Parallelism(tp=tp, attention_gpus=attention, ffn_gpus=ffn, micro_batches=micro_batches)
    match = _LAYOUT.fullmatch(name)
    if not name or match is None:
        raise ValueError("must be a layout such as tp8, tp8ep8, tp1dp16ep16 or afd24+16x3")
    tp, dp, ep = (int(number or 1) for number in match.groups())
    return Parallelism(tp=tp, dp=dp, ep=ep)


def _is_layout(name: str) -> str:
    layout_named(name)
    return name


class ClusterSection(ScenarioSection):
    """The machines. `shared`: the same GPUs train and generate, in turn, and gen_gpus is left out."""

    train_gpus: Count
    gen_gpus: Count | None = None
    shared: bool = False
    gpus_per_server: Count = 8
    nics_per_server: Count = 8
    nic_gbps: Positive = 200.0
    servers_per_tor: Count | None = None  # of fabrics that say nothing else in their options
    servers_per_pod: Count | None = None
    gpu_usd: Positive | None = None  # price of one, for throughput per dollar of all

    @model_validator(mode="after")
    def _whole_servers(self) -> "ClusterSection":
        if self.shared != (self.gen_gpus is None):
            raise ValueError("needs either gen_gpus or shared: true")
        for name in ("train_gpus", "gen_gpus"):
            count = getattr(self, name)
            if count is not None and count % self.gpus_per_server:
                raise ValueError(f"{name} must be whole servers of {self.gpus_per_server} GPUs, {count} are not")
        if self.gpus_per_server % self.nics_per_server:
            raise ValueError("gpus_per_server must be a multiple of nics_per_server")
        return self

    @property
    def gpus(self) -> int:
        return self.train_gpus + (self.gen_gpus or 0)

    @property
    def generating(self) -> int:
        return self.gen_gpus or self.train_gpus

    @property
    def first_generating(self) -> int:
        return 0 if self.shared else self.train_gpus


class ClusterFabricSection(ScenarioSection):
    """`options` are those of its kind, e.g. servers of a ToR and of a PoD."""

    kind: Name
    name: Name | None = None  # by default its kind
    options: dict[str, Any] = Field(default_factory=dict)

    @property
    def title(self) -> str:
        return self.name or self.kind


class TrainingSection(ScenarioSection):
    """What a training step does with its samples. dp follows from the GPUs."""

    tp: Count = 1
    cp: Count = 1
    pp: Count = 1
    ep: Count = 1
    vpp: Count = 1  # stages of each pipeline rank, interleaved
    micro_sequences: Count = 1
    recompute: bool = False
    log_prob_passes: Number = 1  # forward passes before: under the policy, and one more under a reference (KL)
    updates: Count = 1  # optimiser steps on a batch, each on its share of the samples (mini-batches)
    epochs: Count = 1  # over the batch
    recovery_s: NotNegative = 120.0  # for another server to take the place of one that failed, and begin again


class GenerationSection(ScenarioSection):
    """What each step generates, and on which engines: by default on every layout worth a look, predicted from model and
    GPU and from what the fabric gives to those that span servers."""

    workload: WorkloadSection
    layouts: tuple[Annotated[str, AfterValidator(_is_layout)], ...] = ()
    profile: Name | None = None  # instead: a built-in one, or a file from the scenario's folder
    engine: Annotated[str, one_of([*ENGINES, PAPER_ENGINE])] = "vllm"
    initial: str | None = None  # layout that our arms begin with; by default the tuned static baseline's
    arms: Annotated[tuple[Arm, ...], Field(min_length=1)] = ("both",)
    partial_share: Annotated[float, Field(gt=0, le=1)] = 0.9
    kv_transfer: bool = True  # engines can hand KV over; otherwise a moved request is recomputed
    prefix_caching: bool = False
    control: GenerationControlSection = GenerationControlSection()
    _profile: Profile | None = PrivateAttr(None)

    @model_validator(mode="after")
    def _one_source(self) -> "GenerationSection":
        if self.profile is not None and self.layouts:
            raise ValueError("needs either a profile or layouts")
        if given := [name for name in _OF_THE_LOOP if name in self.workload.model_fields_set]:
            raise ValueError(f"workload must leave {', '.join(given)} to the loop")
        return self

    @property
    def profile_value(self) -> Profile | None:
        """The profile that `profile` names, with its curves."""
        return self._profile


class WeightSyncSection(ScenarioSection):
    """How new weights reach engines. `holds`: who waits for it."""

    scheme: Name = "tree"
    holds: Holds = Holds.ENGINES


class LoopSection(ScenarioSection):
    """`warmup_steps` fill the pipeline and teach the forecast: rates leave them out."""

    mode: LoopMode = LoopMode.ONE_STEP_ASYNC
    staleness: Number | None = None  # versions, of bounded_staleness
    steps: Count = 4
    warmup_steps: Number = 1
    batch_samples: Count | None = None  # of a training step; by default all of a generation step
    buffer_samples: Count | None = None  # that wait for training, those being generated among them; by default any

    @model_validator(mode="after")
    def _sane(self) -> "LoopSection":
        if self.warmup_steps >= self.steps:
            raise ValueError(f"warmup_steps must be less than steps ({self.steps}), {self.warmup_steps} are not")
        self.rules(Holds.ENGINES, shared=False)
        return self

    def rules(self, holds: Holds, *, shared: bool) -> LoopRules:
        """Raises ValueError where they are at odds."""
        return LoopRules(self.mode, self.staleness, self.batch_samples, self.buffer_samples, holds, shared)


class ClusterScenario(ScenarioSection):
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
        """`rfabric` alone is one without options."""
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
        """Of a step."""
        return self.generation.workload.prompts * self.generation.workload.samples

    @property
    def engine_value(self) -> EngineModel:
        name = self.generation.engine
        return paper_engine(self.model_value) if name == PAPER_ENGINE else ENGINES[name]

    @property
    def engine_layouts(self) -> tuple[Parallelism, ...]:
        named = tuple(layout_named(name) for name in self.generation.layouts)
        size = self.cluster.gpus_per_server
        return named or tuple(layouts(self.model_value, self.cluster.generating, size))

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
        """The section's, and of what it leaves out what the cluster says, as far as its kind has such options."""
        cluster = self.cluster
        usual = {name: getattr(cluster, name) for name in SIZES} | {
            "train_servers": None if cluster.shared else cluster.train_gpus // cluster.gpus_per_server
        }
        known = options_of(section.kind) if section.kind in KINDS else ()
        given = {name: value for name, value in usual.items() if value is not None and name in known}
        return given | section.options

    def fabric(self, section: ClusterFabricSection, **made: object) -> SimulatedFabric:
        """With what is worked out for it beside its options, see demand.py. Raises Impossible with all that is wrong
        with them."""
        return build(section.kind, self.servers, **(self.fabric_options(section) | made))

    @property
    def train_layout(self) -> TrainLayout:
        part = self.training
        dp = self.cluster.train_gpus // (part.tp * part.cp * part.pp)
        return TrainLayout(tp=part.tp, cp=part.cp, dp=dp, pp=part.pp, ep=part.ep, vpp=part.vpp)

    @property
    def recipe(self) -> Recipe:
        part = self.training
        return Recipe(part.log_prob_passes, part.updates, part.epochs)

    def train_job(self, sequences: int, tokens: float, length_cv: float = 0.0) -> TrainJob:
        """On so many samples of that mean length, prompts included, and that spread of lengths."""
        return TrainJob(
            model=self.model_value,
            gpu=self.gpu_value,
            layout=self.train_layout,
            sequences=sequences,
            tokens=tokens,
            micro_sequences=self.training.micro_sequences,
            recompute=self.training.recompute,
            length_cv=length_cv,
        )

    def rules(self) -> LoopRules:
        """Raises ValueError where they are at odds."""
        return self.loop.rules(self.weight_sync.holds, shared=self.cluster.shared)

    @property
    def schedule(self) -> ClusterFaultSchedule:
        return ClusterFaultSchedule(self.faults)

    def document(self) -> dict[str, Any]:
        """As it would be written with every default filled in. Parsing it gives the same scenario, but for a profile's
        file, which is found from the scenario's folder."""
        return self.model_dump(mode="json", exclude={"generation": {"workload": set(_OF_THE_LOOP)}})
