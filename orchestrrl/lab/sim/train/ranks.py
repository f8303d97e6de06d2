"""Which GPUs form the groups of a layout, as Megatron numbers ranks. Pure.

Ranks count tensor first, then context, data and pipeline: with tp dividing a server's GPUs, a tensor-parallel group is
on one server. Experts are spread over consecutive ranks of a pipeline stage.
"""

import numpy as np

from orchestrrl.lab.sim.net.model import Ints, Servers
from orchestrrl.lab.sim.train.model import TrainJob

AXES = ("tp", "cp", "dp_cp", "pp", "ep", "expert_dp")


def groups(job: TrainJob, axis: str) -> Ints:
    """[group, member], GPUs. `dp_cp`: those that hold the same dense parameters, over which their optimizer is split;
    `expert_dp`: the same of experts. `pp`: in the order of stages."""
    layout = job.layout
    ranks = job.first_gpu + np.arange(layout.gpus, dtype=np.int64)
    grid = ranks.reshape(layout.pp, layout.dp, layout.cp, layout.tp)
    experts = ranks.reshape(layout.pp, -1, layout.ep)
    of = {
        "tp": (grid, layout.tp),
        "cp": (grid.transpose(0, 1, 3, 2), layout.cp),
        "dp_cp": (grid.transpose(0, 3, 1, 2), layout.dp * layout.cp),
        "pp": (grid.transpose(1, 2, 3, 0), layout.pp),
        "ep": (experts, layout.ep),
        "expert_dp": (experts.transpose(0, 2, 1), experts.shape[1]),
    }
    if axis not in of:
        raise ValueError(f"unknown axis {axis!r}, known: {', '.join(AXES)}")
    array, size = of[axis]
    return np.ascontiguousarray(array).reshape(-1, size)


def crosses(of: Ints, servers: Servers) -> bool:
    """Whether a group has members on several servers."""
    home = of // servers.gpus_per_server
    return bool(np.any(home != home[:, :1]))
