"""One YAML file -> one frozen configuration of the daemon, or every fault in it at once.

`Reloadable` keeps the last good one when the file has become faulty.
"""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import AfterValidator, Field, ValidationError, ValidationInfo, field_validator, model_validator

from ocs_drivers.errors import Faults as DriverFaults
from ocs_drivers.registry import make_driver
from orchestrrl.core.addresses import ServerAddress, check_url, parse_address, remote_fault, server_address
from orchestrrl.core.clock import WallClock
from orchestrrl.core.documents import (
    Name,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    parse_yaml,
    read_text,
    require,
)
from orchestrrl.core.errors import ProblemFaults, faults_of, shorten
from orchestrrl.fabric.config_checks import FabricSettings, fabric_faults, read_fabric_site
from orchestrrl.fleet.configured_deployer import DeployerSettings, deployer_faults, deployer_of, start_faults
from orchestrrl.fleet.launch import LaunchSettings, ParallelismSection, launch_faults
from orchestrrl.weights.settings import WeightSettings
from planner.model import Configuration, ConfigurationId, EngineId, GpuId, Knowledge, Mode, Parallelism

if TYPE_CHECKING:  # its curves bring numpy: loaded where a configuration names a profile, and nowhere else
    from planner.cost.profile import Profile
    from planner.fabric.topology import Site


def _check_address(address: str) -> str:
    parse_address(address)
    return address


def _check_local(address: str, section: str, info: ValidationInfo) -> str:
    """`info` has the section's `allow_remote`, unless that is faulty itself."""
    fault = remote_fault(parse_address(address)[0], f"set {section}.allow_remote: true")
    if fault and not info.data.get("allow_remote", True):
        raise ValueError(fault)
    return address


Address = Annotated[str, AfterValidator(_check_address)]
Url = Annotated[str, AfterValidator(check_url)]


class Listen(Section):
    """Where the gRPC server listens. No authentication yet, so anything but loopback must be asked for."""

    # allow_remote stands first because the check of the address reads it.
    allow_remote: bool = False
    address: Address = "127.0.0.1:7070"
    socket: Name | None = None  # path of a Unix socket, beside the address

    @field_validator("address")
    @classmethod
    def _local_unless_allowed(cls, address: str, info: ValidationInfo) -> str:
        return _check_local(address, "listen", info)


class JournalSettings(Section):
    path: Name = "orchestrrl-journal.sqlite"
    # The oldest entries beyond this are dropped; those of open operations and live overrides stay.
    max_entries: Annotated[int, AfterValidator(require(lambda value: value >= 1000, ">= 1000"))] = 1_000_000


class MetricsSettings(Section):
    # As for `listen`.
    allow_remote: bool = False
    address: Address = "127.0.0.1:9107"

    @field_validator("address")
    @classmethod
    def _local_unless_allowed(cls, address: str, info: ValidationInfo) -> str:
        return _check_local(address, "metrics", info)


class FastPolicy(StrEnum):
    """How the fast loop chooses moves."""

    PACKING = "packing"  # by when each engine will end; the paper's rule where engines' step times are unknown
    PAPER = "paper"  # by the load index
    NONE = "none"  # it does not move requests


class FastSettings(Section):
    """The fast loop: which requests move."""

    interval_s: PositiveFloat = 1.0
    policy: Annotated[FastPolicy, Field(strict=False)] = FastPolicy.PACKING
    # packing: ends that differ by no more than this share of the time until the last are left alone
    tolerance: Annotated[float, AfterValidator(require(lambda value: 0 <= value < 1, ">= 0 and < 1"))] = 0.05
    theta: NonNegativeFloat = 0.0002  # spread of the load index (equation 5) that is left alone
    # Once something moves, it goes on until no more than this share of tolerance or theta is left
    settle_share: Annotated[float, AfterValidator(require(lambda value: 0 < value <= 1, "> 0 and <= 1"))] = 1.0
    # packing: of the time until the end, that each move must gain
    min_gain_share: Annotated[float, AfterValidator(require(lambda value: 0 < value < 1, "> 0 and < 1"))] = 0.001
    # paper: a running request leaves an engine with that many times the requests of the emptiest, one more counted in
    crowded_ratio: Annotated[float, AfterValidator(require(lambda value: value > 1, "> 1"))] = 2.0
    max_moves_per_tick: PositiveInt = 8  # at a time, in all: the next ones wait for the results of these
    max_moves_to_engine: PositiveInt = 4  # at a time, of running requests, to one engine
    max_moves_per_request: NonNegativeInt = 4
    # packing: samples of one prompt had rather be on one engine, for engines that cache prefixes
    keep_groups_together: bool = False
    rest_after_move_s: NonNegativeFloat = 10.0  # a request that has moved stays so long, unless its engine stalls
    # A move may lead to a preemption at its destination with this probability at most, as lengths are forecast
    preemption_risk: Annotated[float, AfterValidator(require(lambda value: 0 <= value < 1, ">= 0 and < 1"))] = 0.1
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


