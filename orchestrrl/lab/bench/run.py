"""Run benchmarks by name."""

from collections.abc import Callable, Iterable
from pathlib import Path

from orchestrrl.lab.bench.fabric_allocate import fabric_allocate
from orchestrrl.lab.bench.fabric_windows import fabric_windows
from orchestrrl.lab.bench.figure import Figure
from orchestrrl.lab.bench.gateway import gateway_burst, gateway_cpu, gateway_ledger
from orchestrrl.lab.bench.recorder import recorder
from orchestrrl.lab.bench.routing import routing
from orchestrrl.lab.bench.solve import solver
from orchestrrl.lab.bench.startup import start_up
from orchestrrl.lab.bench.sync_plan import sync_plan
from orchestrrl.lab.bench.ticks import balancer_tick, fast_tick, plan_tick, sim_step
from orchestrrl.lab.testbed.processes import VLLM_PYTHON

# In the order in which they run. The argument is a folder for the logs of processes.
BENCHMARKS: dict[str, Callable[[Path], list[Figure]]] = {
    "balancer_tick": lambda _: balancer_tick(),
    "fast_tick": lambda _: fast_tick(),
    "solve": lambda _: solver(),
    "plan_tick": lambda _: plan_tick(),
    "gateway_cpu": gateway_cpu,
    "gateway_burst": gateway_burst,
    "gateway_ledger": gateway_ledger,
    "start_up": start_up,
    "fabric_allocate": lambda _: fabric_allocate(),
    "sync_plan": lambda _: sync_plan(),
    "sim_step": lambda _: sim_step(),
    "routing": lambda _: routing(),
    "recorder": lambda _: recorder(),
    "fabric_windows": fabric_windows,
}
NEED_TORCH = ("recorder", "fabric_windows")  # benchmarks that need the environment of `make venv-vllm`


def run(names: Iterable[str], log_dir: Path, progress: Callable[[str], None]) -> list[Figure]:
    """Run the benchmarks `names` and return the measured figures. `progress` is called with the name of each benchmark
    as it starts. A benchmark whose environment is missing is skipped; `progress` is then called with the reason."""
    figures: list[Figure] = []
    for name in names:
        if name in NEED_TORCH and not VLLM_PYTHON.exists():
            progress(f"{name}: skipped, {VLLM_PYTHON} is missing: run make venv-vllm")
            continue
        progress(name)
        figures += BENCHMARKS[name](log_dir)
    return figures
