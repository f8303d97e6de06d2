"""The daemon's configuration: its sections, their defaults, and what each value must be. Frozen values."""

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import AfterValidator, Field, ValidationInfo, field_validator, model_validator

from orchestrrl.core.addresses import check_url, parse_address, remote_fault
from orchestrrl.core.config.launch import DeployerSettings, LaunchSettings, ParallelismSection
from orchestrrl.core.config.weights import WeightSettings
from orchestrrl.core.documents import (
    Name,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    SectionWithFormer,
    require,
)
from planner.model import Configuration, ConfigurationId, EngineId, FastPolicy, GpuId, Knowledge, Mode, Parallelism

if TYPE_CHECKING:
    from planner.cost.profile import Profile
    from planner.fabric.topology import Site


def _check_address(address: str) -> str:
    parse_address(address)
    return address


Address = Annotated[str, AfterValidator(_check_address)]
Url = Annotated[str, AfterValidator(check_url)]


class LoopbackListener(Section):
    """Where a server listens. No authentication yet, so anything but loopback must be asked for."""

    # allow_remote stands first because the check of the address reads it.
    allow_remote: bool = False
    address: Address

    @field_validator("address")
    @classmethod
    def _local_unless_allowed(cls, address: str, info: ValidationInfo) -> str:
        section = cls.__name__.removesuffix("Settings").lower()
        fault = remote_fault(parse_address(address)[0], f"set {section}.allow_remote: true")
        if fault and not info.data.get("allow_remote", True):  # which is there, unless it is faulty itself
            raise ValueError(fault)
        return address


class ListenSettings(LoopbackListener):
    address: Address = "127.0.0.1:7070"
    socket: Name | None = None  # path of a Unix socket, beside the address


class JournalSettings(Section):
    path: Name = "orchestrrl-journal.sqlite"
    # The oldest entries beyond this are dropped; those of open operations and live overrides stay.
    max_entries: Annotated[int, AfterValidator(require(lambda value: value >= 1000, ">= 1000"))] = 1_000_000


class MetricsSettings(LoopbackListener):
    address: Address = "127.0.0.1:9107"


class FastSettings(SectionWithFormer):
    """The fast loop: which requests move."""

    former = ("settle_share", "min_gain_share", "crowded_ratio", "keep_groups_together", "preemption_risk")
    interval_s: PositiveFloat = 1.0
    policy: Annotated[FastPolicy, Field(strict=False)] = FastPolicy.PACKING
    # packing: ends that differ by no more than this share of the time until the last are left alone
    tolerance: Annotated[float, AfterValidator(require(lambda value: 0 <= value < 1, ">= 0 and < 1"))] = 0.05
    theta: NonNegativeFloat = 0.0002  # spread of the load index (equation 5) that is left alone
    max_moves_per_tick: PositiveInt = 8  # at a time, in all: the next ones wait for the results of these
    max_moves_to_engine: PositiveInt = 4  # at a time, of running requests, to one engine
    max_moves_per_request: NonNegativeInt = 4
    rest_after_move_s: NonNegativeFloat = 10.0  # a request that has moved stays so long, unless its engine stalls
    # Where no lengths are known: of free KV, kept for each running request to grow into
    headroom_tokens: NonNegativeInt = 128
    stale_after_s: PositiveFloat = 5.0
    operation_expiry_s: PositiveFloat = 10.0
    stall_grace_s: NonNegativeFloat = 5.0


class SlowSettings(Section):
    """The slow loop: which configuration the fleet should have."""

    interval_s: PositiveFloat = 30.0
    epsilon_s: NonNegativeFloat = 10.0  # gain that a reconfiguration must bring beyond its cost
    cooldown_s: NonNegativeFloat = 120.0
    bin_tokens: PositiveInt = 512
    max_output_tokens: PositiveInt = 32768
    stale_after_s: PositiveFloat = 10.0
    scenarios: PositiveInt = 8  # samples of the lengths that plans are judged on
    work_budget: PositiveInt | None = 100_000  # bounds the solver's search; null: as much as it thinks fit
    knowledge: Annotated[Knowledge, Field(strict=False)] = Knowledge.FORECAST  # of lengths; others serve comparisons
    correct_predictions: bool = True  # by how earlier steps came out


class GpuSettings(Section):
    count: PositiveInt
    per_node: PositiveInt = 8


