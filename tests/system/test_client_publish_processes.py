"""The imports of the trainer's publishing client."""

import json
import subprocess
import sys


def test_client_imports_few_packages() -> None:
    heavy = ["torch", "ortools", "prometheus_client", "scipy", "statsmodels", "typer", "yaml", "safetensors"]
    loaded = f"json.dumps(sorted(set({heavy}) & set(sys.modules)))"
    code = f"import json, sys, orchestrrl.weights.trainer.client; print({loaded})"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(shown.stdout) == []
