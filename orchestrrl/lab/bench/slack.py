"""What learning slack costs per event, and how often what is promised of a window is broken, on synthetic iterations.

A rank computes, communicates, computes: 12 layers forward and backward with two all-to-alls each, gradients, an
optimizer step. Compute times vary as the arm says. Every quiet is asked for when it opens and, had it lasted to its
half, once more; a promise is broken if the next collective begins before its end.
"""

import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from orchestrrl.lab.bench.figure import Figure
from planner.fabric.clocks import SAME_CLOCK
from planner.fabric.intent import Stage
from planner.fabric.slack import RemainingQuiet, Signature, SlackLearner
from planner.fabric.windows import CommitNeed, HostWindows, intersect, may_commit
from planner.model import Act

Q = 0.05
ITERATIONS = 200
LAYERS = 12
CHECKED_FROM = 20  # iterations

ARMS = ("jitter", "heavy tail", "drift", "regimes", "stragglers", "bursts")


@dataclass(frozen=True, slots=True)
class SlackStep:
    """Compute for `compute_s`, then a collective of `traffic_s`."""

    signature: Signature
    compute_s: float
    traffic_s: float
    mark: str = ""


def layout(layers: int = LAYERS) -> list[SlackStep]:
    """An iteration of a mixture of experts."""
    exchange = Signature("all_to_all", 1, 1 << 20)
    forward = [SlackStep(exchange, 0.012, 0.003, "forward"), SlackStep(exchange, 0.020, 0.003)] * layers
    backward = [SlackStep(exchange, 0.030, 0.003, "backward"), SlackStep(exchange, 0.040, 0.003)] * layers
    gradients = [SlackStep(Signature("all_reduce", 0, 1 << 26), 0.060, 0.020, "optimizer")]
    return [*forward, *backward, *gradients, SlackStep(Signature("all_gather", 0, 1 << 20), 0.150, 0.004)]


