"""What the gateway writes into a body is what the engine's side reads, and it can be loaded where OrchestrRL is not."""

import subprocess
import sys

from orchestrrl.engines import handover


def test_its_parts_load_without_orchestrrl() -> None:
    """As in vLLM's process: bare names, and nothing but the standard library."""
    script = (
        "import sys; import kv_scheduler, kv_entries;"
        " print(kv_scheduler.KvTransferScheduler.__module__, 'orchestrrl' in sys.modules)"
    )
    environment = {"PYTHONPATH": str(handover.MODULE_FOLDER)}
    command = [sys.executable, "-S", "-c", script]
    told = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert told.stdout.split() == ["kv_scheduler", "False"]
