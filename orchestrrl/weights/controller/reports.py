"""A version's way to every engine, as it is told: state, seconds of each phase, engines, and why. Values only."""

from dataclasses import dataclass, field
from enum import StrEnum

from planner.model import EngineId


class SyncState(StrEnum):
    PUBLISHING = "publishing"  # not every trainer rank has said what it has
    PLANNING = "planning"
    CARRYING = "carrying"
    PREPARED = "prepared"  # every engine's peer has all bytes, checked
    FENCING = "fencing"
    INSTALLING = "installing"
    VERIFYING = "verifying"
    COMMITTED = "committed"  # it is the fleet's version, whatever comes; requests do not go on yet
    DONE = "done"
    ABORTED = "aborted"  # the fleet has the version from before
    SUPERSEDED = "superseded"  # a newer one was published before its turn came


OVER = frozenset({SyncState.DONE, SyncState.ABORTED, SyncState.SUPERSEDED})


class SyncPhase(StrEnum):
    """The phases of a sync, in order. The first two are the trainer's. A and B overlap: B is counted after A."""

    OFFLOAD = "offload"  # from the trainer's devices
    GATHER = "gather"  # shards of its parallelism put together, and in the engines' order
    PUBLISH = "publish"  # waiting for the last rank
    SUMS = "sums"  # checksums
    PLAN = "plan"
    WINDOW = "window"  # waiting until circuits may change
    CIRCUITS = "circuits"
    PHASE_A = "phase_a"  # between PoDs
    PHASE_B = "phase_b"  # inside them
    CHECK = "check"
    NEXT_PAUSE = "next_pause"  # waiting for somebody to close the pause barrier
    FENCE = "fence"  # until all requests stand still
    INSTALL = "install"
    VERIFY = "verify"
    COMMIT = "commit"
    RESUME = "resume"
    TEAR_DOWN = "tear_down"  # circuits as they were; requests run meanwhile


TRANSFER = frozenset({SyncPhase.PHASE_A, SyncPhase.PHASE_B})


@dataclass(frozen=True, slots=True)
class PhaseTime:
    """When a phase began and ended, seconds since the Unix epoch; `ended_s` None: it lasts."""

    phase: SyncPhase
    began_s: float
    ended_s: float | None = None

    @property
    def seconds(self) -> float:
        return 0.0 if self.ended_s is None else self.ended_s - self.began_s


class EngineSync(StrEnum):
    WAITING = "waiting"
    PREPARED = "prepared"
    INSTALLED = "installed"
    VERIFIED = "verified"
    SERVES = "serves"  # the version is the fleet's, and this engine has it
    ROLLED_BACK = "rolled_back"  # it has the one from before again
    QUARANTINED = "quarantined"  # it has not the fleet's version, and gets no requests until it has


@dataclass(frozen=True, slots=True)
class EngineStatus:
    engine: EngineId
    state: EngineSync
    detail: str = ""
    install_s: float = 0.0


@dataclass(frozen=True, slots=True)
class EdgeTime:
    """An edge as it went, beside what was planned."""

    src: str
    dst: str
    phase: str
    bytes: int
    seconds: float
    planned_s: float

    @property
    def gbps(self) -> float:
        return self.bytes * 8e-9 / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True, slots=True)
class SyncReport:
    """`code` is stable, `detail` is for people.

    | state | codes |
    |---|---|
    | done | done, some_quarantined |
    | aborted | peer_lost, bytes_lost, corrupt, not_quiet, install_failed, verify_failed, probe_differs, trainer_lost,
      unreachable, no_engines, operator, restarted, paused, internal |
    | superseded | superseded |
    """

    id: str
    version: int
    state: SyncState
    began_s: float
    code: str = ""
    detail: str = ""
    ended_s: float | None = None
    backend: str = "tree"
    attempt: int = 1
    world: int = 1  # trainer ranks
    published: tuple[int, ...] = ()  # those that have said what they have
    phases: tuple[PhaseTime, ...] = ()
    engines: tuple[EngineStatus, ...] = ()
    bytes: int = 0  # of the version
    carried_bytes: int = 0  # over all edges
    arrived_bytes: int = 0
    estimate_s: float = 0.0  # of phases A and B, by the plan
    lower_bound_s: float = 0.0
    naive_s: float = 0.0
    waves: int = 0
    edges: int = 0
    mended_edges: int = 0  # that broke, and were replaced
    slowest: tuple[EdgeTime, ...] = ()  # at most so many as are looked at
    notes: tuple[str, ...] = ()
    trainer_step_json: str = ""  # of the trainer, on a backend by which it sends itself (weights/backends/base.py)

    def __post_init__(self) -> None:
        if not 0 <= self.version < 2**64:
            raise ValueError(f"version must be from 0 to 2**64 - 1, got {self.version}")

    @property
    def over(self) -> bool:
        return self.state in OVER


@dataclass(frozen=True, slots=True)
class WeightsStatus:
    """The fleet's version, the sync under way, quarantined engines, and all known peers by id."""

    committed: int | None
    sync: SyncReport | None  # under way, or the last
    quarantined: tuple[EngineStatus, ...] = ()
    peers: tuple["PeerStatus", ...] = ()


@dataclass(frozen=True, slots=True)
class PeerStatus:
    id: str
    role: str
    host: str
    attached: bool
    engines: tuple[EngineId, ...] = ()  # that it installs into
    versions: tuple[int, ...] = field(default=())  # that it has whole
    pod: str = ""
    tor: str = ""
    ranks_of: tuple[EngineId, ...] = ()  # engines of several hosts that another peer installs into
