"""How a closed barrier is left, by whoever closed it: with the new version, or with the one from before.

Both are done again, from any point, by a daemon that finds them half done. What is told about an engine is what is in
it; one of which that is not certain gets no requests until it is repaired.
"""

import asyncio
import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType

from orchestrrl.core.errors import OrchestrRLError, Permanent
from orchestrrl.weights.controller.actions import SyncActions
from orchestrrl.weights.controller.carrying import SyncFailed
from orchestrrl.weights.controller.overtaken import notice_others
from orchestrrl.weights.controller.reports import EngineSync, SyncPhase
from orchestrrl.weights.controller.state import HOLDER, CommittedVersion, FleetWeights, SyncRecord
from planner.model import EngineId

logger = logging.getLogger(__name__)

AGAIN_S = 1.0  # after the pause barrier did not do as it was told
TRIES = 5


def own_lease(hands: SyncActions, sync_id: str) -> str:
    """The pause barrier's lease, where this sync holds it; else empty."""
    lease = hands.fence.state.lease
    return lease.id if lease is not None and lease.holder == HOLDER + sync_id else ""


def is_closed(hands: SyncActions) -> bool:
    return hands.fence.state.lease is not None


async def resume_new(hands: SyncActions, record: SyncRecord) -> None:
    """The version is committed: requests go on, by it, where it is."""
    committed = hands.book.fleet.committed
    assert committed is not None
    known = hands.engines()
    await hands.look(engine for engine in committed.has if engine in known)
    for engine in hands.lacking(committed.version, committed.has):
        committed = committed.lost(engine, "was restarted")
    if committed != hands.book.fleet.committed:
        hands.book.stands(replace(hands.book.fleet, committed=committed))
    has = [engine for engine in committed.has if engine in known]
    without = sorted(set(known) - set(has))
    with record.phase(SyncPhase.RESUME):
        lease = own_lease(hands, record.id)
        if not lease or not await _resume(hands, lease, committed.version, without, f"version {committed.version}"):
            # Somebody else closed it, and will open it, or it is open: by then it is known who has what.
            await run_by_peers(hands, has, committed.version, without, "have not got the fleet's weights")
        elif left_resting := hands.rested.intersection(has):  # by a repair that was cut short
            await hands.try_each(left_resting, lambda engine: hands.rest(engine, False))
    for engine in sorted(known):
        if engine in has:
            record.engine(engine, EngineSync.SERVES)
        else:
            record.engine(engine, EngineSync.QUARANTINED, committed.quarantined.get(engine, "was not there"))


async def run_by_peers(
    hands: SyncActions, has: Collection[EngineId], version: int, without: Collection[EngineId], why: str
) -> None:
    """Tell what engines have where no lease of ours is to be resumed; where no gateway is, peers let them run."""
    if without:
        hands.fence.forget(without, why)
    if has:
        hands.fence.set_version(has, version, "brought by a weight sync")
    if not is_closed(hands):
        failed = await hands.try_each(has, lambda engine: hands.rest(engine, False))
        for engine, detail in failed.items():
            logger.warning("%s was not told to run again: %s", engine, detail)


async def go_back(
    hands: SyncActions,
    record: SyncRecord,
    changed: Iterable[EngineId],
    untouched: Collection[EngineId] = (),
    told: Mapping[EngineId, int] = MappingProxyType({}),
) -> None:
    """It is not committed: engines that may have it, or half of it, get back what the fleet has. `untouched`: of these,
    those that are as they were; `told`: what the pause barrier has forgotten of them. Where nobody keeps the fleet's
    version, the others wait for the next one."""
    gone = [engine for engine in changed if hands.gone(engine)]  # by order: nobody waits for them
    changed = sorted(set(changed) - set(gone))
    hands.fence.forget(gone, "left the fleet")
    record.without_engines(gone)
    await hands.let_go(record.report.version)
    lease = own_lease(hands, record.id)
    if not changed:
        if lease:
            await hands.look(_told_of(hands))
            await _resume(hands, lease, None, sorted(hands.book.fleet.quarantined), "nothing was changed")
        return
    if not is_closed(hands):
        lease = await _close_again(hands, record, changed)
    notice_others(hands)
    committed = hands.book.fleet.committed
    # As they were is not as they should be, of those that were changed by an attempt before.
    untouched = set(untouched).difference(hands.book.fleet.quarantined)
    if committed is None:
        bad = {
            engine: "the weights from before cannot be brought back: it waits for the next version"
            for engine in changed
            if engine not in untouched
        }
    else:
        bad = await _bring_back(hands, committed, [engine for engine in changed if engine not in untouched])
    await hands.look({*_told_of(hands), *(engine for engine in changed if engine not in bad)})
    if committed is not None:
        for engine in hands.lacking(committed.version, changed):
            bad.setdefault(engine, "was restarted since it got the weights from before")
    _stand(hands, changed, bad)
    for engine in changed:
        state = EngineSync.QUARANTINED if engine in bad else EngineSync.ROLLED_BACK
        record.engine(engine, state, bad.get(engine, ""))
    good = [engine for engine in changed if engine not in bad and engine in hands.engines()]
    if committed is not None:
        _tell(hands, good, bad, committed.version)
    else:
        _tell_as_before(hands, {engine: told[engine] for engine in good if engine in untouched and engine in told})
    without = sorted(engine for engine in hands.book.fleet.quarantined if engine in hands.engines())
    if lease and await _resume(hands, lease, None, without, "engines have the weights from before"):
        return
    if not is_closed(hands):
        await hands.try_each(good, lambda engine: hands.rest(engine, False))


