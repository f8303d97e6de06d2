"""Responses of OpenAI endpoints, whole or streamed, in one form for comparison."""

import json
from dataclasses import dataclass, field
from typing import Any

import aiohttp


@dataclass
class Answer:
    token_ids: list[int] = field(default_factory=list)
    prompt_token_ids: list[int] | None = None
    text: str = ""
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    finish_reasons: int = 0
    stop_reason: int | str | None = None
    reseeded: list[dict[str, int]] = field(default_factory=list)
    usage: dict[str, Any] | None = None

    def add(self, event: dict[str, Any]) -> None:
        """Add a stream event, or a whole response, of one choice."""
        self.prompt_token_ids = event.get("prompt_token_ids") or self.prompt_token_ids
        for choice in event["choices"]:
            message = choice.get("delta") or choice.get("message") or {"content": choice.get("text")}
            self.prompt_token_ids = choice.get("prompt_token_ids") or self.prompt_token_ids
            self.token_ids += choice.get("token_ids") or []
            self.text += message.get("content") or ""
            logprobs = choice.get("logprobs") or {}
            self.logprobs += logprobs.get("token_logprobs") or []
            self.logprobs += [item["logprob"] for item in logprobs.get("content") or []]
            self.reseeded += choice.get("reseeded") or []
            if choice.get("finish_reason") is not None:
                self.finish_reason = choice["finish_reason"]
                self.stop_reason = choice.get("stop_reason")
                self.finish_reasons += 1
        if event.get("usage"):
            names = ("prompt_tokens", "completion_tokens", "total_tokens")
            self.usage = {name: event["usage"][name] for name in names}


async def read_whole(response: aiohttp.ClientResponse) -> Answer:
    answer = Answer()
    answer.add(await response.json())
    return answer


async def read_stream(response: aiohttp.ClientResponse, answer: Answer | None = None) -> Answer:
    """Read a stream. `answer` is filled during the read, so that callers can observe it."""
    answer = answer or Answer()
    done = False
    async for line in response.content:
        if line.startswith(b"data: "):
            assert not done
            done = line == b"data: [DONE]\n"
            if not done:
                answer.add(json.loads(line[len(b"data: ") :]))
    assert done
    assert answer.finish_reasons == 1
    return answer
