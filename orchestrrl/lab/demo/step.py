"""Submit one generation step over HTTP, as an RL framework does, and record what came back and when."""

import asyncio
import contextlib
import json
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp

from orchestrrl.core.errors import OrchestrRLError
from orchestrrl.core.operations import PauseMode
from orchestrrl.engines.base import Engine, connect
from orchestrrl.gateway.ledger.versions import VersionSpan
from orchestrrl.lab.demo.scenario import DemoScenario, Sample
from orchestrrl.lab.testbed.engines import LocalEngine
from orchestrrl.lab.testbed.processes import meanwhile, until
from planner.model import RequestId

ACCEPTED_WITHIN_S = 60.0
STEP_WITHIN_S = 900.0
SAMPLE_INTERVAL_S = 0.1

Progress = Callable[[int, int], None]  # requests done, requests in all
Report = Callable[[str, int, int], None]  # what is under way, and its progress


@dataclass(slots=True)
class DemoStepRecord:
    """One run of the step. Times in engine seconds from the start of the step."""

    makespan_s: float = 0.0
    finish_s: dict[RequestId, float] = field(default_factory=dict)
    answers: dict[RequestId, list[int]] = field(default_factory=dict)
    spans: dict[RequestId, list[VersionSpan]] = field(default_factory=dict)  # where they were asked for
    faults: dict[RequestId, str] = field(default_factory=dict)
    idle_s: list[float] = field(default_factory=list)  # per engine: nothing running while the step went on

    def remaining(self, total: int) -> tuple[list[float], list[int]]:
        """Requests in flight over time, for a step plot: times, and counts from each time on."""
        times = [0.0, *sorted(self.finish_s.values())]
        return times, [total - done for done in range(len(times))]


@dataclass(slots=True)
class ComparedStep(ABC):
    """One step, run twice: as a baseline and with what is shown."""

    seed: int
    samples: list[Sample]

    @property
    @abstractmethod
    def records(self) -> tuple[DemoStepRecord, DemoStepRecord]: ...

    @property
    def ratio(self) -> float:
        baseline, shown = self.records
        return baseline.makespan_s / shown.makespan_s

    @property
    def lost(self) -> list[RequestId]:
        """Requests without an answer in either run."""
        return [sample.id for sample in self.samples for record in self.records if sample.id not in record.answers]

    def differing(self, expected: Mapping[RequestId, list[int]]) -> list[RequestId]:
        """Requests whose tokens, in either run, are not those of an undisturbed run."""
        return [
            request
            for request, ids in expected.items()
            if any(record.answers.get(request, ids) != ids for record in self.records)
        ]

    @property
    def faults(self) -> list[str]:
        told = (fault for record in self.records for fault in record.faults.items())
        return [f"seed {self.seed}, {request}: {fault}" for request, fault in told]


async def run_step(
    scenario: DemoScenario,
    samples: Sequence[Sample],
    url_of: Callable[[Sample], str],
    engines: Sequence[Engine],
    progress: Progress,
    *,
    hold: bool,
    begun: Callable[[], Awaitable[None]] | None = None,
    spans: bool = False,
) -> DemoStepRecord:
    """Send every sample to its URL at once and wait for all answers.

    hold: freeze the engines until they have every request, so that handing them in, which takes the same wall time at
    any speed of the engines, does not count as engine time. `begun` is awaited after that, while the engines run.
    spans: ask the gateway which policy version each token is from.
    Failures of single requests are recorded, not raised.
    """
    record = DemoStepRecord()
    limits = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=STEP_WITHIN_S)
    async with aiohttp.ClientSession(connector=limits, timeout=timeout) as session:
        if hold:
            await asyncio.gather(*(engine.pause(PauseMode.KEEP) for engine in engines))
        start = _Start(scenario.speed)
        sending = [
            asyncio.create_task(
                _send(session, url_of(sample), sample, scenario, start, record, progress, len(samples), spans)
            )
            for sample in samples
        ]
        if hold:
            await _all_accepted(engines, len(samples))
            await asyncio.gather(*(engine.resume() for engine in engines))
            start.begin()
        if begun is not None:
            await begun()
        idle = _IdleSampler(engines, start)
        async with meanwhile(idle.sample, SAMPLE_INTERVAL_S):
            await asyncio.gather(*sending)
    record.makespan_s = max(record.finish_s.values(), default=0.0)
    record.idle_s = [min(seconds, record.makespan_s) for seconds in idle.seconds]
    return record


