"""The imports of the TRL adapter."""

import subprocess
import sys


def test_adapter_imports_few_packages() -> None:
    heavy = "{'grpc', 'numpy', 'ortools', 'prometheus_client', 'scipy', 'statsmodels', 'torch', 'typer', 'yaml'}"
    code = f"import sys, orchestrrl.integrations.trl; print(sorted({heavy} & set(sys.modules)))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout == "[]\n"
