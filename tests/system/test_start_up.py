"""Processes import slow packages only if they need them."""

import json
import subprocess
import sys

import pytest

OURS = {"balancer", "ocs_drivers", "orchestrrl", "planner"}
# Including the packages that they import.
GRPC = {"google", "grpc", "grpc_health", "grpc_reflection", "grpc_tools", "cython_runtime"}
PYDANTIC = {"annotated_types", "pydantic", "pydantic_core", "typing_extensions", "typing_inspection"}
AIOHTTP = {"aiohappyeyeballs", "aiohttp", "aiosignal", "attr", "attrs", "frozenlist", "idna", "multidict", "propcache"}
AIOHTTP |= {"cython_runtime", "charset_normalizer", "chardet", "brotli", "yarl", "zstandard", "aiodns", "pycares"}
PROCESSES = {
    "orchestrrl.agent.sidecar": GRPC | PYDANTIC,
    # The engine clients of agents and gateways.
    "orchestrrl.lab.simulated_engine.client": PYDANTIC | {"cython_runtime", "httptools", "prometheus_client", "xxhash"},
    "orchestrrl.engines.vllm": PYDANTIC | {"cython_runtime", "httptools", "prometheus_client", "xxhash"},
    "orchestrrl.gateway.service": GRPC | PYDANTIC | {"httptools", "prometheus_client"},
    "orchestrrl.weights.peer.peer": GRPC | PYDANTIC | {"numpy", "xxhash"},
    "orchestrrl.lab.simulated_engine.server": PYDANTIC | AIOHTTP | {"prometheus_client", "xxhash", "yaml"},
    "orchestrrl.daemon.running": GRPC | PYDANTIC | AIOHTTP | {"numpy", "prometheus_client", "yaml"},
}


@pytest.mark.smoke
@pytest.mark.parametrize("module", PROCESSES)
def test_process_imports_no_unneeded_packages(module: str) -> None:
    code = (
        f"import json, sys; before = set(sys.modules); import {module}; print(json.dumps([*set(sys.modules) - before]))"
    )
    loaded = json.loads(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)
    packages = {name.partition(".")[0] for name in loaded if not name.startswith("_")}
    assert packages - set(sys.stdlib_module_names) - OURS <= PROCESSES[module]
