"""Random problems of `orchestrrl plan solve` as JSON: tiny ones with many ties and limits, and realistic larger ones.

All draw from a `random.Random`, so that hypothesis can pass one that shrinks and a loop one that is only seeded.
"""

import math
from random import Random
from typing import Any

Json = dict[str, Any]

# A 14B model on an H100: one token of KV is 192 KiB.
KV_BYTES = 196_608
ENGINES = (  # gpus, alpha_s, beta_s, gamma_s, kv_capacity_tokens
    (1, 0.02375, 8.7e-5, 8.2e-8, 216_674),
    (2, 0.0183738, 8.1e-5, 4.1e-8, 582_885),
    (4, 0.0154841, 7.8e-5, 2.0e-8, 1_315_307),
    (8, 0.01429845, 7.65e-5, 1.0e-8, 2_780_151),
)


def configuration(
    name: str,
    gpus: int,
    times_s: tuple[float, float, float],
    capacity: int,
    slots: int,
    prefill: float,
    switch_s: float,
) -> Json:
    return {
        "id": name,
        "gpus": gpus,
        "alpha_s": times_s[0],
        "beta_s": times_s[1],
        "gamma_s": times_s[2],
        "kv_capacity_tokens": capacity,
        "max_sequences": slots,
        "prefill_tokens_per_s": prefill,
        "switch_s": switch_s,
    }


def engines(switch_s: float = 1.6, widest: int = 8, slots: int = 1024, capacity_share: float = 1.0) -> list[Json]:
    return [
        configuration(f"tp{gpus}", gpus, times, max(1, int(room * capacity_share)), slots, 9000.0 * gpus, switch_s)
        for gpus, *times_and_room in ENGINES
        if gpus <= widest
        for *times, room in [times_and_room]
    ]


def problem(count: int, per_node: int, configurations: list[Json], **rest: Any) -> Json:
    """Return a problem with sensible defaults, with fields in the contract's order."""
    return {
        "gpus": {"count": count, "per_node": per_node},
        "configurations": configurations,
        "kv_bytes_per_token": KV_BYTES,
        "transfer": {"inter_node_gbps_per_gpu": 200, "intra_node_gbps_per_gpu": 1600, "latency_s": 0.002},
        "current": [],
        "requests": [],
        "kv_balance": None,
        "epsilon_s": 0.5,
    } | rest


def request(name: str, context: int, remaining: int, instance: str | None = None, state: str = "new") -> Json:
    return {
        "id": name,
        "context_tokens": context,
        "remaining_tokens": remaining,
        "instance": instance,
        "state": state,
    }


