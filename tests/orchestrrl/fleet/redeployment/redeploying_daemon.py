"""A daemon with fake redeployments, served from a thread of its own, since commands run their own event loop."""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

from changeable_daemon import changeable
from fake_redeployments import FakeSwitching

from orchestrrl.core.clock import WallClock
from orchestrrl.core.config.schema import ListenSettings
from orchestrrl.core.journal.store import Journal
from orchestrrl.daemon.configuration import parse_config
from orchestrrl.daemon.wiring import build_daemon
from orchestrrl.fleet.redeployment.steps import (
    RedeploymentReport,
)
from orchestrrl.rpc.server import DaemonServer
from orchestrrl.rpc.switches_service import SwitchesService


class RedeploymentDaemon:
    """Serves at `daemon.address` inside the block: `with RedeploymentDaemon(folder, pace_s) as daemon:`."""

    def __init__(
        self, folder: Path, pace_s: float = 0.0, address: str = "127.0.0.1:0", *known: RedeploymentReport
    ) -> None:
        """`known` are redeployments from before."""
        self._wanted = address
        self._known = known
        self._folder = folder
        self._pace_s = pace_s
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self.address = ""

    def __enter__(self) -> "RedeploymentDaemon":
        self._thread.start()
        assert self._ready.wait(60)
        return self

    def __exit__(self, *exception: object) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()

    def do(self, act: Callable[[], object]) -> None:
        """Run a call in the daemon's thread, before any later call."""
        done = threading.Event()

        def acting() -> None:
            act()
            done.set()

        self._loop.call_soon_threadsafe(acting)
        assert done.wait(60)

    async def _serve(self) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        clock = WallClock()
        with Journal(self._folder / "journal.sqlite", clock.now_s()) as journal:
            self.parts = changeable(build_daemon(parse_config("mode: act"), journal, clock))
            self.plane = self.parts.control_plane
            self.redeployer = FakeSwitching(clock, self._pace_s)
            self.redeployer.reports.update({report.id: report for report in self._known})
            self.parts.redeployer = self.redeployer
            server = await DaemonServer.start(
                self.parts, ListenSettings(address=self._wanted), SwitchesService({}, self.parts.circuits)
            )
            self.address = server.address
            self._ready.set()
            await self._end.wait()
            await server.stop(0.0)
            await self.redeployer.close()
