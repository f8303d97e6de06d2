import itertools
import json
from collections.abc import AsyncIterator

from hypothesis import given
from hypothesis import strategies as st

from orchestrrl.engines import sse

STREAM = b'data: {"text": "\xc3\xa9\\n"}\r\n\r\n: keep-alive\n\nevent: x\ndata:{"a": 1}\n\ndata: [DONE]\n\ndata: cut'


async def _cut(stream: bytes, at: list[int]) -> AsyncIterator[bytes]:
    edges = [0, *sorted(at), len(stream)]
    for start, end in itertools.pairwise(edges):
        yield stream[start:end]


@given(st.lists(st.integers(0, len(STREAM)), max_size=20))
async def test_events_are_the_same_however_the_network_cuts_them(at: list[int]) -> None:
    data = [item async for item in sse.data_of(_cut(STREAM, at))]
    assert data == ['{"text": "é\\n"}', '{"a": 1}', "[DONE]"]


async def test_a_line_may_be_very_long() -> None:
    document = json.dumps(list(range(200_000)))
    stream = f"data: {document}\n\n".encode()
    assert [item async for item in sse.data_of(_cut(stream, list(range(0, len(stream), 1000))))] == [document]
