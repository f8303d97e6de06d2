"""How a closed barrier is left, by whoever closed it: with the new version, or with the one from before.

Both are done again, from any point, by a daemon that finds them half done. What is told about an engine is what is in
it; one of which that is not certain gets no requests until it is repaired.
"""

import logging
from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType

from orchestrrl.core.errors import OrchestrRLError, Permanent
from orchestrrl.weights.controller.actions import SyncActions, SyncFailed
from orchestrrl.weights.controller.reports import EngineSync, SyncPhase
from orchestrrl.weights.controller.state import HOLDER, CommittedVersion, FleetWeights, SyncRecord
from planner.model import EngineId

logger = logging.getLogger(__name__)

AGAIN_S = 1.0  # after the pause barrier did not do as it was told
TRIES = 5


async def resume_new(acts: SyncActions, record: SyncRecord) -> None:
    """The version is committed: requests go on, by it, where it is."""
    committed = acts.book.fleet.committed
    assert committed is not None
    known = acts.engines()
    await acts.refresh(engine for engine in committed.has if engine in known)
    for engine in acts.lacking(committed.version, committed.has):
        committed = committed.lost(engine, "was restarted")
    acts.book.amend(committed)
    has = [engine for engine in committed.has if engine in known]
    without = sorted(set(known) - set(has))
    with record.phase(SyncPhase.RESUME):
        lease = acts.own_lease(record.id)
        if not lease or not await _resume(acts, lease, committed.version, without, f"version {committed.version}"):
            # Somebody else closed it, and will open it, or it is open: by then it is known who has what.
            await run_by_peers(acts, has, committed.version, without, "have not got the fleet's weights")
        elif left_resting := acts.rested.intersection(has):  # by a repair that was cut short
            await acts.try_each(left_resting, lambda engine: acts.rest(engine, at_rest=False))
    for engine in sorted(known):
        if engine in has:
            record.engine(engine, EngineSync.SERVES)
        else:
            record.engine(engine, EngineSync.QUARANTINED, committed.quarantined.get(engine, "was not there"))


async def run_by_peers(
    acts: SyncActions, has: Collection[EngineId], version: int, without: Collection[EngineId], why: str
) -> None:
    """Tell what engines have where no lease of ours is to be resumed; where no gateway is, peers let them run."""
    if without:
        acts.fence.forget(without, why)
    if has:
        acts.fence.set_version(has, version, "brought by a weight sync")
    if not acts.is_closed:
        failed = await acts.try_each(has, lambda engine: acts.rest(engine, at_rest=False))
        for engine, detail in failed.items():
            logger.warning("%s was not told to run again: %s", engine, detail)


async def go_back(
    acts: SyncActions,
    record: SyncRecord,
    changed: Iterable[EngineId],
    untouched: Collection[EngineId] = (),
    told: Mapping[EngineId, int] = MappingProxyType({}),
) -> None:
    """It is not committed: engines that may have it, or half of it, get back what the fleet has. `untouched`: of these,
    those that are as they were; `told`: what the pause barrier has forgotten of them. Where nobody keeps the fleet's
    version, the others wait for the next one."""
    gone = [engine for engine in changed if acts.gone(engine)]  # by order: nobody waits for them
    changed = sorted(set(changed) - set(gone))
    acts.fence.forget(gone, "left the fleet")
    record.without_engines(gone)
    await acts.let_go(record.report.version)
    lease = acts.own_lease(record.id)
    if not changed:
        if lease:
            await acts.refresh(_known_to_barrier(acts))
            await _resume(acts, lease, None, sorted(acts.book.fleet.quarantined), "nothing was changed")
        return
    if not acts.is_closed:
        lease = await _close_again(acts, record, changed)
    acts.notice_others()
    committed = acts.book.fleet.committed
    # As they were is not as they should be, of those that were changed by an attempt before.
    untouched = set(untouched).difference(acts.book.fleet.quarantined)
    if committed is None:
        bad = {
            engine: "the weights from before cannot be brought back: it waits for the next version"
            for engine in changed
            if engine not in untouched
        }
    else:
        bad = await _bring_back(acts, committed, [engine for engine in changed if engine not in untouched])
    await acts.refresh({*_known_to_barrier(acts), *(engine for engine in changed if engine not in bad)})
    if committed is not None:
        for engine in acts.lacking(committed.version, changed):
            bad.setdefault(engine, "was restarted since it got the weights from before")
    _stand(acts, changed, bad)
    for engine in changed:
        state = EngineSync.QUARANTINED if engine in bad else EngineSync.ROLLED_BACK
        record.engine(engine, state, bad.get(engine, ""))
    good = [engine for engine in changed if engine not in bad and engine in acts.engines()]
    if committed is not None:
        _report_versions(acts, good, bad, committed.version)
    else:
        _restore_versions(acts, {engine: told[engine] for engine in good if engine in untouched and engine in told})
    without = sorted(engine for engine in acts.book.fleet.quarantined if engine in acts.engines())
    if lease and await _resume(acts, lease, None, without, "engines have the weights from before"):
        return
    if not acts.is_closed:
        await acts.try_each(good, lambda engine: acts.rest(engine, at_rest=False))


