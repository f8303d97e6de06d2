"""Turns of verifiers' train client, which sends and receives tokens. Usage: client.py URL MODEL_FOLDER REQUESTS OUT

The output is a JSON list: the token ids and log-probabilities of each turn as verifiers returned them.
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from verifiers.v1.clients.train import TrainClient
from verifiers.v1.configs.client import TrainClientConfig
from verifiers.v1.dialects import ChatDialect
from verifiers.v1.types import SamplingConfig

TOKENS = 64


async def conversation(client: TrainClient, model: str, number: int) -> list[dict[str, Any]]:
    """Hold a conversation of two turns; every fourth one is greedy."""
    greedy = number % 4 == 3
    sampling = SamplingConfig(
        temperature=0.0 if greedy else 1.0, top_p=1.0, max_tokens=TOKENS, seed=1000 + number, ignore_eos=True
    )
    messages = [{"role": "user", "content": f"Count to {number}"}]
    turns = []
    for _ in range(2):
        body = {"model": model, "messages": messages}
        answer = await client.get_response(ChatDialect(), body, sampling, session_id=f"rollout-{number}")
        turns.append({"token_ids": answer.tokens.completion_ids, "logprobs": answer.tokens.completion_logprobs})
        messages = [*messages, answer.raw["choices"][0]["message"], {"role": "user", "content": "Go on"}]
    return turns


async def main() -> None:
    url, model_folder, requests, out = sys.argv[1:]
    config = TrainClientConfig(base_url=f"{url}/v1", api_key_var="NO_KEY", renderer_model_name=model_folder)
    client = TrainClient(config)
    model = Path(model_folder).name
    answers = await asyncio.gather(*(conversation(client, model, number) for number in range(int(requests) // 2)))
    await client.close()
    Path(out).write_text(json.dumps([turn for turns in answers for turn in turns]))


asyncio.run(main())
