"""Options of one simulated engine, its faults included, and how it hands KV over.

KV of running requests goes between simulated engines of one machine by a small file for each entry, in a shared
directory. Bodies carry the parameters of vLLM with OrchestrRL's connector
(orchestrrl/integrations/instrument/kv_scheduler.py). Nothing is carried but what stands for the KV: the tokens that it
belongs to, and the version of the weights.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from orchestrrl.integrations.instrument.kv_scheduler import TransferParams
from orchestrrl.lab.simulated_engine.scheduler import EngineShape
from orchestrrl.lab.simulated_engine.tokens import DEFAULT_LENGTHS, LengthModel


@dataclass(frozen=True, slots=True)
class KvLink:
    """How engines hand KV over. Times are virtual."""

    directory: Path
    bytes_per_token: float
    gbps: float
    latency_s: float

    def transfer_s(self, tokens: int) -> float:
        return self.latency_s + tokens * self.bytes_per_token * 8 / (self.gbps * 1e9)

    def save(self, wish: TransferParams, token_ids: Sequence[int]) -> None:
        """The KV of an aborted request; of no tokens, so that nobody waits for it."""
        assert wish.save is not None
        entry = self.directory / wish.save
        written = entry.with_suffix(".part")
        written.write_text(json.dumps({"weights": wish.weights, "token_ids": list(token_ids)}))
        written.rename(entry)

    def take(self, wish: TransferParams, token_ids: Sequence[int]) -> int | None:
        """How many of these tokens' KV the entry has, at most all but the last; None: it is not there yet. Once found
        it is gone: 0 where it is of other weights or tokens."""
        assert wish.load is not None
        entry = self.directory / wish.load
        try:
            found = json.loads(entry.read_text())
        except FileNotFoundError:
            return None
        entry.unlink()
        common = min(len(found["token_ids"]), len(token_ids))
        if found["weights"] != wish.weights or found["token_ids"][:common] != list(token_ids[:common]):
            return 0
        return min(common, len(token_ids) - 1)


class SimulatedFaults(BaseModel):
    """What is wrong with an engine, for those who try how others take it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    start_delay_s: Annotated[float, Field(ge=0)] = 0.0  # it listens so much later; virtual
    fail_start: bool = False  # it ends with an error message
    hang: bool = False  # it listens, and never answers
    wrong_answers: bool = False  # out of other weights than it has
    misreport: dict[Literal["tp", "pp", "dp", "ep"], Annotated[int, Field(ge=0)]] = Field(default_factory=dict)
    # Which loads of weights, counted from 1, it says no to, and at which it fails halfway.
    refuse_loads: Annotated[frozenset[int], Field(strict=False)] = frozenset()
    tear_loads: Annotated[frozenset[int], Field(strict=False)] = frozenset()


NO_FAULTS = SimulatedFaults()


class SimulatedOptions(BaseModel):
    """Everything that makes one simulated engine. Times are virtual seconds, but for `tick_s`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model_name: str = "simulated"
    # What it claims to be: a published name, and a GPU as `nvidia-smi -L` names it; empty: its host has none.
    model_root: str = "Qwen/Qwen2.5-14B-Instruct"
    gpu: str = "NVIDIA H800"
    alpha_s: Annotated[float, Field(gt=0)] = 0.0184
    beta_s: Annotated[float, Field(ge=0)] = 0.000081
    gamma_s: Annotated[float, Field(ge=0)] = 4.1e-8
    prefill_tokens_per_s: Annotated[float, Field(gt=0)] | None = None  # None: prefill takes no time
    max_num_seqs: Annotated[int, Field(ge=1)] = 48
    kv_capacity_tokens: Annotated[int, Field(ge=1)] = 262_144
    block_tokens: Annotated[int, Field(ge=1)] = 16
    max_model_len_tokens: Annotated[int, Field(ge=2)] = 32_768
    vocab_size: Annotated[int, Field(ge=1024)] = 32_000
    seed: int = 0  # of the weights: engines with the same seed are replicas
    lengths: LengthModel = DEFAULT_LENGTHS
    kv_directory: Path | None = None  # in common with the engines that hand KV over to each other; None: none does
    kv_bytes_per_token: Annotated[float, Field(gt=0)] = 196_608
    kv_gbps: Annotated[float, Field(gt=0)] = 400.0
    kv_latency_s: Annotated[float, Field(ge=0)] = 0.002
    # Seats, KV, prefill and the marginal step times are those of one data-parallel replica, as vLLM counts them.
    tensor_parallel_size: Annotated[int, Field(ge=1)] = 1
    pipeline_parallel_size: Annotated[int, Field(ge=1)] = 1
    data_parallel_size: Annotated[int, Field(ge=1)] = 1
    enable_expert_parallel: bool = False
    enable_sleep_mode: bool = False
    enable_elastic_ep: bool = False
    weights: Path | None = None  # folder of weights to begin with, instead of those of `seed`
    load_s: Annotated[float, Field(ge=0)] = 0.0  # to load weights
    load_s_per_gb: Annotated[float, Field(ge=0)] = 0.0  # and for each GB of them
    weight_transfer: bool = True  # it has OrchestrRL's backend, which checks before it loads, and tells what it has
    sleep_s: Annotated[float, Field(ge=0)] = 0.0  # to fall asleep, and to wake up
    scale_s: Annotated[float, Field(ge=0)] = 0.0  # to go on with more or fewer replicas
    faults: SimulatedFaults = NO_FAULTS
    speed: Annotated[float, Field(gt=0)] = 1.0
    tick_s: Annotated[float, Field(gt=0)] = 0.02

    @model_validator(mode="after")
    def _holds_one_request(self) -> Self:
        whole_blocks_tokens = self.kv_capacity_tokens // self.block_tokens * self.block_tokens
        if whole_blocks_tokens < self.max_model_len_tokens:
            raise ValueError(
                f"kv_capacity_tokens must hold one request of max_model_len_tokens, got {self.kv_capacity_tokens} and "
                f"{self.max_model_len_tokens}"
            )
        return self

    @property
    def link(self) -> KvLink | None:
        if self.kv_directory is None:
            return None
        return KvLink(self.kv_directory, self.kv_bytes_per_token, self.kv_gbps, self.kv_latency_s)

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
