"""Tests of a gateway that is killed and restarted on its ledger: a client that returns gets its answer, and no token is
generated twice.

On simulated engines over HTTP; all are processes.
"""

import asyncio
import itertools
import os
import resource
import signal
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from front import WITHIN_S, Front, Question, check, session, start_engine, until

from orchestrrl.gateway.client import ClientPatience, GatewayClient
from orchestrrl.gateway.ledger.file import AnswerFile
from orchestrrl.gateway.ledger.pieces import AnswerPiece, key_of
from orchestrrl.lab.testbed.engines import LocalEngine
from tests.orchestrrl.gateway.processes import GatewayProcess, free_port

TOKENS = 1500  # of an answer in progress when the test acts
PROBES = 4  # tokens that gateways have engines generate as a probe
ENGINES = 2


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[LocalEngine]]:
    log_dir = tmp_path_factory.mktemp("engines")

    async def start() -> list[LocalEngine]:
        names = [f"e{index}" for index in range(ENGINES)]
        return await asyncio.gather(*(start_engine(name, log_dir, speed=10, tick_s=0.005) for name in names))

    started = asyncio.run(start())
    yield started
    for engine in started:
        engine.kill()


class Restarts(Front):
    """A gateway with a ledger in `folder`, and the same port each time."""

    def __init__(
        self, engines: list[LocalEngine], gateway: GatewayProcess, http: aiohttp.ClientSession, folder: Path
    ) -> None:
        super().__init__(engines, gateway, http)
        self._ledger = folder / "ledger"

    def _kept(self, questions: Iterable[Question]) -> list[Sequence[AnswerPiece]]:
        """Return the stored parts of these answers on disk."""
        with closing(AnswerFile(self._ledger)) as file:
            return [file.read(key_of(question.id), question.id)[1] for question in questions]

    async def kept_whole(self, questions: Iterable[Question]) -> None:
        """Return when these answers are complete on disk."""
        questions = list(questions)

        async def whole() -> bool:
            return all(pieces and pieces[-1].finish_reason for pieces in self._kept(questions))

        await until(whole)

    async def stopped_midway(self, before: int, questions: Sequence[Question]) -> None:
        """Return when at least a third of their tokens were generated since `before`, all of these are on disk, and
        engines generate no more."""
        await self.more_generated(before, len(questions) * TOKENS // 3)
        await self.pause_all()

        async def written() -> bool:
            kept = sum(len(piece.ids) // 4 for pieces in self._kept(questions) for piece in pieces)
            return kept >= await self.generated() - before - PROBES

        await until(written)

    async def go_on(self) -> None:
        """Resume all engines once the gateway has no request there."""
        await self.quiet()
        await self.resume_all()

    async def generated(self) -> int:
        """Return the tokens that all engines have ever generated."""
        metrics = await asyncio.gather(*(self.metrics(index) for index in range(len(self.engines))))
        return sum(reading.generation_tokens_total for reading in metrics)

    async def more_generated(self, before: int, tokens: int) -> None:
        """Return once this many more tokens were generated."""

        async def enough() -> bool:
            return await self.generated() - before >= tokens

        await until(enough)

    async def quiet(self) -> None:
        for index in range(len(self.engines)):
            await self.idle(index)

    async def number(self, metric: str) -> float:
        """Return a metric of the gateway, or of one of its processes."""
        async with self.http.get(self.url + "/metrics") as response:
            lines = (await response.text()).splitlines()
        return next(float(line.split()[-1]) for line in lines if line.startswith(f"orchestrrl_gateway_{metric} "))


async def gateway_of(engines: list[LocalEngine], folder: Path, *arguments: str) -> GatewayProcess:
    flags = [f"--engine=e{index}={engine.url}" for index, engine in enumerate(engines)]
    ledger = ("--ledger", str(folder / "ledger"))
    command = ["--engine-kind", "simulated", "--drain-s", "0", *ledger, *flags, *arguments]
    gateway = GatewayProcess(folder / "gateway.log", command, free_port())
    await gateway.start()
    return gateway


@pytest.fixture(params=[1, 2], ids=["one process", "two processes"])
async def front(engines: list[LocalEngine], tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Restarts]:
    gateway = await gateway_of(engines, tmp_path, "--processes", str(request.param))
    async with session() as http:
        yield Restarts(engines, gateway, http, tmp_path)
    await gateway.stop()


def asked(first: int, count: int, *, max_tokens: int = TOKENS, **more: Any) -> list[Question]:
    """Send the requests; every other one is streamed."""
    return [
        Question(number, max_tokens=max_tokens, stream=number % 2 == 1, more=more)
        for number in range(first, first + count)
    ]


def kill(gateway: GatewayProcess) -> None:
    """Kill all processes of the gateway at once."""
    below = children(gateway.pid)
    gateway.kill()
    for pid in below:
        os.kill(pid, signal.SIGKILL)


def children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [child for child in map(int, text.split()) if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()]


async def broken(asking: "Iterable[asyncio.Task[Any]]") -> None:
    """Check that every connection was broken."""
    for outcome in await asyncio.gather(*asking, return_exceptions=True):
        assert isinstance(outcome, aiohttp.ClientError | AssertionError), outcome


@pytest.mark.smoke
async def test_killed_gateway_continues_requests_after_its_restart(front: Restarts) -> None:
    done, under_way = asked(100, 4, max_tokens=400), asked(200, 6)
    await front.ask_all(done)
    await front.kept_whole(done)
    before = await front.generated()
    asking = [front.asking(question) for question in under_way]
    await front.stopped_midway(before, under_way)
    kill(front.gateway)
    await broken(asking)
    await front.go_on()
    before = await front.generated()
    await front.gateway.start()

    await front.ask_all(done)
    assert await front.generated() == before  # finished requests are not generated again
    await front.ask_all(under_way)
    again, all_tokens = await front.generated() - before, len(under_way) * TOKENS
    print(f"of {all_tokens} tokens {again} were made after the restart")
    assert again < 0.9 * all_tokens
    await front.kept_whole(under_way)
    await front.ask_all(under_way)
    assert await front.generated() == before + again


async def test_one_of_two_killed_processes_loses_nothing(engines: list[LocalEngine], tmp_path: Path) -> None:
    gateway = await gateway_of(engines, tmp_path, "--processes", "2")
    async with session() as http:
        front = Restarts(engines, gateway, http, tmp_path)
        questions = asked(300, 8)
        before = await front.generated()
        asking = [front.asking(question) for question in questions]
        await front.more_generated(before, len(questions) * TOKENS // 2)
        os.kill(children(gateway.pid)[0], signal.SIGKILL)
        outcomes = await asyncio.gather(*asking, return_exceptions=True)
        cut = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
        # The other process takes them at once: the claims of the killed one have ended.
        await front.ask_all(questions)
        made = await front.generated() - before
        print(f"{len(cut)} of {len(questions)} requests were cut; {made / TOKENS:.2f} answers were made in all")
        assert made < (len(questions) + len(cut)) * TOKENS or not cut
        await gateway.stop()


async def test_client_that_left_and_returned_gets_its_answer(front: Restarts) -> None:
    questions = asked(400, 4)
    before = await front.generated()
    asking = [front.asking(question) for question in questions]
    await front.stopped_midway(before, questions)
    for task in asking:
        task.cancel()
    await asyncio.gather(*asking, return_exceptions=True)
    await front.go_on()
    await front.ask_all(questions)
    made = await front.generated() - before
    print(f"{made} tokens were made for answers of {len(questions) * TOKENS}")
    assert made < 1.25 * len(questions) * TOKENS


async def test_id_is_refused_while_another_process_has_it(front: Restarts) -> None:
    (question,) = asked(500, 1)
    before = await front.generated()
    asking = front.asking(question)
    await front.more_generated(before, 50)
    await front.pause_all()
    refusals = await asyncio.gather(*(front.refused(question) for _ in range(8)))
    assert {status for status, _ in refusals} == {409}
    assert "in flight" in refusals[0][1]["message"]
    await front.resume_all()
    check(question, await asking)
    assert await front.generated() - before == TOKENS
    status, error = await front.refused(Question(question.number, max_tokens=7))
    assert (status, "another body" in error["message"]) == (409, True)


async def test_request_that_cannot_be_continued_restarts(front: Restarts) -> None:
    questions = asked(600, 4, presence_penalty=0.1)
    before = await front.generated()
    asking = [front.asking(question) for question in questions]
    await front.stopped_midway(before, questions)
    kill(front.gateway)
    await broken(asking)
    await front.go_on()
    await front.gateway.start()
    await front.ask_all(questions)


async def test_full_disk_does_not_stop_requests(engines: list[LocalEngine], tmp_path: Path) -> None:
    gateway = await gateway_of(engines, tmp_path)
    async with session() as http:
        front = Restarts(engines, gateway, http, tmp_path)
        await front.ask_all(asked(700, 4, max_tokens=400))
        # No file of the process may grow beyond this, as with a quota.
        _, most = resource.prlimit(gateway.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(gateway.pid, resource.RLIMIT_FSIZE, (100_000, most))
        for first in (710, 720, 730, 740):
            await front.ask_all(asked(first, 10, max_tokens=400))

        async def failing() -> bool:
            return await front.number("ledger_failing") == 1

        await until(failing)
        resource.prlimit(gateway.pid, resource.RLIMIT_FSIZE, (most, most))
        tries = itertools.count(100_000)

        async def tried_again() -> bool:  # with something to write, it is full
            await front.ask_all(asked(next(tries), 1, max_tokens=400))
            return not await failing()

        await until(tried_again)
        questions = asked(800, 10, max_tokens=400)
        await front.ask_all(questions)
        await front.kept_whole(questions)
        before = await front.generated()
        kill(gateway)
        await gateway.start()
        await front.ask_all(questions)
        assert await front.generated() == before
        await gateway.stop()
        log = (tmp_path / "gateway.log").read_text()
        assert log.count("answers cannot be stored") == 1


async def test_trainers_client_gets_its_answers_from_the_restarted_gateway(front: Restarts) -> None:
    questions = asked(900, 6)
    # Its clients wait for any start time.
    patience = ClientPatience(connect_s=2.0, probe_first_s=0.05, probe_cap_s=0.2, watch_s=0.1, restart_s=WITHIN_S)
    async with GatewayClient(front.url, [engine.url for engine in front.engines], patience=patience) as client:
        before = await front.generated()
        asking = [asyncio.create_task(client.complete(question.body, request_id=question.id)) for question in questions]
        await front.stopped_midway(before, questions)
        kill(front.gateway)
        await front.go_on()
        await front.gateway.start()
        answers = await asyncio.gather(*asking)
        assert [answer["choices"][0]["token_ids"] for answer in answers] == [q.answer[0] for q in questions]
        made = await front.generated() - before
        print(f"{made} tokens were made for answers of {len(questions) * TOKENS}")
        assert made < 1.25 * len(questions) * TOKENS
        assert client.bypassed == 0
