"""A weight-transfer backend for vLLM that loads a weight version from a folder and reports the loaded version.

If orchestrrl-client is installed or this folder is on PYTHONPATH (orchestrrl_vllm.dist-info), vLLM finds the backend as
a plugin. vLLM uses the backend if it is started with this option:

    --weight-transfer-config '{"backend": "orchestrrl"}'

`/start_weight_update`, `/update_weights` with `{"folder": ..., "version": ...}` and `/finish_weight_update` then load a
checkpoint on the engine's machine. The checkpoint's tensors are memory-mapped, and each worker reads only its part.
`/collective_rpc` with `orchestrrl_weights` returns the outcome of each worker. With several workers and no data
parallelism, a failed load does not raise an exception, because vLLM's executor would then take the remaining responses
to this call for responses to the next call.
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

# Errors that weight loaders raise for weights stored in another form than in checkpoints.
NOT_COMPARABLE = (AssertionError, AttributeError, LookupError, NotImplementedError, RuntimeError, TypeError, ValueError)

logger = logging.getLogger("vllm.orchestrrl.weights")


def register() -> None:
    """Register the backend with vLLM, which calls this function in each of its processes."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, FolderWeights)


@dataclass
class NothingToCompare(WeightTransferInitInfo):  # type: ignore[misc]  # vllm is not installed where types are checked
    """The init info that vLLM's interface requires. It is empty, because there is no connection to a trainer."""


@dataclass
class FolderUpdate(WeightTransferUpdateInfo):  # type: ignore[misc]
    folder: str
    version: int


@dataclass(frozen=True)
class LoadedReport:
    """A worker's report on its last load and on the weight version in its memory. `sum` is the checksum of the
    checkpoint's whole tensors, even if the worker has only a part of each tensor."""

    version: int | None = None  # None: the weights from the start, or unknown
    sum: str = ""
    is_read_back: bool = False  # all weights in the worker's memory were compared with the checkpoint
    not_read_back: str = ""  # reason why not
    fault: str = ""  # error of the last load
    is_torn: bool = False  # the worker may have parts of two versions


