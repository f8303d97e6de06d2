"""Logits processors for vLLM with which an engine cannot serve: each in its own way. A switch to such an engine has to
go back."""

import threading

import torch
from vllm.config import VllmConfig
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor


class Hanging(LogitsProcessor):
    """The engine never gets beyond loading it."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        threading.Event().wait()

    def is_argmax_invariant(self) -> bool:
        return True

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """It knows of no requests."""

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        return logits


class Bent(LogitsProcessor):
    """What is read is understood as ever, and of what may be written the least likely is taken."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        """There is nothing to remember."""

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """It is the same for all requests."""

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        return -logits
