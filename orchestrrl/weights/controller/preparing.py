"""Before a version's bytes are on their way: over which circuits, what is sent by whom, and all sums."""

import asyncio
import contextlib
from collections.abc import Collection, Mapping, Sequence

from orchestrrl.core.errors import OrchestrRLError
from orchestrrl.weights.controller.actions import SyncActions, SyncFailed, each_done
from orchestrrl.weights.controller.carrying import sums
from orchestrrl.weights.controller.circuits import BroughtUp
from orchestrrl.weights.controller.planning import PeerHolding, PlannedSync, plan_sync
from orchestrrl.weights.controller.reports import SyncPhase, SyncState
from orchestrrl.weights.controller.state import SyncRecord
from orchestrrl.weights.model import Peer, VersionMap
from orchestrrl.weights.orders import CheckVersion
from orchestrrl.weights.publication import Publication
from planner.model import PeerId
from planner.sync_tree.network import SyncNetwork


class Preparation:
    """The preparation of one sync, attempt by attempt. `is_up`: circuits may be there, by an earlier daemon."""

    def __init__(
        self, acts: SyncActions, record: SyncRecord, publications: Sequence[Publication], *, is_up: bool = False
    ) -> None:
        self.network: SyncNetwork | None = None  # as it is since the last plan
        self._acts = acts
        self._record = record
        self._publications = publications
        self._stands_still = any(each.install == "at_once" for each in publications)  # the trainer
        self._plans = 0
        self._opened: dict[PeerId, VersionMap] = {}  # with this version, by an earlier attempt
        self._is_up = is_up  # circuits, or on their way
        self._tearing: asyncio.Task[None] | None = None

    async def plan(self, receivers: Collection[PeerId]) -> tuple[PlannedSync, VersionMap]:
        """The plan over the circuits that are there, and the map with all sums."""
        record, acts = self._record, self._acts
        record.state(SyncState.PLANNING)
        await self._trainers_there()
        have = await self._have(receivers)
        with record.phase(SyncPhase.PLAN):
            planned = await self._planned(receivers, acts.circuits.network(), have)

        async def all_sums() -> VersionMap:
            with record.phase(SyncPhase.SUMS):
                return await sums(acts, planned)

        self._is_up = True
        brought, map = await each_done([self._bring_up(planned), all_sums()])
        self.network = brought.network
        if brought.notes:  # it is not as the plan had it
            with record.phase(SyncPhase.PLAN):
                planned = await self._planned(receivers, brought.network, have)
            map = VersionMap(planned.version, planned.map.tensors, map.shards, planned.map.block_bytes)
        record.put(
            bytes=planned.bytes,
            estimate_s=planned.estimate_s,
            lower_bound_s=planned.lower_bound_s,
            naive_s=planned.naive_s,
            waves=planned.waves,
            edges=len(planned.edges),
            carried_bytes=sum(edge.bytes for edge in planned.edges),  # to be; in the end, as it was
        )
        self._opened = {peer: opened.map for peer, opened in planned.opens.items()}
        return planned, map

    async def _bring_up(self, planned: PlannedSync) -> BroughtUp:
        record = self._record
        with contextlib.ExitStack() as lasting:

            def on_phase(phase: SyncPhase) -> None:
                lasting.close()
                lasting.enter_context(record.phase(phase))

            brought = await self._acts.circuits.bring_up(record.id, planned, on_phase, still=self._stands_still)
        record.note(*brought.notes)
        return brought

    async def _trainers_there(self) -> None:
        """What ranks have staged is at their peers."""
        acts = self._acts
        peers = {each.peer for each in self._publications}
        if not await acts.wait_until(lambda: peers <= acts.hub.attached().keys(), acts.settings.patience_s):
            away = sorted(peers - acts.hub.attached().keys())
            raise SyncFailed("trainer_lost", f"peers of the trainer are not attached: {', '.join(away)}")

    async def _have(self, receivers: Collection[PeerId]) -> dict[PeerId, PeerHolding]:
        """Bytes that came in an earlier attempt."""
        found: dict[PeerId, PeerHolding] = {}

        async def of(peer: PeerId) -> None:
            try:
                result = await self._acts.done(peer, CheckVersion(self._record.report.version), 600.0, "corrupt")
            except SyncFailed as failure:
                self._record.note(f"what {peer} has from before is not counted on: {failure.detail}")
            else:
                found[peer] = PeerHolding(self._opened[peer], result.missing)

        there = self._acts.hub.attached()
        await each_done(of(peer) for peer in sorted(self._opened) if peer in there and peer in receivers)
        return found

    async def _planned(
        self, receivers: Collection[PeerId], network: SyncNetwork, have: Mapping[PeerId, PeerHolding]
    ) -> PlannedSync:
        wanted = {*receivers, *(each.peer for each in self._publications)}
        peers: list[Peer] = [peer for id, peer in self._acts.hub.attached().items() if id in wanted]
        version, settings = self._record.report.version, self._acts.settings
        self._plans += 1
        number = self._plans
        try:
            planned: PlannedSync = await self._acts.offload(
                lambda: plan_sync(version, self._publications, peers, network, settings, have=have, attempt=number)
            )
        except ValueError as error:
            raise SyncFailed("unreachable", str(error)) from error
        return planned.named(self._record.id)

    async def tear_down(self) -> None:
        """Give circuits back where they were asked for. It goes on where this is cancelled, and is then waited for by
        the next call."""
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
                self._record.note(f"circuits stay as they are: {error}")
