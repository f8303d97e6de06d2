"""The tree: trainers stage a version, peers send it on to each other, and engines load it from their host's folder.

The daemon plans and mends it (weights/controller/carrying.py), and peers hold versions until they are told to let go.
"""

from orchestrrl.weights.backends.base import BackendCapabilities


class TreeBackend:
    capabilities = BackendCapabilities(stages_ahead=True, rolls_back=True, reads_back=True)