def fleet(rng: Random, count: int, per_node: int, configurations: list[Json], share: float = 1.0) -> list[Json]:
    """Return a current fleet on about `share` of the GPUs, within nodes or on whole nodes."""
    free = {
        node: [*range(node * per_node, min(count, (node + 1) * per_node))]
        for node in range(math.ceil(count / per_node))
    }
    found: list[Json] = []
    for each in rng.choices(configurations, k=count):
        wanted, gpus = each["gpus"], []
        if rng.random() > share:
            continue
        if wanted <= per_node:
            open_nodes = [node for node, left in free.items() if len(left) >= wanted]
            if open_nodes:
                node = rng.choice(open_nodes)
                rng.shuffle(free[node])
                gpus, free[node] = free[node][:wanted], free[node][wanted:]
        elif wanted % per_node == 0:
            whole = [node for node, left in free.items() if len(left) == per_node][: wanted // per_node]
            if len(whole) * per_node == wanted:
                gpus = [gpu for node in whole for gpu in free[node]]
                free.update({node: [] for node in whole})
        if gpus:
            found.append({"id": f"i{len(found)}", "configuration": each["id"], "gpus": sorted(gpus)})
    return found


def one_kind(count: int, per_node: int, each: Json) -> list[Json]:
    """Return as many instances of one configuration as fit."""
    wanted = each["gpus"]
    starts = [at for at in range(0, count - wanted + 1, wanted) if at // per_node == (at + wanted - 1) // per_node]
    return [
        {"id": f"i{n}", "configuration": each["id"], "gpus": [*range(at, at + wanted)]} for n, at in enumerate(starts)
    ]


def states(rng: Random, requests: list[Json], current: list[Json], *, skew: float = 0.0, waiting: float = 0.2) -> None:
    """Distribute the requests over the current instances; a higher skew favours the first ones."""
    for each in requests if current else []:
        kind = rng.random()
        place = int(len(current) * rng.random() ** (1 + skew))
        if kind < 0.9:
            each["instance"] = current[place]["id"]
            each["state"] = "waiting" if kind < 0.9 * waiting else "running"


# --- tiny: ties, limits, zeros


def tiny(rng: Random, max_gpus: int = 4, max_requests: int = 5) -> Json:
    """Return a problem for the exact search: odd node sizes and configurations, zero coefficients, tight KV."""
    count, per_node = rng.randint(1, max_gpus), rng.randint(1, max_gpus)
    sizes = [1, *rng.choices(range(1, max_gpus + 2), k=rng.randint(0, 2))]
    configurations = [_tiny_configuration(rng, f"c{n}", size) for n, size in enumerate(sizes)]
    usable = [each for each in configurations if each["gpus"] <= count]
    current = fleet(rng, count, per_node, usable, rng.choice([0.0, 0.4, 1.0]))
    requests = [
        request(f"r{n}", rng.choice([0, 1, 10, 100, 999]), rng.choice([1, 2, 5, 30, 100, 500]))
        for n in range(rng.randint(0, max_requests))
    ]
    states(rng, requests, current, skew=rng.choice([0, 3]), waiting=rng.choice([0.0, 0.5, 1.0]))
    widest = max((each["context_tokens"] + each["remaining_tokens"] for each in requests), default=0)
    configurations[0]["kv_capacity_tokens"] = max(configurations[0]["kv_capacity_tokens"], widest)
    return problem(
        count,
        per_node,
        configurations,
        current=current,
        requests=requests,
        kv_bytes_per_token=rng.choice([1, KV_BYTES, 10**9]),
        transfer={
            "inter_node_gbps_per_gpu": rng.choice([0, 0.5, 200]),
            "intra_node_gbps_per_gpu": rng.choice([0, 0.5, 1600]),
            "latency_s": rng.choice([0.0, 0.002, 50.0]),
        },
        epsilon_s=rng.choice([0.0, 0.0, 0.5, 1e6]),
    )


def _tiny_configuration(rng: Random, name: str, gpus: int) -> Json:
    times = rng.choice([0.0, 0.01, 0.03]), rng.choice([0.0, 1e-4, 0.02]), rng.choice([0.0, 1e-7, 1e-4])
    return configuration(
        name,
        gpus,
        times,
        capacity=rng.choice([600, 1500, 100_000]),
        slots=rng.choice([1, 2, 1024]),
        prefill=rng.choice([1.0, 9000.0]),
        switch_s=rng.choice([0.0, 1.6, 1e5]),
    )


def few(rng: Random) -> Json:
    """Return a problem with 4 to 16 GPUs and few requests, for the exact search.

    The engines are those of a real model, or their costs per sequence and token are as high as with many requests.
    """
    count = rng.choice([4, 8, 12, 16])
    switch_s = rng.choice([0.0, 1.6, 20.0])
    configurations = engines(switch_s, rng.choice([2, 4, 8]), capacity_share=rng.choice([1.0, 1.0, 0.2]))
    weight = rng.choice([1, 30, 300])
    for each in configurations:
        each.update(beta_s=each["beta_s"] * weight, gamma_s=each["gamma_s"] * weight)
    current: list[Json] = []
    if rng.random() < 0.7:
        chosen = rng.choice([each for each in configurations if each["gpus"] <= count])
        current = (
            one_kind(count, 8, chosen) if rng.random() < 0.7 else fleet(rng, count, 8, configurations, rng.random())
        )
    requests = [
        request(f"r{n}", rng.randint(200, 3000), lengths(rng, rng.choice([4000.0, 12_000.0])))
        for n in range(rng.randint(2, 9))
    ]
    states(rng, requests, current, skew=rng.choice([0.0, 2.0]))
    return problem(count, 8, configurations, current=current, requests=requests, epsilon_s=rng.choice([0.0, 0.5]))


# --- realistic


def lengths(rng: Random, mean: float, longest: int = 32_768) -> int:
    """Return a heavy-tailed length, cut at the longest: log-normal with the mean well above the median."""
    return max(1, min(longest, int(rng.lognormvariate(math.log(mean) - 0.6, 1.1))))


def step(
    rng: Random, count: int, per_gpu: int = 16, *, progress: float = 0.0, skew: float = 0.0, **engine: Any
) -> Json:
    """Return a generation step at its start (no current fleet), or with a share of its tokens already generated.

    The step then runs on a fleet of one configuration; a higher skew concentrates the remaining requests."""
    configurations = engines(**engine)
    current = one_kind(count, 8, rng.choice(configurations)) if progress else []
    requests = []
    for n in range(count * per_gpu):
        total, prompt = lengths(rng, 5000.0), rng.randint(100, 2000)
        done = int(progress * 8000 * rng.random())
        if done < total:
            requests.append(request(f"r{n}", prompt + done, total - done))
    states(rng, requests, current, skew=skew, waiting=0.1)
    return problem(count, 8, configurations, current=current, requests=requests)


def medium(rng: Random) -> Json:
    """Return a problem with 8 to 64 GPUs, at the start or in the middle of a step."""
    return step(
        rng,
        rng.choice([8, 16, 24, 64]),
        rng.choice([2, 8, 16]),
        progress=rng.choice([0.0, 0.3, 1.0]),
        skew=rng.choice([0.0, 1.0, 4.0]),
        switch_s=rng.choice([0.0, 1.6, 20.0, 1e4]),
    )


def kv_tight(rng: Random) -> Json:
    """Return a problem with many times the footprint that fits at once, or with very few sequences at a time."""
    return step(
        rng,
        rng.choice([4, 8]),
        rng.choice([2, 8, 16]),
        progress=rng.choice([0.0, 0.5]),
        skew=rng.choice([0.0, 2.0]),
        slots=rng.choice([1, 2, 7, 1024]),
        capacity_share=rng.choice([0.2, 0.25, 0.5]),
    )


def short(rng: Random, most: int = 6) -> Json:
    """Return a problem for the exact search: few requests that need several times the available KV room or slots."""
    count = rng.choice([1, 2, 4, 8])
    requests = [request(f"r{n}", rng.randint(100, 3000), lengths(rng, 8000.0)) for n in range(rng.randint(4, most))]
    footprints = [each["context_tokens"] + each["remaining_tokens"] for each in requests]
    room = sum(footprints) / rng.choice([2, 3, 4]) / count
    configurations = engines(rng.choice([0.0, 1.6]), min(count, 8), slots=rng.choice([2, 3, 1024]))
    weight = rng.choice([1, 30, 300])
    for each in configurations:
        each.update(
            kv_capacity_tokens=max(1, int(room * each["gpus"] * rng.uniform(0.8, 1.2))),
            beta_s=each["beta_s"] * weight,
            gamma_s=each["gamma_s"] * weight,
        )
    widest = configurations[-1]
    widest["kv_capacity_tokens"] = max(widest["kv_capacity_tokens"], *footprints)
    current = one_kind(count, 8, rng.choice(configurations)) if rng.random() < 0.5 else []
    states(rng, requests, current)
    return problem(count, 8, configurations, current=current, requests=requests)


def crowded(rng: Random) -> Json:
    """Return a step whose requests need two to eight times the KV room, or the slots, of the widest engines."""
    count, per_gpu = rng.choice([8, 16, 64]), rng.choice([8, 16])
    times = rng.choice([2, 4, 8])
    slots = rng.choice([1024, per_gpu * 8 // times])
    found = step(rng, count, per_gpu, progress=rng.choice([0.0, 0.3]), slots=slots)
    footprints = [each["context_tokens"] + each["remaining_tokens"] for each in found["requests"]]
    share = sum(footprints) / times / (count // 8) / ENGINES[-1][4]
    for each in found["configurations"]:
        each["kv_capacity_tokens"] = max(1, int(each["kv_capacity_tokens"] * share))
    widest = found["configurations"][-1]
    widest["kv_capacity_tokens"] = max(widest["kv_capacity_tokens"], *footprints)
    return found


def odd(rng: Random) -> Json:
    """Return a problem with GPUs that do not divide evenly, and configurations of 3 GPUs, several nodes or too many."""
    count, per_node = rng.choice([(20, 8), (13, 8), (32, 8), (24, 8), (7, 4), (10, 3), (17, 16)])
    sizes = rng.sample([1, 2, 3, 4, 5, 8, 16, 64], k=rng.randint(2, 4))
    if min(sizes) > min(per_node, count):
        sizes.append(3)
    configurations = [
        configuration(
            f"w{size}",
            size,
            (0.012 + 0.012 / size, 8e-5, 8e-8 / size),
            capacity=200_000 * size,
            slots=1024,
            prefill=9000.0 * size,
            switch_s=rng.choice([0.0, 2.0]),
        )
        for size in sizes
    ]
    current = fleet(rng, count, per_node, [each for each in configurations if each["gpus"] <= count], rng.random())
    requests = [request(f"r{n}", rng.randint(0, 2000), lengths(rng, 4000.0)) for n in range(rng.randint(1, 60))]
    states(rng, requests, current, skew=rng.choice([0.0, 2.0]))
    return problem(count, per_node, configurations, current=current, requests=requests)


def balanced(rng: Random) -> Json:
    """Return a problem with equation 2: a band around the mean, or one that cannot be met."""
    found = medium(rng) if rng.random() < 0.5 else few(rng)
    mu = rng.choice([0.0, 0.1, 0.5, 2.0])
    return found | {"kv_balance": {"mu": mu, "delta": rng.choice([0.0, 0.05, 0.3])}}


def moves(rng: Random) -> Json:
    """Return a problem dominated by moves: skewed running requests with slow transfer, slow recomputation, or both."""
    found = step(rng, rng.choice([8, 16]), 8, progress=0.5, skew=6.0, switch_s=rng.choice([1.6, 1e4]))
    found["transfer"]["latency_s"] = rng.choice([0.0, 0.1, 30.0])
    found["transfer"]["inter_node_gbps_per_gpu"] = rng.choice([0.1, 200])
    for each in found["configurations"]:
        each["prefill_tokens_per_s"] = rng.choice([20.0, 9000.0, 1e9])
    return found | {"epsilon_s": rng.choice([0.0, 0.5, 1e9])}


def cannot_fit(rng: Random) -> Json:
    """Return a problem with requests on current instances that can never admit them, and a configuration that can."""
    found = few(rng)
    small = configuration("small", 1, (0.02, 1e-4, 1e-7), 1000, 8, 9000.0, 1.0)
    used = {gpu for each in found["current"] for gpu in each["gpus"]}
    free = [gpu for gpu in range(found["gpus"]["count"]) if gpu not in used]
    found["configurations"].insert(rng.randint(0, 1), small)
    if free:
        found["current"].append({"id": "narrow", "configuration": "small", "gpus": [free[0]]})
        for each in rng.sample(found["requests"], k=1):
            each.update(instance="narrow", state=rng.choice(["running", "waiting"]))
    return found


KINDS = {f.__name__: f for f in (tiny, few, short, medium, kv_tight, crowded, odd, balanced, moves, cannot_fit)}
