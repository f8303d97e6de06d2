"""What switches tell of themselves: ports that fail, alarms, circuits that others change. Logged as it comes, handed on
to whoever is to look at the switch at once instead of at its next round.

An event is a reason to look, never knowledge: what it says of a port is read from the switch before anything is planned
on it. While nobody listens, events are lost; so whoever has begun to listen again has a reason to look, too.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import aclosing

from ocs_drivers.base import OcsDriver
from ocs_drivers.errors import DriverError
from ocs_drivers.model import EventKind, SwitchEvent
from orchestrrl.core.clock import Clock

logger = logging.getLogger(__name__)

# Pauses before listening again, longer each time.
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0


class SwitchEvents:
    """Listens to every switch that declares events. `on_news` gets the switch's name; it must not block."""

    def __init__(self, switches: Mapping[str, OcsDriver], clock: Clock, on_news: Callable[[str], None]) -> None:
        self._switches = switches
        self._clock = clock
        self._on_news = on_news

    async def run(self) -> None:
        """Until cancelled, or at once where no switch tells anything."""
        async with asyncio.TaskGroup() as tasks:
            for switch in self._switches:
                tasks.create_task(self._follow(switch))

    async def _follow(self, switch: str) -> None:
        told, pause_s = "", FIRST_PAUSE_S
        while True:
            try:
                if not (await self._switches[switch].capabilities()).events:
                    return
                if told:
                    self._on_news(switch)
                async with aclosing(self._switches[switch].watch()) as events:
                    async for event in events:
                        told, pause_s = "", FIRST_PAUSE_S
                        _log(switch, event)
                        self._on_news(switch)
                reason = "it ended"
            except DriverError as error:
                reason = str(error)
            except Exception as error:  # of one driver: the other switches are listened to all the same
                if (reason := f"{type(error).__name__}: {error}") != told:
                    logger.exception("switch %s cannot be listened to", switch)
            if reason != told:  # once for each new reason: it may last
                logger.warning("switch %s: nobody hears its events: %s", switch, reason)
            told = reason
            await self._clock.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def _log(switch: str, event: SwitchEvent) -> None:
    level = logging.DEBUG if event.kind is EventKind.CIRCUIT else logging.WARNING  # our own changes are circuits, too
    logger.log(level, "switch %s tells: %s: %s", switch, event.kind, event.text)
