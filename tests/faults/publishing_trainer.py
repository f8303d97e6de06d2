"""A trainer process: `publishing_trainer.py ADDRESS PEER FOLDER`.

It publishes versions that the lines of its standard input describe as JSON: `version`, `seed` of its content,
`install`. For each it prints when it is staged, and how it ended.
"""

import json
import sys
import threading
from typing import Any

import numpy as np

from orchestrrl.core.errors import OrchestrRLError
from orchestrrl.weights.trainer.client import PublishInProgress, WeightsClient

SHAPE = (256, 256)
TENSORS = 16  # of 256 KiB
PATIENCE_S = 600.0  # for a daemon that restarts on a busy machine


def content(seed: int) -> dict[str, Any]:
    chance = np.random.default_rng(seed)
    return {f"model.layers.{i}.w": chance.standard_normal(SHAPE, dtype=np.float32) for i in range(TENSORS)}


def main() -> None:
    address, peer, folder = sys.argv[1:]
    line = threading.Lock()

    def say(*words: Any) -> None:
        with line:
            print(json.dumps(words), flush=True)

    def wait(handle: PublishInProgress) -> None:
        try:
            report = handle.result()
            say("over", handle.version, str(report.state), report.code, report.detail)
        except OrchestrRLError as error:
            say("over", handle.version, type(error).__name__, "", str(error))

    client = WeightsClient(address, peer=peer, folder=folder, patience_s=PATIENCE_S)
    say("ready")
    for order in sys.stdin:
        reported = json.loads(order)
        arrays = content(reported["seed"])
        try:
            handle = client.start_publish_arrays(reported["version"], arrays, install=reported["install"])
        except OrchestrRLError as error:
            say("over", reported["version"], type(error).__name__, "", str(error))
            continue
        say("staged", reported["version"])
        threading.Thread(target=wait, args=(handle,), daemon=True).start()


if __name__ == "__main__":
    main()
