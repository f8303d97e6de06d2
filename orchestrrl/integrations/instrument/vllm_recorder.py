"""Record the collectives between the workers of a vLLM engine, as recorder.py does for a trainer.

vLLM adds the methods of RecorderExtension to its workers if it is started with this option and this folder is on
PYTHONPATH:

    --worker-extension-cls vllm_recorder.RecorderExtension

If ORCHESTRRL_RECORDER is set, recording begins when the worker starts. Otherwise it begins when `start_recorder` is
called through `/collective_rpc`. The recorder hooks the methods of vLLM's process groups, because their CPU and GPU
communication mostly bypasses torch.distributed. Collectives inside a captured CUDA graph are not recorded.
"""

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING or __package__:
    from orchestrrl.integrations.instrument import recorder
else:  # in vLLM's process, where this folder is on the path
    import recorder

# Methods of vLLM's GroupCoordinator. If one calls another, or torch.distributed, only the outer call is recorded.
GROUP_METHODS = {
    "_all_reduce_out_place": "all_reduce",
    "_all_gather_out_place": "all_gather",
    "all_gatherv": "all_gather",
    "_reduce_scatter_out_place": "reduce_scatter",
    "reduce_scatterv": "reduce_scatter",
    "gather": "gather",
    "broadcast": "broadcast",
    "send": "send",
    "recv": "recv",
    "dispatch": "all_to_all",
    "combine": "all_to_all",
}


def record() -> None:
    """Start recording in this worker. Has no effect if recording is already on."""
    from vllm.distributed.parallel_state import GroupCoordinator

    recorder.start()
    current = recorder.current()
    if current is not None:
        current.hooks.replace(GroupCoordinator, GROUP_METHODS)


class RecorderExtension:
    """A vLLM worker extension. `/collective_rpc` calls its methods in each worker to start or stop recording."""

    def start_recorder(self) -> None:
        record()

    def stop_recorder(self) -> None:
        recorder.stop()


if os.environ.get(recorder.SWITCH, "0") not in ("", "0"):
    record()
