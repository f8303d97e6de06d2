"""The failover counters, and that each failover is reported to the daemon once."""

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from orchestrrl.fleet.reports import EngineFailovers, FailoverCounts
from orchestrrl.fleet.state import FleetState
from orchestrrl.gateway.failovers import FailoverCounter
from orchestrrl.gateway.metrics import GatewayCollector
from planner.model import EngineId
from tests.orchestrrl.builders import gateway_report
from tests.orchestrrl.gateway.fakes import RunningGroup, World, world
from tests.orchestrrl.gateway.test_relay import PROMPT, finish, move

E0, E1, E2 = EngineId("e0"), EngineId("e1"), EngineId("e2")


async def begun(w: World, count: int, steps: int, **body: object) -> list[RunningGroup]:
    jobs = []
    for index in range(count):
        asked = {"prompt": PROMPT, "max_tokens": 30, **body}
        jobs.append(await w.gateway.request_group(w.ask(request_id=f"r{index}", **asked)).__aenter__())
    await w.settle()
    for _ in range(steps):
        await w.step()
    return jobs


async def ended(w: World, jobs: Sequence[RunningGroup]) -> None:
    for job in jobs:
        await finish(w, job)
        await job.__aexit__()


@pytest.mark.parametrize("tokens", [0, 1, 5])
async def test_failovers_of_a_dead_engine_count_recomputed_contexts(tokens: int) -> None:
    w = world()
    jobs = await begun(w, 6, tokens)
    victims = [job for job in jobs if job.records[0].engine == E0]
    assert len(victims) == 3
    w.engines[E0].die()
    await w.settle()
    assert not w.fleet.failovers.totals  # they have not continued yet
    await ended(w, jobs)
    computed = 3 if tokens else 0
    assert w.fleet.failovers.totals == {E0: FailoverCounts(3, computed, computed * (len(PROMPT) + tokens))}


async def test_engine_that_aborts_requests_counts_as_failed() -> None:
    w = world()
    jobs = await begun(w, 1, 2)
    w.engines[E0].give_up_all()
    await w.settle()
    await ended(w, jobs)
    assert w.fleet.failovers.totals == {E0: FailoverCounts(1, 1, len(PROMPT) + 2)}


async def test_stalled_engine_counts_as_failed() -> None:
    w = world(stall_s=10.0)
    watching = asyncio.create_task(w.gateway.watch())
    jobs = await begun(w, 1, 2)
    w.engines[E0].hangs = True
    await w.clock.advance(15.0)
    await ended(w, jobs)
    watching.cancel()
    assert w.fleet.failovers.totals == {E0: FailoverCounts(1, 1, len(PROMPT) + 2)}


async def test_request_on_successively_dying_engines_is_recomputed_once() -> None:
    w = world(engines=3)
    jobs = await begun(w, 1, 4)
    w.engines[E0].die()
    await w.settle()
    assert jobs[0].records[0].engine == E1
    w.engines[E1].die()
    await w.settle()
    await ended(w, jobs)
    context = len(PROMPT) + 4
    assert w.fleet.failovers.totals == {E0: FailoverCounts(1, 1, context), E1: FailoverCounts(1, 0, 0)}


async def test_request_that_does_not_continue_is_no_failover() -> None:
    w = world(engine_wait_s=5.0, failures=2)
    complete, failing = await begun(w, 2, 3, max_tokens=4)
    w.engines[str(complete.records[0].engine)].step()  # its last token is there, unread
    for engine in w.engines.values():
        engine.die()
    for _ in range(100):
        await w.clock.advance(0.5)
    assert failing.failure is not None
    assert not w.fleet.failovers.totals
    for job in (complete, failing):
        await job.__aexit__()


async def test_move_is_no_failover() -> None:
    w = world()
    jobs = await begun(w, 1, 3)
    moving = move(w, E1, "r0", source=E0)
    await w.settle()
    await w.step()
    assert (await moving).done
    await ended(w, jobs)
    assert not w.fleet.failovers.totals


