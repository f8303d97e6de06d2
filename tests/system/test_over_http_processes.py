"""Health monitoring over HTTP: an engine process is killed and returns with other properties."""

import asyncio
import sys

from planner.model import EngineHealth
from tests.orchestrrl.agent.test_over_http import until, watching


async def start_engine(port: int, max_sequences: int) -> tuple[asyncio.subprocess.Process, str]:
    arguments = ["--port", str(port), "--max-num-seqs", str(max_sequences)]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "orchestrrl", "engine", "simulated", *arguments, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    return process, (await process.stdout.readline()).decode().strip()


async def test_killed_engine_is_gone_and_queried_again_after_restart() -> None:
    process, url = await start_engine(0, max_sequences=8)
    async with watching(url) as seen:
        first = await until(seen, lambda seen: seen.capabilities is not None and seen.health is EngineHealth.OK)
        process.kill()
        await process.wait()
        gone = await until(seen, lambda seen: seen.health is EngineHealth.GONE)
        assert (gone.sample, gone.capabilities) == (None, None)
        assert gone.health_detail
        process, _ = await start_engine(int(url.rpartition(":")[2]), max_sequences=16)
        back = await until(seen, lambda seen: seen.capabilities is not None and seen.health is EngineHealth.OK)
        assert first.capabilities is not None
        assert back.capabilities is not None
        assert (first.capabilities.max_sequences, back.capabilities.max_sequences) == (8, 16)
    process.kill()
    await process.wait()
