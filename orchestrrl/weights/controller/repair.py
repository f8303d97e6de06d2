"""Repair engines without the fleet's version, one after the other, while the other engines serve.

An engine needs repair if it was left out of the commit, has restarted since, or joined the fleet later. Each attempt is
journalled. After each failed attempt on an engine, the delay before its next attempt doubles, up to a maximum.
"""

import itertools
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

from orchestrrl.core.errors import OrchestrRLError, ProblemFaults, cut, few
from orchestrrl.weights.controller.actions import SyncActions, SyncFailed
from orchestrrl.weights.controller.carrying import READ_WITHIN_S, Carrying
from orchestrrl.weights.controller.planning import PlannedSync, plan_repair
from orchestrrl.weights.controller.reports import SyncReport, SyncState
from orchestrrl.weights.controller.state import CommittedVersion, SyncRecord
from orchestrrl.weights.model import HeldVersion, Peer
from orchestrrl.weights.orders import CheckVersion
from planner.model import EngineId

logger = logging.getLogger(__name__)

FIRST_AGAIN_S = 1.0
LAST_AGAIN_S = 60.0
MOST_DOUBLINGS = 16
# Requests that still run on an engine under repair bypassed the gateway, or began before the engine was left out. They
# should end with the weights with which they began. DRAINS attempts wait DRAIN_S for that; the next one aborts them.
DRAIN_S = 10.0
DRAINS = 6


@dataclass(frozen=True, slots=True)
class _Tried:
    times: int
    after_s: float


