"""Receive the events that switches send, such as failed ports, alarms, and circuits changed by other clients. Log each
event, and request that the switch is polled at once.

An event only triggers a poll. Its content is verified on the switch before it is used for planning. Events are lost
while the connection is down, so a restored connection triggers a poll too.
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

# Pauses before reconnecting, longer each time.
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0


class SwitchEvents:
    """Receives the events of every switch whose driver declares events. `on_news` is called with the switch's name
    after each event and before each attempt to reconnect. It must not block."""

    def __init__(self, switches: Mapping[str, OcsDriver], clock: Clock, on_news: Callable[[str], None]) -> None:
        self._switches = switches
        self._clock = clock
        self._on_news = on_news

    async def run(self) -> None:
        """Receive events until cancelled. Return at once if no switch declares events."""
        async with asyncio.TaskGroup() as tasks:
            for switch in self._switches:
                tasks.create_task(self._follow(switch))

    async def _follow(self, switch: str) -> None:
        last_reason, pause_s = "", FIRST_PAUSE_S
        while True:
            try:
                if not (await self._switches[switch].capabilities()).events:
                    return
                if last_reason:
                    self._on_news(switch)
                async with aclosing(self._switches[switch].watch()) as events:
                    async for event in events:
                        last_reason, pause_s = "", FIRST_PAUSE_S
                        _log(switch, event)
                        self._on_news(switch)
                reason = "the stream ended"
            except DriverError as error:
                reason = str(error)
            except Exception as error:  # a fault of one driver must not affect other switches
                if (reason := f"{type(error).__name__}: {error}") != last_reason:
                    logger.exception("events of switch %s cannot be received", switch)
            if reason != last_reason:  # each new reason once, since it may last
                logger.warning("switch %s: its events are not received: %s", switch, reason)
            last_reason = reason
            await self._clock.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def _log(switch: str, event: SwitchEvent) -> None:
    # the daemon's own changes cause circuit events too
    level = logging.DEBUG if event.kind is EventKind.CIRCUIT else logging.WARNING
    logger.log(level, "switch %s reports: %s: %s", switch, event.kind, event.text)
