"""Run curl as an independent HTTP client."""

import asyncio
import json
import shutil
from typing import Any

import pytest


async def curl(*words: str) -> tuple[int, Any]:
    """Return the status, and the JSON body or None. Skip the test if curl is not installed."""
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    process = await asyncio.create_subprocess_exec(
        "curl", "-sS", "--max-time", "60", "-w", "\n%{http_code}", *words, stdout=asyncio.subprocess.PIPE
    )
    try:
        out, _ = await process.communicate()
    except asyncio.CancelledError:
        process.kill()
        await process.wait()
        raise
    body, _, status = out.decode().rpartition("\n")
    return int(status), json.loads(body) if body.strip() else None
