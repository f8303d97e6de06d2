"""All parts of the gateway together, in any order: requests, clients that leave and return, engines, moves, routes,
expected engines, barriers, policy versions, groups, queue and ledger, and a gateway that is restarted on the same
ledger."""

import asyncio
import gc
import tempfile
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest

from orchestrrl.core.clock import VirtualClock
from orchestrrl.core.errors import Permanent
from orchestrrl.core.operations import (
    CloseBarrier,
    EngineRoute,
    FrozenRequests,
    OpenBarrier,
    PauseMode,
)
from orchestrrl.engines.base import CompletionEndpoint, RequestRefused
from orchestrrl.fleet.reports import BarrierPhase
from orchestrrl.gateway.core import Gateway
from orchestrrl.gateway.http.completion_requests import read_completion_request
from orchestrrl.gateway.ledger import store as store_module
from orchestrrl.gateway.ledger.ledger import DuplicateRequest, RequestRecord
from orchestrrl.gateway.ledger.store import LedgerStore, RetentionPolicy
from orchestrrl.gateway.metrics import GatewayCollector
from orchestrrl.gateway.relay import RelayLimits
from orchestrrl.gateway.routing.backend import EngineBackend
from orchestrrl.gateway.routing.backends import EngineBackends
from orchestrrl.gateway.routing.strategies import STRATEGIES, RoutingPolicy
from planner.model import EngineId, NodeId, RequestId, RequestMove, RequestState
from tests.orchestrrl.gateway.fakes import FakeEngine, RunningGroup, logprob_of, undisturbed

ENGINES = ("e0", "e1", "e2")
LEASE_S = 20.0
LONGER_THAN_ANY_S = 1e6
HANGS_AFTER_S = 60.0  # bounds a test that hangs

engines = st.sampled_from(ENGINES)
some = st.integers(0, 5)  # among the connected clients


@dataclass(frozen=True)
class Want:
    """The request of one client."""

    n: int
    stream: bool
    text: bool
    immovable: bool
    logprobs: bool
    max_tokens: int
    group: str
    enough: int
    max_lag: int | None
    on_stale: str
    session: str

    def body(self, number: int) -> dict[str, Any]:
        prompt = f"prompt {number}é"
        body: dict[str, Any] = {"prompt": prompt if self.text else list(prompt.encode()), "max_tokens": self.max_tokens}
        body |= {"n": self.n} if self.n > 1 else {}
        body |= {"session_id": self.session} if self.session else {}
        body |= {"stream": True} if self.stream else {}
        body |= {"presence_penalty": 0.5} if self.immovable else {}
        body |= {"logprobs": 1} if self.logprobs else {}
        body |= {"group_enough": self.enough} if self.enough else {}
        body |= {"max_version_lag": self.max_lag, "on_stale": self.on_stale} if self.max_lag is not None else {}
        return body


wants = st.builds(
    Want,
    n=st.sampled_from((1, 1, 3)),
    stream=st.booleans(),
    text=st.booleans(),
    immovable=st.sampled_from((False, False, True)),
    logprobs=st.booleans(),
    max_tokens=st.integers(1, 24),
    group=st.sampled_from(("", "", "g", "h")),
    enough=st.integers(0, 2),
    max_lag=st.sampled_from((None, None, 0, 1)),
    on_stale=st.sampled_from(("abort", "restart")),
    session=st.sampled_from(("", "", "s", "t")),
)
acts = st.one_of(
    st.tuples(st.just("ask"), wants),
    st.tuples(st.just("ask"), wants),
    st.tuples(st.just("step"), st.integers(1, 4)),
    st.tuples(st.just("step"), st.integers(1, 4)),
    st.tuples(st.just("make"), engines),  # tokens have been sent but not yet read
    st.tuples(st.just("advance"), st.sampled_from((0.1, 1.0, 12.0, 50.0))),
    st.tuples(st.just("leave"), some),
    st.tuples(st.just("again"), some),
    st.tuples(st.just("fault"), st.sampled_from(("die", "refuse", "hang", "give_up")), engines),
    st.tuples(st.just("mend"), engines),
    st.tuples(st.just("move"), some, engines, st.sampled_from((0.0, 0.0, 5.0))),
    st.tuples(st.just("routes"), st.tuples(*[st.sampled_from(("in", "in", "in", "draining", "out", "harness"))] * 3)),
    st.tuples(st.just("expect"), st.frozensets(engines), st.sampled_from((0.0, 5.0, 60.0))),
    st.tuples(st.just("close"), st.sampled_from(PauseMode), st.sampled_from(FrozenRequests)),
    st.tuples(st.just("open"), st.none() | st.integers(0, 4), st.sampled_from(((), (), ("e0",))), st.booleans()),
    st.tuples(st.just("renew")),
    st.tuples(st.just("name_versions")),
    st.tuples(st.just("cancel"), some),
    st.tuples(st.just("cancel_group"), st.sampled_from(("g", "h"))),
    st.tuples(st.just("write")),
    st.tuples(st.just("restart")),
)


