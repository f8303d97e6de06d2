"""A client for trainers, which announces the next communication period and receives reports about its circuits.

    async with FabricClient("127.0.0.1:7070") as fabric:
        report = await fabric.announce("weights", intent, boundary=True)

    report = announce_period("weights", intent, boundary=True)  # the same for synchronous code

The training job continues even if circuits cannot be changed. The existing circuits then carry its traffic. Processes
without the package `orchestrrl` announce through their recorder instead (`recorder.announce`), and receive no reports.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from orchestrrl.core.addresses import DEFAULT_TARGET
from orchestrrl.fabric.intents import intent_to_json
from orchestrrl.fabric.periods import PeriodReport
from orchestrrl.rpc.codecs.fabric import PERIOD
from orchestrrl.rpc.control_client import ControlClient
from orchestrrl.rpc.pb import fabric_pb2
from planner.fabric.intent import Intent

WhatItDoes = Intent | Mapping[str, Any] | None


class FabricClient(ControlClient):
    """A connection to the daemon at `address`, to be used with `async with`.

    Calls raise Retryable if no daemon answers, ProblemFaults for an invalid intent, Permanent if the daemon has no
    fabric or the period is unknown, and OutcomeUnknown if the connection is lost during the call.
    """

    def __init__(self, address: str = DEFAULT_TARGET) -> None:
        super().__init__(address)

    async def announce(
        self, period: str, intent: WhatItDoes = None, *, within_s: float = 0.0, boundary: bool = False, job: str = ""
    ) -> PeriodReport:
        """Announce a period, wait until it is over, and return its last report. The state of the report is committed,
        kept, superseded or failed. The report also contains the reason.

        `intent` is the period's traffic (see intents.py); if it is None, the intent of the last announcement is used
        again. `job` is the job's name, if the intent has none. `within_s` is the time limit in seconds for the wait for
        a window. If it is 0, the daemon's setting is used. If `boundary` is True, the caller guarantees that no rank
        communicates until this call returns, so no window is needed.
        """
        async with aclosing(self.follow(period, intent, within_s=within_s, boundary=boundary, job=job)) as reports:
            async for report in reports:
                last = report
        return last

    async def announce_nowait(
        self, period: str, intent: WhatItDoes = None, *, within_s: float = 0.0, job: str = ""
    ) -> PeriodReport:
        """Announce a period and return its first report. The daemon carries the period out in the background. The
        period cannot be a boundary, because a boundary lasts only while its caller waits."""
        async with aclosing(self.follow(period, intent, within_s=within_s, job=job)) as reports:
            return await anext(reports)

    async def follow(
        self, period: str, intent: WhatItDoes = None, *, within_s: float = 0.0, boundary: bool = False, job: str = ""
    ) -> AsyncGenerator[PeriodReport, None]:
        """Announce a period and yield a report at each change of its state. Closing the generator does not end the
        period, unless the period is a boundary. In that case, changes of circuits that have not begun are dropped."""
        order = fabric_pb2.AnnouncePeriodRequest(
            period=period, intent_json=_written(intent), within_s=within_s, boundary=boundary, job=job
        )
        async with aclosing(self.watch(self.fabric.AnnouncePeriod, order)) as reports:
            async for report in reports:
                yield PERIOD.from_pb(report)


def announce_period(
    period: str,
    intent: WhatItDoes = None,
    *,
    daemon: str = DEFAULT_TARGET,
    within_s: float = 0.0,
    boundary: bool = False,
    wait: bool = True,
    job: str = "",
) -> PeriodReport:
    """Call `FabricClient.announce`, or `announce_nowait` if `wait` is False, from a thread without an event loop.
    Raises ValueError if `boundary` is True and `wait` is False."""
    if boundary and not wait:
        raise ValueError("boundary: must not be set with wait=False, as a boundary lasts only while its caller waits")

    async def once() -> PeriodReport:
        async with FabricClient(daemon) as client:
            if wait:
                return await client.announce(period, intent, within_s=within_s, boundary=boundary, job=job)
            return await client.announce_nowait(period, intent, within_s=within_s, job=job)

    return asyncio.run(once())


def _written(intent: WhatItDoes) -> str:
    match intent:
        case None:
            return ""
        case Intent():
            return intent_to_json(intent)
        case _:
            return json.dumps(intent)
