"""Which GPUs the instances of one configuration take, as the deployer deals them out. Pure.

Inside servers, or on whole ones in a row; under AFD the attention GPUs come first. What is left over stays idle.
"""

from dataclasses import dataclass

import numpy as np

from orchestrrl.sim.net.model import Ints, Servers
from planner.profile import Parallelism


@dataclass(frozen=True, slots=True)
class GenGpus:
    """The GPUs that generate: `count` of them from `first` on, whole servers."""

    first: int
    count: int

    def __post_init__(self) -> None:
        if self.first < 0 or self.count < 1:
            raise ValueError(f"first must be >= 0 and count >= 1, got {self.first} and {self.count}")

    @property
    def all(self) -> Ints:
        return np.arange(self.first, self.first + self.count)


@dataclass(frozen=True, slots=True)
class Fleet:
    """Instances that are all laid out alike."""

    parallelism: Parallelism
    gpus: Ints  # [instance, rank]; under AFD attention before FFN

    def __len__(self) -> int:
        return len(self.gpus)

    @property
    def attention(self) -> Ints:
        """[instance, rank] of those that hold KV."""
        return self.gpus[:, : self.parallelism.attention_gpus] if self.parallelism.afd else self.gpus

    @property
    def ffn(self) -> Ints:
        """[instance, rank] under AFD; else none."""
        return self.gpus[:, self.parallelism.attention_gpus :] if self.parallelism.afd else self.gpus[:, :0]


def deployed(parallelism: Parallelism, where: GenGpus, servers: Servers) -> Fleet:
    """As many instances as there is room for. Raises ValueError where they cannot be told apart by servers."""
    size, per_server = parallelism.gpus, servers.gpus_per_server
    if where.first % per_server or where.count % per_server:
        raise ValueError(f"generation must have whole servers of {per_server} GPUs, got {where}")
    if size > per_server and size % per_server:
        raise ValueError(f"an instance beyond one server must take whole ones of {per_server} GPUs, got {size}")
    if size > per_server:
        starts = np.arange(where.first, where.first + where.count - size + 1, size)
    else:
        server = np.arange(where.first, where.first + where.count, per_server)
        starts = (server[:, None] + np.arange(0, per_server - size + 1, size)).reshape(-1)
    return Fleet(parallelism, starts[:, None] + np.arange(size))