class ConfigurationSettings(Section):
    """One way to run an engine, as in `orchestrrl plan solve`."""

    id: Name
    gpus: PositiveInt
    alpha_s: NonNegativeFloat
    beta_s: NonNegativeFloat
    gamma_s: NonNegativeFloat
    kv_capacity_tokens: PositiveInt
    max_sequences: PositiveInt
    prefill_tokens_per_s: PositiveFloat
    switch_s: NonNegativeFloat
    parallelism: ParallelismSection | None = None  # None: TP over all GPUs

    @model_validator(mode="after")
    def _takes_its_gpus(self) -> Self:
        if self.layout().gpus != self.gpus:
            raise ValueError(f"parallelism must take the {self.gpus} GPUs, takes {self.layout().gpus}")
        return self

    def layout(self) -> Parallelism:
        return Parallelism(tp=self.gpus) if self.parallelism is None else self.parallelism.value()

    def value(self) -> Configuration:
        return Configuration(**{**self.model_dump(exclude={"parallelism"}), "id": ConfigurationId(self.id)})


class EngineSettings(Section):
    """What is known about an engine beforehand; agents and gateways may bring more engines."""

    id: Name
    url: Url
    configuration: Name | None = None
    pool: str = ""  # engines of a kind, which requests' tags may prefer; empty: none
    gpus: tuple[NonNegativeInt, ...] = Field(default=(), strict=False)
    max_sequences: PositiveInt | None = None
    kv_capacity_tokens: PositiveInt | None = None

    @property
    def engine(self) -> EngineId:
        return EngineId(self.id)

    @property
    def gpu_ids(self) -> tuple[GpuId, ...]:
        return tuple(GpuId(gpu) for gpu in self.gpus)


class KvConnector(StrEnum):
    """What the engines were started with to hand KV over, as far as gateways know how to use it."""

    KV_HANDOVER = "kv_handover"  # OrchestrRL's own, see docs/kv-handover.md


class KvTransfer(Section):
    """Engines can hand the KV of a running request over to each other. What is left out here, the profile's `moves` has
    to say."""

    # All engines have it, those of a configuration with a directory in common. None: KV is only priced in plans.
    connector: Annotated[KvConnector, Field(strict=False)] | None = None
    # Names the weights that all engines have. KV of another name is never used: it must change with the weights.
    weights: Name = "initial"

    inter_node_gbps_per_gpu: PositiveFloat | None = None
    intra_node_gbps_per_gpu: PositiveFloat | None = None  # by default as between nodes
    latency_s: NonNegativeFloat | None = None
    kv_bytes_per_token: PositiveFloat | None = None


class FleetSettings(Section):
    gpus: GpuSettings | None = None
    kv_transfer: KvTransfer | None = None  # None: moved requests are prefilled again
    profile: Name | None = None  # path of a profile file, from the configuration's own folder
    configurations: tuple[ConfigurationSettings, ...] = Field(default=(), strict=False)  # beside the profile's
    engines: tuple[EngineSettings, ...] = Field(default=(), strict=False)
    launch: LaunchSettings | None = None  # None: engines are started by somebody else
    deployer: DeployerSettings | None = None  # None: and nobody changes them
    _profile: "Profile | None" = None  # what the file said when the configuration was read

    def profile_value(self) -> "Profile | None":
        """The profile that `profile` names, with its curves."""
        return self._profile

    def configuration_values(self) -> tuple[Configuration, ...]:
        """Those written out, then the profile's in their affine form."""
        profiled = self._profile.configurations if self._profile is not None else ()
        return (
            *(configuration.value() for configuration in self.configurations),
            *(engine.configuration() for engine in profiled),
        )

    def layouts(self) -> dict[ConfigurationId, Parallelism]:
        """How each of `configuration_values` lies over its GPUs."""
        profiled = self._profile.configurations if self._profile is not None else ()
        own = {ConfigurationId(configuration.id): configuration.layout() for configuration in self.configurations}
        return own | {engine.id: engine.parallelism for engine in profiled}


class PacketSideSettings(Section):
    """A ToR's interface to the electrical network that is always there, and its own address on it."""

    interface: Name
    address: Name


class RouterSettings(Section):
    """One ToR as packets see it; `options` are its driver's."""

    tor: Name
    driver: Name
    options: dict[str, Any] = Field(default_factory=dict)
    address: Name  # its own, answered on every interface
    prefixes: tuple[Name, ...] = Field(default=(), strict=False)  # of the hosts behind it
    interfaces: tuple[Name, ...] = Field(strict=False)  # of its fibres, in the order of the site's file
    packet_side: PacketSideSettings | None = None


