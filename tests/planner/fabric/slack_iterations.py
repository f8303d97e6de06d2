"""Synthetic iterations of a rank, from which slack is learnt.

A rank alternates computing and communicating: 12 layers forward and backward with two all-to-alls each, gradients, an
optimizer step. The parameter `arm` selects how compute times vary."""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

from planner.fabric.slack import Signature, SlackLearner

Q = 0.05
ITERATIONS = 200
LAYERS = 12

ARMS = ("jitter", "heavy tail", "drift", "regimes", "stragglers", "bursts")


@dataclass(frozen=True, slots=True)
class SlackStep:
    """Compute for `compute_s`, then a collective of `traffic_s`."""

    signature: Signature
    compute_s: float
    traffic_s: float
    mark: str = ""


def layout(layers: int = LAYERS) -> list[SlackStep]:
    """Return an iteration of a mixture-of-experts model."""
    exchange = Signature("all_to_all", 1, 1 << 20)
    forward = [SlackStep(exchange, 0.012, 0.003, "forward"), SlackStep(exchange, 0.020, 0.003)] * layers
    backward = [SlackStep(exchange, 0.030, 0.003, "backward"), SlackStep(exchange, 0.040, 0.003)] * layers
    gradients = [SlackStep(Signature("all_reduce", 0, 1 << 26), 0.060, 0.020, "optimizer")]
    return [*forward, *backward, *gradients, SlackStep(Signature("all_gather", 0, 1 << 20), 0.150, 0.004)]


def factor(arm: str, iteration: int, rng: random.Random) -> float:
    """Return the ratio of a compute time to its median."""
    jitter = rng.lognormvariate(0, 0.1)
    if arm == "heavy tail":
        return 0.8 + 0.2 * rng.paretovariate(1.5)
    if arm == "drift":  # shorter by a third over the run, then longer again
        return jitter * (1 - 0.33 * math.sin(math.pi * iteration / ITERATIONS))
    if arm == "regimes":  # every 60 iterations half as long, then twice as long again
        return jitter * (0.5 if iteration // 60 % 2 else 1.0)
    if arm == "stragglers":
        return jitter * (rng.uniform(2, 10) if rng.random() < 0.05 else 1.0)
    if arm == "bursts":  # occasionally a short iteration, for example with few tokens
        return jitter * (0.6 if random.Random(iteration).random() < 0.02 else 1.0)
    return jitter


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """One event. `kind`: iteration, mark, started or ended."""

    at_s: float
    kind: str
    signature: Signature | None = None
    text: str = ""
    number: int = 0


def events(arm: str, seed: int, iterations: int = ITERATIONS, *, layers: int = LAYERS) -> Iterator[TraceEvent]:
    """Return the events of one rank, in order of time."""
    rng, at_s, steps = random.Random(seed), 100.0, layout(layers)
    for iteration in range(iterations):
        yield TraceEvent(at_s, "iteration", number=iteration)
        for step in steps:
            if step.mark:
                yield TraceEvent(at_s, "mark", text=step.mark)
            at_s += step.compute_s * factor(arm, iteration, rng)
            yield TraceEvent(at_s, "started", step.signature)
            at_s += step.traffic_s * rng.lognormvariate(0, 0.3)
            yield TraceEvent(at_s, "ended", step.signature)


def feed(learner: SlackLearner, event: TraceEvent, *, marked: bool = True) -> None:
    if event.kind == "iteration":
        if marked:
            learner.iteration(event.number, event.at_s)
    elif event.kind == "mark":
        learner.mark(event.text, event.at_s)
    elif event.kind == "started":
        assert event.signature is not None
        learner.started(event.signature, event.at_s)
    else:
        learner.ended(next(iter(learner._flying), 0), event.at_s)
