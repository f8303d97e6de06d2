"""The modules of the KV connector can be imported without OrchestrRL."""

import subprocess
import sys

from orchestrrl.engines import handover


def test_connector_modules_import_without_orchestrrl() -> None:
    """Import them by bare names with only the standard library, as in vLLM's process."""
    script = (
        "import sys; import kv_scheduler, kv_entries;"
        " print(kv_scheduler.KvTransferScheduler.__module__, 'orchestrrl' in sys.modules)"
    )
    environment = {"PYTHONPATH": str(handover.MODULE_FOLDER)}
    command = [sys.executable, "-S", "-c", script]
    shown = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert shown.stdout.split() == ["kv_scheduler", "False"]
