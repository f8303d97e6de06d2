"""Completions and chats of the openai package, whole and streamed. Usage: client.py URL MODEL_FOLDER REQUESTS OUT

The output is a JSON list: the token ids and log-probabilities of each sample as the client received them.
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI

TOKENS = 64
AT_ONCE = 16


class OpenAiCalls:
    def __init__(self, url: str, model: str) -> None:
        self.openai = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=600)
        self.model = model
        self.slots = asyncio.Semaphore(AT_ONCE)

    async def ask(self, number: int) -> list[dict[str, Any]]:
        """Send one request. Its kind, its seed and the temperature depend on `number`."""
        greedy = number % 4 == 3
        common: dict[str, Any] = {
            "model": self.model,
            "max_tokens": TOKENS,
            "temperature": 0 if greedy else 1,
            "seed": 1000 + number,
            "extra_body": {"return_token_ids": True, "ignore_eos": True},
        }
        async with self.slots:
            if number % 3 == 0:
                completion = await self.openai.completions.create(prompt=f"Count to {number}:", logprobs=0, **common)
                return [
                    {"token_ids": choice.token_ids, "logprobs": choice.logprobs.token_logprobs}
                    for choice in completion.choices
                ]
            messages = [{"role": "user", "content": f"Count to {number}"}]
            if number % 3 == 1:
                chat = await self.openai.chat.completions.create(
                    messages=messages, logprobs=True, n=1 if greedy else 2, **common
                )
                return [
                    {"token_ids": choice.token_ids, "logprobs": [entry.logprob for entry in choice.logprobs.content]}
                    for choice in chat.choices
                ]
            sample: dict[str, Any] = {"token_ids": [], "logprobs": []}
            stream = await self.openai.chat.completions.create(messages=messages, logprobs=True, stream=True, **common)
            async for event in stream:
                for choice in event.choices:
                    sample["token_ids"] += choice.model_extra.get("token_ids") or []
                    sample["logprobs"] += (
                        [entry.logprob for entry in choice.logprobs.content] if choice.logprobs else []
                    )
            return [sample]


async def main() -> None:
    url, model_folder, requests, out = sys.argv[1:]
    client = OpenAiCalls(url, Path(model_folder).name)
    assert [model.id async for model in client.openai.models.list()] == [client.model]
    answers = await asyncio.gather(*(client.ask(number) for number in range(int(requests))))
    Path(out).write_text(json.dumps([sample for samples in answers for sample in samples]))


asyncio.run(main())