class Gpus(Section):
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


class Fleet(Section):
    gpus: Gpus | None = None
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


class Owns(StrEnum):
    """Which circuits of a switch may be taken down."""

    MADE = "made"  # what we made, and what an operator took over by name
    ALL = "all"  # every one: nobody else uses the switch


class SwitchSettings(Section):
    """One optical circuit switch; `options` are its driver's."""

    id: Name
    driver: Name
    owns: Annotated[Owns, Field(strict=False)] = Owns.MADE
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
    listen: Listen = Listen()
    limits: LimitSettings = LimitSettings()
    journal: JournalSettings = JournalSettings()
    metrics: MetricsSettings | None = None
    fast: FastSettings = FastSettings()
    slow: SlowSettings = SlowSettings()
    fleet: Fleet = Fleet()
    ocs: tuple[SwitchSettings, ...] = Field(default=(), strict=False)
    fabric: FabricSettings | None = None  # None: circuits are changed by hand alone
    weights: WeightSettings = WeightSettings()
    _site: "Site | None" = None  # what its file said when the configuration was read

    def site_value(self) -> "Site | None":
        """The site that `fabric.site` names."""
        return self._site


def load_config(path: Path | str, *, with_parts: bool = False) -> Config:
    """The configuration in the file. Raises ProblemFaults with every fault; `with_parts` includes those that switch
    drivers and the deployer find in their options, for which their libraries are loaded. Nothing is opened."""
    return parse_config(read_text(path), Path(path).parent, with_parts=with_parts)


def parse_config(
    text: str, folder: Path = Path(), *, profile: "Profile | None" = None, with_parts: bool = False
) -> Config:
    """As load_config, from text; files that it names are found from `folder`. An empty document is the default
    configuration. A `profile` that is there already stands in for one that the document names."""
    document = parse_yaml(text)
    if document is None:
        document = {}
    if not isinstance(document, dict):
        raise ProblemFaults([f"(document): must be a mapping of sections, got {shorten(document)}"])
    document = {name: section for name, section in document.items() if section is not None}  # `fleet:` and no more
    faults: list[str] = []
    try:
        config = Config.model_validate(document)
    except ValidationError as error:
        faults = faults_of(error, Config)
    # Sections are checked against each other even when other sections are faulty, so nothing waits for a second run.
    if profile is None:
        profile, profile_faults = _read_profile(document.get("fleet"), folder)
        faults += profile_faults
    faults += _cross_faults(document, profile)
    site, site_faults = read_fabric_site(document.get("fabric"), folder)
    faults += site_faults + fabric_faults(document, site)
    if with_parts:
        faults += _switch_faults(document) + _start_faults(document, profile)
    if faults:
        raise ProblemFaults(faults)
    config.fleet._profile = profile
    config._site = site
    return config


def _read_profile(fleet: Any, folder: Path) -> tuple["Profile | None", list[str]]:
    """The profile that the section names, or what is wrong with it."""
    path = fleet.get("profile") if isinstance(fleet, dict) else None
    if not isinstance(path, str) or not path:
        return None, []
    from orchestrrl.engines.profiles.store import read_profile

    try:
        return read_profile(folder / path), []
    except ProblemFaults as error:
        # A file that cannot be read names itself.
        named = (fault if fault.startswith(str(folder / path)) else f"{path}: {fault}" for fault in error.faults)
        return None, [f"fleet.profile: {fault}" for fault in named]


