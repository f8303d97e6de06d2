"""Check, without side effects, that an engine has the layout and KV capacity that a redeployment requested, and that it
generates correct answers."""

import math
from dataclasses import dataclass

from orchestrrl.engines.base import AnswerExcerpt, ReportedLayout
from planner.model import Parallelism

# A prompt of token ids that every vocabulary has. Its meaning is irrelevant: all engines get the same one.
CANARY_IDS = tuple(3 + 7 * place % 200 for place in range(16))
# The least share of the configured capacity that plans tolerate; graphs and fragments take some of it.
CAPACITY_SHARE = 0.9


@dataclass(frozen=True, slots=True)
class AnswerTolerance:
    """The limits for differences from the previous engines' answers. A different layout sums floating-point numbers in
    a different order, so that logits differ in their last bits. Wrong weights cause far larger differences."""

    tokens: int = 16
    mean_nats: float = 0.1  # mean |difference| of log-probabilities; another order of 16-bit sums causes 0.02

    @property
    def single_nats(self) -> float:
        """Return the limit for the difference of one token's log-probability, in nats. Rounding of 16-bit logits alone
        causes differences of a quarter of a nat."""
        return 10 * self.mean_nats


def layout_fault(reported: ReportedLayout, wanted: Parallelism) -> list[str]:
    """Return a fault if the reported layout differs from the requested layout. Values that the engine does not report
    are not compared."""
    pairs = [("TP", reported.tp, wanted.tp), ("PP", reported.pp, wanted.pp), ("DP", reported.dp, wanted.dp)]
    if not wanted.afd:
        pairs.append(("EP", reported.ep, wanted.ep > 1))
    wrong = [f"{name} {got} instead of {want}" for name, got, want in pairs if got is not None and got != want]
    return [f"has another layout: {', '.join(wrong)}"] if wrong else []


def capacity_fault(has_tokens: int, planned_tokens: int) -> list[str]:
    if has_tokens >= CAPACITY_SHARE * planned_tokens:
        return []
    return [f"has KV for {has_tokens} tokens, plans require {planned_tokens}"]


def answers_fault(reference: AnswerExcerpt, scores: tuple[float, ...], tolerance: AnswerTolerance) -> list[str]:
    """Return a fault if the engine's log-probabilities for the reference tokens differ too much from those in the
    reference. `scores` are the engine's log-probabilities."""
    return _scores_fault(reference, scores, tolerance, "differs from the previous engines' answers")


def reading_fault(written: AnswerExcerpt, scores: tuple[float, ...], tolerance: AnswerTolerance) -> list[str]:
    """Return a fault if the engine's log-probabilities for its own answer, read as a prompt, differ too much from those
    at generation. This check detects faults of decoding, which uses kernels, graphs and a cache that prefill does not
    use."""
    return _scores_fault(written, scores, tolerance, "scores its own answer differently as a prompt")


def writing_fault(reference: AnswerExcerpt, written: AnswerExcerpt, tolerance: AnswerTolerance) -> list[str]:
    """Return a fault if the engine's own answer differs too much from the reference. At the first differing token, both
    engines chose the most likely token after the same prefix, so the log-probabilities of the two tokens must be close.
    Later tokens cannot be compared."""
    for place, (token, other) in enumerate(zip(written.token_ids, reference.token_ids, strict=False)):
        if token == other:
            continue
        difference = abs(written.logprobs[place] - reference.logprobs[place])
        if difference <= tolerance.single_nats:
            return []
        return [
            f"differs from the previous engines' answers: token {place + 1} is another, and its log-probability"
            f" differs by {difference:.3g} nats, limit {tolerance.single_nats:g}"
        ]
    return []


def _scores_fault(
    excerpt: AnswerExcerpt, scores: tuple[float, ...], tolerance: AnswerTolerance, what: str
) -> list[str]:
    if len(scores) != len(excerpt.logprobs) or not all(map(math.isfinite, scores)):
        return [f"gave {len(scores)} log-probabilities for {len(excerpt.logprobs)} tokens, or non-finite ones"]
    differences = [abs(one - other) for one, other in zip(scores, excerpt.logprobs, strict=True)]
    mean = math.fsum(differences) / len(differences)
    if mean <= tolerance.mean_nats:
        return []
    return [f"{what}: log-probabilities differ by {mean:.3g} nats a token, limit {tolerance.mean_nats:g}"]