class EngineRepairs:
    """The repairs of engines without the fleet's version. `carrying` is the transfer of the running repair. The
    controller forwards peers' reports to this transfer."""

    def __init__(self, acts: SyncActions) -> None:
        self.carrying: Carrying | None = None
        self._acts = acts
        self._tried: dict[EngineId, _Tried] = {}
        self._numbers = itertools.count(1)

    def poll(self) -> list[EngineId]:
        """Record which engines have the fleet's version; return the engines due for repair, sorted by id. Return an
        empty list while the pause barrier is closed or if no version is committed."""
        acts = self._acts
        self._leave()
        if acts.is_closed or acts.notice_others() or acts.book.fleet.committed is None:
            return []
        committed, told = acts.book.fleet.committed, acts.fence.state.versions
        wanting = []
        for engine, now in sorted(acts.engines().items()):
            peer = acts.hub.peer_of(engine)
            if peer is not None and acts.installed(engine) != committed.version:
                self._lost(engine, f"has {_weights_text(acts.installed(engine))}")
                if now.healthy and committed.is_kept:
                    wanting.append(engine)
            elif peer is not None and engine not in committed.has and now.healthy:
                if engine not in committed.quarantined and told.get(engine) == committed.version:
                    # Both its deployer and the engine report the version.
                    logger.info("%s was started with version %d", engine, committed.version)
                    acts.book.amend(acts.book.fleet.committed.repaired(engine))
                elif committed.is_kept:
                    wanting.append(engine)  # never verified
        self._report_again()
        now_s = acts.clock.now_s()
        return [engine for engine in wanting if engine not in self._tried or now_s >= self._tried[engine].after_s]

    def on_peer(self, peer: Peer) -> None:
        """Stop sending requests to a restarted engine as soon as its peer reports the restart."""
        fence = self._acts.fence
        # If a trainer has installed other weights without peers, the peers' reports about engines are outdated.
        if fence.state.newest not in (None, self._acts.book.fleet.version):
            return
        for each in peer.engines:
            told = fence.state.versions.get(each.engine)
            if told is not None and told != each.installed and (each.installed is None or not self._acts.is_closed):
                fence.forget([each.engine], f"has {_weights_text(each.installed)}")

    async def one(self, engine: EngineId) -> None:
        """Repair an engine: install the fleet's version, verify it, and let the engine serve. If the repair fails,
        delay the engine's next attempt."""
        acts, committed = self._acts, self._acts.book.fleet.committed
        peer = acts.hub.peer_of(engine)
        if committed is None or peer is None:
            return
        try:
            acts.book.repairs(committed.sync, engine)
            tried = self._tried.get(engine)
            await acts.rest(engine, at_rest=True, drain_s=DRAIN_S, ends=tried is not None and tried.times >= DRAINS)
            if why := acts.hub.why_not_whole(engine):
                raise SyncFailed("peer_lost", f"cannot repair engine {engine}: {why}", [engine], unchanged=True)
            for host in acts.hub.hosts_of(engine):
                await self._bytes(acts.hub.attached()[host], committed)
            if acts.notice_others():
                await acts.rest(engine, at_rest=False)
                return
            await acts.install(engine, committed.version)
            if acts.notice_others():  # the engine may have loaded the old version after the new one
                acts.fence.forget([engine], "received a version that is no longer the fleet's")
                return
            await self._same_answer(engine, committed)
            await self._serves(engine, committed)
        except SyncFailed as failure:
            self._put_off(engine, failure.detail)
            if failure.unchanged and failure.code != "not_quiet" and not acts.is_closed:
                # Its weights are complete, though their version is unknown: requests that bypass the gateway continue.
                await acts.try_each([engine], lambda engine: acts.rest(engine, at_rest=False))
        except (OrchestrRLError, ValueError) as error:
            self._put_off(engine, cut(str(error)))

    # --- inside

    def _leave(self) -> None:
        """Remove from the records the engines that have left the fleet."""
        book = self._acts.book
        told = {*book.fleet.quarantined, *(book.fleet.committed.has if book.fleet.committed is not None else ())}
        if gone := [engine for engine in told if self._acts.gone(engine)]:
            book.stands(book.fleet.left(gone))
            for engine in gone:
                self._tried.pop(engine, None)

    def _lost(self, engine: EngineId, why: str) -> None:
        """Record that an engine does not have the fleet's version. `why` is the reason."""
        acts, committed = self._acts, self._acts.book.fleet.committed
        assert committed is not None
        if engine in acts.fence.state.versions:
            acts.fence.forget([engine], why)
        if engine in committed.has or engine not in committed.quarantined:
            acts.book.amend(committed.lost(engine, why))

    def _report_again(self) -> None:
        """Report the fleet's version to the pause barrier for verified engines that the barrier does not list with this
        version."""
        acts, committed = self._acts, self._acts.book.fleet.committed
        assert committed is not None
        state, known = acts.fence.state, acts.engines()
        untold = [
            engine
            for engine in committed.has
            if engine in known
            and acts.installed(engine) == committed.version
            and (state.versions.get(engine) != committed.version or engine in state.left_out)
        ]
        if untold:
            acts.fence.set_version(untold, committed.version, "have the fleet's weights")

    def _put_off(self, engine: EngineId, why: str) -> None:
        before = self._tried.get(engine)
        times = before.times + 1 if before else 1
        again_s = min(LAST_AGAIN_S, FIRST_AGAIN_S * 2.0 ** min(times - 1, MOST_DOUBLINGS))
        self._tried[engine] = _Tried(times, self._acts.clock.now_s() + again_s)
        logger.warning("repair of %s failed, next attempt in %.0f s: %s", engine, again_s, why)
        acts, committed = self._acts, self._acts.book.fleet.committed
        if committed is not None and committed.quarantined.get(engine) != why:
            try:
                acts.book.amend(committed.lost(engine, why))
            except OrchestrRLError as error:
                logger.error("%s", error)

    async def _bytes(self, peer: Peer, committed: CommittedVersion) -> None:
        """Carry to a peer the bytes of the fleet's version that the peer needs and does not have."""
        acts = self._acts
        held = next((each for each in peer.held if each.version == committed.version), None)
        if held is not None and held.complete and held.shards:
            checked = await acts.done(peer.id, CheckVersion(committed.version), READ_WITHIN_S, "corrupt")
            if not checked.missing:
                return
            held = replace(held, missing=checked.missing)
        map = acts.book.map
        if map is None or map.version != committed.version:
            raise SyncFailed(
                "bytes_lost",
                f"the description of the committed version {committed.version} is missing, so the engine waits for the"
                " next version",
            )
        peers = list(acts.hub.attached().values())
        network = acts.circuits.network()
        who = {each.id: h for each in peers for h in each.held if h.version == committed.version}
        who[peer.id] = held or HeldVersion(committed.version, ())
        name = f"{acts.book.log.generation}-{next(self._numbers)}"
        plan = partial(plan_repair, map, [peer.id], peers, network, acts.settings, held=who, name=f"r{name}")
        try:
            planned: PlannedSync = await acts.offload(plan)
        except ProblemFaults as error:
            raise SyncFailed("unreachable", few(error.faults)) from error
        report = SyncReport(f"repair-{name}", committed.version, SyncState.CARRYING, acts.clock.now_s())
        self.carrying = Carrying(acts, SyncRecord(report, acts.clock), planned, network)
        try:
            await self.carrying.run()
        finally:
            self.carrying = None

    async def _same_answer(self, engine: EngineId, committed: CommittedVersion) -> None:
        acts = self._acts
        answers: Mapping[str, tuple[int, ...]] = committed.answers
        now = acts.engines().get(engine)
        expected = answers.get(now.configuration) if now is not None else None
        if not committed.prompt or expected is None:
            return
        tokens = await acts.probe(engine, committed.prompt, len(expected) or 1)
        if tokens != expected:
            raise SyncFailed(
                "probe_differs",
                f"engine {engine} generated tokens {tokens} for the probe, but other engines of its configuration"
                f" generated {expected}",
            )

    async def _serves(self, engine: EngineId, committed: CommittedVersion) -> None:
        acts = self._acts
        if acts.is_closed:
            raise SyncFailed("not_quiet", f"the pause barrier was closed during the repair of engine {engine}")
        # The engine may have been restarted during the repair.
        if acts.installed(engine) != committed.version:
            raise SyncFailed(
                "install_failed",
                f"engine {engine} must have version {committed.version} after the repair,"
                f" got {_weights_text(acts.installed(engine))}",
            )
        fleet = acts.book.fleet
        if fleet.committed is None or fleet.committed.version != committed.version:
            return
        acts.book.amend(fleet.committed.repaired(engine))
        acts.fence.set_version([engine], committed.version, "repaired")
        self._tried.pop(engine, None)
        await acts.rest(engine, at_rest=False)


def _weights_text(version: int | None) -> str:
    return "weights of an unknown version" if version is None else f"version {version}"
