"""Carry a version's bytes to all peers that need them: plan the transfer, request circuits, compute checksums, and
order peers to run the edges (transfers between two peers).

If an edge breaks, other edges replace it. If a peer detaches, the controller waits until the peer attaches again.
Meanwhile, receivers whose edges from this peer break get the bytes from other peers.
"""

import asyncio
import contextlib
import logging
from collections.abc import Collection, Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from orchestrrl.core.clock import until_set
from orchestrrl.core.errors import OrchestrRLError, few
from orchestrrl.weights import orders
from orchestrrl.weights.controller.actions import ANSWER_S, BroughtUp, SyncActions, SyncFailed, each_done
from orchestrrl.weights.controller.peer_hub import Heard
from orchestrrl.weights.controller.planning import PlannedSync, common_transport, edge_of, plan_repair, plan_sync
from orchestrrl.weights.controller.progress import SyncProgress
from orchestrrl.weights.controller.reports import SyncPhase, SyncState
from orchestrrl.weights.controller.state import SyncRecord
from orchestrrl.weights.model import HeldVersion, Peer, VersionMap
from orchestrrl.weights.orders import ArrivedBytes, CarryEdge, EdgeEvent, EdgeState, OrderOutcome, PeerResult
from orchestrrl.weights.publication import Publication
from planner.model import PeerId
from planner.sync_tree.mend import mend
from planner.sync_tree.network import SyncNetwork
from planner.sync_tree.ranges import PeerFlow

logger = logging.getLogger(__name__)

TURN_S = 0.5  # interval of checks whether a peer has been away, or no bytes have arrived, for too long
CHECKS = 4  # comparisons of all bytes with their checksums before the transfer fails as corrupt
READ_WITHIN_S = 600.0  # limit for one read of all bytes


