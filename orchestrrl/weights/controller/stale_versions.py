"""Track engines that restarted after their peer last queried them. The peer's report of their version is then stale.

A peer queries its engines every few seconds. An agent's sample may report a restart before the next query. From then
on, the engine's version is unknown until the peer queries the engine again. The peer also queries the engine before
each installation.
"""

import itertools

from planner.model import EngineId


class StaleVersions:
    """The engines with a stale version. Each restart has a number, so that the response to a query from before the last
    restart is ignored."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._of: dict[EngineId, int] = {}

    def __contains__(self, engine: object) -> bool:
        return engine in self._of

    def restarted(self, engine: EngineId) -> None:
        self._of[engine] = next(self._numbers)

    def of(self, engine: EngineId) -> int | None:
        """Return the number of the engine's last restart, or None if its version is not stale. The caller reads the
        number before it queries the engine."""
        return self._of.get(engine)

    def dispel(self, engine: EngineId, doubt: int | None) -> None:
        """Mark the engine's version as known after a query, unless the engine has restarted again. `doubt` is the
        number of the restart that the caller read from `of` before the query."""
        if doubt is not None and self._of.get(engine) == doubt:
            del self._of[engine]
