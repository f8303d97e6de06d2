"""The options of a simulated engine, including faults, and its KV handover.

Simulated engines on one machine transfer the KV of running requests through a shared directory, with one small file per
entry. Request bodies contain the parameters of vLLM with OrchestrRL's connector
(orchestrrl/integrations/instrument/kv_scheduler.py). Each file represents the KV by the token ids and the version of
the weights.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from orchestrrl.integrations.instrument.kv_scheduler import TransferParams
from orchestrrl.lab.simulated_engine.scheduler import EngineShape
from orchestrrl.lab.simulated_engine.tokens import DEFAULT_LENGTHS, LengthModel


class SimulatedOptions(BaseModel):
    """All options of a simulated engine. Times are in virtual seconds, except `tick_s`. Fields with a description are
    options of `orchestrrl engine simulated`, which parses this source file, so their defaults must be literals."""

    # Batch size, KV, prefill rate and marginal step times are per data-parallel replica, as in vLLM.

    model_config = ConfigDict(extra="forbid", frozen=True)

    model_name: str = Field(default="simulated", description="Name of the served model.")
    model_root: str = Field(
        default="Qwen/Qwen2.5-14B-Instruct",
        description="Published name of the simulated model, reported as vLLM's `root`.",
    )
    gpu: str = Field(default="NVIDIA H800", description="GPU to report, as named by `nvidia-smi -L`. Empty: CPUs.")
    alpha_s: float = Field(default=0.0184, gt=0, description="Fixed part of the step time in seconds.")
    beta_s: float = Field(default=8.1e-5, ge=0, description="Step time per sequence in seconds.")
    gamma_s: float = Field(default=4.1e-8, ge=0, description="Step time per resident KV token in seconds.")
    prefill_tokens_per_s: float | None = Field(
        default=None, gt=0, description="Prefill rate. Default: prefill takes no time."
    )
    max_num_seqs: int = Field(default=48, ge=1, description="Maximum number of sequences in a batch.")
    kv_capacity_tokens: int = Field(default=262_144, ge=1, description="Size of the KV cache in tokens.")
    block_tokens: int = Field(default=16, ge=1, description="Size of a KV block in tokens.")
    max_model_len_tokens: int = Field(default=32_768, ge=2, description="Maximum context length in tokens.")
    vocab_size: int = Field(default=32_000, ge=1024, description="Number of token ids.")
    seed: int = Field(default=0, description="Seed of the weights. Replicas use the same seed.")
    lengths: LengthModel = DEFAULT_LENGTHS
    kv_directory: Path | None = Field(
        default=None, description="Directory shared with other engines for the transfer of KV."
    )
    kv_bytes_per_token: float = Field(default=196_608, gt=0, description="KV bytes per token.")
    kv_gbps: float = Field(default=400.0, gt=0, description="Rate of KV transfer in Gbit/s.")
    kv_latency_s: float = Field(default=0.002, ge=0, description="Latency of a KV transfer in seconds.")
    weights: Path | None = Field(
        default=None, description="Folder of the initial weights. Default: the weights of the seed."
    )
    weight_transfer: bool = True  # emulate OrchestrRL's weight backend, which checks before loading and reports results
    tensor_parallel_size: int = Field(default=1, ge=1, description="Tensor-parallel size to report.")
    pipeline_parallel_size: int = Field(default=1, ge=1, description="Pipeline-parallel size to report.")
    data_parallel_size: int = Field(
        default=1, ge=1, description="Number of replicas. The batch size, KV and rates given are per replica."
    )
    enable_expert_parallel: bool = Field(default=False, description="Report expert parallelism.")
    enable_sleep_mode: bool = Field(default=False, description="Support sleep and wake-up.")
    enable_elastic_ep: bool = Field(default=False, description="Support changes of the number of replicas.")
    load_s: float = Field(default=0.0, ge=0, description="Virtual seconds to load weights.")
    sleep_s: float = Field(default=0.0, ge=0, description="Virtual seconds to fall asleep, and to wake up.")
    scale_s: float = Field(default=0.0, ge=0, description="Virtual seconds to change the number of replicas.")
    start_delay_s: float = Field(default=0.0, ge=0, description="Virtual seconds before the engine listens.")
    fail_start: bool = Field(default=False, description="Fault: fail to start.")
    hang: bool = Field(default=False, description="Fault: accept requests but never respond.")
    wrong_answers: bool = Field(default=False, description="Fault: generate the tokens of other weights.")
    misreport: dict[Literal["tp", "pp", "dp", "ep"], Annotated[int, Field(ge=0)]] = Field(default_factory=dict)
    refuse_load: tuple[int, ...] = Field(
        default=(), description="Fault: refuse this load of weights, counted from 1. Can be repeated."
    )
    tear_load: tuple[int, ...] = Field(
        default=(), description="Fault: fail halfway through this load of weights. Can be repeated."
    )
    speed: float = Field(default=1.0, gt=0, description="Virtual seconds per second.")
    tick_s: float = Field(default=0.02, gt=0, description="Seconds between updates of the scheduler.")

    @model_validator(mode="after")
    def _holds_one_request(self) -> Self:
        whole_blocks_tokens = self.kv_capacity_tokens // self.block_tokens * self.block_tokens
        if whole_blocks_tokens < self.max_model_len_tokens:
            raise ValueError(
                f"kv_capacity_tokens must hold max_model_len_tokens in whole blocks, got {self.kv_capacity_tokens} and "
                f"{self.max_model_len_tokens}"
            )
        return self

    def transfer_s(self, tokens: int) -> float:
        """Return the time, in virtual seconds, to transfer the KV of `tokens` tokens from another engine."""
        return self.kv_latency_s + tokens * self.kv_bytes_per_token * 8 / (self.kv_gbps * 1e9)

    @property
    def shape(self) -> EngineShape:
        replicas = self.data_parallel_size
        prefill_s_per_token = 0.0 if self.prefill_tokens_per_s is None else 1 / self.prefill_tokens_per_s
        return EngineShape(
            alpha_s=self.alpha_s,
            beta_s=self.beta_s / replicas,
            gamma_s=self.gamma_s / replicas,
            max_num_seqs=self.max_num_seqs * replicas,
            kv_capacity_tokens=self.kv_capacity_tokens * replicas,
            prefill_s_per_token=prefill_s_per_token / replicas,
            block_tokens=self.block_tokens,
        )


def save_kv(directory: Path, wish: TransferParams, token_ids: Sequence[int]) -> None:
    """Write the KV entry that `wish` names for an ended request to `directory`. An entry without token ids makes the
    receiver stop waiting."""
    assert wish.save is not None
    entry = directory / wish.save
    written = entry.with_suffix(".part")
    written.write_text(json.dumps({"weights": wish.weights, "token_ids": list(token_ids)}))
    written.rename(entry)


def take_kv(directory: Path, wish: TransferParams, token_ids: Sequence[int]) -> int | None:
    """Read the KV entry that `wish` names in `directory`, and delete it. Return the number of tokens at the start of
    `token_ids` whose KV the entry contains, at most all but the last. Return 0 if the entry was written for different
    weights or tokens, and None if it does not exist yet."""
    assert wish.load is not None
    entry = directory / wish.load
    try:
        found = json.loads(entry.read_text())
    except FileNotFoundError:
        return None
    entry.unlink()
    common = min(len(found["token_ids"]), len(token_ids))
    if found["weights"] != wish.weights or found["token_ids"][:common] != list(token_ids[:common]):
        return 0
    return min(common, len(token_ids) - 1)