@dataclass(frozen=True, slots=True)
class DemoFleet:
    """The scenario's engines while they run, and their clients."""

    scenario: DemoScenario
    kind: str
    out_dir: Path
    report: Report
    running: Sequence[LocalEngine]
    clients: Sequence[Engine]

    async def run_step(
        self, step: Sequence[Sample], label: str, gateway_url: str = "", **options: Any
    ) -> DemoStepRecord:
        """Run a step through a gateway or, without one, on the engines to which its samples are dealt."""

        def url_of(sample: Sample) -> str:
            return gateway_url or self.running[sample.dealt_to].url

        hold, progress = self.kind == "simulated", partial(self.report, label)
        return await run_step(self.scenario, step, url_of, self.clients, progress, hold=hold, **options)


@contextlib.asynccontextmanager
async def connected(kind: str, urls: Iterable[str]) -> AsyncIterator[list[Engine]]:
    """Clients of engines, closed on leaving."""
    clients = [connect(kind, url) for url in urls]
    try:
        yield clients
    finally:
        for client in clients:
            await client.close()


class _Start:
    """The step's zero, and the engines' pace."""

    def __init__(self, speed: float) -> None:
        self.speed = speed
        self.begin()

    def begin(self) -> None:
        self._at_s = time.monotonic()

    def elapsed_s(self) -> float:
        return (time.monotonic() - self._at_s) * self.speed


async def _send(
    session: aiohttp.ClientSession,
    url: str,
    sample: Sample,
    scenario: DemoScenario,
    start: _Start,
    record: DemoStepRecord,
    progress: Progress,
    total: int,
    spans: bool,
) -> None:
    body: dict[str, Any] = {"prompt": list(sample.prompt_ids), "temperature": 0, "return_token_ids": True}
    if scenario.length_is_max_tokens:
        body |= {"max_tokens": sample.output_tokens, "ignore_eos": True}
    else:
        body |= {"max_tokens": scenario.max_tokens}
    if spans:
        body |= {"return_policy_versions": True}
    headers = {"X-Request-Id": sample.id, "X-Group-Id": sample.group}
    try:
        async with session.post(f"{url}/v1/completions", json=body, headers=headers) as response:
            text = await response.text()
        if response.status != 200:
            record.faults[sample.id] = f"HTTP {response.status}: {text[:200]}"
            return
        choice = json.loads(text)["choices"][0]
        if spans:
            record.spans[sample.id] = [VersionSpan(**told) for told in choice["policy_versions"]]
        record.answers[sample.id] = choice["token_ids"]
    except (aiohttp.ClientError, TimeoutError, json.JSONDecodeError, KeyError) as error:
        record.faults[sample.id] = f"{type(error).__name__}: {error}"
        return
    finally:
        record.finish_s[sample.id] = start.elapsed_s()
        progress(len(record.finish_s), total)


async def _all_accepted(engines: Sequence[Engine], total: int) -> None:
    async def accepted() -> bool:
        readings = await asyncio.gather(*(engine.metrics() for engine in engines))
        return sum(reading.running + reading.waiting for reading in readings) >= total

    await until(accepted, f"the engines accept {total} requests", ACCEPTED_WITHIN_S, 0.02)


class _IdleSampler:
    """Seconds in which each engine had nothing running."""

    def __init__(self, engines: Sequence[Engine], start: _Start) -> None:
        self.seconds = [0.0] * len(engines)
        self._engines = engines
        self._start = start
        self._before_s = start.elapsed_s()

    async def sample(self) -> None:
        readings = await asyncio.gather(*(_running(engine) for engine in self._engines))
        now_s = self._start.elapsed_s()
        for index, running in enumerate(readings):
            if running == 0:
                self.seconds[index] += now_s - self._before_s
        self._before_s = now_s


async def _running(engine: Engine) -> int | None:
    """Sequences that the engine decodes; None while it is too busy to say."""
    try:
        return (await engine.metrics()).running
    except OrchestrRLError:
        return None
