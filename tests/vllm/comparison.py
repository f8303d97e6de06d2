"""Compare answers of a bare vLLM server and of the gateway."""

import json
from typing import Any

import aiohttp

# Names of an answer that differ in every answer.
_NAMES = ("id", "request_id", "created")


async def answered(http: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> tuple[int, Any]:
    """Return status and answer. If vLLM sends a refusal as an event of its stream, the status is in that event."""
    async with http.post(url, json=body) as response:
        text = await response.text()
        if not response.headers["Content-Type"].startswith("text/event-stream"):
            answer = json.loads(text)
            return response.status, answer if response.status != 200 else rounded(answer)
        events = [json.loads(line[len("data: ") :]) for line in text.splitlines() if line.startswith("data: {")]
        for event in events:
            if "error" in event:
                return event["error"]["code"], event
        return response.status, rounded(joined(events))


def joined(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the content of a stream, independently of its division into events."""
    whole: dict[str, Any] = {}
    for event in events:
        whole |= {name: value for name, value in event.items() if value is not None and name != "choices"}
        for choice in event["choices"]:
            mine = whole.setdefault(f"choice {choice['index']}", {})
            logprobs = {f"logprobs.{name}": value for name, value in (choice.get("logprobs") or {}).items()}
            for name, value in {**choice, **choice.get("delta", {}), **logprobs}.items():
                if value is None or name in ("delta", "logprobs"):
                    continue
                grows = isinstance(value, list) or name in ("text", "content")
                mine[name] = mine[name] + value if grows and name in mine else value
    return whole


def rounded(value: Any) -> Any:
    """Remove ids and empty fields of an answer, and round numbers, which depend on the batch in their last bits."""
    if isinstance(value, dict):
        kept = {name: rounded(item) for name, item in value.items() if name not in _NAMES}
        return {name: item for name, item in kept.items() if item is not None and item != [] and item != {}}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return round(value, 2) if isinstance(value, float) else value


def near(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) < 0.02
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(near(one[name], other[name]) for name in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(near, one, other))
    return bool(one == other)


def same_answer(one: tuple[int, Any], other: tuple[int, Any]) -> bool:
    """Return whether a bare server's answer `one` equals the gateway's answer `other`. Refusals are equal if they name
    the same field. If servers fail with an internal error, the gateway returns status 503 after several attempts."""
    if one[0] != other[0]:
        return (one[0], other[0]) == (500, 503)
    return near(one[1], other[1]) if one[0] == 200 else one[1]["error"]["param"] == other[1]["error"]["param"]


def fault_of_0_31(one: tuple[int, Any], other: tuple[int, Any]) -> bool:
    """Return whether the bare server's answer `one` differs from the gateway's answer `other` only by a fault of vLLM
    0.31 that 0.32 does not have. Generate requests for several choices fail with an internal error if they are streamed
    or refused by the engine, and the text offsets of streamed log-probabilities are wrong. Without output modes, its
    answers do not name theirs."""
    if one[0] != 200 or other[0] != 200:
        return one[0] == 500
    return near(*(_without_faults(answer) for _, answer in (one, other)))


def _without_faults(answer: dict[str, Any]) -> dict[str, Any]:
    return {
        name: {key: item for key, item in value.items() if key != "logprobs.text_offset"}
        if name.startswith("choice ")
        else value
        for name, value in answer.items()
        if (name, value) != ("output_mode", "tokens")
    }