def _cross_faults(document: dict[Any, Any], profile: "Profile | None") -> list[str]:
    """Faults between entries: double ids, unknown configurations, GPUs that do not exist or serve two engines."""
    fleet = document.get("fleet")
    fleet = fleet if isinstance(fleet, dict) else {}
    configurations, engines = _entries(fleet, "configurations"), _entries(fleet, "engines")
    faults = _double_ids("fleet.configurations", configurations)
    faults += _double_ids("fleet.engines", engines)
    faults += _double_urls("fleet.engines", engines)
    faults += _double_ids("ocs", _entries(document, "ocs"))
    profiled = [str(engine.id) for engine in profile.configurations] if profile is not None else []
    for index, entry in configurations:
        if entry.get("id") in profiled:
            path = f"fleet.configurations[{index}].id"
            faults.append(f"{path}: is the id of a configuration of fleet.profile already, got {entry['id']!r}")
    faults += _transfer_faults(fleet, profile)
    known = sorted({str(entry["id"]) for _, entry in configurations if "id" in entry}.union(profiled))
    for index, engine in engines:
        wanted = engine.get("configuration")
        if isinstance(wanted, str) and wanted not in known:
            listing = ", ".join(known) or "none"
            path = f"fleet.engines[{index}].configuration"
            faults.append(f"{path}: is not one of fleet.configurations (known: {listing}), got {wanted!r}")
    faults += launch_faults(fleet, known)
    faults += deployer_faults(fleet)
    return faults + _gpu_faults(fleet, engines)


def _switch_faults(document: dict[Any, Any]) -> list[str]:
    """Faults that the drivers of the section `ocs` find in their options."""
    faults = []
    for index, entry in _entries(document, "ocs"):
        id, driver, options = entry.get("id"), entry.get("driver"), entry.get("options", {})
        if not isinstance(driver, str) or not driver or not isinstance(options, dict):
            continue  # the section's own check has said so
        named = {name: value for name, value in options.items() if isinstance(name, str)}
        try:
            make_driver(driver, str(id), named)
        except DriverFaults as error:
            faults += [f"ocs[{index}].{fault}" for fault in error.faults]
    return faults


def _start_faults(document: dict[Any, Any], profile: "Profile | None") -> list[str]:
    """Faults that the deployer finds in its options, and those of engines that it could never start, where the section
    `fleet` is sound."""
    try:
        only = Config.model_validate({"fleet": document.get("fleet", {})})
    except ValidationError:
        return []
    only.fleet._profile = profile
    if deployer_faults(document.get("fleet", {})):
        return []
    try:
        deployer_of(only, WallClock())
    except ProblemFaults as error:
        return error.faults
    return start_faults(only)


def _transfer_faults(fleet: dict[Any, Any], profile: "Profile | None") -> list[str]:
    section = fleet.get("kv_transfer")
    if not isinstance(section, dict) or (profile is not None and profile.moves is not None):
        return []
    missing = [name for name in ("inter_node_gbps_per_gpu", "kv_bytes_per_token") if section.get(name) is None]
    without = "must be given where fleet.profile says nothing of moves, got nothing"
    return [f"fleet.kv_transfer.{name}: {without}" for name in missing]


def _entries(section: dict[Any, Any], key: str) -> list[tuple[int, dict[Any, Any]]]:
    listing = section.get(key)
    return (
        [(i, entry) for i, entry in enumerate(listing) if isinstance(entry, dict)] if isinstance(listing, list) else []
    )


def _double_ids(path: str, entries: list[tuple[int, dict[Any, Any]]]) -> list[str]:
    first: dict[str, int] = {}
    faults = []
    for index, entry in entries:
        if not isinstance(entry.get("id"), str):
            continue
        if entry["id"] in first:
            faults.append(f"{path}[{index}].id: is the id of {path}[{first[entry['id']]}] already, got {entry['id']!r}")
        first.setdefault(entry["id"], index)
    return faults


def _double_urls(path: str, entries: list[tuple[int, dict[Any, Any]]]) -> list[str]:
    first: dict[ServerAddress, int] = {}
    faults = []
    for index, entry in entries:
        address = server_address(entry["url"]) if isinstance(entry.get("url"), str) else None
        if address is None:
            continue
        if address in first:
            faults.append(f"{path}[{index}].url: is that of {path}[{first[address]}] already, got {entry['url']!r}")
        first.setdefault(address, index)
    return faults


