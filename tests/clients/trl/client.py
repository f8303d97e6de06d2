"""Generation by TRL's client of server mode, and rollouts by TRL's AsyncGRPO loop.
Usage: client.py URL MODEL_FOLDER REQUESTS OUT

The output is a JSON list: the token ids and log-probabilities of each sample as TRL received them.
"""

import json
import multiprocessing
import sys
import threading
from pathlib import Path
from typing import Any

from accelerate.state import PartialState
from datasets import Dataset
from transformers import AutoTokenizer
from trl.chat_template_utils import qwen2_5_chat_template
from trl.experimental.async_grpo.async_rollout_worker import _AsyncRolloutLoop
from trl.experimental.async_grpo.vllm_client import VLLMClient as AsyncGrpoClient
from trl.generation.vllm_client import VLLMClient

TOKENS = 64
SAMPLES = 4  # per prompt
AT_ONCE = 16


def server_mode(url: str, requests: int) -> list[dict[str, Any]]:
    """Generate `requests` samples: seeded ones, then greedy ones of token ids, then some without a seed."""
    client = VLLMClient(base_url=url)
    assert client.get_world_size() > 0
    assert client.get_server_info()["model_config"]
    prompts = [f"Count to {number}:" for number in range(requests // SAMPLES)]
    limits = {"max_tokens": TOKENS, "generation_kwargs": {"ignore_eos": True, "seed": 7}}
    answers = [
        client.generate(prompts[2:], n=SAMPLES, temperature=1.0, **limits),
        client.generate([[40, 41, number] for number in range(SAMPLES)], temperature=0.0, **limits),
        client.generate(prompts[:1], n=SAMPLES, max_tokens=TOKENS),
    ]
    return [
        {"token_ids": token_ids, "logprobs": [entry[0] for entry in logprobs]}
        for answer in answers
        for token_ids, logprobs in zip(answer["completion_ids"], answer["logprobs"], strict=True)
    ]


def rollouts(url: str, model_folder: str, requests: int) -> list[dict[str, Any]]:
    """Let the AsyncGRPO loop generate at least `requests` samples. Requests in flight at the end are cancelled."""
    PartialState()  # needed by the logger
    client = AsyncGrpoClient(url)
    client.wait_for_server_ready()
    assert client.get_max_model_len() > TOKENS
    assert client.get_dtype() == "torch.float32"
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    tokenizer.chat_template = qwen2_5_chat_template  # the loop accepts only templates that TRL knows
    samples = multiprocessing.Queue()
    loop = _AsyncRolloutLoop(
        model_name=Path(model_folder).name,
        dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": f"Add {n}"}]} for n in range(8)]),
        reward_funcs=[lambda completion_ids, **_: [float(len(ids)) for ids in completion_ids]],
        processing_class=tokenizer,
        eos_token_ids=[tokenizer.eos_token_id],
        rollout_buffer=samples,
        model_version_value=multiprocessing.Value("i", 0),
        heartbeat_value=multiprocessing.Value("d", 0.0),
        failed_event=multiprocessing.Event(),
        exception_info_queue=multiprocessing.Queue(maxsize=1),
        metrics_queue=multiprocessing.Queue(),
        num_generations=SAMPLES,
        max_inflight_tasks=AT_ONCE,
        vllm_server_url=url,
        max_tokens=TOKENS,
    )
    thread = threading.Thread(target=loop.run)
    thread.start()
    received = [samples.get(timeout=120) for _ in range(requests)]
    loop._loop.call_soon_threadsafe(loop._stop_event.set)
    thread.join()
    return [
        {
            "token_ids": sample.input_ids[sample.completion_mask == 1].tolist(),
            "logprobs": sample.old_log_probs[sample.completion_mask == 1].tolist(),
        }
        for sample in received
    ]


def main() -> None:
    url, model_folder, requests, out = sys.argv[1:]
    half = int(requests) // 2
    received = server_mode(url, half) + rollouts(url, model_folder, half)
    Path(out).write_text(json.dumps(received))


main()