def _told_of(hands: SyncActions) -> set[EngineId]:
    """Engines that get requests by what the pause barrier knows of them: one may have been started anew unseen."""
    return set(hands.engines()).intersection(hands.fence.state.versions)


async def _bring_back(
    hands: SyncActions, committed: CommittedVersion, engines: Collection[EngineId]
) -> dict[EngineId, str]:
    """Those that have not the fleet's version after that, and why."""
    if committed.is_kept:
        return await hands.try_each(engines, lambda engine: hands.install(engine, committed.version))
    lost = f"backend {committed.backend} keeps no copy of version {committed.version}: it waits for the next one"
    return {engine: lost for engine in engines if hands.installed(engine) != committed.version}


def _stand(hands: SyncActions, changed: Collection[EngineId], bad: dict[EngineId, str]) -> None:
    """Written down before anybody is told."""
    fleet = hands.book.fleet
    if fleet.committed is None:
        hands.book.stands(FleetWeights(None, {**fleet.spoilt, **bad}))
        return
    committed = fleet.committed
    for engine in changed:
        committed = committed.lost(engine, bad[engine]) if engine in bad else committed.repaired(engine)
    if committed != fleet.committed:
        hands.book.stands(replace(fleet, committed=committed))


def _tell(hands: SyncActions, good: Collection[EngineId], bad: Collection[EngineId], version: int) -> None:
    """All that serve, as it is: a lease that has ended by itself has left nothing known."""
    committed = hands.book.fleet.committed
    assert committed is not None
    known, state = hands.engines(), hands.fence.state
    if bad:
        hands.fence.forget(bad, "did not get the weights from before again")
    still = [engine for engine in committed.has if hands.installed(engine) == version]  # others were restarted
    untold = {e for e in (*good, *still) if e in known and e not in bad and state.versions.get(e) != version}
    if untold:
        hands.fence.set_version(sorted(untold), version, "have the weights from before")


def _tell_as_before(hands: SyncActions, told: Mapping[EngineId, int]) -> None:
    """Of weights that came by another way: nothing has become of them."""
    unknown = {e: v for e, v in told.items() if e not in hands.fence.state.versions and e not in hands.doubts}
    for version in sorted(set(unknown.values())):
        engines = sorted(engine for engine in unknown if unknown[engine] == version)
        hands.fence.set_version(engines, version, "have what they had before")


async def _close_again(hands: SyncActions, record: SyncRecord, changed: Collection[EngineId]) -> str:
    """The lease has ended meanwhile: requests run on engines that have who knows what. Where the pause barrier does not
    close, peers bring these engines to rest. The lease, or empty."""
    settings = hands.settings
    hands.fence.forget(changed, "were being changed when the pause barrier opened")
    if hands.fence.is_manned():
        try:
            return await hands.fence.pause(
                HOLDER + record.id, empty=False, lease_s=settings.lease_s, deadline_s=settings.fence_within_s
            )
        except OrchestrRLError as error:
            record.note(f"the pause barrier could not be closed again: {error}")
    await hands.try_each(changed, lambda engine: hands.rest(engine, True))
    return ""


async def _resume(
    hands: SyncActions, lease: str, version: int | None, without: Collection[EngineId], reason: str
) -> bool:
    """False: the lease has ended before."""
    for attempt in range(TRIES):
        restarted = [] if version is None else [engine for engine in hands.engines() if engine in hands.doubts]
        try:
            await hands.fence.resume(lease, version, sorted({*without, *restarted}), reason)
            return True
        except Permanent as error:
            logger.error("the pause barrier was not opened by its lease: %s", error)
            return False
        except OrchestrRLError as error:
            if attempt + 1 == TRIES:
                raise SyncFailed("internal", f"the pause barrier does not open: {error}") from error
            await hands.clock.sleep(AGAIN_S)
    return False


async def attached_again(hands: SyncActions, engines: Collection[EngineId]) -> None:
    """Wait for the peers of engines, and for gateways where the pause barrier is closed, but not for ever."""
    until_s = hands.clock.now_s() + hands.settings.patience_s
    while hands.clock.now_s() < until_s:
        is_manned = hands.fence.is_manned() or hands.fence.state.lease is None
        if is_manned and all(hands.peer_of(engine) is not None for engine in engines):
            return
        await asyncio.sleep(0)
        await hands.clock.sleep(0.25)