@dataclass(eq=False)
class Client:
    name: str
    number: int
    want: Want
    job: RunningGroup | None = None
    task: "asyncio.Task[None] | None" = None
    read: dict[RequestId, tuple[list[int], list[str]]] = field(default_factory=dict)  # over this connection
    ends: int = 0

    @property
    def there(self) -> bool:
        return self.task is not None and not self.task.done()

    def grown(self, record: RequestRecord) -> None:
        tokens, text = self.read.setdefault(record.id, ([], []))
        for delta in record.take_undelivered():
            tokens += delta.chunk.token_ids
            text.append(delta.text)


class Story:
    """Runs one sequence of acts and checks the invariants between them."""

    def __init__(self, path: Path | None, depth: int, policy: str) -> None:
        self.clock = VirtualClock(1000.0)
        self.path = path
        self.depth = depth
        self.policy = policy
        self.harnesses: dict[str, FakeEngine] = {}  # by URL
        self.urls: dict[str, str] = {}
        self.draining: set[str] = set()
        self.out: set[str] = set()
        self.expected: tuple[list[EngineId], float] = [], 0.0  # the expected engines and their deadline
        for name in ENGINES:
            self.build(name)
        self.clients: list[Client] = []
        self.tasks: set[asyncio.Task[Any]] = set()
        self.leases = 0
        self.refused = False
        self.orphans: set[str] = set()  # paused by an ended gateway; the next one resumes those in its routes
        self.versions: dict[tuple[RequestId, int], int | None] = {}  # the version of each token, as on its engine
        self.gateway: Gateway
        self.watching: asyncio.Task[None]

    def build(self, name: str) -> None:
        url = f"http://{name}/{len(self.harnesses)}"
        self.urls[name] = url
        self.harnesses[url] = FakeEngine(url=url)

    def engine(self, name: str) -> FakeEngine:
        return self.harnesses[self.urls[name]]

    @property
    def fleet(self) -> EngineBackends:
        return self.gateway.fleet

    # --- the gateway ---

    async def begin(self, *, newest: int | None = None, known: dict[EngineId, int | None] | None = None) -> None:
        fleet = EngineBackends(
            self.harnesses.__getitem__, clock=self.clock, routing=RoutingPolicy(self.policy, queue_depth=self.depth)
        )
        limits = RelayLimits(engine_wait_s=LONGER_THAN_ANY_S, stall_s=40.0, failures=10**6)
        self.gateway = Gateway(NodeId("gateway"), fleet, limits=limits)
        if self.path is not None:
            self.gateway.store = LedgerStore(RetentionPolicy(self.path, from_s=0.0), self.clock)
            self.gateway.store.start()
        self.route(newest=newest, known=known)
        self.watching = asyncio.create_task(self.gateway.watch())
        registry = CollectorRegistry(auto_describe=False)
        registry.register(GatewayCollector(self.gateway))
        self.registry = registry
        await self.settle()

    async def finish(self) -> None:
        """Shut down in the order of the service: the pause barrier, the clients, the ledger, and the other parts."""
        await self.driven(self.gateway.barrier.stop())
        for client in self.clients:
            if client.task is not None:
                client.task.cancel()
        await asyncio.gather(*(client.task for client in self.clients if client.task), return_exceptions=True)
        await self.settle()
        self.check_empty()
        if self.gateway.store is not None:
            assert not self.gateway.store._entries
            await self.gateway.store.close()
        self.watching.cancel()
        await asyncio.gather(self.watching, return_exceptions=True)
        outcomes = await self.driven(asyncio.gather(*self.tasks, return_exceptions=True))
        for outcome in outcomes:
            assert not isinstance(outcome, BaseException) or isinstance(outcome, Permanent), outcome
        self.tasks.clear()
        await self.fleet.close()

    def route(self, *, newest: int | None = None, known: dict[EngineId, int | None] | None = None) -> None:
        new_routes = [
            EngineRoute(
                EngineId(name),
                self.urls[name],
                draining=name in self.draining,
                policy_version=(known or {}).get(EngineId(name)),
                newest_policy_version=newest,
            )
            for name in ENGINES
            if name not in self.out
        ]
        assert not self.gateway.set_routes(new_routes, *self.expected)

    # --- acts ---

    async def act(self, act: tuple[Any, ...]) -> None:
        kind, *about = act
        if kind in ("open", "name_versions", "restart", "routes"):
            await self.settle()  # sent tokens are read before versions change
        await getattr(self, f"act_{kind}")(*about)
        if kind != "make":
            await self.settle()
            self.check()

    async def act_ask(self, want: Want) -> None:
        number = len(self.clients)
        client = Client(f"c{number}", number, want)
        self.clients.append(client)
        await self.send(client)

    async def send(self, client: Client) -> None:
        body = client.want.body(client.number)
        ask = read_completion_request(
            CompletionEndpoint.COMPLETIONS,
            body,
            request_id=client.name,
            group=client.want.group,
            tag="",
            default_model="model",
            now_s=self.clock.now_s(),
        )
        client.job = job = self.gateway.request_group(ask, body)
        client.read.clear()
        client.task = task = asyncio.create_task(job.run(client.grown if ask.streaming else None))
        while self.gateway.store is not None and job._entry is None and not task.done():
            await asyncio.sleep(0.0005)

    async def act_leave(self, number: int) -> None:
        there = [client for client in self.clients if client.there]
        if there:
            client = there[number % len(there)]
            assert client.task is not None
            client.task.cancel()

    async def act_again(self, number: int) -> None:
        """Repeat a request id. With the ledger it is the same request, otherwise a new one."""
        gone = [client for client in self.clients if not client.there]
        if gone:
            await self.settle()
            client = gone[number % len(gone)]
            self.check_ended(client)
            await self.send(client)

    async def act_step(self, steps: int) -> None:
        for _ in range(steps):
            quiet = self.gateway.barrier.report().phase is BarrierPhase.QUIET
            before = [bytes(record.generated_ids) for record in self.gateway.ledger]
            for harness in self.harnesses.values():
                self.make(harness)
            await self.settle()
            assert not quiet or [bytes(record.generated_ids) for record in self.gateway.ledger] == before

    async def act_make(self, name: str) -> None:
        self.make(self.engine(name))

    def make(self, harness: FakeEngine) -> None:
        """Generate one token per request, with the engine's version according to the gateway."""
        before = {name: len(attempt.context) for name, attempt in harness.attempts.items()}
        on = {
            record.attempt_id: (record, relay.backend)
            for record in self.gateway.ledger
            if (relay := self.gateway.relays.get(record.id)) is not None and relay.backend is not None
        }
        attempts = dict(harness.attempts)
        harness.step()
        for name, attempt in attempts.items():
            if name in on and len(attempt.context) > before[name]:
                record, backend = on[name]
                prompt = len(bytes(f"prompt {self.number_of(record)}é".encode()))
                self.versions[record.id, before[name] - prompt] = backend.policy_version

    def number_of(self, record: RequestRecord) -> int:
        return int(record.id.removeprefix("c").partition("-")[0])

    async def act_advance(self, seconds: float) -> None:
        await self.clock.advance(seconds)

    async def act_fault(self, kind: str, name: str) -> None:
        engine = self.engine(name)
        if kind == "die":
            engine.die()
        elif kind == "refuse":
            self.refused = True
            engine.refuses = RequestRefused("no", 400, {"error": {"message": "no"}})
        elif kind == "hang":
            engine.hangs = True
        else:
            engine.give_up_all()

    async def act_mend(self, name: str) -> None:
        self.mend(self.engine(name))

    def mend(self, engine: FakeEngine) -> None:
        if engine.dead:
            engine.revive()
        engine.refuses = None
        engine.hangs = False

    async def act_move(self, number: int, name: str, hold_s: float) -> None:
        there = list(self.gateway.ledger)
        if there:
            record = there[number % len(there)]
            order = RequestMove(record.id, record.engine or EngineId(""), EngineId(name), hold_s)
            self.begin_task(self.gateway.move([order]))

    async def act_routes(self, states: tuple[str, ...]) -> None:
        self.out = {name for name, state in zip(ENGINES, states, strict=True) if state == "out"}
        self.draining = {name for name, state in zip(ENGINES, states, strict=True) if state == "draining"}
        for name, state in zip(ENGINES, states, strict=True):
            if state == "harness":
                self.build(name)
        self.route()

    async def act_expect(self, names: frozenset[str], seconds: float) -> None:
        self.expected = sorted(map(EngineId, names)), self.clock.now_s() + seconds
        self.route()

    async def act_close(self, mode: PauseMode, frozen: FrozenRequests) -> None:
        self.leases += 1
        now_s = self.clock.now_s()
        order = CloseBarrier(f"l{self.leases}", "", mode, frozen, now_s + LEASE_S, now_s + LEASE_S / 2)
        self.begin_task(self.gateway.barrier.close(order))

    async def act_open(self, version: int | None, without: tuple[str, ...], anyhow: bool) -> None:
        closed = self.gateway.barrier.closed
        if closed is not None or anyhow:
            left_out = tuple(EngineId(name) for name in without if self.fleet.get(EngineId(name)) is not None)
            lease = "" if anyhow or closed is None else closed.lease
            self.begin_task(self.gateway.barrier.open(OpenBarrier(lease, version, left_out)))

    async def act_renew(self) -> None:
        if (closed := self.gateway.barrier.closed) is not None:
            self.gateway.barrier.renew(closed.lease, self.clock.now_s() + LEASE_S)

    async def act_name_versions(self) -> None:
        """Set the version of engines that missed new weights."""
        newest = self.fleet.policy_version
        if newest is not None:
            await self.gateway.barrier.set_version(tuple(backend.id for backend in self.fleet), newest)

    async def act_cancel(self, number: int) -> None:
        there = list(self.gateway.ledger)
        if there:
            self.gateway.cancel([there[number % len(there)].id], (), "cancelled")

    async def act_cancel_group(self, group: str) -> None:
        self.gateway.cancel((), [group], "cancelled")
        assert all(record.done for record in self.gateway.groups.members(group))

    async def act_write(self) -> None:
        """Collect the growth of the answers into the ledger."""
        if self.gateway.store is not None:
            if self.gateway.store._progress is not None:
                self.gateway.store._progress.cancel()
            self.gateway.store._collect_progress()

    async def act_restart(self) -> None:
        newest = self.fleet.policy_version
        known = {backend.id: backend.policy_version for backend in self.fleet}
        outdated = {backend.id for backend in self.fleet if backend.outdated}
        await self.finish()
        for harness in self.harnesses.values():  # and its successor finds the engines that it had paused
            harness.attempts.clear()
        self.orphans |= {harness.url for harness in self.harnesses.values() if harness.paused}
        if newest is not None:
            known = {name: None if name in outdated else version for name, version in known.items()}
        await self.begin(newest=newest, known=known)

    def begin_task(self, work: Any) -> None:
        self.tasks.add(asyncio.create_task(work))

    # --- invariants ---

    async def driven(self, work: Awaitable[Any]) -> Any:
        """Drive the world until the awaitable is done, and return its result."""
        task = asyncio.ensure_future(work)
        for _ in range(1000):
            await self.settle()
            if task.done():
                break
            await self.clock.advance(0.25)
        assert task.done(), task
        return task.result()

    async def settle(self) -> None:
        await self.clock.advance(0.0)
        await self.clock.advance(0.0)

    def check(self) -> None:
        generate_latest(self.registry)
        self.gateway.report()
        for backend in self.fleet:
            assert_counts(backend)
        for relay in self.gateway.relays.values():
            record = relay.record
            if record.done:
                continue
            spans = record.versions.spans(len(record.generated_ids))
            versions = {at: span.version for span in spans for at in range(span.start, span.end)}
            assert versions == {at: self.versions[record.id, at] for at in range(len(record.generated_ids))}
            if record.max_version_lag is not None and relay.backend is not None and not relay.backend.paused:
                assert record.versions.lag(self.fleet.policy_version) <= record.max_version_lag, record
        for client in self.clients:
            if client.task is not None and client.task.done() and not client.task.cancelled():
                self.check_ended(client)

    def check_ended(self, client: Client) -> None:
        task, job = client.task, client.job
        if task is None or job is None or not task.done() or task.cancelled():
            return
        assert task.exception() is None or isinstance(task.exception(), DuplicateRequest), task.exception()
        if task.exception() is not None:
            raise AssertionError("the id is not in use") from task.exception()
        if job.failure is not None:
            statuses = {400} if self.refused else set()
            statuses |= {502} if client.want.immovable and client.want.stream else set()
            assert job.failure.status in statuses, job.failure
            return
        prompt = list(f"prompt {client.number}é".encode())
        tokens, text, reason = undisturbed(prompt, client.want.max_tokens)
        for record in job.records:
            made = list(record.generated_ids)
            assert record.done
            if record.finish_reason == "abort":
                assert record.stop_reason in ("paused", "max_version_lag", "redundant", "cancelled")
                assert made == tokens[: len(made)]
                assert text.startswith(record.text)
            else:
                assert (made, record.text, record.finish_reason) == (tokens, text, reason)
            if client.want.logprobs and made:
                expected = [logprob_of([*prompt, *made[:at]], token) for at, token in enumerate(made)]
                assert record.logprobs == expected
            if client.want.stream:
                client.grown(record)
                read_tokens, read_text = client.read[record.id]
                assert (read_tokens, "".join(read_text)) == (made, record.text)
            spans = record.versions.spans(len(made))
            assert [span.start for span in spans] == [0, *(span.end for span in spans[:-1])][: len(spans)]
            assert not made or spans[-1].end == len(made)

    def check_empty(self) -> None:
        assert len(self.gateway.ledger) == 0
        assert not self.gateway.relays
        assert not self.gateway.groups._groups
        assert len(self.fleet.queue) == 0
        for backend in self.fleet:
            assert not backend.records
            assert not backend.reserved
            assert_counts(backend)

    async def end(self) -> None:
        """End all interventions, and check that all requests complete."""
        for harness in self.harnesses.values():
            self.mend(harness)
        self.out = set()
        self.draining = set()
        self.route()
        await self.clock.advance(3 * LEASE_S)
        assert self.gateway.barrier.closed is None
        await self.act_name_versions()
        await self.clock.advance(100.0)
        for _ in range(60):
            if not any(client.there for client in self.clients):
                break
            await self.act_step(4)
            await self.clock.advance(2.0)
        assert not any(client.there for client in self.clients), list(self.gateway.relays.values())
        await self.clock.advance(100.0)
        self.check()
        self.check_empty()
        known = set(self.urls.values())
        paused = {harness.url for harness in self.harnesses.values() if harness.paused} - (self.orphans - known)
        assert not paused
        assert not any(harness.attempts for harness in self.harnesses.values())
        await self.finish()


