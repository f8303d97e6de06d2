"""The announced traffic of a communication period: the ranks that communicate, their primitives, and the bytes sent.

A trainer announces the traffic, or the daemon derives it from the deployment. `demand.py` converts it into bytes
between ToRs. An `Intent` corresponds to the intent descriptor in section 5.3 of the paper, and the operations are those
of the paper's table 1.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from planner.model import GpuId


class Stage(StrEnum):
    TRAIN = "train"
    GEN = "gen"
    WEIGHT_SYNC = "weight_sync"


class TrafficOperation(StrEnum):
    DP = "DP"
    TP = "TP"
    PP = "PP"
    CP = "CP"
    EP = "EP"
    AFD = "AFD"
    WEIGHT_SYNC = "WS"
    RESPONSES = "RS"  # from Gen to Train


class Primitive(StrEnum):
    RING_ALL_REDUCE = "ring_all_reduce"
    TREE_ALL_REDUCE = "tree_all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"
    PIPELINE = "pipeline"  # each rank of a group to the next, once
    RING_EXCHANGE = "ring_exchange"  # as PIPELINE, plus the last to the first: ring attention
    BIPARTITE = "bipartite"  # M2N: each rank of a group to each of its receivers, in equal shares
    # the whole message from the first rank of a group to each receiver, or to the rest of the group
    BROADCAST = "broadcast"


@dataclass(frozen=True, slots=True)
class Traffic:
    """One operation of a period, in which each rank contributes a message of `bytes_per_rank` bytes, `times` times.

    `groups` lists groups of ranks. For BIPARTITE and BROADCAST, `receivers` lists the ranks that receive the messages
    of each group, in the order of `groups`. If it is empty, a BROADCAST goes to the rest of the group.
    """

    operation: TrafficOperation
    primitive: Primitive
    groups: tuple[tuple[int, ...], ...]
    bytes_per_rank: float
    times: float = 1.0
    receivers: tuple[tuple[int, ...], ...] = ()
    both_ways: bool = False  # BIPARTITE: receivers send as much back, as under AFD

    def __post_init__(self) -> None:
        for name in ("bytes_per_rank", "times"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be finite and >= 0, got {getattr(self, name)}")
        if self.receivers and len(self.receivers) != len(self.groups):
            raise ValueError(
                f"receivers must have one entry for each of {len(self.groups)} groups, got {len(self.receivers)}"
            )
        if self.primitive is Primitive.BIPARTITE and not self.receivers:
            raise ValueError("receivers must be set for bipartite traffic, got none")


@dataclass(frozen=True, slots=True)
class Intent:
    """The traffic of one period. `period` is a recurring name, such as "gradients". `gpus` maps ranks to GPUs; a rank
    without an entry uses the GPU with the rank's number."""

    period: str
    stage: Stage
    traffic: tuple[Traffic, ...]
    gpus: Mapping[int, GpuId] = field(default_factory=dict)
    job: str = ""  # the job of these ranks, as their recorders name it

    def gpu(self, rank: int) -> GpuId:
        return self.gpus.get(rank, GpuId(rank))

    @property
    def ranks(self) -> frozenset[int]:
        return frozenset(rank for each in self.traffic for group in (*each.groups, *each.receivers) for rank in group)
