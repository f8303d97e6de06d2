"""Tests of adding and removing engines by an operator's commands during a step: no request is lost, and every answer is
correct."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from fleet import ENGINES, Fleet
from front import WITHIN_S, until

from orchestrrl.lab.demo.scenario import Sample, load_scenario, samples
from orchestrrl.lab.demo.stack import engines, orchestrrl
from orchestrrl.lab.testbed.engines import LocalEngine


@pytest.fixture
async def spare(tmp_path: Path) -> AsyncIterator[tuple[Fleet, LocalEngine]]:
    """Start a fleet for a slow step, and one more engine that is not configured."""
    slow = {"prompts": 12, "samples": 4, "max_tokens": 2000, "engines": ENGINES + 1, "speed": 3.0}
    scenario = load_scenario("simulated").model_copy(update=slow)
    async with engines(scenario, "simulated", tmp_path) as running:
        *known, extra = running
        async with orchestrrl(scenario, "simulated", known, tmp_path) as stack:
            yield Fleet(scenario, samples(scenario, "simulated", 7), known, stack), extra


async def operator(fleet: Fleet, *words: str) -> dict[str, Any]:
    """Run `orchestrrl engines ...` as a process and return its output."""
    command = ["-m", "orchestrrl", "engines", *words, "--json", "--daemon", fleet.stack.daemon_address]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, *command, stdout=pipe, stderr=pipe)
    out, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    answer: dict[str, Any] = json.loads(out)
    return answer


async def on(fleet: Fleet, engine: str) -> dict[str, dict[str, Any]]:
    """Return the gateway's requests on the engine, by id."""
    in_flight = (await fleet.gateway_requests())["in_flight"]
    return {request["id"]: request for request in in_flight if request["engine"] == engine}


async def test_step_continues_while_engines_are_added_and_removed(spare: tuple[Fleet, LocalEngine]) -> None:
    fleet, extra = spare
    halves = fleet.step[::2], fleet.step[1::2]
    timeout = aiohttp.ClientTimeout(total=WITHIN_S)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:

        def ask(half: list[Sample]) -> list["asyncio.Task[list[int]]"]:
            return [asyncio.create_task(fleet._ask(session, sample)) for sample in half]

        asking = ask(halves[0])
        await fleet.under_way()

        # Add one without an agent: only the gateway finds it healthy.
        added = await operator(fleet, "add", "e3", "--url", extra.url, "--configuration", "as-started")
        assert (added["draining"], added["reported"]) == (False, False)
        asking += ask(halves[1])

        async def serves() -> bool:
            return any(request["generated_tokens"] for request in (await on(fleet, "e3")).values())

        await until(serves)

        # Drain one, and kill the daemon meanwhile. No request ends there in between.
        async with session.post(f"{fleet.engines[1].url}/pause?mode=keep&clear_cache=false") as paused:
            assert paused.status == 200
        before = set(await on(fleet, "e1"))
        assert before
        await operator(fleet, "drain", "e1", "--move", "--reason", "it is wanted elsewhere")
        fleet.stack.daemon.kill()
        await fleet.stack.daemon.start()
        emptied = await operator(fleet, "drain", "e1", "--move", "--wait", "--timeout-s", str(WITHIN_S))
        assert (emptied["draining"], emptied["requests"]) == (True, 0)
        known = await fleet.gateway_requests()
        moved = [r for r in known["in_flight"] + known["finished"] if r["id"] in before and r["engine"] != "e1"]
        assert {r["id"] for r in moved} == before, "its requests continued on other engines"
        assert all(request["moves"] for request in moved)

        # Its agent reports it healthy, and then dead; it stays removed.
        await operator(fleet, "remove", "e1")
        fleet.engines[1].kill()
        listed = await operator(fleet, "list")
        assert [worker["engine_id"] for worker in listed["engines"]] == ["e0", "e2", "e3"]

        answers = dict(zip((s.id for half in halves for s in half), await asyncio.gather(*asking), strict=True))
    assert [answers[sample.id] for sample in fleet.step] == fleet.expected
    finished = (await fleet.gateway_requests())["finished"]
    assert sorted(request["id"] for request in finished) == sorted(sample.id for sample in fleet.step)
    assert {request["finish_reason"] for request in finished} <= {"stop", "length"}
