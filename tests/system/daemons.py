"""A daemon as a process, for tests that are not coroutines."""

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from orchestrrl.lab.testbed.stack import Stack


@contextmanager
def running_daemon(folder: Path, document: Mapping[str, Any]) -> Iterator[Stack]:
    """Run a daemon that continues the journal in this folder."""
    stack = Stack(folder)
    asyncio.run(stack.start_daemon(document, keep_journal=True))
    try:
        yield stack
    finally:
        asyncio.run(stack.undo.aclose())