class ReroutingSettings(Section):
    """How routers are changed."""

    link_up_s: NonNegativeFloat = 2.0  # how long light is waited for, once switches are done
    neighbour_s: NonNegativeFloat = 1.0  # and then for the ToR at the far end to answer
    settle_s: NonNegativeFloat = 0.002  # for packets that are under way on a circuit whose routes have gone
    poll_s: PositiveFloat = 5.0  # between two looks for links that went dark, and routers that failed
    # As how many circuits in a row the packet side counts; null: packets take it only where no circuits lead.
    packet_hops: PositiveInt | None = None


Share = Annotated[float, Field(strict=False, ge=0, le=1)]


class FabricSettings(Section):
    """When circuits are changed, and how carefully."""

    site: Name  # path of a site's file, from the configuration's own folder
    # A window counts if its length, but for this share of cases, has covered what a commit takes and this margin.
    quantile: Annotated[float, Field(gt=0, lt=0.5)] = 0.05
    # By adding up the ranks': a rank's is never below 0.5 %, so that of many ranks `quantile` is not what is promised.
    most_risk: Annotated[float, Field(gt=0, le=1)] = 1.0
    margin_s: NonNegativeFloat = 0.005
    within_s: PositiveFloat = 30.0  # how long a period waits for its windows
    boundary_within_s: PositiveFloat = 60.0  # the same, where the job stands still for it
    min_fraction: Share = 0.5  # of its circuits, that an endpoint keeps at every point of a change
    max_moves_per_stage: PositiveInt = 1024
    # From link up until packets take it: what is reckoned with where routers follow links by themselves (none listed
    # here), and else before it was measured.
    route_s: NonNegativeFloat = 0.0
    routers: tuple[RouterSettings, ...] = Field(default=(), strict=False)
    rerouting: ReroutingSettings = ReroutingSettings()
    # Where this names a model (see planner/cost/models.py), circuits of Gen follow each redeployment.
    model: Name | None = None
    first_fleet_gpu: NonNegativeInt = 0  # the site's number of the fleet's GPU 0
    tokens_per_period: PositiveFloat = 1e6  # that an engine decodes between them


class CircuitOwnership(StrEnum):
    """Which circuits of a switch may be taken down."""

    MADE = "made"  # what we made, and what an operator took over by name
    ALL = "all"  # every one: nobody else uses the switch


class SwitchSettings(Section):
    """One optical circuit switch; `options` are its driver's."""

    id: Name
    driver: Name
    owns: Annotated[CircuitOwnership, Field(strict=False)] = CircuitOwnership.MADE
    options: dict[str, Any] = Field(default_factory=dict)


class LimitSettings(Section):
    """What the daemon takes in and remembers at most. Whatever is beyond is refused, with the setting's name."""

    message_bytes: Annotated[
        int, AfterValidator(require(lambda value: 65536 <= value < 2**31, ">= 65536 and < 2**31"))
    ] = 64 * 1024 * 1024
    connections: PositiveInt = 16_384  # open at a time, on each address
    calls: PositiveInt = 16_384  # open at a time, streams included
    requests_per_report: PositiveInt = 262_144  # in flight, or finished, and items of a node's result
    requests: PositiveInt = 1_048_576  # in flight, over all gateways
    engines: PositiveInt = 8192  # known at a time, whoever named them
    gateways: PositiveInt = 256  # known at a time
    nodes: PositiveInt = 8192  # attached lately: agents with gateways, and so many weight peers and traced hosts


class Config(Section):
    mode: Annotated[Mode, Field(strict=False)] = Mode.ADVISE
    listen: ListenSettings = ListenSettings()
    limits: LimitSettings = LimitSettings()
    journal: JournalSettings = JournalSettings()
    metrics: MetricsSettings | None = None
    fast: FastSettings = FastSettings()
    slow: SlowSettings = SlowSettings()
    fleet: FleetSettings = FleetSettings()
    ocs: tuple[SwitchSettings, ...] = Field(default=(), strict=False)
    fabric: FabricSettings | None = None  # None: circuits are changed by hand alone
    weights: WeightSettings = WeightSettings()
    _site: "Site | None" = None  # what its file said when the configuration was read

    def site_value(self) -> "Site | None":
        """The site that `fabric.site` names."""
        return self._site
