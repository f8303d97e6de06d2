"""Tests that detect a wrong engine: by its probabilities for another's answer, by its answer, and by its probabilities
for its own."""

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
    """A model whose log-probabilities of the next token are a function of the text so far. `noise_nats` is the noise of
    all of them; `decode_nats` the additional noise of decoding; `takes` the rank of the chosen token by likelihood."""

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
def test_same_model_with_other_rounding_passes(seed: int, noise_nats: float) -> None:
    """This includes answers that diverge because two tokens are about equally likely."""
    assert found(Model(seed), Model(seed, noise_nats)) == []


def test_rounding_makes_some_answers_diverge() -> None:
    """Otherwise the property above would prove little."""
    parted = [Model(seed).excerpt().token_ids != Model(seed, 0.05).excerpt().token_ids for seed in range(100)]
    assert sum(parted) > 10


@given(st.integers(0, 10_000))
def test_another_model_fails(seed: int) -> None:
    assert any("differs from the previous" in fault for fault in found(Model(seed), Model(seed + 1)))


@given(st.integers(0, 10_000), st.floats(0.06, 2.0))
def test_engine_that_decodes_differently_from_prefill_fails(seed: int, decode_nats: float) -> None:
    assert any(
        "scores its own answer differently" in fault for fault in found(Model(seed), Model(seed, 0.0, decode_nats))
    )


def test_engine_that_chooses_unlikely_tokens_fails() -> None:
    """Its probabilities are correct, and consistent with its own answer."""
    (fault,) = found(Model(), Model(takes=VOCABULARY - 1))
    assert fault.startswith("differs from the previous engines' answers: token 1 is another")


@pytest.mark.parametrize(("shift", "faults"), [(0.49, 0), (0.51, 1)])
def test_answers_may_diverge_at_equally_likely_tokens(shift: float, faults: int) -> None:
    one = AnswerExcerpt(PROMPT, (4, 5, 6), (-1.0, -1.0, -1.0))
    other = replace(one, token_ids=(4, 7, 8), logprobs=(-1.0, -1.0 - shift, -9.0))
    assert len(writing_fault(one, other, LIMITS)) == faults


def test_shorter_answer_is_compared_up_to_its_end() -> None:
    one = AnswerExcerpt(PROMPT, (4, 5, 6), (-1.0, -1.0, -1.0))
    assert writing_fault(one, AnswerExcerpt(PROMPT, (4,), (-1.0,)), LIMITS) == []
