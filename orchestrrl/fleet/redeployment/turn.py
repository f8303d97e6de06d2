"""Ensure that at most one change of the deployment runs at a time."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class DeploymentTurn:
    """A lock for changes of the deployment. Pauses, weight syncs and decisions wait while it is `busy`."""

    def __init__(self) -> None:
        self._preparing = False
        self._task: asyncio.Task[Any] | None = None

    @property
    def busy(self) -> bool:
        return self._preparing or (self._task is not None and not self._task.done())

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Hold the lock while a change is prepared, before a task carries it out."""
        self._preparing = True
        try:
            yield
        finally:
            self._preparing = False

    def take(self, task: "asyncio.Task[Any]") -> None:
        """Hold the lock until the task is done."""
        self._task = task
