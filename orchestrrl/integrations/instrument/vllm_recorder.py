"""Records the collectives between the workers of a vLLM engine, as recorder.py does those of a trainer.

vLLM mixes this class into its workers, with this folder on PYTHONPATH:

    --worker-extension-cls vllm_recorder.RecorderExtension

and records from the start where ORCHESTRRL_RECORDER is set, else from `/collective_rpc` with `start_recorder` on. What
its groups do is noted at their own methods: between CPUs and between GPUs they mostly go past torch.distributed. Not
seen is what runs inside a captured CUDA graph.
"""

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING or __package__:
    from orchestrrl.integrations.instrument import recorder
else:  # in vLLM's process, where this folder is on the path
    import recorder

# Methods of vLLM's GroupCoordinator. Where one calls another, or torch.distributed, only the outer is noted.
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
    """Record in this worker from now on; nothing where it is done already."""
    from vllm.distributed.parallel_state import GroupCoordinator

    recorder.start()
    current = recorder.current()
    if current is not None:
        current.hooks.replace(GroupCoordinator, GROUP_METHODS)


class RecorderExtension:
    """What `/collective_rpc` can call in each worker."""

    def start_recorder(self) -> None:
        record()

    def stop_recorder(self) -> None:
        recorder.stop()


if os.environ.get(recorder.SWITCH, "0") not in ("", "0"):
    record()
