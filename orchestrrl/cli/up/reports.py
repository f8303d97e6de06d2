"""Report which engines answer, and when the gateway can serve requests."""

import asyncio
from collections.abc import Callable

from orchestrrl.core.addresses import without_login
from orchestrrl.core.clock import Clock
from orchestrrl.core.errors import OrchestrRLError
from orchestrrl.engines.base import connect
from planner.model import EngineId

POLL_S = 1.0
GATEWAY_POLL_S = 0.1

Report = Callable[[str], None]


async def report_engine(kind: str, engine: EngineId, url: str, report: Report, clock: Clock) -> None:
    """Report the engine's model and version once it answers. Until then, report each new reason why it does not."""
    client, reason = connect(kind, url), ""
    try:
        while True:
            try:
                found = await client.capabilities()
            except OrchestrRLError as error:
                if str(error) != reason:
                    reason = str(error)
                    report(f"engine {engine}: no answer yet: {reason}")
                await clock.sleep(POLL_S)
                continue
            models = ", ".join(found.models) or "no model"
            report(f"engine {engine}: {without_login(url)}, {models}, {found.engine} {found.version}")
            return
    finally:
        await client.close()


async def report_ready(started: asyncio.Event, url: str, report: Report, clock: Clock) -> None:
    """Report when the gateway has started and an engine can serve requests."""
    await started.wait()
    client = connect("vllm", url)  # the gateway has vLLM's /health
    try:
        while not await client.healthy():
            await clock.sleep(GATEWAY_POLL_S)
        report(f"ready: {url} serves requests")
    finally:
        await client.close()
