"""Whose turn it is to change engines."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class DeploymentTurn:
    """One change of the deployment at a time. Pauses, weight syncs and decisions wait while it is `busy`."""

    def __init__(self) -> None:
        self._preparing = False
        self._task: asyncio.Task[Any] | None = None

    @property
    def busy(self) -> bool:
        return self._preparing or (self._task is not None and not self._task.done())

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Busy meanwhile, before there is a task."""
        self._preparing = True
        try:
            yield
        finally:
            self._preparing = False

    def take(self, task: "asyncio.Task[Any]") -> None:
        """Busy until the task is done."""
        self._task = task
