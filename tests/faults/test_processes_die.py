"""Tests that kill an engine, the daemon, the agent or the gateway during a step: no request is lost or answered twice.

On simulated engines over HTTP; an engine's death on real vLLM is in tests/vllm.
"""

import asyncio
import time

import pytest
from fleet import ENGINES, Fleet
from front import until

from orchestrrl.gateway.client import GatewayClient
from orchestrrl.rpc.pb import telemetry_pb2


@pytest.mark.smoke
async def test_requests_of_a_killed_engine_continue_on_others(fleet: Fleet) -> None:
    async def kill() -> None:
        fleet.engines[0].kill()

    assert await fleet.answers_despite(kill) == fleet.expected

    async def known_as_gone() -> bool:
        health = {worker.engine_id: worker.health for worker in (await fleet.stack.status()).workers}
        return health["e0"] == telemetry_pb2.ENGINE_HEALTH_GONE

    await until(known_as_gone)
    await failovers_are_counted(fleet)
    finished = (await fleet.gateway_requests())["finished"]
    assert sorted(request["id"] for request in finished) == sorted(sample.id for sample in fleet.step)


async def failovers_are_counted(fleet: Fleet) -> None:
    """Check that failovers count once, by the gateway and by the daemon, on the metrics page and in the journal."""
    page = await fleet.gateway_metrics()
    names = ("failovers", "failover_requests_recomputed", "failover_recomputed_tokens")
    counted = [page[f'orchestrrl_gateway_{name}_total{{engine="e0"}}'] for name in names]

    async def reported() -> bool:
        status = await fleet.stack.status()
        return counted == [*(status.failovers, status.failover_requests_recomputed, status.failover_tokens_recomputed)]

    await until(reported)
    failovers, requests, tokens = counted
    assert 0 < requests <= failovers <= len(fleet.step)
    # Each had its prompt and at least a token, and at most its prompt and all tokens but the last.
    prompts = [len(sample.prompt_ids) for sample in fleet.step]
    assert requests * (min(prompts) + 1) <= tokens <= requests * (max(prompts) + fleet.scenario.max_tokens - 1)
    shown = await fleet.stack.run("status")
    assert f"failovers: {failovers:,.0f} requests continued after their engine failed" in " ".join(shown.split())
    noted = await fleet.stack.run("journal", "--kind", "engine.failovers")
    assert "e0" in noted


async def test_rollouts_continue_without_the_daemon(fleet: Fleet) -> None:
    async def kill() -> None:
        fleet.stack.daemon.kill()

    assert await fleet.answers_despite(kill) == fleet.expected


@pytest.mark.smoke
async def test_restarted_daemon_recovers_the_fleet(fleet: Fleet) -> None:
    async def kill_and_restart() -> None:
        fleet.stack.daemon.kill()
        await fleet.stack.daemon.start()
        started_s = time.monotonic()

        async def found() -> bool:
            status = await fleet.stack.status()
            read = [w for w in status.workers if w.health == telemetry_pb2.ENGINE_HEALTH_OK and w.HasField("age_s")]
            attached = [node for node in status.nodes if node.attached]
            requests = status.requests_running + status.requests_waiting + status.requests_finished
            return len(read) == ENGINES and len(attached) == 2 and requests > 0

        await until(found)
        print(f"found again {time.monotonic() - started_s:.2f} s after it listened")

    first_generation = (await fleet.stack.status()).generation
    assert await fleet.answers_despite(kill_and_restart) == fleet.expected
    assert (await fleet.stack.status()).generation > first_generation


async def test_no_request_moves_on_stale_reports_without_the_agent(fleet: Fleet) -> None:
    async def kill() -> None:
        fleet.stack.agent.kill()

    assert await fleet.answers_despite(kill) == fleet.expected

    async def detached() -> bool:
        return [node.node_id for node in (await fleet.stack.status()).nodes if node.attached] == ["gateway"]

    await until(detached)


async def test_requests_bypass_a_killed_gateway_and_return(fleet: Fleet) -> None:
    async with GatewayClient(fleet.stack.gateway_url, [engine.url for engine in fleet.engines]) as client:
        asking = [
            asyncio.create_task(client.complete(fleet.body(sample), request_id=sample.id)) for sample in fleet.step
        ]
        await fleet.under_way()
        fleet.stack.gateway.kill()
        answers = [answer["choices"][0]["token_ids"] for answer in await asyncio.gather(*asking)]
        assert answers == fleet.expected
        assert client.bypassed > 0
        assert not client.through_gateway

        await fleet.stack.gateway.start()

        async def back() -> bool:
            return client.through_gateway

        await until(back)
        before = client.bypassed
        answer = await client.complete(fleet.body(fleet.step[0]))
        assert answer["choices"][0]["token_ids"] == fleet.expected[0]
        assert client.bypassed == before
