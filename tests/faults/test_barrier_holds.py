"""Tests of the pause barrier on real processes: no engine runs while it is quiet, requests continue unharmed, and no
process's death freezes the fleet."""

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
from fleet import Fleet
from front import WITHIN_S, until
from prometheus_client.parser import text_string_to_metric_families

from orchestrrl.core.errors import Permanent
from orchestrrl.lab.demo.stack import gateway_flags
from orchestrrl.lab.testbed.processes import LabProcess
from orchestrrl.lab.testbed.stack import engine_flags, named
from orchestrrl.rpc.control_client import ControlClient
from orchestrrl.rpc.pb import agent_pb2
from orchestrrl.rpc.pb import control_pb2 as pb
from tests.orchestrrl.gateway.processes import operator_url

ROOT = Path(__file__).parents[2]
LONG_LEASE_S = 600.0  # ends with a resume
LEASE_S = 8.0  # expires: not before the test has observed it
ENDLESS = 30_000  # tokens: longer than any test
# Pauses, prints its lease, and renews it while it lives.
TRAINER = """
import asyncio, sys
from orchestrrl.rpc.control_client import ControlClient
from orchestrrl.rpc.pb import agent_pb2, control_pb2
from tests.orchestrrl.gateway.processes import operator_url

async def main(address, mode):
    async with ControlClient(address) as client:
        wish = control_pb2.PauseFleetRequest(holder="trainer", lease_s=LEASE_S, mode=int(mode), deadline_s=DEADLINE_S)
        print("asks", flush=True)
        barrier = await client.call(client.control.PauseFleet, wish, 100.0)
        print(barrier.lease_id, flush=True)
        while True:
            await asyncio.sleep(0.5)
            renewal = control_pb2.RenewPauseRequest(lease_id=barrier.lease_id, lease_s=LEASE_S)
            await client.call(client.control.RenewPause, renewal)

DEADLINE_S, LEASE_S = float(sys.argv[3]), float(sys.argv[4])
asyncio.run(main(sys.argv[1], sys.argv[2]))
"""


@dataclass
class Pair:
    """The fleet with a second gateway."""

    fleet: Fleet
    second: LabProcess
    urls: list[str]

    async def barrier(self) -> pb.PauseBarrier:
        async with ControlClient(self.fleet.stack.daemon_address) as client:
            return await client.call(client.control.GetPauseBarrier, pb.GetPauseBarrierRequest())

    async def pause(self, **wish: object) -> pb.PauseBarrier:
        async with ControlClient(self.fleet.stack.daemon_address) as client:
            return await client.call(client.control.PauseFleet, pb.PauseFleetRequest(**wish), WITHIN_S)  # type: ignore[arg-type]

    async def resume(self, barrier: pb.PauseBarrier, version: int | None = None) -> pb.PauseBarrier:
        async with ControlClient(self.fleet.stack.daemon_address) as client:
            order = pb.ResumeFleetRequest(lease_id=barrier.lease_id, policy_version=version)
            return await client.call(client.control.ResumeFleet, order)

    async def open_again(self) -> None:
        """Return once both gateways report the barrier open; the daemon may be dead."""

        async def is_open() -> bool:
            return [await self.phase_of(url) for url in self.urls] == ["open", "open"]

        await until(is_open)

    async def phase_of(self, url: str) -> str:
        async with aiohttp.ClientSession() as session, session.get(f"{url}/metrics") as response:
            text = await response.text()
        closed = _values(text, "orchestrrl_gateway_barrier_closed")
        return "closed" if closed and any(closed) else "open"

    async def generated_tokens(self) -> list[float]:
        """Return the tokens that each engine has generated since its start, by its own count."""
        async with aiohttp.ClientSession() as session:
            counts = []
            for engine in self.fleet.engines:
                async with session.get(f"{engine.url}/metrics") as response:
                    counts.append(sum(_values(await response.text(), "vllm:generation_tokens")))
        return counts

    async def stands_still(self, for_s: float = 0.7) -> None:
        before = await self.generated_tokens()
        await asyncio.sleep(for_s)
        assert await self.generated_tokens() == before

    async def under_way(self, url: str, generated_tokens: int = 500) -> None:
        """Wait until the requests in flight at this gateway have this many tokens."""
        async with aiohttp.ClientSession() as session:

            async def generating() -> bool:
                operator = await operator_url(session, url)
                async with session.get(f"{operator}/orchestrrl/requests") as response:
                    in_flight = (await response.json())["in_flight"]
                return sum(request["generated_tokens"] for request in in_flight) >= generated_tokens

            await until(generating)

    @asynccontextmanager
    async def endless(self) -> AsyncIterator[None]:
        """Keep a request running at each gateway during the block."""
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:

            async def ask(url: str) -> None:
                body = {"prompt": [7, 8, 9], "max_tokens": ENDLESS, "ignore_eos": True, "temperature": 0}
                async with session.post(f"{url}/v1/completions", json=body) as response:
                    raise AssertionError(f"it has ended: {await response.text()}")

            asking = [asyncio.create_task(ask(url)) for url in self.urls]
            try:
                for url in self.urls:
                    await self.under_way(url, 1)
                yield
            finally:
                for task in asking:
                    task.cancel()
                await asyncio.wait(asking)

    async def answers_despite(
        self, fault: Callable[[], Awaitable[None]], urls: Sequence[str] | None = None
    ) -> list[list[int]]:
        """Send the whole step through these gateways alternately, by default both."""
        urls = urls or self.urls
        timeout = aiohttp.ClientTimeout(total=WITHIN_S)
        async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:

            async def ask(index: int) -> list[int]:
                sample = self.fleet.step[index]
                url = f"{urls[index % len(urls)]}/v1/completions"
                async with session.post(
                    url, json=self.fleet.body(sample), headers={"X-Request-Id": sample.id}
                ) as response:
                    assert response.status == 200, await response.text()
                    (choice,) = (await response.json())["choices"]
                    return choice["token_ids"]

            asking = [asyncio.create_task(ask(index)) for index in range(len(self.fleet.step))]
            for url in urls:
                await self.under_way(url)
            await fault()
            return await asyncio.gather(*asking)


