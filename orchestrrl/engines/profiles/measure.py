"""Measure a running engine: its decode speed over a grid of (sequences, context), its prefill speed, and its limits.

A point is a batch of unique prompts that decodes while the arrival time of every token is recorded. Its step time is
the median, over its streams, of the slope of time over tokens while the whole batch ran. Prompts are unique, so that
prefix caching has no effect. Tokens are sampled at temperature 1, as in rollouts. A measurement always aborts its
requests, even if it fails. planner/cost/fit.py fits the samples.
"""

import asyncio
import itertools
import math
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from statistics import linear_regression, median
from typing import NamedTuple

from orchestrrl.core.clock import Clock, stop
from orchestrrl.core.errors import OrchestrRLError, Permanent, ProblemFaults, Retryable
from orchestrrl.engines.base import CompletionEndpoint, Engine, EngineCapabilities, GenerationRequest, RequestRefused
from orchestrrl.engines.profiles.spill import GridPoint, Spill, overfills, spill_of
from orchestrrl.engines.profiles.store import of_fit
from planner.cost.fit import FitError, StepSample, TimedSample, TooFewSamples, fit_curve, fit_rate, fit_step
from planner.cost.profile import Curve, EngineProfile, MoveCosts, Parallelism, ProfileSource, Provenance
from planner.model import ConfigurationId

LEAST_STEPS = 16  # per stream, for a slope
MOST_STEPS = 256
POINT_S = 2.0  # decode time of a point with short steps
KV_FILL = 0.85  # the most of the KV cache that prompts and their growth use, as a fraction
PREFILL_SHARE = 0.25  # fraction of the budget for prefill
PREFILL_ROUNDS = 3
POINT_SHARE = 0.25  # a point that needs more than this fraction of the remaining time waits for the smaller ones
ENOUGH_POINTS = 6  # points of a rough fit, for the budget that an error message suggests
LONGEST_PREFILL_TOKENS = 16384
LONGEST_CONTEXT_TOKENS = 16384
FIRST_CONTEXT_TOKENS = 32
LONGEST_UNKNOWN_TOKENS = 4096  # context length if the engine does not report one
QUIET_WITHIN_S = 30.0
PATIENCE = 1.5  # a batch beyond the KV cache must run within this multiple of its expected prefill time
LARGE_BYTES = 1e10  # second point of the line of transfer times
POLL_S = 0.05
NO_SPILL = Spill(0.0, 0, FitError(0, 0.0, 0.0))
# Vocabulary sizes to try, largest first. Prompts of only a few distinct ids would activate few experts.
VOCABULARIES = (100_000, 30_000, 8_000, 1_000, 400, 100)


class MeasurementInputs(NamedTuple):
    """The inputs of a measurement: the configuration, and numbers that an engine may not report. `switch_s` is the
    time, in seconds, that a redeployment takes from the stop of the old engines to the first answer of the new engine.
    `budget_s` limits the duration of the measurement. A limit that is None is read from the engine."""

    id: ConfigurationId
    parallelism: Parallelism
    switch_s: float
    switch_detail: str
    date: str
    budget_s: float
    max_sequences: int | None = None
    kv_capacity_tokens: int | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True)
class EngineCapacity:
    """The model and the limits of an engine."""

    model: str
    max_sequences: int
    kv_capacity_tokens: int
    max_model_len_tokens: int


class MoveLink(NamedTuple):
    """The KV size per token, and the network link for KV transfers between two engines. An engine cannot report
    them."""

    kv_bytes_per_token: float
    transfer_gbps: float
    latency_s: float = 0.0


# Progress callback: steps done, total steps, and the name of the current step.
OnStep = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True)
class MeasuredProfile:
    engine: EngineProfile
    model: str
    engine_name: str
    samples: tuple[StepSample, ...]  # within the KV cache
    prefill: tuple[TimedSample, ...]
    skipped: tuple[str, ...]  # points without a sample, and why


