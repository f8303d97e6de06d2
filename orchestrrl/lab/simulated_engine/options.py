"""Options of one simulated engine, its faults included, and how it hands KV over.

KV of running requests goes between simulated engines of one machine by a small file for each entry, in a shared
directory. Bodies carry the parameters of vLLM with OrchestrRL's connector
(orchestrrl/integrations/instrument/kv_scheduler.py). Nothing is carried but what stands for the KV: the tokens that it
belongs to, and the version of the weights.
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
    """Everything that makes one simulated engine. Times are virtual seconds, except `tick_s`. Fields with a description
    are options of `orchestrrl engine simulated`, which reads them from this source: their defaults are literals."""

    # Seats, KV, prefill and the marginal step times are those of one data-parallel replica, as vLLM counts them.

    model_config = ConfigDict(extra="forbid", frozen=True)

    model_name: str = Field(default="simulated", description="Name of the served model.")
    model_root: str = Field(
        default="Qwen/Qwen2.5-14B-Instruct",
        description="Published name of the model that it claims to run, as vLLM's `root`.",
    )
    gpu: str = Field(
        default="NVIDIA H800", description="GPU that it claims to run on, as `nvidia-smi -L` names it; empty: CPUs."
    )
    alpha_s: float = Field(default=0.0184, gt=0, description="Step time: fixed part.")
    beta_s: float = Field(default=8.1e-5, ge=0, description="Step time: per sequence.")
    gamma_s: float = Field(default=4.1e-8, ge=0, description="Step time: per resident KV token.")
    prefill_tokens_per_s: float | None = Field(
        default=None, gt=0, description="Prefill rate; without it prefill takes no time."
    )
    max_num_seqs: int = Field(default=48, ge=1, description="Most sequences in a batch.")
    kv_capacity_tokens: int = Field(default=262_144, ge=1, description="KV cache.")
    block_tokens: int = Field(default=16, ge=1, description="KV block size.")
    max_model_len_tokens: int = Field(default=32_768, ge=2, description="Longest context, in tokens.")
    vocab_size: int = Field(default=32_000, ge=1024, description="Token ids.")
    seed: int = Field(default=0, description="Seed of the weights; replicas share it.")
    lengths: LengthModel = DEFAULT_LENGTHS
    kv_directory: Path | None = Field(
        default=None, description="Directory in common with engines that hand the KV of requests over to each other."
    )
    kv_bytes_per_token: float = Field(default=196_608, gt=0, description="KV of a token.")
    kv_gbps: float = Field(default=400.0, gt=0, description="Rate at which KV comes.")
    kv_latency_s: float = Field(default=0.002, ge=0, description="What every transfer of KV waits.")
    weights: Path | None = Field(
        default=None, description="Folder of weights to begin with, instead of those of the seed."
    )
    weight_transfer: bool = True  # it has OrchestrRL's backend, which checks before it loads, and reports what it has
    tensor_parallel_size: int = Field(default=1, ge=1, description="As it says that it is laid out.")
    pipeline_parallel_size: int = Field(default=1, ge=1, description="The same.")
    data_parallel_size: int = Field(
        default=1, ge=1, description="Replicas: each has the seats, KV and rates that are named here."
    )
    enable_expert_parallel: bool = Field(default=False, description="As it says.")
    enable_sleep_mode: bool = Field(default=False, description="It can sleep and wake up.")
    enable_elastic_ep: bool = Field(default=False, description="It can go on with other numbers of replicas.")
    load_s: float = Field(default=0.0, ge=0, description="Virtual seconds to load weights.")
    sleep_s: float = Field(default=0.0, ge=0, description="To fall asleep, and to wake up.")
    scale_s: float = Field(default=0.0, ge=0, description="To go on with another number of replicas.")
    start_delay_s: float = Field(default=0.0, ge=0, description="Listen so many virtual seconds later.")
    fail_start: bool = Field(default=False, description="Fault: end with an error instead.")
    hang: bool = Field(default=False, description="Fault: listen, and never answer.")
    wrong_answers: bool = Field(default=False, description="Fault: answer out of other weights than it has.")
    misreport: dict[Literal["tp", "pp", "dp", "ep"], Annotated[int, Field(ge=0)]] = Field(default_factory=dict)
    refuse_load: tuple[int, ...] = Field(
        default=(), description="Fault: refuse this load of weights, counted from 1; repeat it."
    )
    tear_load: tuple[int, ...] = Field(
        default=(), description="Fault: fail halfway through this load of weights; repeat it."
    )
    speed: float = Field(default=1.0, gt=0, description="Virtual seconds per second.")
    tick_s: float = Field(default=0.02, gt=0, description="Seconds between looks at the clock.")

    @model_validator(mode="after")
    def _holds_one_request(self) -> Self:
        whole_blocks_tokens = self.kv_capacity_tokens // self.block_tokens * self.block_tokens
        if whole_blocks_tokens < self.max_model_len_tokens:
            raise ValueError(
                f"kv_capacity_tokens must hold one request of max_model_len_tokens, got {self.kv_capacity_tokens} and "
                f"{self.max_model_len_tokens}"
            )
        return self

    def transfer_s(self, tokens: int) -> float:
        """Return the virtual seconds that KV of these tokens takes from another engine."""
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
    """Write the KV of an aborted request; of no tokens, so that nobody waits for it."""
    assert wish.save is not None
    entry = directory / wish.save
    written = entry.with_suffix(".part")
    written.write_text(json.dumps({"weights": wish.weights, "token_ids": list(token_ids)}))
    written.rename(entry)


def take_kv(directory: Path, wish: TransferParams, token_ids: Sequence[int]) -> int | None:
    """Return how many of these tokens' KV the entry has, at most all but the last; None: it is not there yet. Once
    found it is gone: 0 where it is of other weights or tokens."""
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
