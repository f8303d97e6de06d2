"""The daemon's state of the pause barrier for weight updates: one lease at a time, and the weight version of each
engine. The functions have no side effects.

Requests are paused while a lease lasts. A lease ends when its holder resumes the fleet, when the fleet does not come to
rest, or when the lease expires. fleet/pause_barrier.py sends the orders to gateways.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from enum import StrEnum

from pydantic import TypeAdapter

from orchestrrl.core.errors import Permanent
from orchestrrl.core.operations import FrozenRequests, PauseMode
from orchestrrl.fleet.reports import BarrierPhase
from planner.model import EngineId, Hold


@dataclass(frozen=True, slots=True)
class PauseLease:
    """A holder's right to keep the fleet paused. All engines must be at rest by `quiet_by_s`; requests resume at
    `until_s`."""

    id: str
    holder: str
    mode: PauseMode
    frozen: FrozenRequests
    began_s: float
    until_s: float
    quiet_by_s: float
    weights_change: bool = False  # if it expires, the engines' weights are unknown

    def __post_init__(self) -> None:
        if not self.id:
            raise ValueError("the lease id must not be empty")
        if not self.began_s < self.quiet_by_s <= self.until_s:
            raise ValueError(
                f"quiet_by_s must be after began_s and not after until_s, got quiet_by_s {self.quiet_by_s},"
                f" began_s {self.began_s} and until_s {self.until_s}"
            )

    def __str__(self) -> str:
        return f"{self.id} of {self.holder or 'an unnamed holder'}, until {time_of_day(self.until_s)}"


class LeaseEnd(StrEnum):
    """The reason why a lease ended."""

    RESUMED = "resumed"
    EXPIRED = "expired"
    GAVE_UP = "gave_up"  # the fleet did not come to rest


@dataclass(frozen=True, slots=True)
class LastRelease:
    """The end of the last lease. Gateways receive these facts in the order to open the barrier."""

    lease: str
    at_s: float
    how: LeaseEnd
    detail: str
    policy_version: int | None = None
    without: tuple[EngineId, ...] = ()
    weights_source: str = ""  # as given with the resume


@dataclass(frozen=True, slots=True)
class PauseState:
    """The state of the pause barrier. Each transition returns a new state, or raises Permanent and changes nothing."""

    lease: PauseLease | None = None
    quiet: bool = False  # every gateway has reported its engines at rest
    opened: LastRelease | None = None  # None: the barrier was never closed
    versions: Mapping[EngineId, int] = field(default_factory=dict)  # of engines' weights, where known
    newest: int | None = None  # the fleet's version; None: not set yet
    newest_source: str = ""  # a folder with these weights that engines can read; empty: unknown
    left_out: tuple[EngineId, ...] = ()  # these lack the newest weights: no requests until a version is set

    def __post_init__(self) -> None:
        if self.quiet and self.lease is None:
            raise ValueError("quiet must not be set without a lease")
        if list(self.left_out) != sorted(set(self.left_out)):
            raise ValueError(f"left_out must be sorted, without duplicates, got {self.left_out}")
        for version in (*self.versions.values(), *(() if self.newest is None else (self.newest,))):
            if not 0 <= version < 2**64:
                raise ValueError(f"a policy version must be from 0 to 2**64 - 1, got {version}")

    @property
    def phase(self) -> BarrierPhase:
        if self.lease is None:
            return BarrierPhase.OPEN
        return BarrierPhase.QUIET if self.quiet else BarrierPhase.CLOSING

    @property
    def weights_changing(self) -> bool:
        """Return whether engines may be receiving new weights. If so, all weight versions are unknown until the lease
        ends."""
        return self.lease is not None and self.lease.weights_change and self.quiet

    def at(self, now_s: float) -> "PauseState":
        """Return the state at `now_s`, which is unchanged unless the lease has expired. If a lease expires while
        weights are being changed, the weight versions of all engines become unknown."""
        if self.lease is None or now_s < self.lease.until_s:
            return self
        detail = (
            f"lease {self.lease} ended without a resume; requests have continued since, and weights that were being"
            " changed may be mixed"
        )
        state = self._open(LastRelease(self.lease.id, self.lease.until_s, LeaseEnd.EXPIRED, detail))
        if self.weights_changing:
            return replace(state, versions={}, newest=None, newest_source="")
        return state

    def paused(self, lease: PauseLease) -> "PauseState":
        if self.lease is not None:
            raise Permanent(f"the pause barrier is already held by lease {self.lease}")
        return replace(self, lease=lease, quiet=False)

    def at_rest(self, lease_id: str) -> "PauseState":
        self.require_lease(lease_id)
        return replace(self, quiet=True)

    def renewed(self, lease_id: str, until_s: float) -> "PauseState":
        """Return the state in which the current lease lasts until `until_s`, or longer if its present end is later.
        Raises Permanent if `lease_id` does not match the current lease."""
        lease = self.require_lease(lease_id)
        return replace(self, lease=replace(lease, until_s=max(lease.until_s, until_s)))

    def resumed(
        self,
        lease_id: str,
        now_s: float,
        engines: Iterable[EngineId],
        policy_version: int | None,
        without: Iterable[EngineId],
        reason: str = "",
        weights_source: str = "",
    ) -> "PauseState":
        """Return the state after the holder has resumed the fleet.

        `engines` are all engines of the fleet. `policy_version` is the weight version of all engines except `without`.
        If it is None, no engine received other weights, and engines that were excluded before remain excluded.
        `weights_source` is the location of the weights that the engines have now. It can also be given if
        `policy_version` is None.
        """
        lease = self.require_lease(lease_id)
        before = self.left_out if policy_version is None else ()
        left_out = tuple(sorted({*before, *without}))
        holder = lease.holder or "its holder"
        words = f"resumed by {holder}" if lease_id else f"opened by a caller other than {holder}"
        words += f": {reason}" if reason else ""
        opened = LastRelease(lease.id, now_s, LeaseEnd.RESUMED, words, policy_version, left_out, weights_source)
        newest = self.newest if policy_version is None else policy_version
        state = replace(self._open(opened), left_out=left_out, newest_source=self._source(newest, weights_source))
        if policy_version is None:
            return state
        fresh = {engine: policy_version for engine in sorted(engines) if engine not in left_out}
        older = {engine: version for engine, version in self.versions.items() if engine in left_out}
        return replace(state, versions=dict(sorted({**older, **fresh}.items())), newest=policy_version)

    def abandoned(self, lease_id: str, now_s: float, detail: str) -> "PauseState":
        lease = self.require_lease(lease_id)
        return self._open(LastRelease(lease.id, now_s, LeaseEnd.GAVE_UP, detail))

    def with_versions(self, engines: Iterable[EngineId], policy_version: int, weights_source: str = "") -> "PauseState":
        """Return the state after these engines got weights of `policy_version`. If no serving engine has the fleet's
        present version, `policy_version` becomes the fleet's version. Engines with other versions then get no requests.
        `weights_source` is kept only if `policy_version` is the fleet's version."""
        now = frozenset(engines)
        versions = dict(sorted({**self.versions, **dict.fromkeys(now, policy_version)}.items()))
        left_out = tuple(engine for engine in self.left_out if engine not in now)
        serving = {version for engine, version in versions.items() if engine not in left_out}
        newest = self.newest if self.newest in serving else policy_version
        source = self._source(newest, weights_source if newest == policy_version else "")
        return replace(self, versions=versions, left_out=left_out, newest=newest, newest_source=source)

    def forgotten(self, engines: Collection[EngineId]) -> "PauseState":
        """Return the state without the weight versions of these engines. Their weights are unknown because they were
        restarted, replaced or stopped."""
        versions = {engine: version for engine, version in self.versions.items() if engine not in engines}
        left_out = tuple(engine for engine in self.left_out if engine not in engines or self.newest is None)
        return replace(self, versions=versions, left_out=left_out)

    def serves(self, engine: EngineId) -> bool:
        """Return whether the engine has the fleet's weights and may get requests."""
        return engine not in self.left_out and self.versions.get(engine) == self.newest

    def require_lease(self, lease_id: str) -> PauseLease:
        """Return the current lease if it has this id. An empty id matches any lease. Raises Permanent if the current
        lease has another id, or if there is no current lease."""
        if self.lease is not None and lease_id in ("", self.lease.id):
            return self.lease
        if not lease_id:
            raise Permanent("the pause barrier is open, so there is nothing to resume")
        if self.opened is not None and self.opened.lease == lease_id:
            how, since = self.opened.how.replace("_", " "), time_of_day(self.opened.at_s)
            raise Permanent(
                f"lease {lease_id} has already ended ({how}); requests have continued since {since}, and weights that"
                " were changed since then may be mixed"
            )
        now = f"the pause barrier is held by lease {self.lease}" if self.lease else "the pause barrier is open"
        raise Permanent(f"lease {lease_id} is unknown or ended long ago; {now}")

    def hold(self, now_s: float, settle_s: float = 0.0) -> Hold | None:
        """Return why no request may be moved, or None if moves are allowed. Moves are also held in the first `settle_s`
        seconds after the barrier has opened, because the engines' measured speeds are not representative then."""
        if self.lease is not None:
            return Hold("barrier_closed", f"the pause barrier is {self.phase}: lease {self.lease}")
        if self.opened is not None and now_s - self.opened.at_s < settle_s:
            since_s = now_s - self.opened.at_s
            return Hold("barrier_opened", f"engines resumed {since_s:.1f} s ago; moves resume {settle_s:g} s later")
        return None

    def _source(self, newest: int | None, given: str) -> str:
        """Return the location of the weights of version `newest`. It is `given` or, if `given` is empty and the version
        is unchanged, the present location. Return an empty string if the location is unknown."""
        return given or (self.newest_source if newest == self.newest else "")

    def _open(self, opened: LastRelease) -> "PauseState":
        return replace(self, lease=None, quiet=False, opened=opened)


PAUSE_STATE = TypeAdapter(PauseState)
LEASE = TypeAdapter(PauseLease)


def time_of_day(at_s: float) -> str:
    return f"{datetime.fromtimestamp(at_s, UTC):%H:%M:%S} UTC"