async def measure(
    engine: Engine, wanted: MeasurementInputs, clock: Clock, on_step: OnStep = lambda done, total, doing: None
) -> MeasuredProfile:
    """Measure the engine and return its profile. `on_step` receives the progress. Raises ProblemFaults if neither the
    engine nor `wanted` gives a required limit, and Permanent if the engine is busy or the budget was too short for a
    fit."""
    capabilities = await engine.capabilities()
    limits = await _limits(engine, capabilities, wanted)
    return await _Run(engine, limits, clock, wanted).measure(capabilities, on_step)


def move_costs(prefill: Sequence[TimedSample], link: MoveLink, provenance: Provenance) -> MoveCosts:
    """Return the costs of moving a request by recomputation and by transfer. The cost of recomputation is fitted to the
    measured samples `prefill`, which must contain several prompt lengths. The cost of transfer is linear in bytes."""
    recompute = fit_curve(prefill)
    large_s = link.latency_s + LARGE_BYTES * 8 / (link.transfer_gbps * 1e9)
    transfer_s = Curve((0.0, LARGE_BYTES), (link.latency_s, large_s))
    return MoveCosts(link.kv_bytes_per_token, transfer_s, recompute.curve, of_fit(provenance, recompute.error))


def grid(limits: EngineCapacity) -> list[GridPoint]:
    """Return the points of the measurement grid that fit in the KV cache. The corners of the grid come first, so that
    the range is covered even if the time budget ends early.

    Batch sizes double up to the maximum number of sequences. Contexts quadruple up to the longest context that leaves
    room for generated tokens.
    """
    batches = sorted({*(2**k for k in range(limits.max_sequences.bit_length())), limits.max_sequences})
    batches = [batch for batch in batches if batch <= limits.max_sequences]
    longest = min(LONGEST_CONTEXT_TOKENS, limits.max_model_len_tokens - 2 * LEAST_STEPS)
    contexts = [FIRST_CONTEXT_TOKENS]
    while contexts[-1] * 4 < longest:
        contexts.append(contexts[-1] * 4)
    points = set()
    for batch in batches:
        most = int(KV_FILL * limits.kv_capacity_tokens / batch) - 2 * LEAST_STEPS
        fitting = [context for context in (*contexts, longest) if 1 <= context <= most]
        if not fitting or most < longest:
            fitting.append(most)
        points |= {GridPoint(batch, context) for context in fitting if 1 <= context <= longest}
    ends = {batches[0], batches[-1], batches[len(batches) // 2]}
    corners = [
        corner
        for batch in sorted(ends)
        if (row := sorted(point for point in points if point.sequences == batch))
        for corner in (row[0], row[-1])
    ]
    return list(dict.fromkeys([*corners, *sorted(points, key=_work)]))


def _work(point: GridPoint) -> int:
    return point.sequences * point.context_tokens


async def _limits(engine: Engine, capabilities: EngineCapabilities, wanted: MeasurementInputs) -> EngineCapacity:
    metrics = await engine.metrics()
    if metrics.running or metrics.waiting:
        raise Permanent(
            f"engine {engine.url} is busy ({metrics.running} running, {metrics.waiting} waiting); use an idle engine"
        )
    sequences = wanted.max_sequences or capabilities.max_sequences
    capacity_tokens = wanted.kv_capacity_tokens or metrics.kv_capacity_tokens
    faults = [
        f"{option}: is required, because {engine.url} does not report it"
        for option, known in (("--max-sequences", sequences), ("--kv-capacity-tokens", capacity_tokens))
        if not known
    ]
    if not capabilities.models:
        raise Permanent(f"engine {engine.url} serves no model")
    if faults or not sequences:
        raise ProblemFaults(faults)
    longest = capabilities.max_model_len_tokens or LONGEST_UNKNOWN_TOKENS
    return EngineCapacity(capabilities.models[0], sequences, capacity_tokens, min(longest, capacity_tokens))


@dataclass(slots=True)
class _Stream:
    """One request and the arrival times of its tokens."""

    id: str
    task: asyncio.Task[None] | None = None  # reads the answer
    arrived: list[tuple[float, int]] = field(default_factory=list)  # (time, tokens so far)
    ended: bool = False
    failed: str = ""  # the error, if the request failed

    @property
    def tokens(self) -> int:
        return self.arrived[-1][1] if self.arrived else 0


class _Run:
    """One measurement and its requests on the engine."""

    def __init__(self, engine: Engine, limits: EngineCapacity, clock: Clock, wanted: MeasurementInputs) -> None:
        self._engine = engine
        self._limits = limits
        self._clock = clock
        self._wanted = wanted
        self._random = random.Random(wanted.seed)
        self._numbers = itertools.count()
        self._decode_s = 0.0  # longest duration of a point so far, without prefill
        self._vocabulary = 0  # token ids below this are in the model's vocabulary
        self._started_s = clock.now_s()
        self._end_s = self._started_s + wanted.budget_s

    async def measure(self, capabilities: EngineCapabilities, on_step: OnStep) -> MeasuredProfile:
        points = grid(self._limits)
        total = len(points) + 2
        on_step(0, total, "prefill")
        await self._learn_vocabulary()
        prefill = await self._prefill()
        try:
            rate, _ = fit_rate(prefill)
        except TooFewSamples as error:
            raise Permanent(
                f"{self._engine.url}: {error}; the engine's longest context is too short to measure prefill"
            ) from None
        point_s = min(POINT_S, 0.5 * self._wanted.budget_s / len(points))
        self._decode_s = 2 * point_s
        samples: list[StepSample] = []
        skipped = []
        number = 0
        # With a short budget, one large point could leave no time for the others, and one sample gives no fit.
        waiting: list[GridPoint] = []
        for point, may_wait in itertools.chain(((each, True) for each in points), ((each, False) for each in waiting)):
            needed_s, left_s = _work(point) / rate + self._decode_s, self._end_s - self._clock.now_s()
            if may_wait and needed_s > POINT_SHARE * left_s:
                waiting.append(point)
                waiting.sort(key=_work)
                continue
            number += 1
            on_step(number, total, _named(point))
            if needed_s > left_s:
                skipped.append(f"{_named(point)}: not within the budget")
                continue
            sample = await self._point(point, point_s)
            self._decode_s = max(self._decode_s, left_s - (self._end_s - self._clock.now_s()) - _work(point) / rate)
            if isinstance(sample, StepSample):
                samples.append(sample)
            else:
                skipped.append(f"{_named(point)}: {sample}")
        on_step(total - 1, total, "beyond the KV cache")
        beyond = await self._beyond(rate, point_s)
        on_step(total, total, "done")
        engine = self._profile(capabilities, samples, prefill, skipped, beyond)
        return MeasuredProfile(
            engine, self._limits.model, capabilities.engine, tuple(samples), tuple(prefill), tuple(skipped)
        )

    def _profile(
        self,
        capabilities: EngineCapabilities,
        samples: list[StepSample],
        prefill: list[TimedSample],
        skipped: list[str],
        beyond: list[StepSample],
    ) -> EngineProfile:
        wanted, limits = self._wanted, self._limits
        try:
            fitted = fit_step(samples)
        except TooFewSamples as error:
            left_out = f"; left out: {'; '.join(skipped)}" if skipped else ""
            # Without a sample, the first point took the whole budget.
            point_s = self._decode_s if samples else max(self._decode_s, wanted.budget_s)
            enough_s = math.ceil(2 * wanted.budget_s + ENOUGH_POINTS * point_s)
            raise Permanent(
                f"cannot fit the step times: {error}; raise --budget-s from {wanted.budget_s:g} to about"
                f" {enough_s}{left_out}"
            ) from None
        rate, prefill_error = fit_rate(prefill)
        detail = f"{self._engine.url}, {capabilities.engine} {capabilities.version}".rstrip()
        seen = Provenance(ProfileSource.MEASURED, wanted.date, detail)
        others = [("prefill_tokens_per_s", of_fit(seen, prefill_error))]
        for name, given in (("kv_capacity_tokens", wanted.kv_capacity_tokens), ("max_sequences", wanted.max_sequences)):
            word = Provenance(ProfileSource.GIVEN, wanted.date, "command line")
            others.append((name, word if given else replace(seen, detail=f"{detail}, as reported")))
        others.append(("switch_s", Provenance(ProfileSource.GIVEN, wanted.date, wanted.switch_detail)))
        spill = spill_of(beyond, fitted.step, limits.kv_capacity_tokens) or NO_SPILL
        if spill is not NO_SPILL:
            others += [(name, of_fit(seen, spill.error)) for name in ("spill_s_per_token", "spill_capacity_tokens")]
        return EngineProfile(
            id=wanted.id,
            parallelism=wanted.parallelism,
            step=replace(fitted.step, spill_s_per_token=spill.s_per_token),
            prefill_tokens_per_s=rate,
            kv_capacity_tokens=limits.kv_capacity_tokens,
            max_sequences=limits.max_sequences,
            switch_s=wanted.switch_s,
            provenance=of_fit(seen, fitted.error),
            spill_capacity_tokens=spill.capacity_tokens,
            others=tuple(others),
        )

    async def _learn_vocabulary(self) -> None:
        for size in VOCABULARIES:
            stream = _Stream(self._new_id())
            try:
                await self._read(stream, [size - 1], 1)
            except RequestRefused:
                continue
            self._vocabulary = size
            return
        raise Permanent(
            f"engine {self._engine.url} refused prompts of one token with the ids {[size - 1 for size in VOCABULARIES]}"
        )

    async def _prefill(self) -> list[TimedSample]:
        """Measure the time to the first token for several prompt lengths. The times include a constant overhead, which
        the fit separates from the time per token."""
        longest = min(LONGEST_PREFILL_TOKENS, self._limits.max_model_len_tokens - 2)
        lengths = sorted({max(1, longest // 2**halvings) for halvings in range(5)})
        end_s = self._started_s + PREFILL_SHARE * self._wanted.budget_s
        seen: list[TimedSample] = []
        for length in lengths * PREFILL_ROUNDS:
            if len({found.size for found in seen}) > 1:
                if self._clock.now_s() > end_s:
                    break
                if self._clock.now_s() + length * seen[-1].seconds / seen[-1].size > end_s:
                    continue
            stream, sent_s = _Stream(self._new_id()), self._clock.now_s()
            await self._read(stream, self._prompt(length), 1)
            seen.append(TimedSample(length, max(stream.arrived[0][0] - sent_s, 1e-6)))
        return seen

    async def _beyond(self, rate: float, point_s: float) -> list[StepSample]:
        """Measure batches that exceed the KV cache. `rate` is the prefill rate in tokens/s, and `point_s` the planned
        decode time of a batch. Stops at the first batch that the engine does not run as a whole, or for which the
        budget is too short."""
        limits, samples = self._limits, []
        capacity_tokens, longest = limits.kv_capacity_tokens, limits.max_model_len_tokens
        for point in overfills(capacity_tokens, limits.max_sequences, longest, MOST_STEPS):
            patience_s = PATIENCE * _work(point) / rate + point_s
            if self._clock.now_s() + patience_s + 2 * point_s > self._end_s:
                break
            sample = await self._point(point, point_s, patience_s)
            if not isinstance(sample, StepSample):
                break
            samples.append(sample)
        return samples

    async def _point(self, point: GridPoint, point_s: float, patience_s: float | None = None) -> StepSample | str:
        """Measure a batch. Returns its step time, or the reason why it could not be measured. `point_s` is the planned
        decode time. `patience_s` bounds the wait for a batch that may never run as a whole."""
        most_tokens = self._limits.max_model_len_tokens - point.context_tokens
        if patience_s is None:
            room = int(self._limits.kv_capacity_tokens / point.sequences) - point.context_tokens
            most_tokens = min(room, most_tokens)
        give_up_s = self._end_s if patience_s is None else self._clock.now_s() + patience_s
        before = await self._engine.metrics()
        streams = [self._start(point.context_tokens, most_tokens) for _ in range(point.sequences)]
        try:
            if not await self._until(lambda: all(stream.tokens for stream in streams), streams, give_up_s):
                return self._why_not(streams)
            began_s, first = self._clock.now_s(), min(stream.tokens for stream in streams)

            def enough() -> bool:
                steps = min(stream.tokens for stream in streams) - first
                return steps >= MOST_STEPS or (steps >= LEAST_STEPS and self._clock.now_s() - began_s >= point_s)

            await self._until(enough, streams, self._end_s)
            after = await self._engine.metrics()
        finally:
            await self._stop(streams)
        if after.preemptions_total != before.preemptions_total:
            return "sequences were preempted"
        return sample_of(point, [stream.arrived for stream in streams]) or self._why_not(streams)

    def _why_not(self, streams: Sequence[_Stream]) -> str:
        failed = next((stream.failed for stream in streams if stream.failed), "")
        if failed:
            return failed
        return (
            "not all sequences ran at once for long enough"
            if self._clock.now_s() < self._end_s
            else "the budget is exhausted"
        )

    async def _until(self, condition: Callable[[], bool], streams: Sequence[_Stream], give_up_s: float) -> bool:
        """Wait for the condition while all streams run. Returns whether the condition became true before
        `give_up_s`."""
        while not condition():
            if any(stream.ended for stream in streams) or self._clock.now_s() > give_up_s:
                return False
            await self._clock.sleep(POLL_S)
        return True

    def _start(self, context_tokens: int, most_tokens: int) -> _Stream:
        stream = _Stream(self._new_id())
        prompt = self._prompt(context_tokens)

        async def follow() -> None:
            try:
                await self._read(stream, prompt, most_tokens)
            except OrchestrRLError as error:
                stream.failed = str(error)
            finally:
                stream.ended = True

        stream.task = asyncio.create_task(follow())
        return stream

    async def _read(self, stream: _Stream, prompt: list[int], most_tokens: int) -> None:
        body = {
            "model": self._limits.model,
            "prompt": prompt,
            "max_tokens": most_tokens,
            "ignore_eos": True,
            "temperature": 1.0,  # without a seed, since engines sample seeded requests one by one
        }
        async for chunk in self._engine.generate(GenerationRequest(stream.id, CompletionEndpoint.COMPLETIONS, body)):
            if chunk.token_ids:
                stream.arrived.append((self._clock.now_s(), stream.tokens + len(chunk.token_ids)))
        if not stream.arrived:
            raise Permanent(f"{self._engine.url}: request {stream.id} ended without a token")

    async def _stop(self, streams: Sequence[_Stream]) -> None:
        """Close these streams, abort their requests on the engine, and wait up to `QUIET_WITHIN_S` until the engine is
        idle."""
        await stop(*(stream.task for stream in streams if stream.task is not None))
        # The closed connections also end the requests, if later. An unreachable engine has nothing to abort.
        with suppress(OrchestrRLError):
            await self._engine.abort([stream.id for stream in streams])
        give_up_s = self._clock.now_s() + QUIET_WITHIN_S
        while self._clock.now_s() < give_up_s:
            with suppress(Retryable):
                metrics = await self._engine.metrics()
                if not metrics.running and not metrics.waiting:
                    return
            await self._clock.sleep(POLL_S)

    def _new_id(self) -> str:
        return f"profile-{self._wanted.seed}-{next(self._numbers)}"

    def _prompt(self, tokens: int) -> list[int]:
        return [self._random.randrange(self._vocabulary) for _ in range(tokens)]


def sample_of(point: GridPoint, arrivals: Sequence[Sequence[tuple[float, int]]]) -> StepSample | None:
    """Return the batch's step time: the median, over its streams, of the slope of time over tokens while the whole
    batch ran.

    `arrivals` has (time, tokens so far) pairs per stream. Returns None if too few tokens arrived for a slope.
    """
    begin_s = max(stream[0][0] for stream in arrivals)
    end_s = min(stream[-1][0] for stream in arrivals)
    slopes, tokens = [], 0.0
    for stream in arrivals:
        inside = [(at_s, count) for at_s, count in stream if begin_s <= at_s <= end_s]
        if len(inside) < 2 or inside[-1][1] - inside[0][1] < LEAST_STEPS // 2:
            return None
        counts, times_s = [count for _, count in inside], [at_s for at_s, _ in inside]
        slopes.append(linear_regression(counts, times_s).slope)
        tokens += point.context_tokens + (counts[0] + counts[-1] - 1) / 2
    step_s = median(slopes)
    return StepSample(point.sequences, tokens, step_s) if step_s > 0 else None


def _named(point: GridPoint) -> str:
    return f"{point.sequences} x {point.context_tokens} tokens"
