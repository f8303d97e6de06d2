"""The daemon's configuration: its sections, their defaults, and the constraints on each value. Instances are frozen."""

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
    """The listen address of a server. Because clients are not authenticated yet, addresses other than loopback require
    `allow_remote`."""

    # allow_remote is declared first because the check of the address reads it.
    allow_remote: bool = False
    address: Address

    @field_validator("address")
    @classmethod
    def _local_unless_allowed(cls, address: str, info: ValidationInfo) -> str:
        section = cls.__name__.removesuffix("Settings").lower()
        fault = remote_fault(parse_address(address)[0], f"set {section}.allow_remote: true")
        if fault and not info.data.get("allow_remote", True):  # present, unless it is invalid itself
            raise ValueError(fault)
        return address


class ListenSettings(LoopbackListener):
    address: Address = "127.0.0.1:7070"
    socket: Name | None = None  # path of a Unix socket, in addition to the address


class JournalSettings(Section):
    path: Name = "orchestrrl-journal.sqlite"
    # The oldest entries beyond this number are dropped, except those of open operations and live overrides.
    max_entries: Annotated[int, AfterValidator(require(lambda value: value >= 1000, ">= 1000"))] = 1_000_000


class MetricsSettings(LoopbackListener):
    address: Address = "127.0.0.1:9107"


class FastSettings(SectionWithFormer):
    """Settings of the fast loop, which moves requests between engines."""

    former = ("settle_share", "min_gain_share", "crowded_ratio", "keep_groups_together", "preemption_risk")
    interval_s: PositiveFloat = 1.0
    policy: Annotated[FastPolicy, Field(strict=False)] = FastPolicy.PACKING
    # packing: end times that differ by at most this share of the time until the last are left unchanged
    tolerance: Annotated[float, AfterValidator(require(lambda value: 0 <= value < 1, ">= 0 and < 1"))] = 0.05
    theta: NonNegativeFloat = 0.0002  # spread of the load index (equation 5) that is left unchanged
    max_moves_per_tick: PositiveInt = 8  # concurrent moves in total; further moves wait for results
    max_moves_to_engine: PositiveInt = 4  # concurrent moves of running requests to one engine
    max_moves_per_request: NonNegativeInt = 4
    rest_after_move_s: NonNegativeFloat = 10.0  # a moved request stays for this time, unless its engine stalls
    # if lengths are unknown: free KV reserved for the growth of each running request
    headroom_tokens: NonNegativeInt = 128
    stale_after_s: PositiveFloat = 5.0
    operation_expiry_s: PositiveFloat = 10.0
    stall_grace_s: NonNegativeFloat = 5.0


class SlowSettings(Section):
    """Settings of the slow loop, which selects the configurations of the fleet's engines."""

    interval_s: PositiveFloat = 30.0
    epsilon_s: NonNegativeFloat = 10.0  # minimum gain of a reconfiguration beyond its cost
    cooldown_s: NonNegativeFloat = 120.0
    bin_tokens: PositiveInt = 512
    max_output_tokens: PositiveInt = 32768
    stale_after_s: PositiveFloat = 10.0
    scenarios: PositiveInt = 8  # samples of the lengths on which plans are evaluated
    work_budget: PositiveInt | None = 100_000  # limit of the solver's search; null: chosen by the solver
    # the planner's knowledge of lengths; other values serve comparisons
    knowledge: Annotated[Knowledge, Field(strict=False)] = Knowledge.FORECAST
    correct_predictions: bool = True  # correct predictions by the outcomes of earlier steps


class GpuSettings(Section):
    count: PositiveInt
    per_node: PositiveInt = 8


