"""What gives a wrong engine away: how it reads what others wrote, how it writes, and how it reads what it wrote."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrrl.engines.base import AnswerExcerpt
from orchestrrl.fleet.redeployment.checks import AnswerTolerance, answers_fault, reading_fault, writing_fault

PROMPT = (3, 10, 17)
VOCABULARY = 8
TOKENS = 16
LIMITS = AnswerTolerance(tokens=TOKENS, mean_nats=0.05)


class Model:
    """Log-probabilities of the next token are a function of the text so far. `noise_nats`: how far they are from those
    of the same model without noise; `decode_nats`: how much further where it writes; `takes`: which by likelihood."""

    def __init__(self, seed: int = 0, noise_nats: float = 0.0, decode_nats: float = 0.0, takes: int = 0) -> None:
        self._seed, self._noise_nats, self._decode_nats, self._takes = seed, noise_nats, decode_nats, takes

    def after(self, text: tuple[int, ...]) -> list[float]:
        chance = random.Random(f"{self._seed} {text}")
        noise = random.Random(f"noise {text}")
        likely = [chance.uniform(-6, -1) for _ in range(VOCABULARY)]
        return [each + noise.uniform(-self._noise_nats, self._noise_nats) for each in likely]

    def excerpt(self) -> AnswerExcerpt:
        text, logprobs = PROMPT, []
        for _ in range(TOKENS):
            after = self.after(text)
            taken = sorted(range(VOCABULARY), key=lambda token: -after[token])[self._takes]
            text = (*text, taken)
            logprobs.append(after[taken] - self._decode_nats)
        return AnswerExcerpt(PROMPT, text[len(PROMPT) :], tuple(logprobs))

    def score(self, excerpt: AnswerExcerpt) -> tuple[float, ...]:
        text = (*excerpt.prompt_ids, *excerpt.token_ids)
        first = len(excerpt.prompt_ids)
        return tuple(self.after(text[:place])[text[place]] for place in range(first, len(text)))


def found(before: Model, now: Model) -> list[str]:
    reference, written = before.excerpt(), now.excerpt()
    return [
        *reading_fault(written, now.score(written), LIMITS),
        *answers_fault(reference, now.score(reference), LIMITS),
        *writing_fault(reference, written, LIMITS),
    ]


@given(st.integers(0, 10_000), st.floats(0, 0.05))
def test_the_same_model_with_other_rounding_is_taken(seed: int, noise_nats: float) -> None:
    """Also where it comes to say something else because two tokens are about as likely."""
    assert found(Model(seed), Model(seed, noise_nats)) == []


def test_rounding_makes_texts_part_sometimes() -> None:
    """Or the property above would show little."""
    parted = [Model(seed).excerpt().token_ids != Model(seed, 0.05).excerpt().token_ids for seed in range(100)]
    assert sum(parted) > 10


@given(st.integers(0, 10_000))
def test_another_model_is_not(seed: int) -> None:
    assert any("answers otherwise" in fault for fault in found(Model(seed), Model(seed + 1)))


@given(st.integers(0, 10_000), st.floats(0.06, 2.0))
def test_who_decodes_otherwise_than_it_reads_is_not(seed: int, decode_nats: float) -> None:
    assert any("reads its own answer otherwise" in fault for fault in found(Model(seed), Model(seed, 0.0, decode_nats)))


def test_who_takes_what_is_unlikely_is_not() -> None:
    """It reads as ever, and finds itself consistent."""
    (fault,) = found(Model(), Model(takes=VOCABULARY - 1))
    assert fault.startswith("answers otherwise than the engines before: its token 1 is another")


@pytest.mark.parametrize(("shift", "faults"), [(0.49, 0), (0.51, 1)])
def test_texts_may_part_where_both_tokens_are_about_as_likely(shift: float, faults: int) -> None:
    one = AnswerExcerpt(PROMPT, (4, 5, 6), (-1.0, -1.0, -1.0))
    other = replace(one, token_ids=(4, 7, 8), logprobs=(-1.0, -1.0 - shift, -9.0))
    assert len(writing_fault(one, other, LIMITS)) == faults


def test_a_text_that_ended_earlier_is_compared_as_far_as_it_goes() -> None:
    one = AnswerExcerpt(PROMPT, (4, 5, 6), (-1.0, -1.0, -1.0))
    assert writing_fault(one, AnswerExcerpt(PROMPT, (4,), (-1.0,)), LIMITS) == []
