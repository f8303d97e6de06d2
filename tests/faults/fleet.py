"""A small generation step on real processes: simulated engines with OrchestrRL."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import aiohttp
from front import WITHIN_S, until

from orchestrrl.lab.demo.scenario import DemoScenario, Sample, expected_ids
from orchestrrl.lab.testbed.engines import LocalEngine
from orchestrrl.lab.testbed.stack import Stack
from tests.orchestrrl.gateway.processes import operator_url

ENGINES = 3


@dataclass
class Fleet:
    """The engines, OrchestrRL's processes, and a step's requests."""

    scenario: DemoScenario
    step: list[Sample]
    engines: list[LocalEngine]
    stack: Stack

    @property
    def expected(self) -> list[list[int]]:
        return [expected_ids(self.scenario, sample) for sample in self.step]

    def body(self, sample: Sample) -> dict[str, Any]:
        limits = {"temperature": 0, "max_tokens": self.scenario.max_tokens}
        return {"prompt": list(sample.prompt_ids), "return_token_ids": True, **limits}

    async def gateway_requests(self) -> dict[str, Any]:
        async with aiohttp.ClientSession() as session:
            operator = await operator_url(session, self.stack.gateway_url)
            async with session.get(f"{operator}/orchestrrl/requests") as response:
                return await response.json()

    async def gateway_metrics(self) -> dict[str, float]:
        """Return the gateway's metrics by name and labels."""
        async with aiohttp.ClientSession() as session:
            async with session.get(f"{self.stack.gateway_url}/metrics") as response:
                lines = (await response.text()).splitlines()
        samples = [line.rpartition(" ") for line in lines if not line.startswith("#")]
        return {name: float(value) for name, _, value in samples}

    async def under_way(self, generated_tokens: int = 500) -> None:
        """Wait until the requests in flight have this many tokens, so that the step is in its middle."""

        async def generating() -> bool:
            in_flight = (await self.gateway_requests())["in_flight"]
            return sum(request["generated_tokens"] for request in in_flight) >= generated_tokens

        await until(generating)

    async def answers_despite(self, fault: Callable[[], Awaitable[None]]) -> list[list[int]]:
        """Send the whole step at once, inject the fault in its middle, and return every answer's token ids."""
        timeout = aiohttp.ClientTimeout(total=WITHIN_S)
        async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
            asking = [asyncio.create_task(self._ask(session, sample)) for sample in self.step]
            await self.under_way()
            await fault()
            return await asyncio.gather(*asking)

    async def _ask(self, session: aiohttp.ClientSession, sample: Sample) -> list[int]:
        headers = {"X-Request-Id": sample.id, "X-Group-Id": sample.group}
        url = f"{self.stack.gateway_url}/v1/completions"
        async with session.post(url, json=self.body(sample), headers=headers) as response:
            assert response.status == 200, await response.text()
            (choice,) = (await response.json())["choices"]
            return choice["token_ids"]