def _values(text: str, name: str) -> list[float]:
    return [
        sample.value
        for family in text_string_to_metric_families(text)
        if family.name == name
        for sample in family.samples
        if not sample.name.endswith("_created")
    ]


@pytest.fixture
async def pair(fleet: Fleet) -> Pair:
    engines = engine_flags("--engine", named([engine.url for engine in fleet.engines]))
    url = await fleet.stack.start_gateway(*gateway_flags(fleet.scenario, "simulated"), *engines, name="gateway2")
    made = Pair(fleet, fleet.stack.processes["gateway2"], [fleet.stack.gateway_url, url])

    async def attached() -> bool:
        return [gateway.node_id for gateway in (await made.barrier()).gateways] == ["gateway", "gateway2"]

    await until(attached)
    return made


@pytest.mark.smoke
@pytest.mark.parametrize("frozen", [agent_pb2.FROZEN_REQUESTS_RECOMPUTE, agent_pb2.FROZEN_REQUESTS_CONTINUE])
async def test_quiet_fleet_generates_nothing_and_answers_are_undisturbed(
    pair: Pair, frozen: agent_pb2.FrozenRequests.ValueType
) -> None:
    async def update_weights() -> None:
        for version in (1, 2):
            barrier = await pair.pause(holder="trainer", lease_s=LONG_LEASE_S, frozen=frozen)
            assert barrier.phase == "quiet"
            assert all(engine.done for engine in barrier.engines), barrier
            await pair.stands_still()
            seen = await pair.barrier()
            assert sum(gateway.report.frozen + gateway.report.held for gateway in seen.gateways) > 0
            assert sum(gateway.report.running for gateway in seen.gateways) == 0
            opened = await pair.resume(barrier, version)
            assert (opened.phase, opened.policy_version) == ("open", version)
            assert [engine.policy_version for engine in opened.engines] == [version] * len(pair.fleet.engines)
            before = sum(await pair.generated_tokens())
            if version == 1:

                async def goes_on(before: float = before) -> bool:
                    return sum(await pair.generated_tokens()) > before + 200

                await until(goes_on)

    async with pair.endless():
        assert await pair.answers_despite(update_weights) == pair.fleet.expected


async def test_requests_during_a_pause_are_answered_later(pair: Pair) -> None:
    barrier = await pair.pause(lease_s=LONG_LEASE_S)
    asking = asyncio.create_task(pair.answers_despite(_nothing))
    await asyncio.sleep(1.0)
    assert not asking.done()
    await pair.stands_still(0.2)
    await pair.resume(barrier)
    assert await asking == pair.fleet.expected


async def _nothing() -> None:
    return None


@pytest.mark.parametrize("gateways", [(0, 1), (0,), (1,)])
async def test_wait_mode_lets_running_requests_finish(pair: Pair, gateways: tuple[int, ...]) -> None:
    """A gateway without requests lets the other's requests finish."""

    async def drain() -> None:
        barrier = await pair.pause(mode=agent_pb2.PAUSE_MODE_WAIT, lease_s=4 * WITHIN_S, deadline_s=0.8 * WITHIN_S)

        async def reported() -> bool:  # by the reports after the barrier became quiet
            seen = await pair.barrier()
            return sum(gateway.report.running + gateway.report.frozen for gateway in seen.gateways) == 0

        await until(reported)
        await pair.stands_still()
        await pair.resume(barrier, 1)

    urls = [pair.urls[index] for index in gateways]
    assert await pair.answers_despite(drain, urls) == pair.fleet.expected


