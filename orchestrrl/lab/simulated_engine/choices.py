"""The choices of one call: their requests run side by side on one engine, and a formatter writes their tokens as stream
events or as one JSON object."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Protocol

from aiohttp import web

from orchestrrl.lab.simulated_engine.endings import AnswerPart
from orchestrrl.lab.simulated_engine.runtime import Runtime, SimulatedAnswer
from orchestrrl.lab.simulated_engine.sampling import SimulatedRequest


class AnswerFormatter(Protocol):
    """Formats the tokens of one call in the JSON of an endpoint."""

    def opening(self) -> list[bytes]:
        """Return the stream events before the first token."""

    def part(self, choice: int, part: AnswerPart) -> bytes:
        """Return the stream events with newly generated tokens of a choice."""

    def closing(self) -> list[bytes]:
        """Return the stream events after the last token."""

    def whole(self, parts: Sequence[AnswerPart]) -> Mapping[str, Any]:
        """Return the whole answer as one JSON object. Each part contains all tokens of one choice."""


async def answer_call(
    http_request: web.Request,
    runtime: Runtime,
    requests: Sequence[tuple[str, SimulatedRequest]],
    formatter: AnswerFormatter,
    *,
    stream: bool,
) -> web.StreamResponse:
    """Run the requests, each with the id by which clients can abort it, and send the answer. If the client disconnects,
    the requests are aborted."""
    answers = [runtime.submit(request, engine_id) for engine_id, request in requests]
    try:
        if stream:
            return await _send_stream(http_request, answers, formatter)
        parts = [part for answer in answers async for part in answer.parts(streamed=False)]
        return web.json_response(formatter.whole(parts))
    finally:
        for answer in answers:
            runtime.drop(answer)


async def _send_stream(
    http_request: web.Request, answers: Sequence[SimulatedAnswer], formatter: AnswerFormatter
) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await response.prepare(http_request)
    opening = formatter.opening()
    if len(answers) == 1:
        async for part in answers[0].parts():
            await response.write(b"".join([*opening, formatter.part(0, part)]))
            opening = []
    else:
        async for choice, part in _merged(answers):
            await response.write(b"".join([*opening, formatter.part(choice, part)]))
            opening = []
    await response.write(b"".join(formatter.closing()))
    await response.write_eof()
    return response


async def _merged(answers: Sequence[SimulatedAnswer]) -> AsyncIterator[tuple[int, AnswerPart]]:
    """Yield the parts of several answers as they are generated, each with the index of its answer."""
    ready: asyncio.Queue[tuple[int, AnswerPart]] = asyncio.Queue()

    async def forward(choice: int) -> None:
        async for part in answers[choice].parts():
            ready.put_nowait((choice, part))

    tasks = [asyncio.create_task(forward(choice)) for choice in range(len(answers))]
    unfinished = len(answers)
    try:
        while unfinished:
            choice, part = await ready.get()
            unfinished -= part.finish_reason is not None
            yield choice, part
    finally:
        for task in tasks:
            task.cancel()
