"""The TRL adapter without TRL: a trainer that has what the adapter reads, and servers that behave like vLLM's."""

import subprocess
import sys


def test_the_trainers_environment_needs_little() -> None:
    heavy = "{'grpc', 'numpy', 'ortools', 'prometheus_client', 'scipy', 'statsmodels', 'torch', 'typer', 'yaml'}"
    code = f"import sys, orchestrrl.integrations.trl; print(sorted({heavy} & set(sys.modules)))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout == "[]\n"
