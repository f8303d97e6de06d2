"""A logits processor for vLLM that keeps a step from being short. It is loaded by the servers of these tests, in vLLM's
environment: a test that steps in while a request runs must not race a small model on a busy machine."""

import os
import time

import torch
from vllm.config import VllmConfig
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

ENVIRONMENT = "ORCHESTRRL_TEST_SLOW_STEPS"  # "1000:0.02": 20 ms a step while a request may have 1,000 tokens or more
WHILE = "ORCHESTRRL_TEST_SLOW_WHILE"  # a file: only while it is there


class SlowSteps(LogitsProcessor):
    """Sleeps in every step with a request whose `max_tokens` is large enough. The logits stay as they are."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        least_max_tokens, step_s = os.environ[ENVIRONMENT].split(":")
        self._least_max_tokens = int(least_max_tokens)
        self._step_s = float(step_s)
        self._while = os.environ.get(WHILE)
        self._slow: dict[int, bool] = {}  # by index in the batch

    def is_argmax_invariant(self) -> bool:
        return False  # it is, but then greedy batches would not come here

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