async def test_restarted_answer_counts_its_prompt_as_recomputed() -> None:
    w = world()
    jobs = await begun(w, 1, 5, presence_penalty=0.5)
    w.engines[str(jobs[0].records[0].engine)].die()
    await ended(w, jobs)
    assert w.fleet.failovers.totals == {E0: FailoverCounts(1, 1, len(PROMPT))}


async def test_metrics_page_has_failovers_by_engine() -> None:
    w = world()
    registry = CollectorRegistry()
    registry.register(GatewayCollector(w.gateway))
    jobs = await begun(w, 4, 3)
    w.engines[E0].die()
    await ended(w, jobs)
    labels = {"engine": "e0"}
    assert registry.get_sample_value("orchestrrl_gateway_failovers_total", labels) == 2
    assert registry.get_sample_value("orchestrrl_gateway_failover_requests_recomputed_total", labels) == 2
    tokens = registry.get_sample_value("orchestrrl_gateway_failover_recomputed_tokens_total", labels)
    assert tokens == 2 * (len(PROMPT) + 3)


async def test_failovers_are_reported_until_acknowledged() -> None:
    w = world()
    jobs = await begun(w, 2, 3)
    w.engines[E0].die()
    await ended(w, jobs)
    reports = [w.gateway.report(), w.gateway.report()]
    assert [[f.counts.failovers for f in report.failovers] for report in reports] == [[1], [1]]
    w.gateway.acknowledge(reports[0].sequence)
    assert not w.gateway.report().failovers


events = st.lists(
    st.one_of(
        st.tuples(st.just("count"), st.sampled_from([E0, E1]), st.none() | st.integers(0, 1000)),
        st.tuples(st.just("report"), st.booleans(), st.booleans()),  # delivered, and its acknowledgement
        st.just(("daemon restarts",)),
        st.just(("gateway restarts",)),
    ),
    max_size=30,
)


@given(events)
def test_each_failover_counts_once_despite_lost_and_repeated_reports(history: list[tuple[object, ...]]) -> None:
    """A daemon's totals include the failovers since its start, and those that were not acknowledged before."""
    gateway, state, sequence, expected = FailoverCounter(), FleetState(), 0, FailoverCounts()
    unknown: list[FailoverCounts] = []  # counted, and not acknowledged
    received: list[FailoverCounts] = []  # as new, by the current daemon
    known = 0  # of these, the ones sent to the current daemon
    for at, event in enumerate(history):
        match event:
            case ("count", str() as engine, tokens):
                assert tokens is None or isinstance(tokens, int)
                gateway.count(EngineId(engine), tokens, float(at))
                unknown.append(FailoverCounts(1, tokens is not None, tokens or 0))
            case ("report", delivered, acknowledged):
                sequence += 1
                failovers = gateway.report(sequence)
                if delivered:
                    for _ in range(2):  # twice
                        report = gateway_report(sequence=sequence, failovers=failovers)
                        received += [new.counts for new in state.fold_gateway(report, float(at))]
                    expected = sum(unknown[known:], expected)
                    known = len(unknown)
                    if acknowledged:
                        gateway.acknowledge(sequence)
                        unknown, known = [], 0
            case ("daemon restarts",):
                state, expected, known, received = FleetState(), FailoverCounts(), 0, []
            case ("gateway restarts",):
                gateway, unknown, known, sequence = FailoverCounter(), [], 0, 0
    assert sum(state.failovers.values(), FailoverCounts()) == expected
    assert sum(received, FailoverCounts()) == expected


def test_acknowledgement_of_unsent_report_is_ignored() -> None:
    failovers = FailoverCounter()
    failovers.count(E0, 5, 1.0)
    failovers.acknowledge(7)
    (received,) = failovers.report(1)
    assert received == EngineFailovers(E0, 1, 1.0, FailoverCounts(1, 1, 5))
    failovers.acknowledge(2)
    assert failovers.report(2) == (received,)
