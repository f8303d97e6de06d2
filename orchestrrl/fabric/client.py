"""For trainers: announce the communication period that comes next, and hear what becomes of its circuits.

    async with FabricClient("127.0.0.1:7070") as fabric:
        report = await fabric.announce("weights", intent, boundary=True)

    report = announce_period("weights", intent, boundary=True)  # the same for a loop that is not asynchronous

Whatever comes of it, the job runs on: where circuits could not be changed, those that were up carry it. Processes
without OrchestrRL announce through their recorder instead (`recorder.announce`), and hear nothing.
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
    """One connection to the daemon at `address`. Use as `async with`.

    Calls raise Retryable when there is no daemon, ProblemFaults for an intent that makes no sense, Permanent where the
    daemon drives no fabric or does not know the period, and OutcomeUnknown when it was lost meanwhile.
    """

    def __init__(self, address: str = DEFAULT_TARGET) -> None:
        super().__init__(address)

    async def announce(
        self, period: str, intent: WhatItDoes = None, *, within_s: float = 0.0, boundary: bool = False, job: str = ""
    ) -> PeriodReport:
        """Wait until it is over: committed, kept, superseded or failed, with the reason.

        `intent`: what it does, see intents.py; None: as it was announced last. `job`: whose, where the intent
        does not say. `within_s`: how long a window is
        waited for; 0: as the daemon is configured. `boundary`: nobody communicates until this returns, so that no
        window is needed.
        """
        async with aclosing(self.follow(period, intent, within_s=within_s, boundary=boundary, job=job)) as reports:
            async for report in reports:
                last = report
        return last

    async def announce_nowait(
        self, period: str, intent: WhatItDoes = None, *, within_s: float = 0.0, job: str = ""
    ) -> PeriodReport:
        """The daemon has it, and goes on with it by itself: never at a boundary, which lasts while its caller waits."""
        async with aclosing(self.follow(period, intent, within_s=within_s, job=job)) as reports:
            return await anext(reports)

    async def follow(
        self, period: str, intent: WhatItDoes = None, *, within_s: float = 0.0, boundary: bool = False, job: str = ""
    ) -> AsyncGenerator[PeriodReport, None]:
        """What becomes of it, whenever that changes. Whoever stops listening does not end it, but at a boundary: then
        what has not been begun stays as it is."""
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
    """`FabricClient.announce`, or with `wait` False `announce_nowait`, from a thread that runs no event loop. Raises
    ValueError for a boundary that is not waited for."""
    if boundary and not wait:
        raise ValueError("boundary: lasts only while its caller waits, and wait is False")

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