class ConfigurationSettings(Section):
    """A configuration in which engines can run. Apart from `parallelism`, its fields are those of a configuration in a
    problem of `orchestrrl plan solve`."""

    id: Name
    gpus: PositiveInt
    alpha_s: NonNegativeFloat
    beta_s: NonNegativeFloat
    gamma_s: NonNegativeFloat
    kv_capacity_tokens: PositiveInt
    max_sequences: PositiveInt
    prefill_tokens_per_s: PositiveFloat
    switch_s: NonNegativeFloat
    parallelism: ParallelismSection | None = None  # None: tensor parallelism over all GPUs

    @model_validator(mode="after")
    def _takes_its_gpus(self) -> Self:
        if self.layout().gpus != self.gpus:
            raise ValueError(f"parallelism must use {self.gpus} GPUs, got {self.layout().gpus}")
        return self

    def layout(self) -> Parallelism:
        return Parallelism(tp=self.gpus) if self.parallelism is None else self.parallelism.value()

    def value(self) -> Configuration:
        return Configuration(**{**self.model_dump(exclude={"parallelism"}), "id": ConfigurationId(self.id)})


class EngineSettings(Section):
    """An engine that is listed in the configuration. Agents and gateways may add more engines at run time."""

    id: Name
    url: Url
    configuration: Name | None = None
    pool: str = ""  # name of a group of similar engines, which requests' tags may prefer; empty: none
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
    """The supported connectors for transferring KV caches between engines."""

    KV_HANDOVER = "kv_handover"  # OrchestrRL's own, see docs/kv-handover.md


class KvTransfer(Section):
    """Settings that let engines transfer the KV cache of running requests to each other. Costs that are not set here
    must be in the profile's `moves`."""

    # All engines use this connector; engines of one configuration share a directory. None: KV transfer is only priced
    # in plans.
    connector: Annotated[KvConnector, Field(strict=False)] | None = None
    # Name of the weights that all engines have. KV of another name is never used: the name must change with the
    # weights.
    weights: Name = "initial"

    inter_node_gbps_per_gpu: PositiveFloat | None = None
    intra_node_gbps_per_gpu: PositiveFloat | None = None  # default: as for inter_node_gbps_per_gpu
    latency_s: NonNegativeFloat | None = None
    kv_bytes_per_token: PositiveFloat | None = None


class FleetSettings(Section):
    gpus: GpuSettings | None = None
    kv_transfer: KvTransfer | None = None  # None: moved requests are prefilled again
    profile: Name | None = None  # path of a profile file, relative to the configuration's folder
    configurations: tuple[ConfigurationSettings, ...] = Field(default=(), strict=False)  # in addition to the profile's
    engines: tuple[EngineSettings, ...] = Field(default=(), strict=False)
    launch: LaunchSettings | None = None  # None: engines are started externally
    deployer: DeployerSettings | None = None  # None: engines are never changed
    _profile: "Profile | None" = None  # content of the file when the configuration was read

    def profile_value(self) -> "Profile | None":
        """Return the profile that was read from the file `profile`, or None if no profile is configured."""
        return self._profile

    def configuration_values(self) -> tuple[Configuration, ...]:
        """Return the configurations listed in this section, followed by those of the profile. The step times of the
        profile are approximated by affine functions."""
        profiled = self._profile.configurations if self._profile is not None else ()
        return (
            *(configuration.value() for configuration in self.configurations),
            *(engine.configuration() for engine in profiled),
        )

    def layouts(self) -> dict[ConfigurationId, Parallelism]:
        """Return the parallel layout of each configuration in `configuration_values`."""
        profiled = self._profile.configurations if self._profile is not None else ()
        own = {ConfigurationId(configuration.id): configuration.layout() for configuration in self.configurations}
        return own | {engine.id: engine.parallelism for engine in profiled}


class PacketSideSettings(Section):
    """A ToR's interface to the permanent electrical network, and the ToR's address in that network."""

    interface: Name
    address: Name


class RouterSettings(Section):
    """The router of one ToR. `options` are the options of its driver."""

    tor: Name
    driver: Name
    options: dict[str, Any] = Field(default_factory=dict)
    address: Name  # the router's address, to which it responds on every interface
    prefixes: tuple[Name, ...] = Field(default=(), strict=False)  # prefixes of the hosts behind the router
    interfaces: tuple[Name, ...] = Field(strict=False)  # interfaces of its fibres, in the order of the site's file
    packet_side: PacketSideSettings | None = None


