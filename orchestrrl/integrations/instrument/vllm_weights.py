"""A weight-transfer backend for vLLM that loads a version of the weights from a folder, and says what it has loaded.

vLLM finds it with this folder on PYTHONPATH, as a plugin (orchestrrl_vllm.dist-info), and uses it where it is told so:

    --weight-transfer-config '{"backend": "orchestrrl"}'

`/start_weight_update`, `/update_weights` with `{"folder": ..., "version": ...}` and `/finish_weight_update` then load a
checkpoint of this machine: its tensors are mapped, and each worker reads of them what it keeps. What became of it tells
`/collective_rpc` with `orchestrrl_weights`, one answer for each worker, because a worker that raises leaves vLLM's
executor of several workers with answers that the next call takes for its own.
"""

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import snapshot_download
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

if TYPE_CHECKING or __package__:
    from orchestrrl.integrations.instrument import checkpoint_files as files
else:  # in vLLM's process, where this folder is on the path
    import checkpoint_files as files

BACKEND = "orchestrrl"
METHOD = "orchestrrl_weights"  # for /collective_rpc

DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool,
}  # fmt: skip

# What weight loaders raise of weights that are kept in another form than that of checkpoints.
NOT_COMPARABLE = (AssertionError, AttributeError, LookupError, NotImplementedError, RuntimeError, TypeError, ValueError)

logger = logging.getLogger("vllm.orchestrrl.weights")


def register() -> None:
    """vLLM calls it in each of its processes."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, FolderWeights)


@dataclass
class NothingToCompare(WeightTransferInitInfo):  # type: ignore[misc]  # vllm is not there when types are checked
    """There is no connection to a trainer."""


@dataclass
class FolderUpdate(WeightTransferUpdateInfo):  # type: ignore[misc]
    folder: str
    version: int


@dataclass(frozen=True)
class LoadedReport:
    """What a worker says. `sum` is of the checkpoint's whole tensors, also where it keeps a part of each."""

    version: int | None = None  # that it has; None: those that it was started with, or nobody knows
    sum: str = ""
    is_read_back: bool = False  # all that it keeps was compared with the checkpoint, in its memory
    not_read_back: str = ""  # why
    fault: str = ""  # of the last load
    is_torn: bool = False  # it has some of one version and some of another


