"""Engines that were started anew since their peer asked them last: what it says of them is from before.

A peer asks every few seconds; an agent's sample may tell of the restart sooner. Until the peer has asked anew, which it
does before it installs, nobody knows what such an engine has.
"""

import itertools

from planner.model import EngineId


class StaleVersions:
    """Each has a number: an answer to what was asked before the last restart dispels nothing."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._of: dict[EngineId, int] = {}

    def __contains__(self, engine: object) -> bool:
        return engine in self._of

    def restarted(self, engine: EngineId) -> None:
        self._of[engine] = next(self._numbers)

    def of(self, engine: EngineId) -> int | None:
        """To be taken before the engine is asked."""
        return self._of.get(engine)

    def dispel(self, engine: EngineId, doubt: int | None) -> None:
        """The engine was asked since then. Harmless where it was restarted once more."""
        if doubt is not None and self._of.get(engine) == doubt:
            del self._of[engine]
