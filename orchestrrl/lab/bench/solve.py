"""Measure how the makespan solver's time, optimality gap and memory grow with the size of the fleet.

Each problem is solved in a new process, `python -m orchestrrl.lab.bench.solve GPUS`, so that no cache is warm.
"""

import json
import resource
import subprocess
import sys
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from orchestrrl.lab.bench.figure import Figure
from planner.model import Configuration, ConfigurationId, EngineId, GpuId, RequestId
from planner.solver.makespan import solve
from planner.solver.problem import RUNNING, WAITING, CurrentInstance, KvTransferCost, MakespanProblem, ProblemRequests

SEED = 1
SIZES = (8, 32, 128, 512, 1_024, 4_096, 16_384)  # GPUs
REQUESTS_PER_GPU = 16
AIMS_S = {1_024: 0.3, 16_384: 2.0}
GAP_AIM = 0.04
CHILD_TIMEOUT_S = 300.0

# GPUs -> alpha, beta, gamma, KV tokens, prefill rate, switch seconds. Beta includes 70 to 90 us of host time.
ENGINES = {
    1: (0.02375, 8.7e-5, 8.2e-8, 216_674, 9_000.0, 1.6),
    2: (0.0183738, 8.1e-5, 4.1e-8, 582_885, 18_000.0, 1.7),
    4: (0.0154841, 7.8e-5, 2.0e-8, 1_315_307, 36_000.0, 1.9),
    8: (0.01429845, 7.65e-5, 1.0e-8, 2_780_151, 72_000.0, 2.3),
}
MAX_SEQUENCES, LONGEST = 1_024, 32_768
LENGTH_MEDIAN, LENGTH_SIGMA = 4_500.0, 1.0  # lognormal distribution, in tokens


def step(gpus: int, seed: int) -> MakespanProblem:
    """Return a problem in the middle of a step. The requests are unevenly distributed over instances of two GPUs
    each."""
    rng = np.random.default_rng(seed)
    count, engines = gpus * REQUESTS_PER_GPU, gpus // 2
    generated = rng.integers(0, 3_000, count)
    shares = rng.choice([3.0, 1.0, 1.0, 1.0], engines)
    places = rng.choice(engines, count, p=shares / shares.sum())
    context = rng.integers(100, 2_000, count) + generated
    states = np.where(rng.random(count) < 0.1, WAITING, RUNNING).astype(np.int8)
    remaining = _longer(rng, generated) - generated
    configurations = tuple(
        Configuration(ConfigurationId(f"tp{size}"), size, *engine[:4], MAX_SEQUENCES, *engine[4:])
        for size, engine in ENGINES.items()
    )
    current = tuple(
        CurrentInstance(EngineId(f"i{number}"), ConfigurationId("tp2"), (GpuId(2 * number), GpuId(2 * number + 1)))
        for number in range(engines)
    )
    names = tuple(RequestId(f"r{number}") for number in range(count))
    requests = ProblemRequests(names, context, remaining, places, states)
    return MakespanProblem(
        gpus,
        8,
        configurations,
        KvTransferCost(200.0, 1_600.0, 0.002, kv_bytes_per_token=196_608.0),
        current,
        requests,
        0.5,
    )


def _longer(rng: np.random.Generator, generated: NDArray[np.int64]) -> NDArray[np.int64]:
    """Sample the output lengths of requests, conditioned on exceeding the number of tokens generated so far."""
    lengths = np.zeros(len(generated))
    while (short := np.flatnonzero(lengths <= generated)).size:
        lengths[short] = LENGTH_MEDIAN * np.exp(LENGTH_SIGMA * rng.standard_normal(short.size))
    return np.minimum(np.ceil(lengths), LONGEST).astype(np.int64)


def solver() -> list[Figure]:
    figures = []
    for gpus in SIZES:
        command = [sys.executable, "-m", "orchestrrl.lab.bench.solve", str(gpus)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=CHILD_TIMEOUT_S)
        row, aim_s = json.loads(done.stdout), AIMS_S.get(gpus)
        note = f"{row['requests']:,} requests, in a new process, {row['cpu_s']:.2g} s of CPU, {row['rss_mib']} MiB"
        baseline = ("target", aim_s) if aim_s else ("its CPU seconds", row["cpu_s"])
        figures.append(Figure(f"solve_{gpus}_gpus", row["solve_s"], "s", baseline[0], baseline[1], note))
        makespan_s, bound_s = row["makespan_s"], row["lower_bound_s"]
        note = f"gap {row['gap'] * 100:.2f} %, costs included; the target is {GAP_AIM * 100:g} % on large fleets"
        figures.append(Figure(f"solve_{gpus}_gpus_makespan", makespan_s, "s", "its proven lower bound", bound_s, note))
    return figures


def measure(gpus: int) -> dict[str, Any]:
    problem = step(gpus, SEED)
    started_s, cpu_s = time.perf_counter(), time.process_time()
    solution = solve(problem)
    return {
        "requests": len(problem.requests.ids),
        "solve_s": time.perf_counter() - started_s,
        "cpu_s": time.process_time() - cpu_s,
        "rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "makespan_s": solution.makespan_s,
        "lower_bound_s": solution.lower_bound_s,
        "gap": solution.gap or 0.0,
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(measure(int(sys.argv[1]))))
