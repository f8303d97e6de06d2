"""A weight-transfer backend for vLLM without a GPU: each tensor is broadcast over gloo, as `nccl` does without packing.
Contains the parts of the worker and of the trainer.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from vllm.distributed.utils import stateless_init_torch_distributed_process_group
from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

BACKEND = "gloo_for_tests"
TIMEOUT = timedelta(seconds=30)


def register() -> None:
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, GlooWeights)
        WeightTransferTrainerFactory.register_engine(BACKEND, GlooTrainer)


@dataclass
class Init(WeightTransferInitInfo):
    master_address: str
    master_port: int
    rank_offset: int
    world_size: int


@dataclass
class Update(WeightTransferUpdateInfo):
    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]


@dataclass
class TrainerInit(TrainerInitInfo):
    backend: ClassVar[str] = BACKEND
    master_address: str
    master_port: int
    world_size: int


def group_of(address: str, port: int, rank: int, world: int) -> Any:
    return stateless_init_torch_distributed_process_group(address, port, rank, world, "gloo", timeout=TIMEOUT)


def broadcast(group: Any, tensor: torch.Tensor) -> None:
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    group.broadcast([tensor], options).wait()


class GlooWeights(WeightTransferEngine):
    init_info_cls = Init
    update_info_cls = Update

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.group: Any = None

    def init_transfer_engine(self, init_info: Init) -> None:
        own = self.parallel_config.data_parallel_index * self.parallel_config.world_size + self.parallel_config.rank
        rank = own + init_info.rank_offset
        self.group = group_of(init_info.master_address, init_info.master_port, rank, init_info.world_size)

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: Update) -> None:
        for name, dtype, shape in zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True):
            tensor = torch.empty(shape, dtype=getattr(torch, dtype))
            broadcast(self.group, tensor)
            self.model.load_weights([(name, tensor)])

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        self.group = None


class GlooTrainer(TrainerWeightTransferEngine):
    init_info_cls = TrainerInit
    group: Any = None

    @classmethod
    def trainer_init(cls, init_info: TrainerInit, *, client: Any, source: Any = None) -> "GlooTrainer":
        engine = cls(client=client, source=source, is_sender=init_info.is_sender)
        if engine.is_sender:
            address, port, world = init_info.master_address, init_info.master_port, init_info.world_size
            with ThreadPoolExecutor(1) as beside:
                joining = beside.submit(client.init_weight_transfer_engine, asdict(Init(address, port, 1, world)))
                engine.group = group_of(address, port, 0, world)
                joining.result()
        return engine

    def send_weights(self) -> None:
        metas = self.source.metadata()
        if not self.is_sender:
            for _ in self.source:
                pass
            return
        update = Update(
            [meta.name for meta in metas],
            [str(meta.dtype).removeprefix("torch.") for meta in metas],
            [list(meta.shape) for meta in metas],
        )
        self.client.start_weight_update()
        beside = ThreadPoolExecutor(1)
        try:
            taking = beside.submit(self.client.update_weights, asdict(update))
            for tensor in self._tensors():
                broadcast(self.group, tensor)
            taking.result()
        finally:
            beside.shutdown(wait=False)
        self.client.finish_weight_update()

    def _tensors(self) -> Iterator[torch.Tensor]:
        for _, tensor in self.source:
            yield tensor.contiguous()

    def shutdown(self) -> None:
        self.group = None