class FolderWeights(WeightTransferEngine):  # type: ignore[misc]
    """One in each worker. A folder that is not a whole checkpoint of this model is refused before anything changes."""

    init_info_cls = NothingToCompare
    update_info_cls = FolderUpdate
    supports_draft_weight_update = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.report = LoadedReport()
        self._wanted = _shapes_at_start(str(self.model_config.model), self.model_config.revision)
        # A plugin runs before there are workers to add it to.
        from vllm.v1.worker.worker_base import WorkerBase

        setattr(WorkerBase, METHOD, _report)

    def init_transfer_engine(self, init_info: NothingToCompare) -> None:
        pass

    def start_weight_update(self) -> None:
        pass

    def finish_weight_update(self) -> None:
        pass

    def shutdown(self) -> None:
        pass

    def update_weights(self, update_info: dict[str, Any]) -> None:
        try:
            self.receive_weights(self.parse_update_info(update_info))
        except Exception as error:
            logger.exception("%s could not be loaded", update_info)
            touched = not isinstance(error, files.BrokenCheckpoint)
            fault = f"{type(error).__name__}: {error}" if touched else str(error)
            # Of an older version that is still whole it goes on telling.
            known = LoadedReport() if touched or self.report.is_torn else self.report
            self.report = LoadedReport(**{**asdict(known), "fault": fault, "is_torn": touched or self.report.is_torn})
            # With one worker an error is told as it should be. Of further replicas only errors are told.
            if self.parallel_config.world_size == 1 or self.parallel_config.data_parallel_size > 1:
                raise

    def receive_weights(self, update_info: FolderUpdate) -> None:
        """Raises BrokenCheckpoint where nothing has changed, and whatever vLLM does where the model may be torn."""
        stored = files.read_checkpoint(Path(update_info.folder))
        if self._wanted is not None:
            files.check_same_model(files.shapes_of(stored), self._wanted)
        if unknown := {each.dtype for each in stored.values()} - DTYPES.keys():
            raise files.BrokenCheckpoint(f"{update_info.folder}: has tensors of {', '.join(sorted(unknown))}")
        data = files.mapped(stored)
        tensors = {name: _tensor(each, data[name]) for name, each in stored.items()}
        self._load(tensors)
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        not_read_back = self._compare(tensors)
        if not_read_back:
            logger.info("version %d was not read back: %s", update_info.version, not_read_back)
        content = files.content_sum(stored, data)
        self.report = LoadedReport(
            update_info.version, content, is_read_back=not not_read_back, not_read_back=not_read_back
        )

    def _load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Through vLLM's reload of one layer after the other; nothing else knows how layers keep their weights."""
        wanted = {name for name, _ in self.model.named_parameters()}
        self._let_go()
        initialize_layerwise_reload(self.model)
        try:
            loaded = self.model.load_weights(iter(tensors.items()))
            if self.model_config.quantization is None:
                missing = sorted(wanted - loaded if loaded is not None else ()) + self._incomplete()
                if missing:  # vLLM goes on with what was there before
                    raise ValueError(f"the checkpoint has not all weights of {', '.join(missing[:5])}")
            finalize_layerwise_reload(self.model, self.model_config)
        except BaseException:
            self._let_go()
            raise

    def _incomplete(self) -> list[str]:
        """Linear layers of which some is missing: several tensors of a checkpoint make one of them. Others may wait for
        no more, as embeddings that are padded."""
        waiting = [
            (name, get_layerwise_info(layer))
            for name, layer in self.model.named_modules()
            if isinstance(layer, LinearBase)
        ]
        return [name for name, info in waiting if info.can_load() and 0 < info.load_numel < info.load_numel_total]

    def _let_go(self) -> None:
        """Of a reload that was broken off: layers that wait for the rest of their weights would take those of the next
        reload for it. They get their old weights back."""
        waiting = [info for info in map(get_layerwise_info, self.model.modules()) if info.can_load()]
        for info in waiting:
            info.load_numel, info.loaded_weights = 0, []
        if waiting:
            finalize_layerwise_reload(self.model, self.model_config)

    def _compare(self, tensors: Mapping[str, torch.Tensor]) -> str:
        """Why what the model keeps cannot be said to be these; empty: it was read, and it is. Layers whose weights are
        packed cannot be read so: those of vLLM's CPU build, and some quantised ones."""
        comparing = TensorComparison()
        try:
            with comparing:
                self.model.load_weights(iter(tensors.items()))
        except NOT_COMPARABLE as error:
            return f"{type(error).__name__}: {error}"
        return f"{comparing.differing} tensors are kept in another form" if comparing.differing else ""


class TensorComparison(TorchDispatchMode):  # type: ignore[misc]  # torch neither
    """Weight loaders run as ever, except that what they would copy is compared with what is there: nothing is
    written."""

    def __init__(self) -> None:
        super().__init__()
        self.differing = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            kept, given = args[0], args[1]
            if kept.shape != given.shape:
                raise TypeError(f"shape {list(kept.shape)} is kept of {list(given.shape)}")
            self.differing += not torch.equal(kept, given.to(kept.device, kept.dtype))
            return kept
        if func in (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default):  # of what pads a vocabulary
            self.differing += not bool((args[0] == (args[1] if len(args) > 1 else 0)).all())
            return args[0]
        if func._schema.is_mutable:
            raise TypeError(f"{func} would write")
        return func(*args, **(kwargs or {}))


def _tensor(stored: files.StoredTensor, data: memoryview) -> torch.Tensor:
    if not data:
        return torch.empty(stored.shape, dtype=DTYPES[stored.dtype])
    return torch.frombuffer(data, dtype=torch.uint8).view(DTYPES[stored.dtype]).view(stored.shape)


def _shapes_at_start(model: str, revision: str | None) -> dict[str, tuple[int, ...]] | None:
    """Of the checkpoint that it was started with; None where there is none of safetensors on this machine."""
    try:
        folder = model if Path(model).is_dir() else snapshot_download(model, revision=revision, local_files_only=True)
        return files.shapes_of(files.read_checkpoint(Path(folder)))
    except (files.BrokenCheckpoint, OSError, ValueError) as fault:
        logger.warning("names and shapes of versions will not be checked before they are loaded: %s", fault)
        return None


def _report(worker: Any) -> dict[str, Any]:
    told: LoadedReport = worker.weight_transfer_engine.report
    return {**asdict(told), "is_updating": bool(getattr(worker, "_weight_update_active", False))}
