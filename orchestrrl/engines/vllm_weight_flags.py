"""What goes on a vLLM server's command line for it to take versions of the weights from folders, checked, and what its
workers report of them.

Pure. The servers' side is `orchestrrl/integrations/instrument/vllm_weights.py`: vLLM finds a plugin there, with
handover.py's MODULE_FOLDER on its PYTHONPATH. Without it versions go through `reload_weights`.
"""

import json
from dataclasses import dataclass

BACKEND = "orchestrrl"  # as integrations/instrument/vllm_weights.py registers it
METHOD = "orchestrrl_weights"  # of its workers, for /collective_rpc
VLLM_ARGUMENTS = ("--weight-transfer-config", json.dumps({"backend": BACKEND}))


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """As `Told` in integrations/instrument/vllm_weights.py, and whether a load was begun that was never ended."""

    version: int | None
    sum: str
    is_read_back: bool
    not_read_back: str
    fault: str
    is_torn: bool
    is_updating: bool
