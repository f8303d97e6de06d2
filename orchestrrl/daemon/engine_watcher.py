"""Watch engines that a deployer started, as an agent would: nobody else may be beside them.

Where an agent speaks for such an engine, it has the word; it is stood in for again once it has been silent for long.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from orchestrrl.agent.watch import EngineWatch, HealthLimits
from orchestrrl.core.clock import stop
from orchestrrl.core.nodes import NodeKind
from orchestrrl.daemon.fleet_coordinator import FleetCoordinator
from orchestrrl.engines.base import Engine, connect
from orchestrrl.fleet.reports import EngineReport
from orchestrrl.fleet.state import STAND_IN
from planner.model import EngineId, NodeId

logger = logging.getLogger(__name__)

WATCHER = NodeId("daemon")
INTERVAL_S = 0.25  # as agents scrape
SILENT_AFTER_S = 3.0  # an agent that has said nothing for so long is stood in for
LOOK_S = 1.0  # whether that is so is asked this often


@dataclass(frozen=True, slots=True)
class _Watched:
    url: str
    product: str
    client: Engine
    task: asyncio.Task[None]


class DeployedEngineWatcher:
    """Watches the engines that it was last told to follow. `close` ends it."""

    def __init__(
        self,
        fleet: FleetCoordinator,
        *,
        make_engine: Callable[[str, str], Engine] = connect,
        interval_s: float = INTERVAL_S,
        limits: HealthLimits | None = None,
    ) -> None:
        """`make_engine`: a client, from product and URL."""
        self._fleet = fleet
        self._make_engine = make_engine
        self._interval_s = interval_s
        self._limits = limits or HealthLimits()
        self._watched: dict[EngineId, _Watched] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._sequence = 0

    def follow(self, engines: Mapping[EngineId, tuple[str, str]]) -> None:
        """Watch these, (URL, product) of each, and no others. Raises Permanent for an unknown product, and changes
        nothing then."""
        known = {engine: (watched.url, watched.product) for engine, watched in self._watched.items()}
        fresh = {
            engine: self._make_engine(product, url)
            for engine, (url, product) in engines.items()
            if known.get(engine) != (url, product)
        }
        for engine in [engine for engine in known if engine not in engines or engine in fresh]:
            self._watched.pop(engine).task.cancel()
        for engine, client in fresh.items():
            url, product = engines[engine]
            task = asyncio.create_task(self._stand_in(engine, client))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            self._watched[engine] = _Watched(url, product, client, task)

    async def close(self) -> None:
        self._watched.clear()
        await stop(*self._tasks)

    async def _stand_in(self, engine: EngineId, client: Engine) -> None:
        """For as long as nobody else speaks for the engine; for ever."""
        watch: asyncio.Task[None] | None = None
        try:
            while True:
                alone = not self._spoken_for(engine)
                if watch is not None and (watch.done() or not alone):
                    await self._end(engine, watch)
                    watch = None
                if watch is None and alone:
                    watch = asyncio.create_task(self._watch(engine, client).run())
                await self._fleet.clock.sleep(LOOK_S)
        finally:
            if watch is not None:
                await self._end(engine, watch)
            await client.close()

    def _watch(self, engine: EngineId, client: Engine) -> EngineWatch:
        return EngineWatch(
            engine,
            client,
            partial(self._publish, client),
            agent=WATCHER,
            clock=self._fleet.clock,
            interval_s=self._interval_s,
            limits=self._limits,
        )

    async def _end(self, engine: EngineId, watch: asyncio.Task[None]) -> None:
        await stop(watch)
        if not watch.cancelled() and watch.exception() is not None:
            logger.error("%s: a defect ended its watch, which begins anew", engine, exc_info=watch.exception())

    def _publish(self, client: Engine, report: EngineReport) -> None:
        watched = self._watched.get(report.engine)
        if watched is None or watched.client is not client or self._spoken_for(report.engine):
            return
        self._sequence += 1
        self._fleet.engine_reported(replace(report, sequence=self._sequence), STAND_IN)

    def _spoken_for(self, engine: EngineId) -> bool:
        """By an agent that has been heard of late."""
        since_s = self._fleet.clock.now_s() - SILENT_AFTER_S
        return any(
            state.hello.kind is NodeKind.AGENT and engine in state.hello.engines and state.last_report_s >= since_s
            for state in self._fleet.nodes.states()
        )
