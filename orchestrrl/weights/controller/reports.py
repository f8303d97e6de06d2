"""Data types of reports on weight syncs: the state of the sync, the time of each phase, and the state of each
engine."""

from dataclasses import dataclass, field
from enum import StrEnum

from planner.model import EngineId


class SyncState(StrEnum):
    PUBLISHING = "publishing"  # some trainer ranks have not published yet
    PLANNING = "planning"
    CARRYING = "carrying"
    PREPARED = "prepared"  # every engine's peer has all bytes, checked
    FENCING = "fencing"
    INSTALLING = "installing"
    VERIFYING = "verifying"
    COMMITTED = "committed"  # irrevocably the fleet's version; requests are still paused
    DONE = "done"
    ABORTED = "aborted"  # the fleet keeps the previous version
    SUPERSEDED = "superseded"  # a newer version was published before this one was installed


OVER = frozenset({SyncState.DONE, SyncState.ABORTED, SyncState.SUPERSEDED})


class SyncPhase(StrEnum):
    """The phases of a sync, in chronological order. The first two phases run in the trainer. `PHASE_A` and `PHASE_B`
    overlap, so the time of `PHASE_B` is measured from the end of `PHASE_A`."""

    OFFLOAD = "offload"  # copy from the trainer's devices to its host
    GATHER = "gather"  # assemble the trainer's shards in the engines' layout
    PUBLISH = "publish"  # wait for the last rank
    SUMS = "sums"  # compute checksums
    PLAN = "plan"
    WINDOW = "window"  # wait until circuits may change
    CIRCUITS = "circuits"
    PHASE_A = "phase_a"  # transfer between PoDs
    PHASE_B = "phase_b"  # transfer inside PoDs
    CHECK = "check"
    NEXT_PAUSE = "next_pause"  # wait until another holder closes the pause barrier
    FENCE = "fence"  # wait until all requests are paused
    INSTALL = "install"
    VERIFY = "verify"
    COMMIT = "commit"
    RESUME = "resume"
    TEAR_DOWN = "tear_down"  # release circuits; requests run meanwhile


TRANSFER = frozenset({SyncPhase.PHASE_A, SyncPhase.PHASE_B})


@dataclass(frozen=True, slots=True)
class PhaseTime:
    """The start and end of a phase, in seconds since the Unix epoch. `ended_s` is None while the phase runs."""

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
    SERVES = "serves"  # the version is committed, and this engine has it
    ROLLED_BACK = "rolled_back"  # the previous version was restored
    QUARANTINED = "quarantined"  # without the fleet's version; gets no requests until repaired


@dataclass(frozen=True, slots=True)
class EngineStatus:
    engine: EngineId
    state: EngineSync
    detail: str = ""
    install_s: float = 0.0


@dataclass(frozen=True, slots=True)
class EdgeTime:
    """The time of an edge's transfer: `seconds` is the measured time, and `planned_s` is the time in the plan."""

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
    """The report on one sync. `code` explains the final state, and `detail` is free text.

    The codes of each final state are:

    - done: done, some_quarantined
    - aborted: peer_lost, bytes_lost, corrupt, not_quiet, install_failed, verify_failed, probe_differs, trainer_lost,
      unreachable, no_engines, operator, restarted, paused, internal
    - superseded: superseded
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
    published: tuple[int, ...] = ()  # ranks that have published
    phases: tuple[PhaseTime, ...] = ()
    engines: tuple[EngineStatus, ...] = ()
    bytes: int = 0  # size of the version
    carried_bytes: int = 0  # sum over all edges
    arrived_bytes: int = 0
    estimate_s: float = 0.0  # planned time of phases A and B
    lower_bound_s: float = 0.0
    naive_s: float = 0.0
    waves: int = 0
    edges: int = 0
    mended_edges: int = 0  # edges that broke and were replaced
    slowest: tuple[EdgeTime, ...] = ()  # the slowest edges, at most weights.slowest_edges
    notes: tuple[str, ...] = ()
    trainer_step_json: str = ""  # open step of the trainer with a direct backend (weights/backends/base.py)

    def __post_init__(self) -> None:
        if not 0 <= self.version < 2**64:
            raise ValueError(f"version must be from 0 to 2**64 - 1, got {self.version}")

    @property
    def over(self) -> bool:
        return self.state in OVER


@dataclass(frozen=True, slots=True)
class WeightsStatus:
    """The fleet's version, the running or latest sync, the quarantined engines, and all known peers sorted by id."""

    committed: int | None
    sync: SyncReport | None  # the running one, else the last
    quarantined: tuple[EngineStatus, ...] = ()
    peers: tuple["PeerStatus", ...] = ()


@dataclass(frozen=True, slots=True)
class PeerStatus:
    id: str
    role: str
    host: str
    attached: bool
    engines: tuple[EngineId, ...] = ()  # engines into which it installs
    versions: tuple[int, ...] = field(default=())  # versions that it stores completely
    pod: str = ""
    tor: str = ""
    ranks_of: tuple[EngineId, ...] = ()  # engines with ranks on its host into which another peer installs
