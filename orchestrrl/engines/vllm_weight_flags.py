"""What goes on a vLLM server's command line for it to take versions of the weights from folders, checked and told.

Pure. The servers' side is `orchestrrl/integrations/instrument/vllm_weights.py`. Without it versions go through
`reload_weights`.
"""

import json
from pathlib import Path

from orchestrrl.integrations import instrument

MODULE_FOLDER = Path(instrument.__file__).parent  # for PYTHONPATH of the server: vLLM finds a plugin there
BACKEND = "orchestrrl"  # as integrations/instrument/vllm_weights.py registers it
METHOD = "orchestrrl_weights"  # of its workers, for /collective_rpc
VLLM_ARGUMENTS = ("--weight-transfer-config", json.dumps({"backend": BACKEND}))