class TreeTransfer:
    """The transfer of the bytes of one published version to peers, in one or more attempts. `still` is set if the
    trainer sends no other traffic during the transfer. `is_up` is set if an earlier daemon may have brought up circuits
    for the sync."""

    def __init__(
        self, acts: SyncActions, record: SyncRecord, publications: Sequence[Publication], *, still: bool, is_up: bool
    ) -> None:
        self.carrying: Carrying | None = None
        self._acts = acts
        self._record = record
        self._publications = publications
        self._still = still
        self._plans = 0
        self._carried: PlannedSync | None = None  # the last plan that peers began to carry out, with all checksums
        self._is_up = is_up  # circuits are up or have been requested
        self._tearing: asyncio.Task[None] | None = None

    async def prepare(self, receivers: Collection[PeerId]) -> VersionMap:
        """Carry the version to all receivers; return the version's map with the checksums of all shards. Raises
        SyncFailed if a receiver cannot get all bytes."""
        record, acts = self._record, self._acts
        record.state(SyncState.PLANNING)
        await self._trainers_there()
        held = await self._held(receivers)
        planned = await self._plan(receivers, acts.circuits.network(), held)
        self._is_up = True
        brought: BroughtUp
        map: VersionMap
        brought, map = await each_done([self._bring_up(planned), self._sums(planned)])
        if brought.notes:  # the circuits differ from the plan
            planned = await self._plan(receivers, brought.network, held)
        record.put(
            bytes=map.bytes,
            estimate_s=planned.plan.estimate_s,
            lower_bound_s=planned.plan.lower_bound_s,
            naive_s=planned.plan.naive_s,
            waves=len(planned.plan.waves),
            edges=len(planned.edges),
            carried_bytes=sum(edge.bytes for edge in planned.edges),  # planned; the actual value replaces it at the end
        )
        self._carried = replace(planned, map=map)
        record.state(SyncState.CARRYING)
        self.carrying = Carrying(acts, record, self._carried, brought.network)
        try:
            await self.carrying.run()
        finally:
            self.carrying = None
        return map

    async def _trainers_there(self) -> None:
        """Wait until the peers on whose hosts trainer ranks have staged parts are attached. Raises SyncFailed if one of
        them does not attach within `patience_s`."""
        hub, peers = self._acts.hub, {each.peer for each in self._publications}
        if not await self._acts.wait_until(lambda: peers <= hub.attached().keys(), self._acts.settings.patience_s):
            away = sorted(peers - hub.attached().keys())
            raise SyncFailed(
                "trainer_lost",
                f"these peers of the trainer are not attached: {', '.join(away)}; start `orchestrrl sync peer` on their"
                " hosts",
            )

    async def _held(self, receivers: Collection[PeerId]) -> dict[PeerId, HeldVersion]:
        """Return the bytes of the version that each peer stores from an earlier attempt. A peer that is not a receiver
        is included only if none of its bytes are missing. Return {} if there was no earlier attempt, or if a peer with
        staged parts is not included. Also return {} if a receiver is new or its share has changed, because its shards
        from the earlier attempt then do not match the share."""
        there, before = self._acts.hub.attached(), self._carried
        if before is None or any(there[peer].share != before.shares.get(peer) for peer in there.keys() & receivers):
            return {}
        found: dict[PeerId, HeldVersion] = {}
        version, opens = self._record.report.version, before.opens

        async def of(peer: PeerId) -> None:
            try:
                result = await self._acts.done(peer, orders.CheckVersion(version), READ_WITHIN_S, "corrupt")
            except SyncFailed as failure:
                self._record.note(f"bytes that {peer} has from an earlier attempt are not used: {failure.detail}")
                return
            if peer in receivers or not result.missing:
                found[peer] = HeldVersion(version, tuple(shard.id for shard in opens[peer].map.shards), result.missing)

        await each_done(of(peer) for peer in sorted(opens.keys() & self._acts.hub.attached().keys()))
        return found if {each.peer for each in self._publications} <= found.keys() else {}

    async def _plan(
        self, receivers: Collection[PeerId], network: SyncNetwork, held: Mapping[PeerId, HeldVersion]
    ) -> PlannedSync:
        wanted = {*receivers, *held, *(each.peer for each in self._publications)}
        peers = {id: peer for id, peer in self._acts.hub.attached().items() if id in wanted}
        self._plans += 1
        settings, name, before = self._acts.settings, f"{self._record.id}.{self._plans}", self._carried

        def make() -> PlannedSync:
            if before is None or not held:
                version = self._record.report.version
                return plan_sync(version, self._publications, peers.values(), network, settings, name=name)
            known = before.opens.keys() & peers.keys() & set(receivers)
            planned = plan_repair(before.map, known, peers.values(), network, settings, held=held, name=name)
            return replace(planned, opens={**planned.opens, **{p: o for p, o in before.opens.items() if p in held}})

        with self._record.phase(SyncPhase.PLAN):
            try:
                planned: PlannedSync = await self._acts.offload(make)
            except ValueError as error:
                raise SyncFailed("unreachable", str(error)) from error
        return planned

    async def _bring_up(self, planned: PlannedSync) -> BroughtUp:
        record = self._record
        with contextlib.ExitStack() as lasting:

            def on_phase(phase: SyncPhase) -> None:
                lasting.close()
                lasting.enter_context(record.phase(phase))

            brought = await self._acts.circuits.bring_up(record.id, planned, on_phase, still=self._still)
        record.note(*brought.notes)
        return brought

    async def _sums(self, planned: PlannedSync) -> VersionMap:
        """Return the version's map with the checksums of all shards. Each checksum is computed once, by a peer that
        stores the shard."""
        if not planned.summed_by:
            return planned.map
        by_peer: dict[PeerId, list[str]] = {}
        for shard, peer in sorted(planned.summed_by.items()):
            by_peer.setdefault(peer, []).append(shard)

        async def of(peer: PeerId, shards: Sequence[str]) -> Mapping[str, tuple[str, ...]]:
            await self._acts.done(peer, planned.opens[peer], READ_WITHIN_S, "trainer_lost")
            order = orders.SumShards(planned.map.version, tuple(shards))
            return (await self._acts.done(peer, order, READ_WITHIN_S, "trainer_lost")).sums

        found: dict[str, tuple[str, ...]] = {}
        with self._record.phase(SyncPhase.SUMS):
            for told in await each_done(of(peer, shards) for peer, shards in by_peer.items()):
                found.update(told)
        if lacking := sorted(set(planned.summed_by) - set(found)):
            raise SyncFailed("corrupt", f"no peer has sent the checksums of shards {few(lacking, between=', ')}")
        return summed(planned.map, found)

    async def tear_down(self) -> None:
        """Release the circuits that were requested for the transfer. If this call is cancelled, the release continues,
        and the next call waits until it is complete."""
        if self._is_up:
            self._is_up = False
            self._tearing = asyncio.ensure_future(self._tear_down())
        if self._tearing is not None:
            await asyncio.shield(self._tearing)

    async def _tear_down(self) -> None:
        with self._record.phase(SyncPhase.TEAR_DOWN):
            try:
                self._record.note(*await self._acts.circuits.tear_down(self._record.id))
            except OrchestrRLError as error:
                self._record.note(f"circuits were not released: {error}")


