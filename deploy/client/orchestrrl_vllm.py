"""Entry point through which vLLM finds OrchestrRL's plug-ins if this distribution is installed in vLLM's environment.

The folder of the plug-ins is added to the end of the import path, because vLLM's options name its modules. The package
`orchestrrl` is not imported, because it changes the environment variables of its process.
"""

import importlib
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent / "orchestrrl" / "integrations" / "instrument"))

register = importlib.import_module("vllm_weights").register
