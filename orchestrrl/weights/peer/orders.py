"""Carries the daemon's orders out on one host; those that take long beside the others."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import assert_never

from orchestrrl.core.clock import Clock
from orchestrrl.core.delivery import NotDone
from orchestrrl.engines.base import LoadedWeights
from orchestrrl.weights.orders import (
    BackendAct,
    CarryEdges,
    CheckVersion,
    EndEdges,
    InstallVersion,
    KeepVersions,
    OpenVersion,
    OrderOutcome,
    PeerOrder,
    PeerResult,
    ProbeWeights,
    QueryVersion,
    RestEngine,
    ServeEngines,
    SumShards,
)
from orchestrrl.weights.peer.carry import ThreadedCarrier
from orchestrrl.weights.peer.engines import PeerEngines
from orchestrrl.weights.peer.staged import StagedVersion
from orchestrrl.weights.peer.store import VersionStore
from planner.model import EngineId

logger = logging.getLogger(__name__)


class PeerOrders:
    """`changed` is called when what the peer holds has changed."""

    def __init__(
        self,
        store: VersionStore,
        carrier: ThreadedCarrier,
        engines: PeerEngines,
        clock: Clock,
        changed: Callable[[], None],
    ) -> None:
        self._store = store
        self._carrier = carrier
        self._engines = engines
        self._clock = clock
        self._changed = changed
        # Held by who changes which versions there are; who asks for one waits for what was ordered before.
        self._turn = asyncio.Lock()

    async def perform(self, order: PeerOrder) -> PeerResult:
        """Raises as what it calls does."""
        began_s = self._clock.now_s()
        result = await self._act(order.id, order)
        self._changed()
        return replace(result, began_s=began_s, ended_s=self._clock.now_s())

    def not_done(self, order: PeerOrder, why: NotDone, detail: str, began_s: float) -> PeerResult:
        outcome = OrderOutcome.UNKNOWN if why is NotDone.UNKNOWN else OrderOutcome.FAILED
        logger.warning("order %s (%s): %s: %s", order.id, order.order.kind, outcome, detail)
        return PeerResult(order.id, outcome, detail, began_s, self._clock.now_s())

    async def _act(self, id: str, order: PeerOrder) -> PeerResult:
        match order.order:
            case OpenVersion() as asked:
                staged = await self._open(asked)
                return PeerResult(id, OrderOutcome.DONE, str(staged.found or ""), missing=staged.missing())
            case SumShards(version, shards):
                found, hashed = await asyncio.to_thread((await self._version(version)).sums_of, shards)
                return PeerResult(id, OrderOutcome.DONE, str(hashed), sums=found)
            case CarryEdges() as asked:
                staged = await self._version(asked.version)
                await asyncio.to_thread(self._carrier.carry, staged, asked)
                return PeerResult(id, OrderOutcome.DONE)
            case EndEdges(version, edges):
                await asyncio.to_thread(self._carrier.end, version, edges)
                return PeerResult(id, OrderOutcome.DONE)
            case CheckVersion(version):
                staged = await self._version(version)
                hashed = await asyncio.to_thread(staged.check)
                if not staged.missing() and await self._engines.take_sums():
                    await asyncio.to_thread(staged.take_content_sum)
                words = f"{hashed}; {staged.disagreed} blocks did not agree so far"
                return PeerResult(id, OrderOutcome.DONE, words, missing=staged.missing())
            case InstallVersion(version, engine, by_s, anew):
                loaded, words = await self._install(await self._version(version), engine, by_s, anew=anew)
                return PeerResult(id, OrderOutcome.DONE, words, loaded_sum=loaded.sum, is_read_back=loaded.is_read_back)
            case QueryVersion(engine):
                return PeerResult(id, OrderOutcome.DONE, await self._engines.refresh_one(engine))
            case ProbeWeights(engine, prompt_ids, max_tokens, by_s):
                tokens = await self._engines.go_on(engine, prompt_ids, max_tokens, by_s)
                return PeerResult(id, OrderOutcome.DONE, tokens=tokens)
            case RestEngine(engine, at_rest, drain_s, ends):
                words = await self._engines.rest(engine, at_rest, drain_s, ends=ends)
                return PeerResult(id, OrderOutcome.DONE, words)
            case ServeEngines(engines):
                # Written down first: what it says of itself it says again after a restart.
                await asyncio.to_thread(self._store.note_serving, engines)
                return PeerResult(id, OrderOutcome.DONE, await self._engines.serve(engines))
            case KeepVersions(versions):
                gone = await self._keep(versions)
                return PeerResult(id, OrderOutcome.DONE, f"discarded {', '.join(map(str, gone)) or 'none'}")
            case BackendAct() as asked:
                if asked.changes:  # whatever becomes of it, it has no version of this folder
                    await asyncio.to_thread(self._store.note_installed, asked.engine, "")
                return PeerResult(id, OrderOutcome.DONE, result_json=await self._engines.act(asked))
            case other:
                assert_never(other)

    async def _install(
        self, staged: StagedVersion, engine: EngineId, by_s: float, *, anew: bool
    ) -> tuple[LoadedWeights, str]:
        folder = await asyncio.to_thread(staged.install_folder)
        identity = await asyncio.to_thread(lambda: staged.identity)
        is_other = anew or self._store.installed.get(engine) != identity
        if is_other:  # until it is there: one that is killed in the middle has neither
            await asyncio.to_thread(self._store.note_installed, engine, "")
        known_sum = await asyncio.to_thread(staged.content_sum)
        loaded, words = await self._engines.install(
            engine, staged.map.version, folder, by_s, is_other=is_other, known_sum=known_sum
        )
        await asyncio.to_thread(self._store.note_installed, engine, identity)
        return loaded, words

    async def _open(self, order: OpenVersion) -> StagedVersion:
        async with self._turn:
            how = order.map, order.parts, order.at_home
            before = self._store.versions.get(order.map.version)
            if before is not None and not await asyncio.to_thread(before.is_same, *how):
                # Edges of the plan before write into the same file: what is found in it by its sums has to stay.
                await asyncio.to_thread(self._carrier.end, order.map.version)
            return await asyncio.to_thread(self._store.open, *how)

    async def _keep(self, versions: tuple[int, ...]) -> list[int]:
        async with self._turn:
            for version in self._store.versions.keys() - set(versions):
                await asyncio.to_thread(self._carrier.end, version)
            return await asyncio.to_thread(self._store.keep, versions)

    async def _version(self, version: int) -> StagedVersion:
        async with self._turn:
            return self._store.version(version)