def summed(map: VersionMap, sums: Mapping[str, tuple[str, ...]]) -> VersionMap:
    return replace(map, shards=tuple(replace(shard, sums=sums.get(shard.id, shard.sums)) for shard in map.shards))


class Carrying:
    """The transfer of one plan's bytes. `run` returns when every receiver has all bytes and all checksums match."""

    def __init__(self, acts: SyncActions, record: SyncRecord, planned: PlannedSync, network: SyncNetwork) -> None:
        """Create the transfer. The map of `planned` must contain the checksums of all shards."""
        self.progress = SyncProgress(planned)
        self._acts = acts
        self._record = record
        self._version = planned.map.version
        self.network = network
        sums_of = {shard.id: shard.sums for shard in planned.map.shards}
        self._opens = {peer: replace(opened, map=summed(opened.map, sums_of)) for peer, opened in planned.opens.items()}
        self._woken = asyncio.Event()
        self._orders: set[asyncio.Task[None]] = set()
        self._mends = 0
        self._stuck = ""
        self._arrived: dict[PeerId, int] = {}
        self._arrived_bytes = 0
        self._moved_s = acts.clock.now_s()  # when bytes last arrived

    def on_news(self, peer: PeerId, news: Heard) -> None:
        """Handle a report from a peer. `news` is None if the peer has detached."""
        match news:
            case EdgeEvent() if news.version == self._version:
                self._edge(news)
            case ArrivedBytes() if news.version == self._version:
                more = news.received_bytes - self._arrived.get(peer, 0)
                if more > 0:
                    self._moved_s = self._acts.clock.now_s()
                self._arrived[peer] = news.received_bytes
                self._arrived_bytes += more
                self._record.put(arrived_bytes=self._arrived_bytes)
                return
            case Peer() if peer in self._opens:
                # The peer has attached again or reports its state again: open the version and order its edges again.
                held = next((each for each in news.held if each.version == self._version), None)
                self.progress.on_held(peer, held)
                self._moved_s = self._acts.clock.now_s()
                self._start(self._again(peer, self.progress.live_of(peer)))
        self._woken.set()

    async def run(self) -> None:
        """Carry all bytes and verify their checksums. Raises SyncFailed if a receiver stays detached for `patience_s`,
        no bytes arrive for `patience_s` plus `stall_s`, or bytes are still corrupt after `CHECKS` checks."""
        record = self._record
        try:
            record.begins(SyncPhase.PHASE_A if self.progress.is_in_phase_a() else SyncPhase.PHASE_B)
            await each_done(self._open(peer) for peer in sorted(self._opens))
            self._give(self.progress.live)
            for _ in range(CHECKS):
                await self._until_all_is_there()
                if await self._check():
                    return
            raise SyncFailed(
                "corrupt", f"bytes of version {self._version} still do not match their checksums after {CHECKS} checks"
            )
        finally:
            for task in self._orders:
                task.cancel()
            for phase in (SyncPhase.PHASE_A, SyncPhase.PHASE_B):
                record.ends(phase)
            slowest = self.progress.slowest(self._acts.settings.slowest_edges)
            record.put(slowest=slowest, carried_bytes=self.progress.carried_bytes, mended_edges=self.progress.mended)

    async def _open(self, peer: PeerId) -> None:
        code = "trainer_lost" if self._opens[peer].parts else "peer_lost"
        await self._acts.done(peer, self._opens[peer], READ_WITHIN_S, code)

    async def _until_all_is_there(self) -> None:
        while True:
            self._woken.clear()
            lacking = sorted(self.progress.lacking_peers)
            if not lacking:
                return
            self._check_patience(lacking)
            doubtful = self.progress.doubtful
            doubtful.difference_update([peer for peer in doubtful if not self.progress.uncovered(peer)])
            if any(self._is_attached(peer) for peer in doubtful):
                await self._mend()
            self._phases()
            await until_set(self._acts.clock, self._woken, TURN_S)

    async def _check(self) -> bool:
        """Return whether all received bytes match their checksums. Bytes that do not match are marked as missing."""
        receivers, order = self.progress.receivers, orders.CheckVersion(self._version)
        with self._record.phase(SyncPhase.CHECK):
            results: list[PeerResult]
            results = await each_done(self._acts.done(peer, order, READ_WITHIN_S, "corrupt") for peer in receivers)
        for peer, result in zip(receivers, results, strict=True):
            if result.missing:
                self._record.note(f"peer {peer} had bytes that did not match their checksums; they are sent again")
                self.progress.corrupt(peer, result.missing)
        return not any(result.missing for result in results)

    def _check_patience(self, lacking: Sequence[PeerId]) -> None:
        acts = self._acts
        now_s, patience_s = acts.clock.now_s(), acts.settings.patience_s
        gone = [peer for peer in lacking if self._gone_s(peer) >= patience_s]
        if gone:
            words = f"{few(gone, between=', ')} did not attach again within {patience_s:g} s"
            raise SyncFailed("peer_lost", words, acts.hub.engines_of(gone))
        if now_s - self._moved_s < patience_s + acts.settings.stall_s:
            return
        away = sorted(peer for peer in self._opens if not self._is_attached(peer))
        trainers = [peer for peer in away if self._opens[peer].parts]
        code = "trainer_lost" if trainers else "bytes_lost"
        who = f"; these peers are not attached: {few(away, between=', ')}" if away else ""
        lack = few(lacking, between=", ")
        raise SyncFailed(code, f"peers {lack} received no bytes for {now_s - self._moved_s:.0f} s{who}")

    async def _mend(self) -> None:
        """Plan and start edges for the missing bytes that no running edge transfers."""
        progress, acts = self.progress, self._acts
        peers = {id: peer for id, peer in acts.hub.attached().items() if id in progress.peers}
        missing = {peer: progress.lacking(peer) for peer in peers}
        # Running edges between peers that are detached for a moment are kept.
        self._mends += 1
        name = f"{self._record.id}.{self._record.report.attempt}.m{self._mends}."
        weight = partial(self._weight, peers)
        flows: list[PeerFlow]
        flows, lost = await acts.offload(partial(mend, progress.live, progress.broken_off, missing, weight=weight))
        words = f"no attached peer has the bytes that {few(sorted(lost), between=', ')} lack"
        if lost and words != self._stuck:
            self._stuck = words
            logger.warning("weight sync %s: %s", self._record.id, words)
        edges = tuple(self._edge_of(f"{name}{number}", flow, peers) for number, flow in enumerate(flows))
        if edges:
            self._stuck = ""
            progress.add(edges, {})
            progress.mended += len(edges)
            self._record.put(mended_edges=progress.mended)
            self._give(edges)

    def _weight(self, peers: Mapping[PeerId, Peer], src: PeerId, dst: PeerId) -> float | None:
        """Return the relative cost of a byte from `src` to `dst`, or None if the peers have no common transport. The
        cost is higher if `src` has sent corrupt bytes to `dst` or an edge from `src` to `dst` has broken. It is lower
        within a PoD than between PoDs."""
        if common_transport(self._acts.settings, peers[src], peers[dst]) is None:
            return None
        weight = 100.0 if src in self.progress.blamed(dst) else 1.0
        return weight * (1.0 if self._pod(src) == self._pod(dst) else 4.0)

    def _pod(self, peer: PeerId) -> str:
        station = self.network.stations.get(peer)
        return "" if station is None else station.pod

    def _edge_of(self, id: str, flow: PeerFlow, peers: Mapping[PeerId, Peer]) -> CarryEdge:
        src, dst = flow.src, flow.dst
        way = common_transport(self._acts.settings, peers[src], peers[dst])
        assert way is not None
        phase: Literal["A", "B"] = "B" if self._pod(src) == self._pod(dst) else "A"
        flow = replace(flow, phase=phase, rate_gbps=self.progress.rate_gbps(dst, flow.shard))
        return edge_of(id, flow, peers[dst], way)

    def _give(self, edges: Sequence[CarryEdge]) -> None:
        """Order the sender and the receiver of each edge to start the edge."""
        of: dict[PeerId, list[CarryEdge]] = {}
        for edge in edges:
            for end in (edge.src, edge.dst):
                of.setdefault(end, []).append(edge)
        for peer in sorted(of):
            self._start(self._carry(peer, tuple(of[peer])))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._orders.add(task)
        task.add_done_callback(self._orders.discard)

    async def _carry(self, peer: PeerId, edges: tuple[CarryEdge, ...]) -> None:
        settings = self._acts.settings
        order = orders.CarryEdges(self._version, edges, settings.chunk_bytes, settings.stall_s)
        try:
            result = await self._acts.hub.send_order(peer, order, ANSWER_S + settings.patience_s, settings.patience_s)
        except OrchestrRLError as error:
            logger.warning("weight sync %s: %s", self._record.id, error)  # sent again when the peer attaches
            return
        if result.outcome is not OrderOutcome.DONE:
            self._record.note(f"peer {peer} did not start its edges: {result.detail}")
            for edge in edges:
                self._broken(edge.id, 0)
            self._woken.set()

    def _edge(self, event: EdgeEvent) -> None:
        if event.state is EdgeState.BROKEN:
            self._broken(event.edge, event.bytes if event.is_receiver else 0)
        elif event.is_receiver:
            self._moved_s = self._acts.clock.now_s()
            if event.state is EdgeState.DONE:
                self.progress.done(event)

    def _broken(self, edge_id: str, arrived_bytes: int) -> None:
        edge = self.progress.broken(edge_id, arrived_bytes)
        if edge is not None:
            logger.warning("weight sync %s: edge %s from %s to %s broke", self._record.id, edge.id, edge.src, edge.dst)
            for end in (edge.src, edge.dst):
                if self._is_attached(end):
                    self._start(self._let_go(end, edge.id))

    async def _let_go(self, peer: PeerId, edge_id: str) -> None:
        if why := await self._acts.hub.try_order(peer, orders.EndEdges(self._version, (edge_id,)), ANSWER_S):
            logger.warning("weight sync %s: peer %s: %s", self._record.id, peer, why)

    async def _again(self, peer: PeerId, edges: tuple[CarryEdge, ...]) -> None:
        try:
            await self._open(peer)
        except SyncFailed as failure:
            logger.warning("weight sync %s: %s", self._record.id, failure)
            return
        if edges:
            await self._carry(peer, edges)

    def _phases(self) -> None:
        lasting = {each.phase for each in self._record.report.phases if each.ended_s is None}
        if SyncPhase.PHASE_A in lasting and not self.progress.is_in_phase_a():
            self._record.ends(SyncPhase.PHASE_A)
            self._record.begins(SyncPhase.PHASE_B)

    def _is_attached(self, peer: PeerId) -> bool:
        state = self._acts.hub.peers.get(peer)
        return state is not None and state.attached

    def _gone_s(self, peer: PeerId) -> float:
        state = self._acts.hub.peers[peer]
        return 0.0 if state.attached else self._acts.clock.now_s() - state.last_report_s
