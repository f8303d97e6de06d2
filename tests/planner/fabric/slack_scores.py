"""Measure how often predictions of windows are broken, on the synthetic iterations of slack_iterations.py.

Every quiet time is predicted when it opens and again at half its length. A prediction is broken if the next collective
begins before its end."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from planner.fabric.clocks import ClockOffset
from planner.fabric.intent import Stage
from planner.fabric.slack import RemainingQuiet, SlackLearner
from planner.fabric.windows import CommitNeed, ReportedQuiet, intersect, may_commit
from planner.model import Act, Hold
from tests.planner.fabric.slack_iterations import ITERATIONS, Q, events, factor, feed, layout

CHECKED_FROM = 20  # iterations


@dataclass(slots=True)
class SlackScore:
    """Results of one run; `promised_s` over `quiet_s` is the usable part of the quiet time."""

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
    chosen: tuple[int, int] = (CHECKED_FROM, ITERATIONS),
) -> SlackScore:
    """Score predictions made after `at_share` of each quiet time, in the iterations `chosen`."""
    learner, result = SlackLearner(0), SlackScore()
    iteration, opened_s = 0, math.inf
    for event in events(arm, seed, chosen[1]):
        if event.kind == "iteration":
            iteration += 1
        if event.kind == "started" and opened_s < event.at_s and iteration > chosen[0]:
            now_s = opened_s + at_share * (event.at_s - opened_s)
            predicted = learner.remaining(now_s, q)
            result.queries += 1
            result.quiet_s += event.at_s - now_s
            if isinstance(predicted, RemainingQuiet):
                result.promised += 1
                result.broken += predicted.until_s > event.at_s
                result.promised_s += min(predicted.until_s, event.at_s) - now_s
        feed(learner, event, marked=marked)
        if event.kind == "ended":
            opened_s = event.at_s
    return result


NEED = CommitNeed(device_s=0.025, route_s=0.003, control_s=0.002, margin_s=0.002)
RANKS = 8
JOINT_RISK = 0.01  # risk that any of the ranks breaks its prediction


@dataclass(slots=True)
class Commits:
    """Windows that all ranks share, each requested when it opens."""

    windows: int = 0
    fitting: int = 0  # that were long enough in hindsight
    made: int = 0
    outside: int = 0  # commits that ended after a collective of some rank had begun


def commits(arm: str, seed: int, iterations: int = ITERATIONS) -> Commits:
    """Simulate ranks that compute at different speeds; a collective ends for all of them after the last has joined."""
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
            handles = [learner.started(step.signature, at_s) for learner, at_s in zip(learners, begins_s, strict=True)]
            now_s = max(begins_s) + step.traffic_s * rng.lognormvariate(0, 0.3)
            for learner, handle in zip(learners, handles, strict=True):
                learner.ended(handle, now_s)
    return result


def _commits(learners: Sequence[SlackLearner], now_s: float) -> bool:
    reports, clock = [], ClockOffset(0.0, 0.0)
    for learner in learners:
        predicted = learner.remaining(now_s, JOINT_RISK / RANKS)
        if isinstance(predicted, Hold):
            return False
        reports.append(ReportedQuiet("host", now_s, learner.rank, predicted, clock))
    window = intersect(reports, now_s)
    return isinstance(may_commit(Stage.TRAIN, window, NEED, now_s, boundary=False), Act)
