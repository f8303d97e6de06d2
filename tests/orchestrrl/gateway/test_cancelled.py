"""Cancellation of answers: redundant ones of a group, and by order."""

from planner.model import RequestId, RequestState
from tests.orchestrrl.gateway.barriers import close, open_barrier
from tests.orchestrrl.gateway.fakes import RunningGroup, undisturbed, world
from tests.orchestrrl.gateway.test_relay import PROMPT, finish


async def test_redundant_answers_of_a_group_are_ended() -> None:
    w = world()
    async with w.gateway.request_group(w.ask(prompt=PROMPT, max_tokens=30, n=4, group_enough=2)) as job:
        await w.settle()
        for record, limit in zip(job.records, (4, 9, 20, 30), strict=True):
            engine = w.engines[record.engine or ""]
            engine.attempts[record.attempt_id].left = limit
        for _ in range(12):
            await w.step()
        assert job.done
        assert [record.finish_reason for record in job.records] == ["length", "length", "abort", "abort"]
        assert [record.stop_reason for record in job.records] == [None, None, "redundant", "redundant"]
        assert [len(record.generated_ids) for record in job.records[:2]] == [4, 9]
        assert not any(engine.attempts for engine in w.engines.values())
    assert w.gateway.cancelled_total == {"redundant": 2}
    assert w.gateway.groups.members("r") == ()


async def test_late_request_of_a_complete_group_is_ended_at_once() -> None:
    w = world(1)
    async with w.gateway.request_group(
        w.ask(request_id="g", prompt=PROMPT, max_tokens=30, n=2, group_enough=2)
    ) as group:
        await w.settle()
        w.engines["e0"].attempts["g-0~1"].left = 1
        await w.step()
        ask = w.ask(request_id="late", prompt=PROMPT, max_tokens=30)
        ask.records[0].group, ask.records[0].group_enough = "g", 1
        async with w.gateway.request_group(ask) as late:
            await w.settle()
            assert [record.stop_reason for record in late.records] == ["redundant"]
            assert not any(request.request_id.startswith("late") for request in w.engines["e0"].seen)
        await finish(w, group)
        assert_undisturbed_tokens(group, 1)


def assert_undisturbed_tokens(job: RunningGroup, index: int) -> None:
    assert list(job.records[index].generated_ids) == undisturbed(PROMPT, 30)[0]


async def test_cancel_ends_requests_in_every_state() -> None:
    w = world(1)
    w.engines["e0"].max_sequences = 1
    async with w.gateway.request_group(w.ask(request_id="runs", prompt=PROMPT, max_tokens=30)) as runs:
        await w.settle()
        await w.step()
        async with w.gateway.request_group(
            w.ask(request_id="g", prompt=PROMPT, max_tokens=30, n=2, group_enough=2)
        ) as group:
            await w.settle()
            await (await close(w))
            async with w.gateway.request_group(w.ask(request_id="held", prompt=PROMPT, max_tokens=30)) as held:
                await w.settle()
                names = [RequestId("runs"), RequestId("held"), RequestId("unknown")]
                cancelled = w.gateway.cancel(names, ["g", "unknown"], "operator")
                assert cancelled == ("runs", "held", "g-0", "g-1")
                await w.settle()
                for job in (runs, group, held):
                    assert job.done
                    assert {record.stop_reason for record in job.records} == {"operator"}
                assert w.gateway.cancel(names, ["g"], "again") == ()
            await open_barrier(w)
    assert w.gateway.ledger.finished_by_reason == {"abort": 4}
    assert w.gateway.cancelled_total == {"other": 4}
    assert [record.state for record in held.records] == [RequestState.WAITING]