class ReroutingSettings(Section):
    """Settings for changing the routes of routers when circuits change."""

    link_up_s: NonNegativeFloat = 2.0  # time limit for light after the switches have changed
    neighbour_s: NonNegativeFloat = 1.0  # time limit for the response of the ToR at the far end
    settle_s: NonNegativeFloat = 0.002  # wait for packets in transit on a circuit whose routes were removed
    poll_s: PositiveFloat = 5.0  # interval of checks for dark links and failed routers
    # The cost of the packet side as a number of successive circuits; null: packets use it only if no circuits exist.
    packet_hops: PositiveInt | None = None


Share = Annotated[float, Field(strict=False, ge=0, le=1)]


class FabricSettings(Section):
    """Settings of the optical fabric: its site and routers, and the timing and safety margins of circuit changes."""

    site: Name  # path of a site file, relative to the configuration's folder
    # A window is used if its length, except in this share of cases, has covered the time of a commit and this margin.
    quantile: Annotated[float, Field(gt=0, lt=0.5)] = 0.05
    # Sum over the ranks. A rank's risk is never below 0.5 %, so with many ranks `quantile` is not guaranteed.
    most_risk: Annotated[float, Field(gt=0, le=1)] = 1.0
    margin_s: NonNegativeFloat = 0.005
    within_s: PositiveFloat = 30.0  # time for which a period waits for its windows
    boundary_within_s: PositiveFloat = 60.0  # the same for a boundary, where the job is idle
    min_fraction: Share = 0.5  # fraction of its circuits that an endpoint keeps at every point of a change
    max_moves_per_stage: PositiveInt = 1024
    # Time from link up until packets use the link. This value is used if routers follow links on their own (none are
    # listed here), and otherwise until the time is measured.
    route_s: NonNegativeFloat = 0.0
    routers: tuple[RouterSettings, ...] = Field(default=(), strict=False)
    rerouting: ReroutingSettings = ReroutingSettings()
    # If this names a model (see planner/cost/models.py), Gen's circuits follow each redeployment.
    model: Name | None = None
    first_fleet_gpu: NonNegativeInt = 0  # the site's number of the fleet's GPU 0
    tokens_per_period: PositiveFloat = 1e6  # tokens that an engine decodes between redeployments


class CircuitOwnership(StrEnum):
    """The rule that determines which circuits of a switch the daemon may remove."""

    MADE = "made"  # circuits that this daemon made or an operator took over
    ALL = "all"  # all circuits: the switch has no other users


class SwitchSettings(Section):
    """One optical circuit switch. `options` are the options of its driver."""

    id: Name
    driver: Name
    owns: Annotated[CircuitOwnership, Field(strict=False)] = CircuitOwnership.MADE
    options: dict[str, Any] = Field(default_factory=dict)


class LimitSettings(Section):
    """Limits on what the daemon accepts and stores. Input that exceeds a limit is rejected with an error that names the
    setting."""

    message_bytes: Annotated[
        int, AfterValidator(require(lambda value: 65536 <= value < 2**31, ">= 65536 and < 2**31"))
    ] = 64 * 1024 * 1024
    connections: PositiveInt = 16_384  # open at a time, on each address
    calls: PositiveInt = 16_384  # open at a time, streams included
    requests_per_report: PositiveInt = 262_144  # in flight, or finished, and items of a node's result
    requests: PositiveInt = 1_048_576  # in flight, over all gateways
    engines: PositiveInt = 8192  # known at a time, from all sources
    gateways: PositiveInt = 256  # known at a time
    # attached recently: agents and gateways together; the same limit applies to weight peers and to traced hosts
    nodes: PositiveInt = 8192


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
    fabric: FabricSettings | None = None  # None: circuits are only changed manually
    weights: WeightSettings = WeightSettings()
    _site: "Site | None" = None  # content of its file when the configuration was read

    def site_value(self) -> "Site | None":
        """Return the site that was read from the file `fabric.site`, or None if no site is configured."""
        return self._site
