"""Faulty logits processors for vLLM: an engine with one of them cannot serve, and a redeployment to it must be rolled
back."""

import threading

import torch
from vllm.config import VllmConfig
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor


class Hanging(LogitsProcessor):
    """A processor that hangs while the engine loads it."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        threading.Event().wait()

    def is_argmax_invariant(self) -> bool:
        return True

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Do nothing: no request has state."""

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        return logits


class Bent(LogitsProcessor):
    """A processor that selects the least likely token; prompts are processed correctly."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        """Ignore the arguments: there is no state."""

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Do nothing: all requests are treated alike."""

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        return -logits
