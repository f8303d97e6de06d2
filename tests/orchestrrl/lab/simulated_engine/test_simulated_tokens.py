"""The simulated model: continued responses equal undisturbed ones, and lengths follow the length model."""

import math
from statistics import correlation, quantiles

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrrl.lab.simulated_engine.tokens import FIRST_WORD, Generation, LengthModel, Sampling, TokenModel, likeliest

prompts = st.lists(st.integers(0, 31_999), min_size=1, max_size=40)
LENGTHS = LengthModel((0, 0.5, 0.9, 1), (10, 100, 1000, 10_000), correlation=0.6)


samplings = st.builds(Sampling, st.integers(-(2**63), 2**63), st.floats(0.1, 2))
any_sampling = st.none() | samplings


def tokens_of(generation: Generation, count: int) -> list[int]:
    return [generation.next_token()[0] for _ in range(count)]


@given(prompts, st.data())
def test_continuation_from_any_point_equals_the_undisturbed_response(prompt: list[int], data: st.DataObject):
    model = TokenModel()
    whole = model.begin(prompt)
    answer = [whole.next_token() for _ in range(whole.answer_tokens)]
    cut = data.draw(st.integers(0, len(answer)))
    continued = model.begin([*prompt, *(token for token, _ in answer[:cut])])
    assert continued.answer_tokens == whole.answer_tokens
    assert continued.position - cut == whole.position - len(answer)
    assert [continued.next_token() for _ in answer[cut:]] == answer[cut:]


@given(prompts, prompts)
def test_responses_differ_by_prompt_seed_and_weights(prompt: list[int], other: list[int]):
    plain, sampled = tokens_of(TokenModel().begin(prompt), 8), tokens_of(TokenModel().begin(prompt, Sampling(1)), 80)
    assert all(token >= FIRST_WORD for token in (*plain, *sampled))
    assert sampled != tokens_of(TokenModel().begin(prompt), 80)
    assert sampled != tokens_of(TokenModel().begin(prompt, Sampling(2)), 80)
    assert plain != tokens_of(TokenModel(weights_seed=1).begin(prompt), 8)
    if other != prompt:
        assert plain != tokens_of(TokenModel().begin(other), 8)


def ranks(model: TokenModel, context: list[int]) -> list[int]:
    """Return the rank of each token except the first, counted from 0."""
    found = zip(context[1:], model.prompt_logprobs(context), strict=True)
    return [token - first for token, (_, first, _) in found]


@given(st.text(min_size=1, max_size=20), samplings, st.integers(1, 60))
def test_request_with_a_seed_repeats_the_draws_of_its_own_start(text: str, sampling: Sampling, cut: int):
    model = TokenModel()
    prompt = model.tokenize(text)
    whole = tokens_of(model.begin(prompt, sampling), 60)
    assert tokens_of(model.begin(prompt, sampling), 60) == whole
    context = [*prompt, *whole[:cut]]
    continued = tokens_of(model.begin(context, sampling), 60)
    assert ranks(model, [*context, *continued])[-60:] == ranks(model, [*prompt, *whole])[-60:]


@given(st.text(min_size=1, max_size=20), samplings, samplings, st.integers(1, 60))
def test_length_of_a_continued_response_is_not_in_its_past(text: str, first: Sampling, second: Sampling, cut: int):
    model = TokenModel(lengths=LengthModel((0, 1), (40, 200)))
    begun = model.begin(model.tokenize(text), first)
    cut = min(cut, begun.answer_tokens - 1)
    context = [*model.tokenize(text), *tokens_of(begun, cut)]
    assert (same := model.begin(context, first)).position == cut
    assert same.answer_tokens == begun.answer_tokens
    assert (other := model.begin(context, second)).position == cut
    assert other.answer_tokens > cut


@given(st.floats(0.1, 2))
def test_lower_temperature_draws_likelier_tokens(temperature: float):
    made = [TokenModel().begin([1], Sampling(seed, temperature)).next_token()[1] for seed in range(200)]
    colder = [TokenModel().begin([1], Sampling(seed, temperature / 2)).next_token()[1] for seed in range(200)]
    assert all(low <= high for low, high in zip(made, colder, strict=True))
    assert made != colder


@given(prompts, any_sampling, st.integers(5, 60))
def test_generated_text_has_lower_logprobs_with_other_weights(
    prompt: list[int], sampling: Sampling | None, tokens: int
):
    generation = TokenModel().begin(prompt, sampling)
    made = [generation.next_token() for _ in range(tokens)]
    text = [*prompt, *(token for token, _ in made)]
    shown = TokenModel().prompt_logprobs(text)
    assert len(shown) == len(text) - 1
    assert [logprob for logprob, _, _ in shown[-tokens:]] == [logprob for _, logprob in made]
    if sampling is None:
        assert [first for _, first, _ in shown[-tokens:]] == [token for token, _ in made]
    assert all(logprob <= best <= 0 for logprob, _, best in shown)
    other = TokenModel(weights_seed=1).prompt_logprobs(text)[-tokens:]
    assert sum(logprob for logprob, _, _ in other) < sum(logprob for _, logprob in made)


@given(prompts, any_sampling, st.integers(0, 20))
def test_likeliest_tokens_are_those_of_the_position(prompt: list[int], sampling: Sampling | None, count: int):
    model = TokenModel()
    token, logprob = model.begin(prompt, sampling).next_token()
    (_, first, first_logprob) = model.prompt_logprobs([*prompt, token])[-1]
    rows = likeliest(token, logprob, count, model.vocab_size)
    assert rows[0] == (token, logprob, token - first + 1)
    assert len({each for each, _, _ in rows}) == len(rows)
    if count:
        assert (first, first_logprob, 1) in rows
    assert sorted(rank for _, _, rank in rows)[:count] == list(range(1, count + 1))


@given(prompts, st.integers(0, 30), st.integers(1, 30))
def test_response_continues_with_other_weights_as_if_resent(prompt: list[int], before: int, after: int):
    generation, other = TokenModel().begin(prompt), TokenModel(weights_seed=3)
    had = [generation.next_token()[0] for _ in range(before)]
    generation.follow(other)
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
