"""Each client receives the undisturbed answer once, in any order of moves, kills, stalls and refusals."""

import asyncio
from contextlib import AsyncExitStack

from hypothesis import given
from hypothesis import strategies as st

from orchestrrl.core.operations import (
    OperationItemResult,
)
from orchestrrl.engines.base import CompletionEndpoint, RequestRefused
from orchestrrl.gateway.ledger.ledger import AnswerDelta
from orchestrrl.gateway.routing.backend import EngineBackend
from planner.model import EngineId, RequestMove, RequestState
from tests.orchestrrl.gateway.fakes import RunningGroup, World, chat_prompt, undisturbed, world

ENGINES = ("e0", "e1", "e2")
REQUESTS = 4

engines = st.sampled_from(ENGINES)
requests = st.integers(0, REQUESTS - 1)
events = st.one_of(
    st.tuples(st.just("step"), engines),
    st.tuples(st.just("step"), engines),
    st.tuples(st.just("make"), engines),  # tokens have been sent but not yet read
    st.tuples(st.just("move"), requests, engines),
    st.tuples(st.just("move"), requests, engines),
    st.tuples(st.just("die"), engines),
    st.tuples(st.just("revive"), engines),
    st.tuples(st.just("refuse"), engines),
    st.tuples(st.just("accept"), engines),
    st.tuples(st.just("give_up"), engines),
    st.tuples(st.just("hang"), engines),
    st.tuples(st.just("wake"), engines),
    st.tuples(st.just("read"), requests),
    st.tuples(st.just("settle")),
    st.tuples(st.just("time"), st.sampled_from((0.1, 3.0, 50.0))),
)