class FolderWeights(WeightTransferEngine):  # type: ignore[misc]
    """The weight-transfer backend in one worker. An incomplete checkpoint is refused before any weights are changed. A
    checkpoint of another model is also refused, if the shapes of the engine's initial checkpoint are known."""

    init_info_cls = NothingToCompare
    update_info_cls = FolderUpdate
    supports_draft_weight_update = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.report = LoadedReport()
        self._wanted = _shapes_at_start(str(self.model_config.model), self.model_config.revision)
        # Added here because the worker class does not exist yet when plugins run.
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
            # Keep reporting the previous version if it is still intact.
            known = LoadedReport() if touched or self.report.is_torn else self.report
            self.report = LoadedReport(**{**asdict(known), "fault": fault, "is_torn": touched or self.report.is_torn})
            # With one worker, vLLM reports an error correctly. With data parallelism, it reports only errors.
            if self.parallel_config.world_size == 1 or self.parallel_config.data_parallel_size > 1:
                raise

    def receive_weights(self, update_info: FolderUpdate) -> None:
        """Load and verify a weight version. Raises BrokenCheckpoint if the checkpoint is unusable; the model is then
        unchanged. Raises other errors if the load fails; the model may then have parts of two versions."""
        stored = files.read_checkpoint(Path(update_info.folder))
        if self._wanted is not None:
            files.check_same_model(files.shapes_of(stored), self._wanted)
        if unknown := {each.dtype for each in stored.values()} - DTYPES.keys():
            raise files.BrokenCheckpoint(
                f"{update_info.folder}: tensors must have one of the dtypes {', '.join(DTYPES)},"
                f" got {', '.join(sorted(unknown))}"
            )
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
        """Load tensors through vLLM's layerwise reload, because only vLLM's loaders support the formats of all layers.
        Raises ValueError if the model is unquantized and the checkpoint lacks some of its weights."""
        wanted = {name for name, _ in self.model.named_parameters()}
        self._let_go()
        initialize_layerwise_reload(self.model)
        try:
            loaded = self.model.load_weights(iter(tensors.items()))
            if self.model_config.quantization is None:
                missing = sorted(wanted - loaded if loaded is not None else ()) + self._incomplete()
                if missing:  # vLLM would keep the previous weights there
                    raise ValueError(f"the checkpoint lacks weights for {', '.join(missing[:5])}")
            finalize_layerwise_reload(self.model, self.model_config)
        except BaseException:
            self._let_go()
            raise

    def _incomplete(self) -> list[str]:
        """Return the names of linear layers for which the checkpoint has only some of the weights. One layer may be
        formed from several tensors of a checkpoint. Other layers are skipped, because vLLM never reports padded layers,
        such as embeddings, as complete."""
        waiting = [
            (name, get_layerwise_info(layer))
            for name, layer in self.model.named_modules()
            if isinstance(layer, LinearBase)
        ]
        return [name for name, info in waiting if info.can_load() and 0 < info.load_numel < info.load_numel_total]

    def _let_go(self) -> None:
        """End an interrupted reload, and restore the old weights of the layers that wait for further weights. Otherwise
        these layers would take weights from the next reload."""
        waiting = [info for info in map(get_layerwise_info, self.model.modules()) if info.can_load()]
        for info in waiting:
            info.load_numel, info.loaded_weights = 0, []
        if waiting:
            finalize_layerwise_reload(self.model, self.model_config)

    def _compare(self, tensors: Mapping[str, torch.Tensor]) -> str:
        """Compare the model's weights with the checkpoint's tensors. Return an empty string if all weights are equal,
        else the reason why they could not be verified. Packed weights, as in vLLM's CPU build and some quantized
        models, cannot be compared."""
        comparing = TensorComparison()
        try:
            with comparing:
                self.model.load_weights(iter(tensors.items()))
        except NOT_COMPARABLE as error:
            return f"{type(error).__name__}: {error}"
        return f"{comparing.differing} tensors are stored in another form" if comparing.differing else ""


class TensorComparison(TorchDispatchMode):  # type: ignore[misc]  # torch is not installed there either
    """A dispatch mode in which weight loaders write nothing, but compare each tensor that they would write with the
    existing tensor. `differing` counts the unequal tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.differing = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            kept, given = args[0], args[1]
            if kept.shape != given.shape:
                raise TypeError(f"the model has shape {list(kept.shape)}, the checkpoint {list(given.shape)}")
            self.differing += not torch.equal(kept, given.to(kept.device, kept.dtype))
            return kept
        if func in (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default):  # padding of a vocabulary
            self.differing += not bool((args[0] == (args[1] if len(args) > 1 else 0)).all())
            return args[0]
        if func._schema.is_mutable:
            raise TypeError(f"{func} would write to the model")
        return func(*args, **(kwargs or {}))


def _tensor(stored: files.StoredTensor, data: memoryview) -> torch.Tensor:
    if not data:
        return torch.empty(stored.shape, dtype=DTYPES[stored.dtype])
    return torch.frombuffer(data, dtype=torch.uint8).view(DTYPES[stored.dtype]).view(stored.shape)


def _shapes_at_start(model: str, revision: str | None) -> dict[str, tuple[int, ...]] | None:
    """Return the tensor shapes of the engine's initial checkpoint, by tensor name. Return None if this machine has no
    complete safetensors files of that checkpoint."""
    try:
        folder = model if Path(model).is_dir() else snapshot_download(model, revision=revision, local_files_only=True)
        return files.shapes_of(files.read_checkpoint(Path(folder)))
    except (files.BrokenCheckpoint, OSError, ValueError) as fault:
        logger.warning("names and shapes of versions are not checked before they are loaded: %s", fault)
        return None


def _report(worker: Any) -> dict[str, Any]:
    told: LoadedReport = worker.weight_transfer_engine.report
    return {**asdict(told), "is_updating": bool(getattr(worker, "_weight_update_active", False))}
