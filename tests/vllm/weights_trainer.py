"""A trainer's rank that publishes a small model under every parallelism of torch, one version for each.

    torchrun ... weights_trainer.py DAEMON FOLDER

Ranks 0 and 1 are on one host, 2 and 3 on another. For each version rank 0 also saves the expected, gathered tensors.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from orchestrrl.weights.trainer.client import WeightsClient


class Block(nn.Module):
    """A block with sizes that are not divisible by four ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(12, 10)
        self.down = nn.Linear(10, 12, bias=False)
        self.norm = nn.LayerNorm(3)
        self.register_buffer("steps", torch.tensor(7))
        self.register_buffer("cache", torch.zeros(9), persistent=False)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 12)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(12, 11, bias=False)
        self.head.weight = self.embed.weight


def built() -> Model:
    torch.manual_seed(3)
    return Model()


def sharded(model: Model, mesh: object) -> Model:
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def tensor_parallel(model: Model, mesh: object) -> Model:
    for layer in model.layers:
        parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def placed_by_hand(mesh: object) -> dict[str, torch.Tensor]:
    """Return tensors with placements that no module here has."""
    torch.manual_seed(4)
    wide, flat = torch.randn(5, 7), torch.randn(3)
    return {
        "columns": distribute_tensor(wide, mesh, [Shard(1), Replicate()]),
        "both": distribute_tensor(wide, mesh, [Shard(1), Shard(0)]),
        "twice": distribute_tensor(wide, mesh, [Shard(1), Shard(1)]),
        "last": distribute_tensor(wide, mesh, [Replicate(), Shard(-1)]),
        "few_rows": distribute_tensor(flat, mesh, [Shard(0), Shard(0)]),
        "all": distribute_tensor(wide, mesh, [Replicate(), Replicate()]),
        "plain": wide.clone(),
        "turned": torch.randn(4, 6).t(),
        "scale": torch.arange(8.0).to(torch.float8_e4m3fn),
    }


def gathered(state: dict[str, torch.Tensor], dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    whole = {}
    for name, tensor in state.items():
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        converts = dtype is not None and full.dtype in (torch.float32, torch.bfloat16)
        whole[name] = (full.to(dtype) if converts else full).contiguous().clone()
    return whole


def main() -> None:
    daemon, folder = sys.argv[1], Path(sys.argv[2])
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    host = rank // 2
    line = init_device_mesh("cpu", (world,))
    grid = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("outer", "inner"))
    models = [
        (built(), None),  # equal on all ranks, as with DistributedDataParallel
        (nn.parallel.DistributedDataParallel(built()), torch.bfloat16),
        (sharded(built(), line), torch.bfloat16),
        (sharded(built(), grid), None),  # replicas of shards
        (sharded(tensor_parallel(built(), grid["inner"]), grid["outer"]), None),
        (placed_by_hand(grid), None),
    ]
    with WeightsClient(daemon, peer=f"train{host}", folder=folder / f"host{host}", rank=rank, world=world) as client:
        for version, (model, dtype) in enumerate(models):
            state = model if isinstance(model, dict) else getattr(model, "module", model).state_dict()
            client.publish(version, model, dtype=dtype)
            whole = gathered(state, dtype)
            whole.pop("head.weight", None)  # tied
            if rank == 0:
                save_file(whole, folder / f"whole-{version}.safetensors")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
