"""Add, drain and remove engines on an operator's order while the daemon runs.

Each change is checked, written to the journal, and sent to the gateways at once. The requests of a leaving engine are
moved in rounds, in the same way as all other moves, until no movable request is left. The rounds include requests that
a gateway sent to the engine before it received the change. They also continue drains that an earlier daemon began.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated

from pydantic import PlainSerializer, TypeAdapter

from balancer.drain import leave
from orchestrrl.core.addresses import check_url
from orchestrrl.core.clock import Clock
from orchestrrl.core.config.schema import Config
from orchestrrl.core.errors import Permanent, ProblemFaults, shorten
from orchestrrl.core.journal.store import EntryKind, Journal
from orchestrrl.core.operations import MovesOutcome
from orchestrrl.fleet.routes import RoutingTable
from orchestrrl.fleet.state import EngineFacts, FleetState
from planner.model import ConfigurationId, EngineId, EngineView, RequestId, RequestMove, Snapshot

logger = logging.getLogger(__name__)

MOVES_A_ROUND = 64
# A moved request is not moved again for this long: its gateway has reported the move by then.
TOLD_WITHIN_S = 2.0
# A request whose move was refused is tried again after this long, doubling up to the cap.
RETRY_FIRST_S = 1.0
RETRY_CAP_S = 30.0
# Removed engines that are remembered: an agent may still report one long after its removal.
REMOVED_REMEMBERED = 4096

StartMoves = Callable[[Sequence[RequestMove], Snapshot], "asyncio.Task[MovesOutcome]"]
_EngineIds = Annotated[frozenset[EngineId], PlainSerializer(sorted)]  # sorted in the journal


@dataclass(frozen=True, slots=True)
class Membership:
    """The engines that operators added, drained or removed.

    The membership is kept when the daemon restarts or reloads its configuration. Each `with_` method returns a new
    value and is idempotent. An engine is in at most one of `added` and `removed`, and is never both removed and
    draining.
    """

    added: tuple[EngineFacts, ...] = ()  # by id; these override the configuration's
    draining: _EngineIds = frozenset()  # no new requests are sent to these
    leaving: _EngineIds = frozenset()  # the draining engines whose requests are moved elsewhere
    removed: tuple[EngineId, ...] = ()  # oldest first; ignored until added again

    def __post_init__(self) -> None:
        added = [facts.id for facts in self.added]
        if added != sorted(set(added)):
            raise ValueError(f"added must be sorted by id, without duplicates, got {added}")
        if twice := (set(added) | self.draining) & set(self.removed):
            raise ValueError(f"removed engines must not be added or draining, got {sorted(twice)}")
        if not self.leaving <= self.draining:
            raise ValueError(f"leaving engines must be draining, but {sorted(self.leaving - self.draining)} are not")

    def with_added(self, facts: EngineFacts) -> "Membership":
        """Return the membership with this engine added and accepting requests."""
        others = [other for other in self.added if other.id != facts.id]
        taking = self.with_undrained(facts.id).with_readmitted(facts.id)
        return replace(taking, added=tuple(sorted([*others, facts], key=lambda one: one.id)))

    def with_readmitted(self, engine: EngineId) -> "Membership":
        """Return the membership without the removal of this engine. The configuration's entry for the engine then
        applies again."""
        return replace(self, removed=tuple(other for other in self.removed if other != engine))

    def with_drained(self, engine: EngineId, move: bool = False) -> "Membership":
        """Return the membership in which the engine gets no new requests. If `move` is True, the engine's requests are
        also moved to other engines. A later call without `move` does not cancel these moves."""
        leaving = self.leaving | {engine} if move else self.leaving
        return replace(self, draining=self.draining | {engine}, leaving=leaving)

    def with_undrained(self, engine: EngineId) -> "Membership":
        return replace(self, draining=self.draining - {engine}, leaving=self.leaving - {engine})

    def with_removed(self, engine: EngineId) -> "Membership":
        added = tuple(facts for facts in self.added if facts.id != engine)
        removed = (*self.with_readmitted(engine).removed, engine)[-REMOVED_REMEMBERED:]
        return replace(self.with_undrained(engine), added=added, removed=removed)


MEMBERSHIP = TypeAdapter(Membership)


def engine_facts(config: Config) -> list[EngineFacts]:
    """Return the facts about each engine that the configuration lists."""
    known = {configuration.id: configuration for configuration in config.fleet.configuration_values()}
    return [
        EngineFacts(
            id=EngineId(engine.id),
            url=engine.url,
            gpus=engine.gpu_ids,
            max_sequences=engine.max_sequences,
            kv_capacity_tokens=engine.kv_capacity_tokens,
            pool=engine.pool,
        ).of(known.get(ConfigurationId(engine.configuration or "")))
        for engine in config.fleet.engines
    ]


def recovered_roster(journal: Journal) -> Membership:
    """Return the last membership in the journal, or an empty membership if the journal has none."""
    return journal.newest(EntryKind.ENGINES, lambda body: MEMBERSHIP.validate_python(body["roster"])) or Membership()


@dataclass(frozen=True, slots=True)
class EngineRemoval:
    requests_moved: int
    requests_left: int  # these could not move and finish on the engine


@dataclass(frozen=True, slots=True)
class _Rest:
    """A pause in the moves of one request. No further move of the request is ordered before `until_s`."""

    until_s: float
    refusals: int = 0
    refused_by: frozenset[EngineId] = frozenset()

    def refused(self, by: EngineId, now_s: float) -> "_Rest":
        wait_s = min(RETRY_CAP_S, RETRY_FIRST_S * 2.0**self.refusals)
        return _Rest(now_s + wait_s, self.refusals + 1, self.refused_by | {by})


@dataclass(slots=True, eq=False)
class MembershipChanges:
    """The current membership and the changes that operators make to it. The constructor recovers the membership from
    the journal. `tick` moves requests off leaving engines."""

    _config: Config
    _state: FleetState
    _routes: RoutingTable
    _journal: Journal
    _clock: Clock
    _start_moves: StartMoves  # starts moves by the normal path, in any daemon mode
    _check_movable: Callable[[], None]  # raises Permanent while the pause barrier is closed
    membership: Membership = field(init=False)
    _round: "asyncio.Task[MovesOutcome] | None" = field(default=None, init=False)
    _rests: dict[RequestId, _Rest] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.membership = recovered_roster(self._journal)
        self._report_state()

    def reconfigure(self, config: Config) -> None:
        """Apply a reloaded configuration."""
        self._config = config
        self._report_state()

    # --- an operator's changes

    def add(self, new: EngineFacts, reason: str = "") -> None:
        """Add an engine and send the changed routes to every gateway. To readmit a removed engine that the
        configuration lists, set only the id in `new`. Raises ProblemFaults with all faults of `new`."""
        configured = any(facts.id == new.id for facts in engine_facts(self._config))
        if configured and new.id in self.membership.removed and new == EngineFacts(new.id, ""):
            self._change("add", new.id, self.membership.with_readmitted(new.id), reason)
            return
        views = self._state.engines(self._clock.now_s())
        faults = [*self._identity_faults(new, views), *self._place_faults(new, views)]
        if faults:
            raise ProblemFaults(faults)
        known = {configuration.id: configuration for configuration in self._config.fleet.configuration_values()}
        facts = new if new.configuration is None else new.of(known[new.configuration])
        self._change("add", new.id, self.membership.with_added(facts), reason)

    def drain(self, engine: EngineId, move: bool = False, reason: str = "") -> None:
        """Stop new requests to the engine. If `move` is True, also move its requests to other engines in rounds. Raises
        ProblemFaults if the engine is unknown."""
        self._require_known(engine)
        self._change_names("drain", engine, lambda membership, name: membership.with_drained(name, move), reason)

    def undrain(self, engine: EngineId, reason: str = "") -> None:
        """End the drain of an engine, so that it accepts requests again. Raises ProblemFaults if the engine is
        unknown."""
        self._require_known(engine)
        self._change_names("undrain", engine, Membership.with_undrained, reason)

    async def remove(self, engine: EngineId, force: bool = False, reason: str = "") -> EngineRemoval:
        """Remove an engine from the fleet, even if agents still report it. Requests that still run on the engine finish
        there, because their gateway keeps the connection.

        Raises ProblemFaults if the engine is unknown, and Permanent if the engine has requests and `force` is False. If
        `force` is True, movable requests are moved first, which raises Permanent if the pause barrier is closed.
        """
        self._require_known(engine)
        there = self._requests_on(engine)
        if there and not force:
            raise Permanent(
                f"engine {engine} cannot be removed while it has {len(there)} requests; empty it with `orchestrrl"
                f" engines drain {engine} --move --wait`, or use --force to move what can move and let the rest finish"
            )
        if there:
            self._check_movable()
        moved = await self._empty(engine, reason) if there else set()
        self._change_names("remove", engine, Membership.with_removed, reason)
        return EngineRemoval(len(moved), len(self._requests_on(engine) - moved))

    def _change_names(
        self, change: str, engine: EngineId, step: Callable[[Membership, EngineId], Membership], reason: str
    ) -> None:
        """Apply `step` to the engine's id and to each alias that only nodes use for the engine. If aliases were left
        out, an alias would become the id of a separate engine, which the change does not cover, once no other name
        refers to the engine."""
        names, membership = self._state.names(self._clock.now_s()), self.membership
        others = {id for _, id in names.others.get(engine, ())}
        for name in [engine, *sorted(id for id in others if names.is_other(id) and id not in membership.removed)]:
            membership = step(membership, name)
        self._change(change, engine, membership, reason)

    # --- moves off leaving engines

    def tick(self, snapshot: Snapshot) -> None:
        """Start a round of moves off the leaving engines, unless a round is running."""
        leaving = self.membership.leaving
        if self._round is not None:
            return
        there = {request.id for request in snapshot.requests if request.engine in leaving}
        self._rests = {request: rest for request, rest in self._rests.items() if request in there}
        resting = {request for request, rest in self._rests.items() if rest.until_s > snapshot.now_s}
        moves = self._moves(snapshot, leaving, resting, MOVES_A_ROUND) if there else ()
        if moves:
            self._round = self._start_moves(moves, snapshot)
            self._round.add_done_callback(partial(self._round_ended, moves))

    def _moves(
        self, snapshot: Snapshot, leaving: Iterable[EngineId], resting: Iterable[RequestId], most: int
    ) -> tuple[RequestMove, ...]:
        return leave(
            snapshot.requests,
            frozenset(leaving),
            snapshot.engines,
            willing={each.id for each in snapshot.engines if self._is_fresh(each) and self._routes.accepts(each)},
            max_moves=most,
            avoid={request: rest.refused_by for request, rest in self._rests.items()},
            excluded=frozenset(resting),
        )

    def _is_fresh(self, engine: EngineView) -> bool:
        recent = engine.age_s is not None and engine.age_s <= self._config.fast.stale_after_s
        return recent or not self._state.reported(engine.id)

    def _round_ended(self, moves: Sequence[RequestMove], task: "asyncio.Task[MovesOutcome]") -> None:
        self._round = None
        if task.cancelled() or task.exception() is not None:  # logged by the code that started the task
            return
        now_s = self._clock.now_s()
        for move, item in zip(moves, task.result().items, strict=True):
            if item.done:
                self._rests[move.request] = _Rest(now_s + TOLD_WITHIN_S)
            else:
                logger.info("request %s stays on %s: %s", move.request, move.from_engine, item.detail)
                earlier = self._rests.get(move.request, _Rest(now_s))
                self._rests[move.request] = earlier.refused(move.to_engine, now_s)

    async def _empty(self, engine: EngineId, reason: str) -> set[RequestId]:
        """Drain the engine, try to move each of its requests once, and return the requests that moved."""
        self._change("drain", engine, self.membership.with_drained(engine), reason)
        snapshot = self._state.snapshot(self._clock.now_s())
        moved: set[RequestId] = set()
        moves = self._moves(snapshot, {engine}, (), len(snapshot.requests))
        for first in range(0, len(moves), MOVES_A_ROUND):
            outcome = await self._start_moves(moves[first : first + MOVES_A_ROUND], snapshot)
            moved.update(RequestId(item.id) for item in outcome.items if item.done)
        return moved

    # --- inside

    def _change(self, change: str, engine: EngineId, membership: Membership, reason: str) -> None:
        if membership == self.membership:
            return
        now_s = self._clock.now_s()
        body = {"change": change, "reason": reason, "roster": MEMBERSHIP.dump_python(membership, mode="json")}
        self._journal.append(now_s, EntryKind.ENGINES, engine, body)
        self.membership = membership
        logger.info("engine %s: %s %s", engine, change, reason)
        self._report_state()
        self._routes.send(self._state.engines(now_s))

    def _report_state(self) -> None:
        roster = self.membership
        self._state.set_roster(engine_facts(self._config), roster.added, roster.draining, roster.removed)

    def _requests_on(self, engine: EngineId) -> set[RequestId]:
        snapshot = self._state.snapshot(self._clock.now_s())
        return {request.id for request in snapshot.requests if request.engine == engine}

    def _require_known(self, engine: EngineId) -> None:
        # An engine that was drained and then forgotten is still accepted.
        known = {view.id for view in self._state.engines(self._clock.now_s())} | self.membership.draining
        if engine not in known:
            listing = ", ".join(sorted(known)) or "none"
            raise ProblemFaults([f"engine_id: must be a known engine ({listing}), got {engine!r}"])

    def _place_faults(self, new: EngineFacts, views: Sequence[EngineView]) -> list[str]:
        """Return the faults of the new engine's configuration and GPUs."""
        fleet, faults = self._config.fleet, []
        known = {configuration.id: configuration for configuration in fleet.configuration_values()}
        configuration = known.get(new.configuration) if new.configuration is not None else None
        if new.configuration is not None and configuration is None:
            listing = ", ".join(sorted(known)) or "none; add it to fleet.configurations"
            faults.append(f"configuration: is not a known configuration (known: {listing}), got {new.configuration!r}")
        if configuration is not None and new.gpus and len(new.gpus) != configuration.gpus:
            wish = f"must have the {configuration.gpus} GPUs of {configuration.id}"
            faults.append(f"gpus: {wish}, got {shorten(list(new.gpus))}")
        owner = {gpu: view.id for view in views for gpu in view.gpus if view.id != new.id}
        for place, gpu in enumerate(new.gpus):
            if gpu < 0:
                faults.append(f"gpus[{place}]: must be >= 0, got {gpu}")
            if fleet.gpus is not None and gpu >= fleet.gpus.count:
                faults.append(f"gpus[{place}]: must be less than fleet.gpus.count ({fleet.gpus.count}), got {gpu}")
            if gpu in owner:
                faults.append(f"gpus[{place}]: is in use by {owner[gpu]}, got {gpu}")
            if gpu in new.gpus[:place]:
                faults.append(f"gpus[{place}]: must not be repeated, got {gpu}")
        return faults

    def _identity_faults(self, new: EngineFacts, views: Sequence[EngineView]) -> list[str]:
        faults, now_s = [], self._clock.now_s()
        if not new.id.strip():
            faults.append(f"engine_id: must not be empty, got {new.id!r}")
        here = next((view for view in views if view.id == new.id), None)
        if here is not None:
            where = f"is in use by the engine at {here.url or 'an unknown URL'}; remove that engine first"
            faults.append(f"engine_id: {where}, got {new.id!r}")
        called = self._state.engine_called(new.id, now_s)
        if called != new.id:
            faults.append(f"engine_id: is an alias of engine {called}, got {new.id!r}")
        try:
            check_url(new.url)
        except ValueError as error:
            faults.append(f"url: {error}, got {new.url!r}")
        twin = self._state.engine_at(new.url, now_s)
        if twin is not None and twin != new.id:
            faults.append(f"url: is in use by engine {twin}, got {new.url!r}")
        return faults
