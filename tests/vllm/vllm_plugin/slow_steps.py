"""A logits processor for vLLM that slows steps down. The servers of these tests load it, in vLLM's environment, so that
a test that acts during a request does not race a small model on a busy machine."""

import os
import time

import torch
from vllm.config import VllmConfig
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

ENVIRONMENT = "ORCHESTRRL_TEST_SLOW_STEPS"  # "1000:0.02": 20 ms per step while a request with max_tokens >= 1,000 runs
WHILE = "ORCHESTRRL_TEST_SLOW_WHILE"  # a file: slow only while it exists


class SlowSteps(LogitsProcessor):
    """Sleeps in every step with a request whose `max_tokens` is large enough. It does not change logits."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        least_max_tokens, step_s = os.environ[ENVIRONMENT].split(":")
        self._least_max_tokens = int(least_max_tokens)
        self._step_s = float(step_s)
        self._while = os.environ.get(WHILE)
        self._slow: dict[int, bool] = {}  # by batch index

    def is_argmax_invariant(self) -> bool:
        return False  # true in fact, but then vLLM would skip it for greedy batches

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(
            self._slow,
            batch_update,
            lambda params, _prompt, _output: True if (params.max_tokens or 0) >= self._least_max_tokens else None,
        )

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        if self._slow and (self._while is None or os.path.exists(self._while)):
            time.sleep(self._step_s)
        return logits
