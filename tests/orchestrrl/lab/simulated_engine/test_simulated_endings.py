"""Ends of responses: stop strings and the text that streams release, compared with a simple model of vLLM's rules."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from orchestrrl.lab.simulated_engine.endings import AnswerPart, ResponseText, ending_of, find_stop
from orchestrrl.lab.simulated_engine.sampling import SamplingBody, requests_for
from orchestrrl.lab.simulated_engine.tokens import EOS, LengthModel, TokenModel

MODEL = TokenModel(vocab_size=1024, lengths=LengthModel((0, 1), (20, 60)))
PROMPT = (7, 8, 9)
texts = st.text("ab", max_size=30)
stops = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4)


def stop_by_characters(text: str, new_chars: int, stop: list[str]) -> tuple[str, int] | None:
    """Search like `find_stop`, but extend the text by one character at a time."""
    for end in range(len(text) - new_chars + 1, len(text) + 1):
        for string in stop:
            if text[:end].endswith(string):
                return string, end - len(string)
    return None


@given(texts, stops, st.data())
def test_find_stop_equals_a_search_by_characters(text: str, stop: list[str], data: st.DataObject):
    new_chars = data.draw(st.integers(0, len(text)))
    before = text[: len(text) - new_chars]
    if stop_by_characters(before, len(before), stop) is None:
        assert find_stop(text, new_chars, stop) == stop_by_characters(text, new_chars, stop)


@given(
    st.integers(1, 50),
    st.integers(0, 60),
    st.lists(st.text(" w0123456789", min_size=1, max_size=5), max_size=3),
    st.lists(st.integers(0, 29), max_size=2),
    st.booleans(),
    st.booleans(),
    st.data(),
)
def test_response_ends_and_streams_as_in_vllm(
    max_tokens: int,
    min_tokens: int,
    stop: list[str],
    stop_at: list[int],
    include_stop: bool,
    ignore_eos: bool,
    data: st.DataObject,
):
    generation = MODEL.begin(PROMPT)
    made = [generation.next_token()[0] for _ in range(60)]
    min_tokens = min(min_tokens, max_tokens)
    body = SamplingBody(
        min_tokens=min_tokens,
        ignore_eos=ignore_eos,
        stop=stop,
        stop_token_ids=[made[at] for at in stop_at],
        include_stop_str_in_output=include_stop,
    )
    (request,) = requests_for(body, PROMPT, max_tokens, None, None)
    natural = max(MODEL.begin(PROMPT).answer_tokens, min_tokens + 1)

    tokens: list[int] = []
    text, visible, expected = "", "", None
    while expected is None:
        token = made[len(tokens)]
        if len(tokens) + 1 == natural and not ignore_eos:
            token = EOS
        tokens.append(token)
        late = len(tokens) > min_tokens
        ends_by_token = late and token in request.stop_token_ids and token != EOS
        piece = "" if ends_by_token and not include_stop else MODEL.detokenize([token])
        text += piece
        visible = text
        found = stop_by_characters(text, len(piece), stop) if late and token != EOS and not ends_by_token else None
        if token == EOS:
            expected = ("stop", None)
        elif ends_by_token:
            expected = ("stop", token)
        elif found is not None:
            expected, visible = ("stop", found[0]), text[: found[1] + len(found[0]) * include_stop]
        elif len(tokens) == max_tokens:
            expected = ("length", None)

    ending = ending_of(request, MODEL.begin(PROMPT))
    assert (ending.tokens, ending.finish_reason, ending.stop_reason) == (len(tokens), *expected)
    assert ending.eos == (tokens[-1] == EOS)

    cuts = sorted({0, len(tokens), *data.draw(st.lists(st.integers(1, len(tokens)), max_size=5))})
    withheld = 0 if include_stop or not stop else max(map(len, stop)) - 1
    released, response = "", ResponseText(request, MODEL)
    for start, end in pairwise(cuts):
        is_last = end == len(tokens)
        part = AnswerPart(tokens[start:end], [], *(expected if is_last else ()))
        released += response.add(part)
        so_far = MODEL.detokenize(tokens[:end])
        assert released == (visible if is_last else so_far[: max(len(so_far) - withheld, 0)])


def test_text_is_released_when_a_response_is_aborted():
    (request,) = requests_for(SamplingBody(stop=["never found"]), PROMPT, 9, None, None)
    response = ResponseText(request, MODEL)
    assert response.add(AnswerPart([300], [])) == ""
    assert response.add(AnswerPart([], [], "abort")) == MODEL.detokenize([300])


def test_stop_string_that_other_weights_have_removed_does_not_shorten_the_text():
    (request,) = requests_for(SamplingBody(stop=["w999"]), PROMPT, 9, None, None)
    response = ResponseText(request, MODEL)
    assert response.add(AnswerPart([300, 301], [], "stop", "w999")) == MODEL.detokenize([300, 301])
