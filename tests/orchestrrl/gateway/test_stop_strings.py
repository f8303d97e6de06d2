"""A moved answer with stop strings equals the unmoved one, for any text, stop strings and cuts."""

from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from hypothesis import example, given, settings
from hypothesis import strategies as st

from orchestrrl.engines.base import Chunk, CompletionEndpoint, TokenLogprob
from orchestrrl.gateway.ledger.ledger import RequestRecord
from orchestrrl.gateway.moves.detokenizer import INCOMPLETE, TextAfterCut, last_tokens
from orchestrrl.gateway.moves.stop_strings import StopStringMatcher
from orchestrrl.gateway.moves.stops_after_cut import StopsAfterCut
from planner.model import RequestId
from tests.orchestrrl.gateway.fakes import DecodeStream, decode
from tests.orchestrrl.gateway.stop_reference import ReferenceDetokenizer, reference_answer

PROMPT = tuple(b"p")
END = 256  # a stop token; it has no text
T = TypeVar("T")


def returned(coroutine: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine that never waits."""
    try:
        coroutine.send(None)
    except StopIteration as ended:
        return ended.value  # type: ignore[no-any-return]
    raise AssertionError("the coroutine waits")


async def decoded(tokens: Sequence[int]) -> str:
    return decode(tokens)


def record_of(sampling: dict[str, Any]) -> RequestRecord:
    record = RequestRecord(
        RequestId("r"), CompletionEndpoint.COMPLETIONS, sampling, False, arrived_s=0.0, max_tokens=99
    )
    record.prompt_ids = PROMPT
    return record


def first_part(record: RequestRecord, tokens: Sequence[int], cut: int) -> bool:
    """Append what the first engine returns for the tokens before the cut. Returns False if the answer ends there."""
    engine = ReferenceDetokenizer(record.body, DecodeStream(PROMPT).step)
    for token in tokens[:cut]:
        engine.add(token)
        if engine.matched is not None:
            return False
        record.append(Chunk((token,), logprobs=(TokenLogprob(str(token), -1.0),)), engine.news(ends=False), None, 0.0)
    return True


def next_part(record: RequestRecord, tokens: Sequence[int], sizes: Sequence[int], finish_reason: str | None) -> None:
    """Append what the gateway delivers of the next engine's chunks, which have these numbers of tokens. The engine
    matches no stop strings. Without finish_reason, this part is cut too."""
    before = [*PROMPT, *record.generated_ids]
    whole = decode(before).rstrip(INCOMPLETE)[len(PROMPT) :]
    assert whole.startswith(record.text)
    matcher = StopStringMatcher(record.body, whole, len(record.generated_ids), len(record.text))
    stops = StopsAfterCut(record, decoded, matcher)
    window = last_tokens(record)
    splice = TextAfterCut(record, decoded, window, decode(window)) if decode(window).endswith(INCOMPLETE) else None
    stream, at = DecodeStream(before), 0
    for size in sizes:
        ids = tuple(tokens[at : at + size])
        at += len(ids)
        last = at == len(tokens)
        shown = ids[:-1] if last and finish_reason == "stop" and not record.body["include_stop_str_in_output"] else ids
        chunk = Chunk(
            ids,
            "".join(stream.step(token) for token in shown),
            logprobs=tuple(TokenLogprob(str(token), -1.0) for token in ids),
            finish_reason=finish_reason if last else None,
        )
        text = chunk.text if splice is None else returned(splice.text(chunk))
        splice = splice if splice is not None and splice.open else None
        chunk, text = returned(stops.take(chunk, text))
        record.append(chunk, text, None, 0.0)
        if record.done or last:
            return


# Few characters, so that stop strings occur.
TOKENS = st.lists(st.sampled_from([*map(str.encode, "ab漢"), [300], [301]]), min_size=2, max_size=12)
STOPS = st.lists(st.text("ab漢", min_size=1, max_size=4), min_size=1, max_size=3)


@settings(max_examples=200)
@given(
    TOKENS,
    STOPS | st.text("ab漢", min_size=1, max_size=5),
    st.booleans(),
    st.integers(0, 9),
    st.lists(st.integers(1, 9), min_size=1, max_size=3),
    st.lists(st.integers(1, 4), min_size=1, max_size=80),
    st.sampled_from(["length", "stop"]),
)
@example([b"aab"], ["ab"], False, 0, [2], [4], "length")  # the stop string spans the cut
@example(["漢a漢".encode()], ["漢"], True, 1, [1, 1], [3, 1], "stop")  # cuts inside a character
@example([b"bbba"], ["b"], False, 2, [1], [1], "length")  # only the third token may end the answer
@example([b"bbabb"], ["b"], False, 2, [2], [1], "length")  # a stop string before the cut that min_tokens permits
@example([b"aa", [301]], ["漢", "aab", "ab"], False, 2, [2], [4], "length")  # three end in one token, two together
def test_moved_answer_equals_the_unmoved_one(
    pieces: Sequence[Sequence[int]],
    stop: list[str] | str,
    included: bool,
    min_tokens: int,
    cuts: list[int],
    sizes: list[int],
    finish_reason: str,
) -> None:
    sampling = {"stop": stop, "include_stop_str_in_output": included, "min_tokens": min_tokens}
    tokens = [token for piece in pieces for token in piece] + [END] * (finish_reason == "stop")
    expected = reference_answer(sampling, tokens, DecodeStream(PROMPT).step, finish_reason)
    record = record_of(sampling)
    record.streaming = True
    if cuts[0] >= len(tokens) or not first_part(record, tokens, cuts[0]):
        return
    for cut in (*cuts[1:], len(tokens)):
        rest = tokens[len(record.generated_ids) :]
        part = rest[:cut]
        next_part(record, part, [*sizes, *[1] * len(part)], finish_reason if len(part) == len(rest) else None)
        if record.done:
            break
    answer = (list(record.generated_ids), record.text, record.finish_reason, record.stop_reason)
    assert answer == expected
    assert record.logprobs is not None
    assert [item.token for item in record.logprobs] == [str(token) for token in record.generated_ids]
    deltas = record.take_undelivered()
    assert "".join(delta.text for delta in deltas) == record.text
    assert [token for delta in deltas for token in delta.chunk.token_ids] == list(record.generated_ids)


@given(st.text("ab漢", max_size=16), STOPS, st.booleans())
def test_stream_never_has_text_that_a_stop_string_removes(text: str, stop: list[str], included: bool) -> None:
    """The gateway withholds as much as an engine does."""
    sampling = {"stop": stop, "include_stop_str_in_output": included}
    engine = ReferenceDetokenizer(sampling, lambda token: chr(token))
    matcher = StopStringMatcher(sampling, "", 0, 0)
    for number, character in enumerate(text, 1):
        ends = number == len(text)
        engine.add(ord(character))
        assert matcher.add(1, character, ends=ends) == engine.news(ends=ends or engine.matched is not None)
        assert matcher.matched == engine.matched
        if engine.matched is not None:
            return
