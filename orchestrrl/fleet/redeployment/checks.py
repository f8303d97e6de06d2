"""Whether an engine is what a redeployment wanted: its layout, its KV, its answers. Pure."""

import math
from dataclasses import dataclass

from orchestrrl.engines.base import AnswerExcerpt, ReportedLayout
from planner.model import Parallelism

# A prompt of ids that every vocabulary has. What it says does not matter: all engines are asked the same.
CANARY_IDS = tuple(3 + 7 * place % 200 for place in range(16))
# Plans count on the configured capacity; what graphs and fragments cost beyond this share would break them.
CAPACITY_SHARE = 0.9


@dataclass(frozen=True, slots=True)
class AnswerTolerance:
    """How far an engine's answers may be from its predecessor's. Other layouts sum in another order, so that logits
    differ in their last bits; wrong weights differ by far more."""

    tokens: int = 16
    mean_nats: float = 0.1  # mean |difference| of log-probabilities; 16-bit sums in another order make 0.02

    @property
    def single_nats(self) -> float:
        """Of one token. Logits of 16 bits alone make a quarter of a nat."""
        return 10 * self.mean_nats


def layout_fault(reported: ReportedLayout, wanted: Parallelism) -> list[str]:
    """What the engine says of itself against what it was started for. What it does not say is not held against it."""
    pairs = [("TP", reported.tp, wanted.tp), ("PP", reported.pp, wanted.pp), ("DP", reported.dp, wanted.dp)]
    if not wanted.afd:
        pairs.append(("EP", reported.ep, wanted.ep > 1))
    wrong = [f"{name} {got} instead of {want}" for name, got, want in pairs if got is not None and got != want]
    return [f"is laid out otherwise: {', '.join(wrong)}"] if wrong else []


def capacity_fault(has_tokens: int, planned_tokens: int) -> list[str]:
    if has_tokens >= CAPACITY_SHARE * planned_tokens:
        return []
    return [f"has KV for {has_tokens} tokens, and plans count on {planned_tokens}"]


def answers_fault(reference: AnswerExcerpt, scores: tuple[float, ...], tolerance: AnswerTolerance) -> list[str]:
    """Whether it gives another's words the probabilities that the other gave them."""
    return _scores_fault(reference, scores, tolerance, "answers otherwise than the engines before")


def reading_fault(written: AnswerExcerpt, scores: tuple[float, ...], tolerance: AnswerTolerance) -> list[str]:
    """Whether it finds its own words, read as a prompt, as likely as when it wrote them: decoding has kernels, graphs
    and a cache that reading a prompt does not use."""
    return _scores_fault(written, scores, tolerance, "reads its own answer otherwise than it wrote it")


def writing_fault(reference: AnswerExcerpt, written: AnswerExcerpt, tolerance: AnswerTolerance) -> list[str]:
    """Whether it writes as the other did. Where the texts part, both took what was likeliest after the same words, so
    that one was as likely as the other; beyond that they cannot be compared."""
    for place, (token, other) in enumerate(zip(written.token_ids, reference.token_ids, strict=False)):
        if token == other:
            continue
        difference = abs(written.logprobs[place] - reference.logprobs[place])
        if difference <= tolerance.single_nats:
            return []
        return [
            f"answers otherwise than the engines before: its token {place + 1} is another, and its log-probability"
            f" differs by {difference:.3g} nats, limit {tolerance.single_nats:g}"
        ]
    return []


def _scores_fault(
    excerpt: AnswerExcerpt, scores: tuple[float, ...], tolerance: AnswerTolerance, what: str
) -> list[str]:
    if len(scores) != len(excerpt.logprobs) or not all(map(math.isfinite, scores)):
        return [f"gave {len(scores)} log-probabilities for {len(excerpt.logprobs)} tokens, or such as are none"]
    differences = [abs(one - other) for one, other in zip(scores, excerpt.logprobs, strict=True)]
    mean = math.fsum(differences) / len(differences)
    if mean <= tolerance.mean_nats:
        return []
    return [f"{what}: log-probabilities differ by {mean:.3g} nats a token, limit {tolerance.mean_nats:g}"]
