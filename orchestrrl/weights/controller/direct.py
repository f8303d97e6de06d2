"""Sync a version that the trainer sends itself, through a direct backend of weights/backends. The steps of the sync are
the same as with the tree backend.

A call of the trainer reaches the backend only while a step of the trainer is open, so that no weights move unless the
daemon has requested it. An engine is treated as having the version only if the engine's own report confirms it.
"""

import asyncio
import itertools
import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from orchestrrl.core.clock import within
from orchestrrl.core.errors import OrchestrRLError, OutcomeUnknown, Permanent
from orchestrrl.weights.backends.base import STEP_DONE, STEP_FAILED, DirectBackend, EnginesFailed, TrainerStep
from orchestrrl.weights.controller.actions import ANSWER_S, SyncActions, SyncFailed, results_by_engine
from orchestrrl.weights.controller.reports import EngineSync, SyncPhase, SyncState
from orchestrrl.weights.controller.state import SyncAttempt, SyncRecord
from orchestrrl.weights.model import TensorMeta, VersionMap
from orchestrrl.weights.orders import BackendAct, OrderOutcome, PeerResult
from orchestrrl.weights.publication import Publication
from planner.model import EngineId

logger = logging.getLogger(__name__)


class DirectTransfer:
    """One sync in which the trainer sends the weights. Implements `DirectSync` for the backend."""

    def __init__(
        self, acts: SyncActions, record: SyncRecord, publications: Sequence[Publication], backend: DirectBackend
    ) -> None:
        self.version = record.report.version
        self.publications = publications
        self.engines: tuple[EngineId, ...] = ()
        self._acts = acts
        self._record = record
        self._backend = backend
        self._numbers = itertools.count(1)
        self._asked: tuple[TrainerStep, asyncio.Future[None]] | None = None  # the trainer's open step, and its end
        self._changes = False
        self._until_s = 0.0

    async def prepare(self, engines: Sequence[EngineId]) -> VersionMap:
        """Call the backend's `prepare`; return the version's map, without shards. Raises SyncFailed if the backend's
        `prepare` fails."""
        record, self.engines = self._record, tuple(sorted(engines))
        tensors: dict[str, TensorMeta] = {each.name: each for word in self.publications for each in word.tensors}
        map = VersionMap(
            self.version, tuple(tensors[name] for name in sorted(tensors)), (), self._acts.settings.chunk_bytes
        )
        record.put(bytes=map.bytes)
        record.state(SyncState.PLANNING)
        self._begin(changes=False)
        try:
            with record.phase(SyncPhase.PLAN):
                await self._backend.prepare(self)
        except EnginesFailed as failed:
            raise SyncFailed("unreachable", str(failed), failed.why) from failed
        except OrchestrRLError as error:
            raise SyncFailed("trainer_lost", str(error)) from error
        return map

    async def install(self, attempt: SyncAttempt, until_s: float | None) -> dict[EngineId, PeerResult]:
        """Have the trainer send the version to the engines; return each engine's result. Raises SyncFailed if an engine
        does not have the version afterwards. The next attempt leaves out the engines without the version. If no engine
        has the version, no engine is left out, because the trainer may be the cause."""
        record, began_s = self._record, self._acts.clock.now_s()
        self._begin(changes=True, until_s=until_s)
        became = await self._backend.install(self)
        results: dict[EngineId, PeerResult] = {}
        failed: dict[EngineId, str] = {}
        for engine in self.engines:
            error = became.get(engine, OutcomeUnknown("the backend reported no result"))
            if error is None and self._acts.installed(engine) != self.version:
                error = OutcomeUnknown(f"version {self.version} was sent, but the engine does not report it")
            if error is None:
                results[engine] = PeerResult("", OrderOutcome.DONE)
                record.engine(engine, EngineSync.INSTALLED, install_s=self._acts.clock.now_s() - began_s)
                continue
            failed[engine] = str(error)
            record.engine(engine, EngineSync.WAITING, failed[engine])
            if not isinstance(error, OutcomeUnknown):
                attempt.untouched.add(engine)
        if failed:
            raise SyncFailed("install_failed", results_by_engine(failed), failed if results else ())
        return results

    def broken(self) -> None:
        """Clean up after a failed attempt: reset the backend and close the trainer's open step."""
        self._backend.forget()
        self._withdraw_request()

    async def relayed(self, rank: int, number: int, call: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Handle a trainer rank's call for step `number`; return the response. Raises Permanent if step `number` is not
        open. Also raises the backend's own errors."""
        if self._asked is None or self._asked[0].number != number or self._asked[1].done():
            raise Permanent(f"step {number} of weight sync {self._record.id} has already ended")
        if call == STEP_FAILED:
            self._asked[1].set_exception(OutcomeUnknown(f"rank {rank} of the trainer: {body.get('why', 'has failed')}"))
            return {}
        if rank != 0:
            return {}  # the other ranks only take part in gathering; rank 0 reports for all
        if call == STEP_DONE:
            self._asked[1].set_result(None)
            return {}
        return await self._backend.relayed(self, call, body)

    # --- DirectSync, called by backends

    async def at(self, engine: EngineId, act: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        acts, changes = self._acts, self._changes
        peer = acts.hub.peer_of(engine)
        if peer is None:
            raise Permanent(f"no peer of engine {engine} is attached; start `orchestrrl sync peer` on its host")
        within_s = max(0.0, self._until_s - acts.clock.now_s())
        backend = self._record.report.backend
        order = BackendAct(backend, engine, act, self.version, json.dumps(dict(body)), changes, self._until_s)
        try:
            result = await acts.hub.send_order(peer.id, order, within_s + ANSWER_S, acts.settings.patience_s)
        except OrchestrRLError as error:
            raise OutcomeUnknown(str(error)) from error
        if result.outcome is OrderOutcome.DONE:
            told: Mapping[str, Any] = json.loads(result.result_json or "{}")
            return told
        words = f"{engine}: {act} failed: {result.detail}"
        raise OutcomeUnknown(words) if result.outcome is OrderOutcome.UNKNOWN else Permanent(words)

    async def request_trainer(self, step: str, body: Mapping[str, Any]) -> None:
        asked = TrainerStep(next(self._numbers), step, body)
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._asked = asked, ended
        self._record.put(trainer_step_json=asked.to_json())
        within_s = max(0.0, self._until_s - self._acts.clock.now_s())
        try:
            await within(self._acts.clock, within_s, ended)
        except Permanent as error:  # the time limit: ranks never end a step with Permanent
            raise OutcomeUnknown(f"the trainer did not complete step {step!r} within {within_s:.0f} s") from error
        finally:
            self._withdraw_request()

    # --- inside

    def _begin(self, *, changes: bool, until_s: float | None = None) -> None:
        self._changes = changes
        by_s = self._acts.clock.now_s() + self._acts.settings.install_within_s
        self._until_s = by_s if until_s is None else min(by_s, until_s)

    def _withdraw_request(self) -> None:
        if self._asked is not None:
            self._asked[1].cancel()
            self._asked = None
            self._record.put(trainer_step_json="")
