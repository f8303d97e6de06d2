"""The plug-in of an installed orchestrrl-client. Its folder in the repository has the files as an installation has."""

import subprocess

from orchestrrl.lab.testbed.processes import VLLM_PYTHON
from tests.distributions import ROOT

CODE = """
import os
from orchestrrl_vllm import register
register()
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
import kv_handover
assert "orchestrrl" in WeightTransferEngineFactory._registry
print({name for name in os.environ if name.startswith("OPENBLAS")}, kv_handover.__file__)
"""


def test_entry_point_registers_the_weight_backend_and_finds_the_connector() -> None:
    client = ROOT / "deploy" / "client"
    environment = {"PYTHONPATH": str(client), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([VLLM_PYTHON, "-c", CODE], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"set() {client}/orchestrrl/integrations/instrument/kv_handover.py"
