"""Every token has a policy version, and answers beyond their version lag do not continue."""

import pytest

from orchestrrl.core.operations import FrozenRequests
from orchestrrl.gateway.ledger.ledger import OnStale, VersionSpan
from tests.orchestrrl.gateway.barriers import close, open_barrier, tokens_of
from tests.orchestrrl.gateway.fakes import world
from tests.orchestrrl.gateway.test_relay import PROMPT, assert_undisturbed, finish


async def test_every_token_has_a_policy_version() -> None:
    w = world()
    await (await close(w, lease="1"))
    await open_barrier(w, 7, lease="1")
    async with w.gateway.request_group(w.ask(prompt=PROMPT, max_tokens=30)) as job:
        await w.settle()
        for _ in range(4):
            await w.step()
        await (await close(w, lease="2"))
        await open_barrier(w, 8, lease="2")
        for _ in range(3):
            await w.step()
        await (await close(w, lease="3"))
        await open_barrier(w, lease="3")  # the weights are the same
        await finish(w, job)
        (record,) = job.records
        total = len(record.generated_ids)
        assert record.versions.spans(total) == (VersionSpan(7, 0, 4), VersionSpan(8, 4, total))
        assert record.view(w.clock.now_s()).policy_version == 7
    assert w.gateway.version_lags == {1: 1}


async def test_tokens_of_a_coalesced_chunk_count_as_the_older_version() -> None:
    w = world(1, coalesce_tokens=3)
    w.engines["e0"].tokens_per_step = 3
    await (await close(w, lease="1"))
    await open_barrier(w, 1, lease="1")
    async with w.gateway.request_group(w.ask(prompt=PROMPT, max_tokens=30)) as job:
        await w.settle()
        await w.step()
        await (await close(w, lease="2"))
        await open_barrier(w, 2, lease="2")
        await w.step()
        await w.step()
        (record,) = job.records
        assert record.versions.spans(9) == (VersionSpan(1, 0, 6), VersionSpan(2, 6, 9))


async def test_tokens_of_single_token_chunks_count_as_the_newer_version() -> None:
    w = world(1)
    await (await close(w, lease="1"))
    await open_barrier(w, 1, lease="1")
    async with w.gateway.request_group(w.ask(prompt=PROMPT, max_tokens=30, stream=True)) as job:
        await w.settle()
        await w.step()
        await (await close(w, lease="2"))
        await open_barrier(w, 2, lease="2")
        w.engines["e0"].tokens_per_step = 3  # read late, but each of these tokens is newer than the change
        await w.step()
        (record,) = job.records
        assert record.versions.spans(4) == (VersionSpan(1, 0, 1), VersionSpan(2, 1, 4))


async def test_answer_beyond_its_version_lag_is_ended() -> None:
    w = world()
    await (await close(w, lease="1"))
    await open_barrier(w, 1, lease="1")
    async with w.gateway.request_group(w.ask(prompt=PROMPT, max_tokens=30, max_version_lag=1)) as job:
        await w.settle()
        await w.step()
        for version in (2, 3):
            await (await close(w, lease=f"v{version}"))
            assert not job.done
            await open_barrier(w, version, lease=f"v{version}")
        (record,) = job.records
        assert (record.finish_reason, record.stop_reason) == ("abort", "max_version_lag")
        assert len(record.generated_ids) == 1
    assert w.gateway.barrier.stale_total == {OnStale.ABORT: 1}


async def test_answer_beyond_its_version_lag_is_restarted() -> None:
    w = world()
    await (await close(w, lease="1"))
    await open_barrier(w, 1, lease="1")
    async with w.gateway.request_group(
        w.ask(prompt=PROMPT, max_tokens=30, max_version_lag=0, on_stale="restart")
    ) as job:
        await w.settle()
        await w.step()
        await w.step()
        await (await close(w, lease="2"))
        await open_barrier(w, 2, lease="2")
        assert tokens_of(job) == 0
        await finish(w, job)
        assert_undisturbed(job, PROMPT, 30)
        (record,) = job.records
        assert record.versions.spans(99) == (VersionSpan(2, 0, 99),)
    assert w.gateway.barrier.stale_total == {OnStale.RESTART: 1}


async def test_delivered_answer_beyond_its_version_lag_is_ended() -> None:
    w = world()
    await (await close(w, lease="1"))
    await open_barrier(w, 1, lease="1")
    ask = w.ask(prompt=PROMPT, max_tokens=30, max_version_lag=0, on_stale="restart", stream=True)
    async with w.gateway.request_group(ask) as job:
        await w.settle()
        await w.step()
        job.records[0].take_undelivered()
        await (await close(w, lease="2"))
        await open_barrier(w, 2, lease="2")
        assert job.records[0].stop_reason == "max_version_lag"


async def test_frozen_requests_restart_only_with_new_weights() -> None:
    w = world()
    async with w.gateway.request_group(w.ask(prompt=PROMPT, max_tokens=30)) as job:
        await w.settle()
        await w.step()
        await (await close(w, lease="1", frozen=FrozenRequests.RESTART))
        await open_barrier(w, lease="1")
        assert tokens_of(job) == 1
        await (await close(w, lease="2", frozen=FrozenRequests.RESTART))
        await open_barrier(w, 1, lease="2")
        assert tokens_of(job) == 0
        await finish(w, job)
        assert_undisturbed(job, PROMPT, 30)


@pytest.mark.parametrize("stream", [False, True])
async def test_version_lag_is_counted_once_per_answer(stream: bool) -> None:
    w = world()
    await (await close(w, lease="1"))
    await open_barrier(w, 9, lease="1")
    async with w.gateway.request_group(w.ask(prompt=PROMPT, max_tokens=3, stream=stream)) as job:
        await finish(w, job)
    assert w.gateway.version_lags == {0: 1}


async def test_trainer_may_return_to_an_earlier_version() -> None:
    w = world()
    await (await close(w, lease="1"))
    await open_barrier(w, 9, lease="1")
    async with w.gateway.request_group(w.ask(prompt=PROMPT, max_tokens=30, max_version_lag=0)) as job:
        await w.settle()
        await w.step()
        await (await close(w, lease="2"))
        await open_barrier(w, 4, lease="2")
        await finish(w, job)
        assert_undisturbed(job, PROMPT, 30)
    assert w.gateway.barrier.report().policy_version == 4