class Schedule:
    """Runs events on a world with four requests: one non-streamed, one streamed, one chat, one of tokens alone."""

    def __init__(self, tokens_per_step: int, max_tokens: int) -> None:
        self.w: World = world(len(ENGINES), stall_s=40.0, engine_wait_s=1e6, failures=10**6)
        self.max_tokens = max_tokens
        self.prompts = [
            list(b"first"),
            list("zweite 漢".encode())[:-1],
            chat_prompt([{"role": "user", "content": "third"}]),
            list("vier é".encode()),
        ]
        self.jobs: list[RunningGroup] = []
        self.read: list[list[AnswerDelta]] = [[] for _ in range(REQUESTS)]
        self.moves: list[asyncio.Task[tuple[OperationItemResult, ...]]] = []
        for engine in self.w.engines.values():
            engine.tokens_per_step = tokens_per_step

    async def play(self, schedule: list[tuple]) -> None:  # type: ignore[type-arg]
        watching = asyncio.create_task(self.w.gateway.watch())
        async with AsyncExitStack() as stack:
            limit = self.max_tokens
            for ask in (
                self.w.ask(prompt=self.prompts[0], max_tokens=limit, logprobs=1, request_id="q0"),
                self.w.ask(prompt=self.prompts[1], max_tokens=limit, stream=True, request_id="q1"),
                self.w.ask(
                    CompletionEndpoint.CHAT,
                    messages=[{"role": "user", "content": "third"}],
                    max_tokens=limit,
                    stream=True,
                    logprobs=True,
                    request_id="q2",
                ),
                self.w.ask(
                    CompletionEndpoint.GENERATE,
                    token_ids=self.prompts[3],
                    sampling_params={"max_tokens": limit, "logprobs": 1},
                    stream=True,
                    request_id="q3",
                ),
            ):
                self.jobs.append(await stack.enter_async_context(self.w.gateway.request_group(ask)))
            await self.w.settle()
            for event in schedule:
                await self.play_one(*event)
                self.check_counts()
            await self.recover()
            self.check_answers()
        results = [result for (result,) in await asyncio.gather(*self.moves)]
        for index, job in enumerate(self.jobs):
            done = sum(result.done for result in results if result.id == f"q{index}")
            assert job.records[0].moves == done
        assert not self.w.gateway.relays
        assert all(not engine.attempts for engine in self.w.engines.values())
        self.check_counts()
        watching.cancel()

    async def play_one(self, kind: str, *about: object) -> None:
        engine = self.w.engines.get(str(about[0])) if about else None
        match kind, engine:
            case "step", engine if engine:
                engine.step()
                await self.w.settle()
            case "make", engine if engine:
                engine.step()
            case "die", engine if engine:
                engine.die()
            case "revive", engine if engine:
                engine.revive()
            case "refuse", engine if engine:
                # A refusal would end a request that never ran, so it is applied only if all requests ran.
                if all(job.records[0].generated_ids for job in self.jobs):
                    engine.refuses = RequestRefused("no", 400, {"error": {"message": "no"}})
            case "accept", engine if engine:
                engine.refuses = None
            case "give_up", engine if engine:
                engine.give_up_all()
            case "hang", engine if engine:
                engine.hangs = True
            case "wake", engine if engine:
                engine.hangs = False
            case "move", _:
                index, target = about
                move = RequestMove(
                    self.jobs[index].records[0].id,  # type: ignore[index]
                    self.jobs[index].records[0].engine or EngineId(""),  # type: ignore[index]
                    EngineId(str(target)),
                )
                self.moves.append(asyncio.create_task(self.w.gateway.move([move])))
                await asyncio.sleep(0)
            case "read", _:
                self.take(int(about[0]))  # type: ignore[call-overload]
            case "settle", _:
                await self.w.settle()
            case "time", _:
                await self.w.clock.advance(float(about[0]))  # type: ignore[arg-type]

    async def recover(self) -> None:
        """Repair all engines and wait for the answers."""
        for engine in self.w.engines.values():
            engine.revive()
            engine.refuses = None
            engine.hangs = False
        for _ in range(self.max_tokens * 4 + 50):
            if all(job.done for job in self.jobs):
                return
            await self.w.step()
            await self.w.clock.advance(1.0)
        raise AssertionError(f"not done: {[job.records for job in self.jobs]}")

    def take(self, index: int) -> None:
        self.read[index] += self.jobs[index].records[0].take_undelivered()

    def check_answers(self) -> None:
        for index, (job, prompt) in enumerate(zip(self.jobs, self.prompts, strict=True)):
            (record,) = job.records
            assert record.failure is None
            tokens, text, finish_reason = undisturbed(prompt, self.max_tokens)
            assert list(record.generated_ids) == tokens
            tokens_only = index == 3
            text = "" if tokens_only else text
            assert record.text == text
            assert record.finish_reason == finish_reason
            if index != 1:
                assert record.logprobs is not None
                shown = "token_id:{}" if tokens_only else "<{}>"
                assert [item.token for item in record.logprobs] == [shown.format(token) for token in tokens]
                if tokens_only:
                    assert record.choice_fields["sampling_mask"] == [[token] for token in tokens]
            if record.streaming:
                self.take(index)
                deltas = self.read[index]
                assert [token for delta in deltas for token in delta.chunk.token_ids] == tokens
                assert "".join(delta.text for delta in deltas) == text

    def check_counts(self) -> None:
        """Check the fleet's running totals against a fresh count."""
        for backend in self.w.fleet:
            assert_counts(backend)


def assert_counts(backend: EngineBackend) -> None:
    running = [record for record in backend.records.values() if record.state is RequestState.RUNNING]
    waiting = [record for record in backend.records.values() if record.state is RequestState.WAITING]
    assert backend.running == len(running)
    assert backend.waiting == len(waiting)
    assert backend.running_tokens == sum(record.context_tokens for record in running)
    assert backend.waiting_tokens == sum(record.context_tokens for record in waiting)


@given(schedule=st.lists(events, max_size=60), tokens_per_step=st.integers(1, 4), max_tokens=st.integers(1, 40))
def test_every_client_receives_the_undisturbed_answer_once(
    schedule: list[tuple],  # type: ignore[type-arg]
    tokens_per_step: int,
    max_tokens: int,
) -> None:
    asyncio.run(Schedule(tokens_per_step, max_tokens).play(schedule))
