"""Submit one generation step over HTTP, as an RL framework does, and record responses and times."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

import aiohttp

from orchestrrl.core.errors import OrchestrRLError
from orchestrrl.core.operations import PauseMode
from orchestrrl.engines.base import Engine, EngineSample, connect
from orchestrrl.gateway.ledger.ledger import VersionSpan
from orchestrrl.lab.demo.scenario import DemoScenario, Sample
from orchestrrl.lab.testbed.processes import meanwhile, until
from planner.model import RequestId

ACCEPTED_WITHIN_S = 60.0
STEP_WITHIN_S = 900.0
SAMPLE_INTERVAL_S = 0.1

Report = Callable[[str, int, int], None]  # current activity, units done, total units


@dataclass(slots=True)
class DemoStepRecord:
    """The record of one run of a generation step. Times are in engine seconds. Finish times are measured from the start
    of the step."""

    makespan_s: float = 0.0
    finish_s: dict[RequestId, float] = field(default_factory=dict)
    answers: dict[RequestId, list[int]] = field(default_factory=dict)
    spans: dict[RequestId, list[VersionSpan]] = field(default_factory=dict)  # only if they were requested
    faults: dict[RequestId, str] = field(default_factory=dict)
    idle_s: list[float] = field(default_factory=list)  # per engine: time without a running request during the step


@dataclass(slots=True)
class ComparedStep:
    """One step that is run twice: as a baseline and with the demonstrated feature. `expected` contains the responses of
    an undisturbed run. If it is None, the baseline is the undisturbed run."""

    seed: int
    samples: list[Sample]
    baseline: DemoStepRecord
    shown: DemoStepRecord = field(default_factory=DemoStepRecord)
    expected: Mapping[RequestId, list[int]] | None = None

    @property
    def ratio(self) -> float:
        return self.baseline.makespan_s / self.shown.makespan_s

    @property
    def lost(self) -> list[RequestId]:
        """The requests without a response in one of the two runs. A request is listed twice if neither run has a
        response to it."""
        runs = (self.baseline, self.shown)
        return [sample.id for sample in self.samples for record in runs if sample.id not in record.answers]

    @property
    def differing(self) -> list[RequestId]:
        """The requests whose tokens, in either run, differ from the tokens of an undisturbed run."""
        expected, runs = self.baseline.answers if self.expected is None else self.expected, (self.baseline, self.shown)
        return [id for id, ids in expected.items() if any(record.answers.get(id, ids) != ids for record in runs)]

    @property
    def faults(self) -> list[str]:
        faults = (*self.baseline.faults.items(), *self.shown.faults.items())
        return [f"seed {self.seed}, {request}: {fault}" for request, fault in faults]


Step = TypeVar("Step", bound=ComparedStep)


@dataclass(slots=True)
class ComparedDemo(Generic[Step]):
    """The compared steps of a demo, one for each seed."""

    scenario: DemoScenario
    seeds: list[Step]

    @property
    def lost(self) -> int:
        return sum(len(outcome.lost) for outcome in self.seeds)

    @property
    def differing(self) -> int:
        return sum(len(outcome.differing) for outcome in self.seeds)

    @property
    def faults(self) -> list[str]:
        return [fault for outcome in self.seeds for fault in outcome.faults]

    @property
    def is_well(self) -> bool:
        return not self.lost and not self.differing


@dataclass(frozen=True, slots=True)
class DemoFleet:
    """The running engines of one kind, with a client for each engine. `connected` creates the fleet."""

    scenario: DemoScenario
    kind: str
    urls: Sequence[str]
    report: Report
    clients: Sequence[Engine]

    async def run_step(
        self,
        step: Sequence[Sample],
        label: str,
        gateway_url: str = "",
        *,
        begun: Callable[[], Awaitable[None]] | None = None,
        spans: bool = False,
    ) -> DemoStepRecord:
        """Send all samples at once, through a gateway or, without a gateway, each to its assigned engine. Return the
        record of the run when all requests have ended.

        Simulated engines are paused until they have accepted every request. Submission takes the same wall-clock time
        at any engine speed, so it must not count as engine time. When all requests are submitted and the engines run,
        `begun` is awaited. With `spans`, request the policy version of each token from the gateway. Failures of single
        requests are recorded and raise no exception.
        """
        hold, record = self.kind == "simulated", DemoStepRecord(idle_s=[0.0] * len(self.clients))
        run = _StepRun(self, record, partial(self.report, label), len(step), spans)
        limits = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=STEP_WITHIN_S)
        async with aiohttp.ClientSession(connector=limits, timeout=timeout) as session:
            if hold:
                await asyncio.gather(*(engine.pause(PauseMode.KEEP) for engine in self.clients))
            run.began_s = time.monotonic()
            sending = [
                asyncio.create_task(run.send(session, gateway_url or self.urls[sample.dealt_to], sample))
                for sample in step
            ]
            if hold:
                await until(run.all_accepted, f"the engines accept {len(step)} requests", ACCEPTED_WITHIN_S, 0.02)
                await asyncio.gather(*(engine.resume() for engine in self.clients))
                run.began_s = time.monotonic()
            if begun is not None:
                await begun()
            run.sampled_s = run.elapsed_s()
            async with meanwhile(run.sample_idle, SAMPLE_INTERVAL_S):
                await asyncio.gather(*sending)
        record.makespan_s = max(record.finish_s.values(), default=0.0)
        record.idle_s = [min(seconds, record.makespan_s) for seconds in record.idle_s]
        return record


@contextlib.asynccontextmanager
async def connected(scenario: DemoScenario, kind: str, urls: Sequence[str], report: Report) -> AsyncIterator[DemoFleet]:
    """Connect a client to each engine and yield the fleet. The clients are closed on exit."""
    clients = [connect(kind, url) for url in urls]
    try:
        yield DemoFleet(scenario, kind, urls, report, clients)
    finally:
        for client in clients:
            await client.close()


@dataclass(slots=True)
class _StepRun:
    """One run of a step. It fills the step's record, with times in engine seconds since the start of the run."""

    fleet: DemoFleet
    record: DemoStepRecord
    progress: Callable[[int, int], None]  # requests done, total requests
    total: int
    spans: bool
    began_s: float = 0.0  # monotonic clock
    sampled_s: float = 0.0  # time of the last sample of idle engines

    def elapsed_s(self) -> float:
        return (time.monotonic() - self.began_s) * self.fleet.scenario.speed

    async def send(self, session: aiohttp.ClientSession, url: str, sample: Sample) -> None:
        record, has_length = self.record, self.fleet.scenario.length_is_max_tokens
        max_tokens = sample.output_tokens if has_length else self.fleet.scenario.max_tokens
        body: dict[str, Any] = {"prompt": list(sample.prompt_ids), "temperature": 0, "return_token_ids": True}
        body |= {"max_tokens": max_tokens, "ignore_eos": has_length}
        if self.spans:
            body |= {"return_policy_versions": True}
        headers = {"X-Request-Id": sample.id, "X-Group-Id": sample.group}
        try:
            async with session.post(f"{url}/v1/completions", json=body, headers=headers) as response:
                text = await response.text()
            if response.status != 200:
                record.faults[sample.id] = f"HTTP {response.status}: {text[:200]}"
                return
            choice = json.loads(text)["choices"][0]
            if self.spans:
                record.spans[sample.id] = [VersionSpan(**span) for span in choice["policy_versions"]]
            record.answers[sample.id] = choice["token_ids"]
        except (aiohttp.ClientError, TimeoutError, json.JSONDecodeError, KeyError) as error:
            record.faults[sample.id] = f"{type(error).__name__}: {error}"
        finally:
            record.finish_s[sample.id] = self.elapsed_s()
            self.progress(len(record.finish_s), self.total)

    async def all_accepted(self) -> bool:
        readings = await asyncio.gather(*(engine.metrics() for engine in self.fleet.clients))
        return sum(reading.running + reading.waiting for reading in readings) >= self.total

    async def sample_idle(self) -> None:
        """Add the time since the last sample to the idle time of each engine that has no running requests.
        An engine that does not respond is treated as busy."""
        readings = await asyncio.gather(*(engine.metrics() for engine in self.fleet.clients), return_exceptions=True)
        now_s = self.elapsed_s()
        for index, reading in enumerate(readings):
            if isinstance(reading, EngineSample):
                self.record.idle_s[index] += 0.0 if reading.running else now_s - self.sampled_s
            elif not isinstance(reading, OrchestrRLError):
                raise reading
        self.sampled_s = now_s