def _gpu_faults(fleet: dict[Any, Any], engines: list[tuple[int, dict[Any, Any]]]) -> list[str]:
    section = fleet.get("gpus")
    count = section.get("count") if isinstance(section, dict) else None
    owner: dict[int, str] = {}
    faults = []
    for index, engine in engines:
        gpus = engine.get("gpus")
        for position, gpu in enumerate(gpus if isinstance(gpus, list) else []):
            path = f"fleet.engines[{index}].gpus[{position}]"
            if not isinstance(gpu, int):
                continue
            if isinstance(count, int) and gpu >= count:
                faults.append(f"{path}: must be less than fleet.gpus.count ({count}), got {gpu}")
            if gpu in owner:
                faults.append(f"{path}: is in use by {owner[gpu]} already, got {gpu}")
            owner.setdefault(gpu, f"fleet.engines[{index}]")
    return faults


class Reloadable:
    """The configuration in force. `reload` takes the file's, or keeps the old one and raises with the reason."""

    def __init__(self, path: Path, config: Config) -> None:
        self._path = path
        self.config = config

    @classmethod
    def load(cls, path: Path) -> Self:
        return cls(path, load_config(path, with_parts=True))

    def reload(self) -> Config:
        """The new configuration. Raises ProblemFaults and keeps the old one when the file is faulty."""
        fresh = load_config(self._path, with_parts=True)
        fixed = [f"{name}: cannot change while the daemon runs" for name in _fixed_changes(self.config, fresh)]
        if fixed:
            raise ProblemFaults(fixed)
        self.config = fresh
        return fresh


def _fixed_changes(old: Config, new: Config) -> list[str]:
    """Sections that are bound to sockets, files and devices, or to what is on its way, where the two differ."""
    fixed = [
        name
        for name in ("listen", "limits", "journal", "metrics", "ocs", "fabric", "weights")
        if getattr(old, name) != getattr(new, name)
    ]
    if old.fleet.deployer != new.fleet.deployer:
        fixed.append("fleet.deployer")
    if old.fleet.deployer is not None:  # it starts engines by these
        fixed += [
            f"fleet.{name}" for name in ("launch", "gpus") if getattr(old.fleet, name) != getattr(new.fleet, name)
        ]
    return fixed


