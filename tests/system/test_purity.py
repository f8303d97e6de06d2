"""Decisions are pure: planner and balancer import no modules for I/O."""

import subprocess
import sys

PROGRAM = """
import importlib, pkgutil, sys
import balancer, planner
for package in (planner, balancer):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)
        print(module.name)
loaded = sorted(name for name in ("grpc", "aiohttp", "torch", "google.protobuf", "orchestrrl") if name in sys.modules)
sys.exit(f"loaded: {loaded}" if loaded else 0)
"""


def test_decisions_import_neither_grpc_nor_aiohttp_nor_torch() -> None:
    finished = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=False)
    assert finished.returncode == 0, finished.stderr
    assert {"planner.plan", "planner.workload.forecast", "balancer.load_index_moves"} <= set(finished.stdout.split())


def test_balancer_does_not_import_numpy() -> None:
    program = "import sys, balancer.load_index_moves; sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=120, check=False).returncode == 0
