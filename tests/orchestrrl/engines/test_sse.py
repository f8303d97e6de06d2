import itertools
import json

from hypothesis import given
from hypothesis import strategies as st

from orchestrrl.engines.openai_chunks import DONE, ServerSentEvents

STREAM = b'data: {"text": "\xc3\xa9\\n"}\r\n\r\n: keep-alive\n\nevent: x\ndata:{"a": 1}\n\ndata: [DONE]\n\ndata: cut'


def lines(stream: bytes, at: list[int]) -> list[bytes]:
    events = ServerSentEvents()
    edges = [0, *sorted(at), len(stream)]
    return [event for start, end in itertools.pairwise(edges) for event in events.feed(stream[start:end])]


@given(st.lists(st.integers(0, len(STREAM)), max_size=20))
def test_events_may_be_cut_anywhere(at: list[int]) -> None:
    assert lines(STREAM, at) == ['{"text": "é\\n"}'.encode(), b'{"a": 1}', DONE]


def test_line_may_be_very_long() -> None:
    document = json.dumps(list(range(200_000))).encode()
    stream = b"data: %b\n\n" % document
    assert lines(stream, list(range(0, len(stream), 1000))) == [document]
