"""Engines started by a deployer are reported by the daemon unless they have an agent."""

import asyncio
import sys
from pathlib import Path

from orchestrrl.core.clock import WallClock
from orchestrrl.daemon.redeployment_wiring import DeployedEngineWatcher
from planner.model import EngineHealth
from tests.orchestrrl.daemon.test_engine_watcher import E0, Sink


async def test_deployed_engine_is_reported(tmp_path: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "orchestrrl", "engine", "simulated", "--port", "0", stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    url = (await process.stdout.readline()).decode().strip()
    clock = WallClock()
    sink = Sink(tmp_path, clock)
    watch = DeployedEngineWatcher(sink, interval_s=0.05)
    watch.follow({E0: (url, "simulated")})
    try:
        async with asyncio.timeout(60):
            while sink.fleet.state.capabilities(E0) is None:
                await asyncio.sleep(0.01)
            process.kill()
            await process.wait()
            while sink.fleet.state.engines(clock.now_s())[0].health is not EngineHealth.GONE:
                await asyncio.sleep(0.01)
    finally:
        await watch.close()
        sink.journal.close()
    assert sink.reports[0].health is EngineHealth.OK
