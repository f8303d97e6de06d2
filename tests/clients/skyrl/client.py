"""Calls of SkyRL's remote inference client. Usage: client.py URL MODEL_FOLDER REQUESTS OUT

The output is a JSON list: the token ids and log-probabilities of each sample as SkyRL returned them.
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import RemoteInferenceClient

TOKENS = 64
SAMPLES = 4  # of one Tinker request


async def generate(client: RemoteInferenceClient, numbers: range, **sampling: Any) -> list[dict[str, Any]]:
    """Generate a sample for each number, in a session of its own."""
    answer = await client.generate(
        {
            "prompt_token_ids": [[40, 41, 42, 60 + number] for number in numbers],
            "sampling_params": {"max_tokens": TOKENS, "logprobs": 0, "ignore_eos": True, **sampling},
            "session_ids": [f"trajectory-{number}" for number in numbers],
            "cache_salt": "policy-0",
        }
    )
    assert len(answer["responses"]) == len(numbers)
    assert set(answer["stop_reasons"]) == {"length"}
    pairs = zip(answer["response_ids"], answer["response_logprobs"], strict=True)
    return [{"token_ids": token_ids, "logprobs": logprobs} for token_ids, logprobs in pairs]


async def sample(client: RemoteInferenceClient, number: int) -> list[dict[str, Any]]:
    """Generate samples as for Tinker's SamplingClient."""
    sampling = {"temperature": 1.0, "max_tokens": TOKENS, "seed": 2000 + number, "top_k": -1, "top_p": 1.0}
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [50, 51, 60 + number]}]}
    answer = await client.sample({"json": {"prompt": prompt, "num_samples": SAMPLES, "sampling_params": sampling}})
    return [{"token_ids": each["tokens"], "logprobs": each["logprobs"]} for each in answer["sequences"]]


async def chat(client: RemoteInferenceClient, number: int) -> list[dict[str, Any]]:
    body = {
        "messages": [{"role": "user", "content": f"Count to {number}"}],
        "session_id": f"chat-{number}",
        "max_tokens": TOKENS,
        "temperature": 1.0,
        "seed": 3000 + number,
        "logprobs": True,
        "return_token_ids": True,
    }
    answer = await client.chat_completion({"json": body})
    return [
        {"token_ids": choice["token_ids"], "logprobs": [each["logprob"] for each in choice["logprobs"]["content"]]}
        for choice in answer["choices"]
    ]


async def main() -> None:
    url, model_folder, requests, out = sys.argv[1:]
    quarter = int(requests) // 4
    model = Path(model_folder).name
    async with RemoteInferenceClient(
        proxy_url=url, server_urls=[url], data_parallel_size=1, model_name=model
    ) as client:
        (tokens,) = await client.tokenize(["Count to ten"])
        assert await client.detokenize([tokens]) == ["Count to ten"]
        answers = await asyncio.gather(
            generate(client, range(quarter), temperature=1.0, seed=11),
            generate(client, range(quarter, 2 * quarter), temperature=0.0),
            *(sample(client, number) for number in range(quarter // SAMPLES)),
            *(chat(client, number) for number in range(quarter)),
        )
        await client.finish_session("trajectory-0")
    Path(out).write_text(json.dumps([each for samples in answers for each in samples]))


asyncio.run(main())