@pytest.mark.parametrize("mode", [agent_pb2.PAUSE_MODE_KEEP, agent_pb2.PAUSE_MODE_WAIT])
async def test_killed_trainer_does_not_leave_the_fleet_frozen(pair: Pair, mode: agent_pb2.PauseMode.ValueType) -> None:
    """It is killed while it holds the lease, or while it waits for the fleet to come to rest."""

    async def update_weights() -> None:
        keeps = mode == agent_pb2.PAUSE_MODE_KEEP
        command = [
            sys.executable,
            "-c",
            TRAINER,
            pair.fleet.stack.daemon_address,
            str(int(mode)),
            str(LEASE_S if keeps else 0.8 * WITHIN_S),
            str(LEASE_S),
        ]
        trainer = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)}
        )
        assert trainer.stdout is not None
        assert await trainer.stdout.readline() == b"asks\n"
        if keeps:
            lease = (await trainer.stdout.readline()).decode().strip()
            first = await pair.barrier()
            assert first.lease_id == lease

            async def renewed() -> bool:
                now = await pair.barrier()
                assert now.lease_id == lease
                return now.lease_until_unix_s > first.lease_until_unix_s + 1.0

            await until(renewed)
            await pair.stands_still(0.3)
        else:

            async def closing() -> bool:
                return (await pair.barrier()).phase == "closing"

            await until(closing)
        trainer.kill()
        await trainer.wait()
        killed_s = time.monotonic()
        await pair.open_again()
        print(f"open {time.monotonic() - killed_s:.2f} s after the trainer was killed")

        async def known() -> bool:
            return (await pair.barrier()).phase == "open"

        await until(known)

    async with pair.endless():
        assert await pair.answers_despite(update_weights) == pair.fleet.expected
    detail = (await pair.barrier()).detail
    expected = "ended without a resume" if mode == agent_pb2.PAUSE_MODE_KEEP else "the caller stopped waiting"
    assert expected in detail


async def test_killed_daemon_does_not_leave_the_fleet_frozen(pair: Pair) -> None:
    async def update_weights() -> None:
        barrier = await pair.pause(lease_s=LEASE_S)
        pair.fleet.stack.daemon.kill()
        await pair.stands_still()
        await pair.open_again()
        await pair.fleet.stack.daemon.start()
        with pytest.raises(Permanent, match="requests have continued since"):
            await pair.resume(barrier, 1)

    assert await pair.answers_despite(update_weights) == pair.fleet.expected
    assert not (await pair.barrier()).HasField("policy_version")


async def test_daemon_restarted_in_time_still_has_the_lease(pair: Pair) -> None:
    async def update_weights() -> None:
        barrier = await pair.pause(lease_s=LONG_LEASE_S)
        pair.fleet.stack.daemon.kill()
        await pair.fleet.stack.daemon.start()

        async def attached() -> bool:
            seen = await pair.barrier()
            return seen.lease_id == barrier.lease_id and len(seen.gateways) == 2

        await until(attached)
        await pair.stands_still()
        opened = await pair.resume(barrier, 1)
        assert opened.policy_version == 1

    assert await pair.answers_despite(update_weights) == pair.fleet.expected


async def test_gateway_restarted_during_a_pause_closes_again(pair: Pair) -> None:
    barrier = await pair.pause(lease_s=LONG_LEASE_S)
    pair.second.kill()
    await pair.second.start()

    async def closed() -> bool:
        return await pair.phase_of(pair.urls[1]) == "closed"

    await until(closed)
    asking = asyncio.create_task(pair.answers_despite(_nothing))
    await asyncio.sleep(0.5)
    await pair.stands_still(0.3)
    await pair.resume(barrier, 1)
    assert await asking == pair.fleet.expected


async def test_group_over_two_gateways_is_cancelled_when_it_has_enough(pair: Pair) -> None:
    """Each gateway alone sees too few answers."""
    samples, enough = pair.fleet.step[:16], 9
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=WITHIN_S)) as session:

        async def ask(index: int) -> dict[str, str]:
            body = pair.fleet.body(samples[index]) | {"group_enough": enough}
            if index >= 12:  # these must not finish before the others are enough
                body |= {"max_tokens": ENDLESS, "ignore_eos": True}
            headers = {"X-Request-Id": samples[index].id, "X-Group-Id": "one"}
            async with session.post(f"{pair.urls[index % 2]}/v1/completions", json=body, headers=headers) as response:
                assert response.status == 200, await response.text()
                (choice,) = (await response.json())["choices"]
                return choice

        choices = await asyncio.gather(*(ask(index) for index in range(len(samples))))
    complete = [choice for choice in choices if choice["finish_reason"] in ("stop", "length")]
    assert enough <= len(complete) < len(samples)
    others = [choice for choice in choices if choice not in complete]
    assert {(choice["finish_reason"], choice["stop_reason"]) for choice in others} == {("abort", "redundant")}
