"""Sites for tests of weight sync, in the contract's format: regular families, and random irregular ones."""

import itertools
import random
from typing import Any

import numpy as np

from planner.sync_tree.model import Shard, ShardPairs, SyncPlan, SyncProblem

Document = dict[str, Any]


def regular(
    train: int = 2,
    gen: int = 6,
    size: int = 32,
    *,
    circuits: int = 8,
    shards: int = 16,
    total: float = 64e9,
    tp: int = 4,
    holders: int = 2,
    chunk_bytes: int = 16 << 20,
    nic_gbps: float = 200.0,
) -> Document:
    """Return a regular site with engines of `tp` adjacent endpoints: each shard goes to one endpoint of every
    engine."""
    names = [f"train{pod}" for pod in range(train)] + [f"gen{pod}" for pod in range(gen)]
    ends = [
        {"id": f"{pod}-{place:02}", "pod": pod, "tor": f"{pod}-tor{place // 8}", "nic_gbps": nic_gbps}
        for pod in names
        for place in range(size)
    ]
    sending = [end["id"] for end in ends if str(end["pod"]).startswith("train")]
    receiving = [end["id"] for end in ends if str(end["pod"]).startswith("gen")]
    return {
        "link_gbps": 200,
        "pods": [{"id": pod, "role": pod.rstrip("0123456789"), "boundary_circuits": circuits} for pod in names],
        "endpoints": ends,
        "tor_circuits": {str(end["tor"]): 8 for end in ends},
        "shards": [
            {
                "id": f"s{shard:03}",
                "bytes": int(total) // shards,
                "holders": sorted(
                    {sending[(shard * len(sending) // shards + 7 * copy) % len(sending)] for copy in range(holders)}
                ),
                "receivers": receiving[shard % tp :: tp],
            }
            for shard in range(shards)
        ],
        "seeds_per_pod": 1,
        "chunk_bytes": chunk_bytes,
        "hop_latency_s": 1e-5,
    }


def irregular(rng: random.Random) -> Document:
    """Return a random site in which NICs, boundaries, ToRs, sizes, holders and receivers may all be uneven."""
    pods = [f"p{pod}" for pod in range(rng.randint(1, 4))]
    ends = [
        {
            "id": f"{pod}-{place}",
            "pod": pod,
            "tor": f"{pod}-tor{rng.randrange(2)}",
            "nic_gbps": rng.choice([50, 100, 200, 400]),
        }
        for pod in pods
        for place in range(rng.randint(1, 6))
    ]
    names = [str(end["id"]) for end in ends]
    without = rng.choice([0.0, 0.0, 0.2])  # probability that a pod or a ToR has no circuits
    return {
        "link_gbps": rng.choice([100, 200]),
        "pods": [
            {
                "id": pod,
                "role": rng.choice(["train", "gen"]),
                "boundary_circuits": 0 if rng.random() < without else rng.randint(1, 5),
            }
            for pod in pods
        ],
        "endpoints": ends,
        "tor_circuits": {str(end["tor"]): 0 if rng.random() < without else rng.randint(1, 4) for end in ends},
        "shards": [
            {
                "id": f"s{shard}",
                "bytes": rng.choice([1, 7, 1000, 5_000_000, 1_000_000_000]),
                "holders": rng.sample(names, rng.randint(1, min(3, len(names)))),
                "receivers": rng.sample(names, rng.randint(0, len(names))),
            }
            for shard in range(rng.randint(0, 5))
        ],
        "seeds_per_pod": rng.randint(1, 3),
        "chunk_bytes": rng.choice([1, 1 << 20, 1 << 26]),
        "hop_latency_s": rng.choice([0.0, 1e-5]),
    }


def oversubscribed(rng: random.Random) -> Document:
    """Return a site whose ToRs have fewer uplinks than NICs; trainers and engine ranks may share a ToR."""
    tors = [f"p{pod}-tor{tor}" for pod in range(rng.randint(1, 3)) for tor in range(rng.choice([2, 4, 6]))]
    per_tor, uplinks = rng.choice([4, 5, 6, 8]), rng.randint(1, 3)
    ends = [
        {"id": f"{tor}-{place}", "pod": tor.split("-")[0], "tor": tor, "nic_gbps": 400}
        for tor in tors
        for place in range(per_tor)
    ]
    names = [str(end["id"]) for end in ends]
    trainers = len(names) // rng.choice([3, 4, 8])
    training, serving = names[:trainers], names[trainers:]
    tp = rng.randint(1, 4)
    return {
        "link_gbps": 400,
        "pods": [
            {"id": pod, "role": "gen", "boundary_circuits": per_tor * 2} for pod in sorted({end["pod"] for end in ends})
        ],
        "endpoints": ends,
        "tor_circuits": dict.fromkeys(tors, uplinks),
        "shards": [
            {
                "id": f"s{shard}",
                "bytes": rng.choice([8_000_000_000, 16_000_000_000, 49_000_000_000]),
                "holders": rng.sample(training, rng.randint(1, len(training))),
                "receivers": serving[shard % tp :: tp],
            }
            for shard in range(rng.randint(1, 6))
        ],
        "seeds_per_pod": 1,
        "chunk_bytes": 16 << 20,
        "hop_latency_s": 1e-5,
    }


def linked(rng: random.Random) -> Document:
    """Return a random site in which some pairs of PoDs are connected by fixed links of all kinds."""
    site = irregular(rng)
    pods = [pod["id"] for pod in site["pods"]]
    site["links"] = [
        {"a": a, "b": b, "circuits": rng.randint(1, 4), "gbps": rng.choice([1, 10, 100, 400])}
        for a, b in itertools.combinations(pods, 2)
        if rng.random() < 0.7
    ]
    if rng.random() < 0.7:  # rarely another bottleneck
        site["pods"] = [{**pod, "boundary_circuits": 100} for pod in site["pods"]]
        site["tor_circuits"] = {tor: max(1, each) for tor, each in site["tor_circuits"].items()}
    return site


def problem_of(document: Document) -> SyncProblem:
    pods = {pod["id"]: place for place, pod in enumerate(document["pods"])}
    tors = {tor: place for place, tor in enumerate(document["tor_circuits"])}
    ends = {end["id"]: place for place, end in enumerate(document["endpoints"])}
    return SyncProblem(
        link_gbps=document["link_gbps"],
        pods=tuple(pods),
        boundary_circuits=np.array([pod["boundary_circuits"] for pod in document["pods"]], dtype=np.int64),
        tors=tuple(tors),
        tor_gbps=np.array([each * document["link_gbps"] for each in document["tor_circuits"].values()], dtype=float),
        endpoints=tuple(ends),
        pod=np.array([pods[end["pod"]] for end in document["endpoints"]], dtype=np.int64),
        tor=np.array([tors[end["tor"]] for end in document["endpoints"]], dtype=np.int64),
        nic_gbps=np.array([end["nic_gbps"] for end in document["endpoints"]], dtype=float),
        shards=tuple(
            Shard(
                shard["id"],
                shard["bytes"],
                tuple(ends[name] for name in shard["holders"]),
                tuple(ends[name] for name in shard["receivers"] if name not in shard["holders"]),
            )
            for shard in document["shards"]
        ),
        chunk_bytes=document["chunk_bytes"],
        hop_latency_s=document["hop_latency_s"],
        pairs=_pairs(pods, document["links"]) if "links" in document else None,
    )


def _pairs(pods: dict[str, int], links: list[Document]) -> ShardPairs:
    circuits = np.zeros((len(pods), len(pods)), dtype=np.int64)
    gbps = np.zeros((len(pods), len(pods)))
    for link in links:
        a, b = pods[link["a"]], pods[link["b"]]
        circuits[a, b] = circuits[b, a] = link["circuits"]
        gbps[a, b] = gbps[b, a] = link["gbps"]
    return ShardPairs(circuits, gbps)


def answer_of(problem: SyncProblem, plan: SyncPlan) -> Document:
    """Return the result as `orchestrrl sync plan --json` prints it."""
    waves = []
    for number, wave in enumerate(plan.waves):
        each = wave.edges
        columns = (each.shard, each.offset, each.bytes, each.src, each.dst, each.circuits, each.rate_gbps)
        edges = [
            {
                "shard": problem.shards[shard].id,
                "offset": offset,
                "bytes": size,
                "src": problem.endpoints[src],
                "dst": problem.endpoints[dst],
                "phase": "A" if circuits else "B",
                "circuits": circuits,
                "rate_gbps": rate_gbps,
            }
            for shard, offset, size, src, dst, circuits, rate_gbps in zip(
                *(column.tolist() for column in columns), strict=True
            )
        ]
        waves.append({"wave": number, "seconds": wave.seconds, "edges": edges})
    return {
        "waves": waves,
        "estimate_s": plan.estimate_s,
        "lower_bound_s": plan.lower_bound_s,
        "naive_s": plan.naive_s,
    }
