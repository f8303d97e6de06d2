"""The simulated model: continued responses equal undisturbed ones, and lengths follow the length model."""

import math
from statistics import correlation, quantiles

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrrl.lab.simulated_engine.tokens import FIRST_WORD, LengthModel, TokenModel

prompts = st.lists(st.integers(0, 31_999), min_size=1, max_size=40)
LENGTHS = LengthModel((0, 0.5, 0.9, 1), (10, 100, 1000, 10_000), correlation=0.6)


@given(prompts, st.integers(0, 5), st.data())
def test_continuation_from_any_point_equals_the_undisturbed_response(prompt: list[int], seed: int, data: st.DataObject):
    model = TokenModel()
    whole = model.begin(prompt, seed)
    answer = [whole.next_token() for _ in range(whole.answer_tokens)]
    cut = data.draw(st.integers(0, len(answer)))
    continued = model.begin([*prompt, *(token for token, _ in answer[:cut])], seed)
    assert continued.answer_tokens == whole.answer_tokens
    assert continued.position - cut == whole.position - len(answer)
    assert [continued.next_token() for _ in answer[cut:]] == answer[cut:]


@given(prompts, prompts)
def test_responses_differ_by_prompt_seed_and_weights(prompt: list[int], other: list[int]):
    def answer(model: TokenModel, context: list[int], seed: int = 0) -> list[int]:
        generation = model.begin(context, seed)
        return [generation.next_token()[0] for _ in range(8)]

    plain = answer(TokenModel(), prompt)
    assert all(token >= FIRST_WORD for token in plain)
    assert plain != answer(TokenModel(), prompt, seed=1)
    assert plain != answer(TokenModel(weights_seed=1), prompt)
    if other != prompt:
        assert plain != answer(TokenModel(), other)


@given(prompts, st.integers(0, 5), st.integers(5, 60))
def test_generated_text_has_lower_logprobs_with_other_weights(prompt: list[int], seed: int, tokens: int):
    generation = TokenModel().begin(prompt, seed)
    made = [generation.next_token() for _ in range(tokens)]
    text = [*prompt, *(token for token, _ in made)]
    shown = TokenModel().prompt_logprobs(text, seed)
    assert len(shown) == len(text) - 1
    assert [(likeliest, logprob) for logprob, likeliest, _ in shown[-tokens:]] == made
    assert all(logprob <= best <= 0 for logprob, _, best in shown)
    other = TokenModel(weights_seed=1).prompt_logprobs(text, seed)[-tokens:]
    assert sum(logprob for logprob, _, _ in other) < sum(logprob for _, logprob in made)


@given(prompts, st.integers(0, 30), st.integers(1, 30))
def test_response_continues_with_other_weights_as_if_resent(prompt: list[int], before: int, after: int):
    generation, other = TokenModel().begin(prompt), TokenModel(weights_seed=3)
    had = [generation.next_token()[0] for _ in range(before)]
    generation.follow(other, 0)
    anew = other.begin([*prompt, *had])
    assert [generation.next_token() for _ in range(after)] == [anew.next_token() for _ in range(after)]


def test_lengths_have_the_given_quantiles_and_correlation():
    model = TokenModel(lengths=LENGTHS)
    pairs = []
    for prompt in range(3000):
        shared = [prompt, 7]
        pairs.append([math.log(model.begin([*shared, FIRST_WORD + s]).answer_tokens) for s in (0, 1)])
    lengths = [math.exp(first) for first, _ in pairs]
    deciles = quantiles(lengths, n=10)
    assert deciles[4] == pytest.approx(100, rel=0.1)
    assert deciles[8] == pytest.approx(1000, rel=0.2)
    assert correlation([a for a, _ in pairs], [b for _, b in pairs]) == pytest.approx(0.6, abs=0.06)


@pytest.mark.parametrize(
    ("quantile", "tokens", "fault"),
    [
        ((0, 1), (5,), "same length"),
        ((0.1, 1), (5, 6), "ascend from 0 to 1"),
        ((0, 1), (6, 5), "must be >= 1 and ascend"),
    ],
)
def test_invalid_length_model_is_rejected(quantile: tuple[float, ...], tokens: tuple[float, ...], fault: str):
    with pytest.raises(ValueError, match=fault):
        LengthModel(quantile, tokens)


def test_text_round_trip():
    model = TokenModel()
    assert model.detokenize(model.tokenize("größer als 3 →")) == "größer als 3 →"
    assert model.detokenize([0xC3, FIRST_WORD]) == f"� w{FIRST_WORD}"
