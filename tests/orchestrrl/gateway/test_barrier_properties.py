"""Answers stay correct and no request stays frozen, in any order of barriers, engine failures and moves."""

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from orchestrrl.core.clock import VirtualClock
from orchestrrl.core.errors import Permanent
from orchestrrl.core.operations import (
    CloseBarrier,
    FrozenRequests,
    OpenBarrier,
    PauseMode,
)
from orchestrrl.fleet.reports import BarrierPhase
from planner.model import EngineId, RequestMove
from tests.orchestrrl.gateway.fakes import RunningGroup, World, undisturbed, world

ENGINES = 3
LEASE_S = 20.0

engines = st.integers(0, ENGINES - 1).map(lambda index: f"e{index}")
acts = st.one_of(
    st.tuples(st.just("ask"), st.integers(1, 20)),
    st.tuples(st.just("step"), st.integers(1, 3)),
    st.tuples(st.just("advance"), st.sampled_from([0.1, 1.0, 15.0])),
    st.tuples(st.just("close"), st.sampled_from(PauseMode), st.sampled_from(FrozenRequests), st.booleans()),
    st.tuples(st.just("pause engines")),
    st.tuples(st.just("open"), st.none() | st.integers(0, 9)),
    st.tuples(st.just("renew")),
    st.tuples(st.just("die"), engines),
    st.tuples(st.just("revive"), engines),
    st.tuples(st.just("move"), engines),
)


class Story:
    """Runs one sequence of acts and checks the invariants between them."""

    def __init__(self) -> None:
        self.w: World = world(ENGINES, engine_wait_s=10_000.0, failures=10_000)
        self.jobs: list[tuple[RunningGroup, list[int], int]] = []
        self.tasks: set[asyncio.Task[object]] = set()
        self.leases = 0
        self.stack = AsyncExitStack()

    async def act(self, act: tuple[object, ...]) -> None:
        w = self.w
        match act:
            case ("ask", int(max_tokens)):
                prompt = [*b"prompt ", len(self.jobs)]
                ask = w.ask(request_id=f"r{len(self.jobs)}", prompt=prompt, max_tokens=max_tokens)
                self.jobs.append(
                    (await self.stack.enter_async_context(w.gateway.request_group(ask)), prompt, max_tokens)
                )
            case ("step", int(steps)):
                for _ in range(steps):
                    await self._step()
            case ("advance", float(seconds)):
                await w.clock.advance(seconds)
            case ("close", PauseMode() as mode, FrozenRequests() as frozen, bool(engines_run)):
                self.leases += 1
                now_s = w.clock.now_s()
                until_s, quiet_by_s = now_s + LEASE_S, now_s + LEASE_S / 2
                order = CloseBarrier(f"l{self.leases}", "", mode, frozen, until_s, quiet_by_s, engines_run)
                self._begin(w.gateway.barrier.close(order))
            case ("pause engines",):
                if (closed := w.gateway.barrier.closed) is not None:
                    self._begin(w.gateway.barrier.close(replace(closed, engines_run=False)))
            case ("open", version):
                assert version is None or isinstance(version, int)
                self._begin(w.gateway.barrier.open(OpenBarrier("", version)))
            case ("renew",):
                if (closed := w.gateway.barrier.closed) is not None:
                    w.gateway.barrier.renew(closed.lease, w.clock.now_s() + LEASE_S)
            case ("die", str(name)):
                w.engines[name].die()
            case ("revive", str(name)) if w.engines[name].dead:
                w.engines[name].revive()
            case ("move", str(name)):
                for record in list(w.gateway.ledger):
                    order_of = RequestMove(record.id, record.engine or EngineId(""), EngineId(name))
                    self._begin(w.gateway.move([order_of]))
        await w.settle()

    async def _step(self) -> None:
        """Check that no engine generates a token while the barrier is quiet."""
        quiet = self.w.gateway.barrier.report().phase is BarrierPhase.QUIET
        before = [bytes(record.generated_ids) for record in self.w.gateway.ledger]
        await self.w.step()
        if quiet:
            assert [bytes(record.generated_ids) for record in self.w.gateway.ledger] == before

    def _begin(self, work: "asyncio.Future[object] | object") -> None:
        task: asyncio.Task[object] = asyncio.create_task(work)  # type: ignore[arg-type]
        self.tasks.add(task)

    async def end(self) -> None:
        """End all interventions, and check that all requests complete."""
        w = self.w
        for engine in w.engines.values():
            if engine.dead:
                engine.revive()
        await w.clock.advance(2 * LEASE_S)
        assert w.gateway.barrier.closed is None
        # Engines that missed new weights wait until their version is set.
        newest = w.fleet.policy_version
        if newest is not None:
            await w.gateway.barrier.set_version(tuple(backend.id for backend in w.fleet), newest)
        for _ in range(200):
            await self._step()
            await w.clock.advance(0.5)
        assert not any(engine.paused for engine in w.engines.values())
        for job, prompt, max_tokens in self.jobs:
            (record,) = job.records
            assert job.done, record
            tokens, text, finish_reason = undisturbed(prompt, max_tokens)
            if record.stop_reason == "paused":
                assert list(record.generated_ids) == tokens[: len(record.generated_ids)]
            else:
                assert (list(record.generated_ids), record.text) == (tokens, text)
                assert record.finish_reason == finish_reason
            spans = record.versions.spans(len(record.generated_ids))
            assert [span.start for span in spans] == [0, *(span.end for span in spans[:-1])][: len(spans)]
        outcomes = await asyncio.gather(*self.tasks, return_exceptions=True)
        assert all(not isinstance(outcome, BaseException) or isinstance(outcome, Permanent) for outcome in outcomes)


@given(st.lists(acts, max_size=25))
def test_answers_survive_any_order_of_events(story: list[tuple[object, ...]]) -> None:
    async def run() -> None:
        played = Story()
        async with played.stack:
            for act in story:
                await played.act(act)
            await played.end()
        assert len(played.w.gateway.ledger) == 0
        assert isinstance(played.w.clock, VirtualClock)
        await played.w.fleet.close()

    asyncio.run(run())
