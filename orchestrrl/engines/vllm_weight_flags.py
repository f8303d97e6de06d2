"""The command-line flags for a vLLM server that loads verified weight versions from folders, and the reports of its
workers.

The server loads the versions with the plugin in `orchestrrl/integrations/instrument/vllm_weights.py`. vLLM finds the
plugin if handover.py's MODULE_FOLDER is on its PYTHONPATH. Without the plugin, versions are loaded through
`reload_weights`.
"""

import json
from dataclasses import dataclass

BACKEND = "orchestrrl"  # as integrations/instrument/vllm_weights.py registers it
METHOD = "orchestrrl_weights"  # the workers' method for /collective_rpc
VLLM_ARGUMENTS = ("--weight-transfer-config", json.dumps({"backend": BACKEND}))


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """A worker's report of its weights, as integrations/instrument/vllm_weights.py sends it. `sum` is the checksum of
    the loaded bytes. `is_read_back` is True if all weights in memory were compared with the checkpoint. Otherwise,
    `not_read_back` is the reason. `fault` is the error of the last load. `is_torn` is True if the worker may have parts
    of two versions, and `is_updating` is True if a load was started and not finished."""

    version: int | None
    sum: str
    is_read_back: bool
    not_read_back: str
    fault: str
    is_torn: bool
    is_updating: bool