EXAMPLE = """\
# OrchestrRL daemon. Every section may be left out; the values shown are the defaults unless said otherwise.

# advise: decide and explain, change nothing. act: also move requests. Begin with advise.
mode: advise

listen:
  address: 127.0.0.1:7070       # gRPC; port 0 takes a free one
  socket: null                  # also listen on this Unix socket, e.g. /run/orchestrrl.sock
  allow_remote: false           # must be true for an address that is not loopback: there is no authentication yet

# What the daemon takes in and remembers at most; what is beyond is refused, with the setting's name. The defaults are
# for 1,024 engines of 1,024 requests each, over several gateways.
limits:
  message_bytes: 67108864       # of one gRPC message
  connections: 16384            # open at a time, on each address
  calls: 16384                  # open at a time, streams included
  requests_per_report: 262144   # that one gateway has in flight, or reports as finished at a time
  requests: 1048576             # in flight, over all gateways
  engines: 8192                 # known at a time, whoever named them
  gateways: 256                 # known at a time
  nodes: 8192                   # agents and gateways known at a time; as many weight peers, and traced hosts

journal:
  path: orchestrrl-journal.sqlite  # and beside it -wal, -shm, .tail and .lock; all belong together
  max_entries: 1000000          # the oldest beyond this are dropped

# Prometheus metrics; without this section there are none.
metrics:
  address: 127.0.0.1:9107
  allow_remote: false           # as for listen

# The fast loop moves requests between engines.
fast:
  interval_s: 1.0
  policy: packing               # by when each engine will end; paper: by the load index; none: no moves
  tolerance: 0.05               # packing: ends that differ by no more than this share of the last are left alone
  theta: 0.0002                 # paper: spread of the load index, (running + waiting) / cap / decode rate, left alone
  settle_share: 1.0             # once something moves, it goes on until this share of tolerance or theta is left
  min_gain_share: 0.001         # packing: of the time until the end, that each move must gain
  crowded_ratio: 2.0            # paper: a running request leaves an engine with so many times the emptiest's requests
  max_moves_per_tick: 8         # at a time, in all: the next ones wait for the results of these
  max_moves_to_engine: 4        # at a time, of running requests, to one engine
  max_moves_per_request: 4
  rest_after_move_s: 10.0       # a request that has moved stays so long, unless its engine stalls
  keep_groups_together: false   # packing: samples of one prompt had rather be on one engine (prefix caching)
  preemption_risk: 0.1          # that a move may bring its destination, as lengths are forecast
  headroom_tokens: 128          # where no lengths are known: of free KV, kept for each running request
  stale_after_s: 5.0            # an engine with older news is left out; without a gateway's news all is held
  operation_expiry_s: 10.0      # a move that a gateway has not begun by then is off
  stall_grace_s: 5.0            # after a step's start, before a decode rate of 0 counts as a stall

# The slow loop proposes which engines to have, and which requests each should decode.
slow:
  interval_s: 30.0
  epsilon_s: 10.0               # gain that a proposal must bring beyond its cost
  cooldown_s: 120.0
  bin_tokens: 512               # of the histogram of remaining lengths
  max_output_tokens: 32768      # where a request does not say
  stale_after_s: 10.0
  scenarios: 8                  # samples of the lengths that plans are judged on
  work_budget: 100000           # bounds the solver's search, deterministically; null: as it thinks fit
  knowledge: forecast           # of lengths; mean: only the average; oracle: as a simulation tells them
  correct_predictions: true     # by how earlier steps came out, by a factor of at most 2

# What agents and gateways cannot tell. All of it is optional; there is none by default.
fleet:
  gpus: {count: 8, per_node: 8}
  profile: null                 # a file of `orchestrrl profile measure` or `import`: its configurations join these
  # Only where engines hand the KV of running requests over to each other, which none does by itself: without this,
  # plans prefill moved requests again. Anything left out is as the profile's `moves` has it:
  # {inter_node_gbps_per_gpu: 200.0, intra_node_gbps_per_gpu: 1600.0, latency_s: 0.002, kv_bytes_per_token: 196608.0}
  # With `connector: kv_handover` (docs/kv-handover.md) gateways use it, for KV of the weights that `weights` names.
  kv_transfer: null
  configurations:
    # One decode iteration over b sequences that hold K KV tokens takes alpha_s + beta_s*b + gamma_s*K.
    # Each is TP over its GPUs, unless it has e.g. `parallelism: {tp: 1, dp: 8, ep: 8}`; AFD: {attention_gpus: 16,
    # ffn_gpus: 8, micro_batches: 2}.
    - {id: tp2, gpus: 2, alpha_s: 0.0184, beta_s: 0.000081, gamma_s: 4.1e-8, kv_capacity_tokens: 582885,
       max_sequences: 1024, prefill_tokens_per_s: 18000.0, switch_s: 1.7}
    - {id: tp4, gpus: 4, alpha_s: 0.0155, beta_s: 0.000078, gamma_s: 2.0e-8, kv_capacity_tokens: 1315307,
       max_sequences: 1024, prefill_tokens_per_s: 36000.0, switch_s: 1.9}
  engines:                      # `orchestrrl engines add` brings more while the daemon runs
    # Engines of one pool are of a kind, which requests' tags may prefer: {..., pool: long-context}.
    - {id: e0, url: "http://127.0.0.1:8000", configuration: tp2, gpus: [0, 1]}
    - {id: e1, url: "http://127.0.0.1:8001", configuration: tp2, gpus: [2, 3], max_sequences: 256}
  # How engines are started: `orchestrrl plan render` prints their command lines. There is none by default.
  launch:
    engine: vllm                # simulated: `orchestrrl engine simulated`, which needs no GPU and no model
    python: null                # of the engines' own environment; by default python3, and ours for simulated ones
    model: Qwen/Qwen2.5-14B-Instruct   # a name or a folder; there is no default
    served_model_name: null     # by default the model's
    device: cuda                # cpu: vLLM's CPU build, where a GPU's id stands for cores_per_gpu cores; 0: not bound
    cores_per_gpu: 0
    host: 127.0.0.1             # that they listen on
    ports: [8100, 8199]         # each GPU of a node has its own four; an engine uses those of its lowest GPU
    nodes: []                   # addresses, in the order of GPUs; engines over several nodes need them
    arguments: []               # for engines, e.g. [--max-model-len, "16384"]; what contradicts a layout is a fault
    environment: {}
    configurations: {}          # more for one of them, or otherwise: {tp4: {arguments: [...], environment: {...}}}
    kv_directory: null          # where kv_transfer has a connector: a folder in it for each configuration
    weight_backend: false       # true: vLLM checks versions of the weights as it loads them, and reads them back
  # Who starts and stops engines: `orchestrrl switch`, and the planner in mode act. There is none by default.
  deployer:
    product: local              # processes of this machine; ray and kubernetes are extras, see docs/deployers.md
    options: {}                 # the product's own
    name: orchestrrl            # whose engines are whose, on machines that fleets share
    folder: orchestrrl-engines  # for records and logs
    standby: stop               # keep: replaced engines that can sleep are kept, for a later switch to wake
    drain_within_s: 30.0        # limits of a switch's steps: for requests that cannot move to finish
    stop_within_s: 60.0
    start_within_s: 60.0
    ready_within_s: 600.0       # from its start until an engine answers
    load_within_s: 300.0        # weights
    check_within_s: 120.0       # warm-up, verification
    compare_tokens: 16          # a new engine must find likely what the old ones answer, over so many tokens,
    compare_nats: 0.1           # but for this mean difference of log-probabilities

# Optical circuit switches; there are none by default. Drivers and their options are in docs/ocs.md. Circuits that
# somebody else made are never taken down, unless `orchestrrl ocs take-over` names them, or nobody else uses the switch:
# `owns: all`.
ocs:
  - {id: ocs1, driver: virtual, owns: made, options: {}}

# Circuits follow what periods announce, inside windows without collectives, see docs/fabric.md. There is none by
# default; `site` is a file of `orchestrrl fabric generate`, and every switch in it must be in `ocs`:
# {site: site.yaml, quantile: 0.05, most_risk: 1.0, margin_s: 0.005, within_s: 30.0, boundary_within_s: 60.0,
#  min_fraction: 0.5, max_moves_per_stage: 1024, route_s: 0.0, routers: [], model: qwen2.5-14b, first_fleet_gpu: 0,
#  tokens_per_period: 1000000.0}
# Packets follow circuits where `routers` has every ToR, else its router must follow links by itself, within `route_s`:
# {tor: train0/r0, driver: iproute, options: {prefix: [ssh, tor1]}, address: 192.0.2.1, prefixes: [10.0.1.0/24],
#  interfaces: [swp1, swp2, swp3, swp4], packet_side: {interface: eth0, address: 198.51.100.1}}
# and beside `routers`, steering: {link_up_s: 2.0, neighbour_s: 1.0, settle_s: 0.002, look_again_s: 5.0,
#  packet_hops: null}
fabric: null

# New weights reach the engines by way of peers (`orchestrrl sync peer`), see docs/weight-sync.md.
weights:
  transports: [nccl, tcp, gloo] # in order of preference: the first that both ends of an edge have
  chunk_bytes: 4194304
  seeds_per_pod: 1              # that receive the same bytes from outside
  hop_latency_s: 0.001
  rate_share: 1.0               # of NICs and links that a sync takes at most; 1.0: it is not held back
  # Where there is no fabric. Peers say in which PoD and ToR they are; what is not named here has no limit but NICs:
  # {pods: [{id: train0, boundary_circuits: 4}], tors: [{id: t0, circuits: 4}]}
  network: {link_gbps: 100.0, nic_gbps: 100.0, pods: [], tors: []}
  install: at_once              # next_gate: the trainer goes on, and engines take weights when the gate closes next
  probe: {prompt_ids: [1, 2, 3, 4, 5, 6, 7, 8], max_tokens: 8}  # which every engine answers first; or null
  publish_within_s: 120.0       # from the first trainer rank's word to the last one's
  stall_s: 10.0                 # an edge on which nothing moves for so long is broken
  patience_s: 30.0              # for a peer that has gone
  fence_within_s: 60.0
  install_within_s: 300.0
  probe_within_s: 60.0
  lease_s: 3600.0               # of the gate while engines are changed: how long requests wait for a dead daemon
  attempts: 2                   # of one version
  slowest_edges: 16             # that a report names
"""