def assert_counts(backend: EngineBackend) -> None:
    """Check the running totals against a fresh count."""
    running = [record for record in backend.records.values() if record.state is RequestState.RUNNING]
    waiting = [record for record in backend.records.values() if record.state is RequestState.WAITING]
    assert backend.running == len(running)
    assert backend.waiting == len(waiting) + len(backend.reserved)
    assert backend.running_tokens == sum(record.context_tokens for record in running)
    assert backend.waiting_tokens == sum(record.context_tokens for record in waiting) + sum(backend.reserved.values())
    if not backend.reserved:
        assert backend.cached_waiting_tokens == sum(record.cached_tokens for record in waiting)


@contextmanager
def ledger(on: bool) -> Iterator[Path | None]:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patched:
        patched.setattr(store_module, "BATCH_S", 0.001)
        patched.setattr(store_module, "CLAIM_POLL_S", 0.001)
        yield Path(folder) / "ledger" if on else None


def play(story: list[tuple[Any, ...]], path: Path | None, depth: int, policy: str) -> None:
    faults: list[dict[str, Any]] = []

    async def run() -> None:
        before = asyncio.all_tasks()
        asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))
        played = Story(path, depth, policy)
        await played.begin()
        for act in story:
            await played.act(act)
        await played.end()
        await played.settle()
        left = asyncio.all_tasks() - before
        assert not left

    asyncio.run(asyncio.wait_for(run(), HANGS_AFTER_S))
    gc.collect(1)
    assert not [(fault["message"], fault.get("exception"), fault.get("future")) for fault in faults]


@settings(suppress_health_check=[HealthCheck.data_too_large, HealthCheck.too_slow])
@given(
    story=st.lists(acts, min_size=12, max_size=40),
    kept=st.sampled_from((False, False, True)),
    depth=st.sampled_from((0, 1, 3)),
    policy=st.sampled_from(sorted(STRATEGIES)),
)
def test_gateway_survives_any_order_of_all_events(
    story: list[tuple[Any, ...]], kept: bool, depth: int, policy: str
) -> None:
    with ledger(kept) as path:
        play(story, path, depth, policy)
