"""Processes of a broadcast, by torch.distributed or by our executor: runs where torch is, started by weights_bandwidth.

    python -m orchestrrl.lab.bench.weights_ranks RANKS BYTES CHUNK_BYTES PARENT,PARENT,...

`PARENT`s are of ranks 1 and on: who sends to whom. It reads the name of a way on its standard input (`broadcast`, or a
transport), moves the bytes that way once, and answers with a line of JSON: seconds from the first rank's beginning to
the last one's end, CPU seconds of all of them together, and whether all had the bytes.
"""

import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
import xxhash

from orchestrrl.lab.testbed.ranks import Ranks, print_json
from orchestrrl.lab.weights_in_memory import BlockingCarrier, InMemory
from orchestrrl.weights.orders import CarryEdge, CarryEdges, EdgeState
from planner.model import PeerId

HOST = "127.0.0.1"
SHARD = "weights"
TRANSPORTS = ("gloo", "tcp")
STALL_S = 60.0


@dataclass(frozen=True, slots=True)
class BenchSite:
    """Who there is, and how bytes go."""

    ranks: int
    size: int
    chunk_bytes: int
    parents: tuple[int, ...]
    store: str

    def edges(self, version: int, transport: str, addresses: Sequence[Mapping[str, str]]) -> tuple[CarryEdge, ...]:
        return tuple(
            CarryEdge(
                f"e{rank}", SHARD, 0, self.size, _name(parent), _name(rank), transport, addresses[rank][transport]
            )
            for rank, parent in enumerate(self.parents, start=1)
        )


def _name(rank: int) -> PeerId:
    return PeerId(f"rank{rank}")


class BenchRank:
    """One process: its memory, a group of all, and a carrier."""

    def __init__(self, site: BenchSite, rank: int) -> None:
        self._site, self._rank = site, rank
        self._staged = InMemory(0, {SHARD: site.size})
        self._memory = self._staged.bytes[SHARD]
        self._tensor = torch.frombuffer(self._memory, dtype=torch.uint8)
        store = dist.FileStore(site.store, site.ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=site.ranks)
        self._carrier = BlockingCarrier(_name(rank), HOST, TRANSPORTS)
        self.addresses = self._carrier.addresses

    def prepare(self, version: int) -> None:
        self._staged.wipe((SHARD,))
        if self._rank == 0:
            words = torch.arange(self._site.size // 8).mul_(2654435761).add_(version)
            self._tensor[: 8 * len(words)] = words.view(torch.uint8)
            self._staged.arrived(SHARD, 0, self._site.size)

    def move(self, way: str, version: int, addresses: Sequence[Mapping[str, str]]) -> None:
        if way == "broadcast":
            dist.broadcast(self._tensor, src=0)
            return
        me = _name(self._rank)
        mine = tuple(edge for edge in self._site.edges(version, way, addresses) if me in (edge.src, edge.dst))
        for event in self._carrier.carry(self._staged, CarryEdges(version, mine, self._site.chunk_bytes, STALL_S)):
            if event.state is not EdgeState.DONE:
                raise RuntimeError(event.detail)

    def after(self, version: int) -> str:
        self._carrier.end(version)
        return xxhash.xxh3_64_hexdigest(self._memory)

    def close(self) -> None:
        self._carrier.close()
        dist.destroy_process_group()


def _live(site: BenchSite, number: int, line: Connection) -> None:
    torch.set_num_threads(1)
    rank = BenchRank(site, number)
    line.send(rank.addresses)
    addresses = line.recv()
    line.send(None)
    while (order := line.recv()) is not None:
        way, version = order
        rank.prepare(version)
        line.send(None)
        line.recv()
        began_s, cpu_s = time.monotonic(), time.process_time()
        rank.move(way, version, addresses)
        ended_s, cpu_s = time.monotonic(), time.process_time() - cpu_s
        line.send((began_s, ended_s, cpu_s, rank.after(version)))
    rank.close()


def main() -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    count, size, chunk_bytes = (int(each) for each in sys.argv[1:4])
    parents = tuple(int(each) for each in sys.argv[4].split(","))
    with tempfile.TemporaryDirectory() as folder:
        site = BenchSite(count, size, chunk_bytes, parents, f"{folder}/store")
        ranks = Ranks(count, partial(_live, site))
        ranks.ask(ranks.receive())  # each learns the addresses of all
        for version, way in enumerate(sys.stdin):
            ranks.ask((way.strip(), version))
            began_s, ended_s, cpu_s, sums = zip(*ranks.ask("go"), strict=True)
            wall_s = max(ended_s) - min(began_s)
            print_json({"wall_s": wall_s, "cpu_s": sum(cpu_s), "same": len(set(sums)) == 1})
        ranks.stop()


if __name__ == "__main__":
    main()