def factor(arm: str, iteration: int, rng: random.Random) -> float:
    """By which a compute time differs from its median."""
    jitter = rng.lognormvariate(0, 0.1)
    if arm == "heavy tail":
        return 0.8 + 0.2 * rng.paretovariate(1.5)
    if arm == "drift":  # shorter by a third over the run, then longer again
        return jitter * (1 - 0.33 * math.sin(math.pi * iteration / ITERATIONS))
    if arm == "regimes":  # every 60 iterations half as long, then twice as long again
        return jitter * (0.5 if iteration // 60 % 2 else 1.0)
    if arm == "stragglers":
        return jitter * (rng.uniform(2, 10) if rng.random() < 0.05 else 1.0)
    if arm == "bursts":  # now and then an iteration is short, e.g. of few tokens
        return jitter * (0.6 if random.Random(iteration).random() < 0.02 else 1.0)
    return jitter


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """`kind`: iteration, mark, started or ended."""

    at_s: float
    kind: str
    signature: Signature | None = None
    text: str = ""
    number: int = 0


def events(arm: str, seed: int, iterations: int = ITERATIONS, *, layers: int = LAYERS) -> Iterator[TraceEvent]:
    """Of one rank, in order of time."""
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
    else:
        assert event.signature is not None
        tell = learner.started if event.kind == "started" else learner.ended
        tell(event.signature, event.at_s)


@dataclass(slots=True)
class SlackScore:
    """`promised_s` against `quiet_s`: what part of the quiet could be used."""

    queries: int = 0
    promised: int = 0
    broken: int = 0
    promised_s: float = 0.0
    quiet_s: float = 0.0

    @property
    def broken_share(self) -> float:
        return self.broken / max(1, self.promised)

    @property
    def use(self) -> float:
        return self.promised_s / self.quiet_s if self.quiet_s else 0.0


def score(
    arm: str,
    seed: int,
    *,
    q: float = Q,
    marked: bool = True,
    at_share: float = 0.0,
    asked: tuple[int, int] = (CHECKED_FROM, ITERATIONS),
) -> SlackScore:
    """Asked when a quiet has lasted for `at_share` of what it will, in the iterations `asked`."""
    learner, result = SlackLearner(0), SlackScore()
    iteration, opened_s = 0, math.inf
    for event in events(arm, seed, asked[1]):
        if event.kind == "iteration":
            iteration += 1
        if event.kind == "started" and opened_s < event.at_s and iteration > asked[0]:
            now_s = opened_s + at_share * (event.at_s - opened_s)
            said = learner.remaining(now_s, q)
            result.queries += 1
            result.quiet_s += event.at_s - now_s
            if isinstance(said, RemainingQuiet):
                result.promised += 1
                result.broken += said.until_s > event.at_s
                result.promised_s += min(said.until_s, event.at_s) - now_s
        feed(learner, event, marked=marked)
        if event.kind == "ended":
            opened_s = event.at_s
    return result


NEED = CommitNeed(device_s=0.025, route_s=0.003, control_s=0.002, margin_s=0.002)
COMMITTED = ("jitter", "regimes", "stragglers")
RANKS = 8
JOINT_RISK = 0.01  # that any of the ranks breaks its promise


@dataclass(slots=True)
class Commits:
    """Windows of all ranks together, each asked for when it opens."""

    windows: int = 0
    fitting: int = 0  # that were long enough, as seen afterwards
    made: int = 0
    outside: int = 0  # commits that a collective of any rank began before the end of


def commits(arm: str, seed: int, iterations: int = ITERATIONS) -> Commits:
    """Ranks that compute each at its own pace; a collective ends for all of them after the last has come."""
    rng, result, now_s = random.Random(seed), Commits(), 0.0
    learners = [SlackLearner(rank) for rank in range(RANKS)]
    for iteration in range(iterations):
        for learner in learners:
            learner.iteration(iteration, now_s)
        for step in layout():
            begins_s = [now_s + step.compute_s * factor(arm, iteration, rng) for _ in learners]
            fits = min(begins_s) - now_s >= NEED.total_s
            made = _commits(learners, now_s)
            result.windows += 1
            result.fitting += fits
            result.made += made
            result.outside += made and not fits
            for learner, at_s in zip(learners, begins_s, strict=True):
                learner.started(step.signature, at_s)
            now_s = max(begins_s) + step.traffic_s * rng.lognormvariate(0, 0.3)
            for learner in learners:
                learner.ended(step.signature, now_s)
    return result


def _commits(learners: Sequence[SlackLearner], now_s: float) -> bool:
    said = tuple((learner.rank, learner.remaining(now_s, JOINT_RISK / RANKS)) for learner in learners)
    window = intersect([HostWindows("host", now_s, said, SAME_CLOCK)], now_s)
    return isinstance(may_commit(Stage.TRAIN, window, NEED, now_s, boundary=False), Act)


def cost_us(marked: bool) -> float:
    """CPU time per event, once the sequence is known."""
    told = list(events("jitter", 1))
    learner, warm = SlackLearner(0), len(told) // 4
    for event in told[:warm]:
        feed(learner, event, marked=marked)
    started_s = time.process_time()
    for event in told[warm:]:
        feed(learner, event, marked=marked)
    return (time.process_time() - started_s) / (len(told) - warm) * 1e6


def question_us(prepared: bool) -> float:
    """Median CPU time of one question, when it has just become quiet."""
    learner, spent_s = SlackLearner(0), list[float]()
    for event in events("jitter", 1):
        feed(learner, event)
        if event.kind == "started" and prepared:
            learner.prepare(Q)
        if event.kind == "ended":
            started_s = time.process_time()
            learner.remaining(event.at_s, Q)
            spent_s.append(time.process_time() - started_s)
    return median(spent_s) * 1e6


def slack() -> list[Figure]:
    figures = [
        Figure(
            f"slack learner ({name})",
            cost_us(marked),
            "us",
            "budget",
            5.0,
            "CPU per event",
        )
        for name, marked in (("iterations marked", True), ("iterations found", False))
    ]
    figures.append(
        Figure(
            "slack question (prepared)",
            question_us(True),
            "us",
            "unprepared",
            question_us(False),
            "CPU, when it has just become quiet",
        )
    )
    for arm in ARMS:
        scores = [score(arm, seed) for seed in range(3)]
        promised, broken = sum(each.promised for each in scores), sum(each.broken for each in scores)
        figures.append(
            Figure(
                f"slack promise broken ({arm})",
                100 * broken / max(1, promised),
                "%",
                "promised",
                100 * Q,
                f"{promised} of {sum(each.queries for each in scores)} windows promised, "
                f"{sum(each.use for each in scores) / len(scores):.0%} of their time",
            )
        )
    for arm in COMMITTED:
        made = commits(arm, 1)
        figures.append(
            Figure(
                f"commits outside a window ({arm}, {RANKS} ranks)",
                100 * made.outside / max(1, made.made),
                "%",
                "allowed",
                100 * JOINT_RISK,
                f"{made.made} commits of {NEED.total_s * 1e3:.0f} ms made in {ITERATIONS} iterations; as seen "
                f"afterwards {made.fitting} of {made.windows} windows were long enough",
            )
        )
    return figures
