"""Which GPUs the instances of one configuration take, as the deployer deals them out. Pure.

Inside servers, or on whole ones in a row; under AFD the attention GPUs come first. Instances that fit into a PoD of the
fabric stay inside one. The servers that PoDs have left over make instances together where that narrows nothing, as in
trees of packet switches; else they stay idle: such an instance would get half or a third of what the others get.
"""

from dataclasses import dataclass

import numpy as np

from orchestrrl.lab.sim.net.fabrics.base import Pods
from orchestrrl.lab.sim.net.model import Ints, Servers
from planner.cost.profile import Parallelism


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
class UniformFleet:
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


def deployed(parallelism: Parallelism, where: GenGpus, servers: Servers, pods: Pods | None = None) -> UniformFleet:
    """As many instances as there is room for; `pods` None: all servers are of one. Raises ValueError where instances
    cannot be told apart by servers."""
    size, per_server = parallelism.gpus, servers.gpus_per_server
    if where.first % per_server or where.count % per_server:
        raise ValueError(f"generation must have whole servers of {per_server} GPUs, got {where}")
    if size > per_server and size % per_server:
        raise ValueError(f"an instance beyond one server must take whole ones of {per_server} GPUs, got {size}")
    server = np.arange(where.first, where.first + where.count, per_server) // per_server
    if size > per_server:
        rows = _in_pods(server, size // per_server, pods or Pods(np.zeros(servers.count, np.int64), apart=False))
        return UniformFleet(parallelism, (rows[:, :, None] * per_server + np.arange(per_server)).reshape(-1, size))
    starts = (server[:, None] * per_server + np.arange(0, per_server - size + 1, size)).reshape(-1)
    return UniformFleet(parallelism, starts[:, None] + np.arange(size))


def left_idle(fleet: UniformFleet, where: GenGpus) -> int:
    """GPUs that could take further instances which span servers, were it not for PoDs."""
    size = fleet.parallelism.gpus
    return (where.count // size - len(fleet)) * size


def _in_pods(servers: Ints, each: int, pods: Pods) -> Ints:
    """[instance, server]: `each` of these servers for each. Where none fits into any PoD, they go over all of them."""
    groups = [servers[pods.of[servers] == pod] for pod in np.unique(pods.of[servers])]
    whole = [len(group) // each * each for group in groups]
    rest = np.concatenate([group[count:] for group, count in zip(groups, whole, strict=True)])
    if pods.apart and any(whole):
        rest = rest[:0]
    rest = rest[: len(rest) // each * each]
    rows = np.concatenate([*(group[:count] for group, count in zip(groups, whole, strict=True)), rest])
    rows = rows.reshape(-1, each)
    return np.asarray(rows[np.argsort(rows[:, 0])])