def _known_to_barrier(acts: SyncActions) -> set[EngineId]:
    """Engines that get requests by what the pause barrier knows of them: one may have been started anew unseen."""
    return set(acts.engines()).intersection(acts.fence.state.versions)


async def _bring_back(
    acts: SyncActions, committed: CommittedVersion, engines: Collection[EngineId]
) -> dict[EngineId, str]:
    """Those that have not the fleet's version after that, and why."""
    if committed.is_kept:
        return await acts.try_each(engines, lambda engine: acts.install(engine, committed.version))
    lost = f"backend {committed.backend} keeps no copy of version {committed.version}: it waits for the next one"
    return {engine: lost for engine in engines if acts.installed(engine) != committed.version}


def _stand(acts: SyncActions, changed: Collection[EngineId], bad: dict[EngineId, str]) -> None:
    """Write down what became of the changed engines, before the pause barrier is told."""
    fleet = acts.book.fleet
    if fleet.committed is None:
        acts.book.stands(FleetWeights(None, {**fleet.spoilt, **bad}))
        return
    committed = fleet.committed
    for engine in changed:
        committed = committed.lost(engine, bad[engine]) if engine in bad else committed.repaired(engine)
    acts.book.amend(committed)


def _report_versions(acts: SyncActions, good: Collection[EngineId], bad: Collection[EngineId], version: int) -> None:
    """All that serve, as it is: a lease that has ended by itself has left nothing known."""
    committed = acts.book.fleet.committed
    assert committed is not None
    known, state = acts.engines(), acts.fence.state
    if bad:
        acts.fence.forget(bad, "did not get the weights from before again")
    still = [engine for engine in committed.has if acts.installed(engine) == version]  # others were restarted
    untold = {e for e in (*good, *still) if e in known and e not in bad and state.versions.get(e) != version}
    if untold:
        acts.fence.set_version(sorted(untold), version, "have the weights from before")


def _restore_versions(acts: SyncActions, told: Mapping[EngineId, int]) -> None:
    """Of weights that came by another way: nothing has become of them."""
    unknown = {e: v for e, v in told.items() if e not in acts.fence.state.versions and e not in acts.stale}
    for version in sorted(set(unknown.values())):
        engines = sorted(engine for engine in unknown if unknown[engine] == version)
        acts.fence.set_version(engines, version, "have what they had before")


async def _close_again(acts: SyncActions, record: SyncRecord, changed: Collection[EngineId]) -> str:
    """The lease has ended meanwhile: requests run on engines that have who knows what. Where the pause barrier does not
    close, peers bring these engines to rest. The lease, or empty."""
    settings = acts.settings
    acts.fence.forget(changed, "were being changed when the pause barrier opened")
    if acts.fence.is_manned():
        try:
            return await acts.fence.pause(
                HOLDER + record.id, empty=False, lease_s=settings.lease_s, deadline_s=settings.fence_within_s
            )
        except OrchestrRLError as error:
            record.note(f"the pause barrier could not be closed again: {error}")
    await acts.try_each(changed, lambda engine: acts.rest(engine, at_rest=True))
    return ""


async def _resume(
    acts: SyncActions, lease: str, version: int | None, without: Collection[EngineId], reason: str
) -> bool:
    """False: the lease has ended before."""
    for attempt in range(TRIES):
        restarted = [] if version is None else [engine for engine in acts.engines() if engine in acts.stale]
        try:
            await acts.fence.resume(lease, version, sorted({*without, *restarted}), reason)
            return True
        except Permanent as error:
            logger.error("the pause barrier was not opened by its lease: %s", error)
            return False
        except OrchestrRLError as error:
            if attempt + 1 == TRIES:
                raise SyncFailed("internal", f"the pause barrier does not open: {error}") from error
            await acts.clock.sleep(AGAIN_S)
    return False


async def attached_again(acts: SyncActions, engines: Collection[EngineId]) -> None:
    """Wait for the peers of engines, and for gateways where the pause barrier is closed, but not for ever."""

    def attached() -> bool:
        is_manned = acts.fence.is_manned() or acts.fence.state.lease is None
        return is_manned and all(acts.hub.peer_of(engine) is not None for engine in engines)

    await acts.wait_until(attached, acts.settings.patience_s)
