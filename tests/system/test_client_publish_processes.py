"""Publishing, against a daemon that is real gRPC and says what the test wants."""

import json
import subprocess
import sys


def test_the_trainers_environment_needs_little() -> None:
    heavy = ["torch", "ortools", "prometheus_client", "scipy", "statsmodels", "typer", "yaml", "safetensors"]
    loaded = f"json.dumps(sorted(set({heavy}) & set(sys.modules)))"
    code = f"import json, sys, orchestrrl.weights.trainer.client; print({loaded})"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(shown.stdout) == []
