"""Read the tensors of torch modules, state dicts and DTensors on a trainer rank, and copy them from a device to a file.

torch is imported inside functions, because the daemon's environment does not have it.
"""

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from orchestrrl.core.errors import Permanent
from orchestrrl.weights.layout import Bytes
from orchestrrl.weights.model import DTYPE_BYTES, TensorMeta
from orchestrrl.weights.trainer.boxes import AxisCut, TensorPiece, blocks, divided, slices

Rename = Callable[[str], str | None]  # returns a tensor's name for engines; None leaves the tensor out
Tied = Literal["once", "each"]

_DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2", "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint64": "U64",
    "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
_TORCH_OF = {ours: theirs for theirs, ours in _DTYPES.items()}
# Quantized dtypes are meaningful only with their scales and are never converted.
_CONVERTED = ("F64", "F32", "F16", "BF16")
# Name components that torch.compile, activation checkpointing and FSDP1 insert.
_WRAPPERS = re.compile(r"(_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\.")
BOUNCE_BYTES = 64 * 1024 * 1024  # size of each of the two pinned buffers between a device and the file


def pieces_of(
    model: Any, *, dtype: Any = None, tied: Tied = "once", rename: Rename | None = None, ignore: Sequence[str] = ()
) -> list[TensorPiece]:
    """Return this rank's pieces of a module, or of a state dict with whole tensors and DTensors. Tensors are not
    gathered.

    If `dtype` is given, for example "bf16" or torch.bfloat16, floating-point tensors of at least 16 bits are published
    in it. If `tied` is "once", a tensor with several names is published only under the first name, as Hugging Face
    saves it. If `tied` is "each", it is published under every name. `rename` returns the name of a tensor for engines,
    or None to leave the tensor out. `ignore` lists more tensors to leave out, by name or by a name prefix that ends in
    a dot. Raises Permanent if some tensors cannot be published; the message lists them.
    """
    pieces: list[TensorPiece] = []
    for name, tensor, local in _publishable(model, tied, rename, ignore):
        if local.numel():
            meta = TensorMeta(name, published_dtype(local.dtype, dtype), tuple(tensor.shape))
            pieces += _placed(meta, tensor, local)
    return pieces


def state_of(model: Any) -> Mapping[str, Any]:
    if isinstance(model, Mapping):
        return model
    if not hasattr(model, "state_dict"):
        raise Permanent(f"model must be a module or a state dict, got {type(model).__name__}")
    if hasattr(model, "peft_config"):
        raise Permanent(
            "cannot publish a PEFT model, because its adapters are separate from its weights; publish the result of"
            " merge_and_unload() on a copy"
        )
    state: Mapping[str, Any] = model.state_dict()
    return state


def published_dtype(dtype: Any, wanted: Any) -> str:
    """Return the safetensors name of the dtype in which a tensor of `dtype` is published. This is `wanted` if it is
    given and `dtype` is a floating-point type of at least 16 bits, and otherwise `dtype` itself. Raises Permanent if
    either dtype is unsupported."""
    own = _DTYPES.get(str(dtype).removeprefix("torch."))
    if own is None:
        raise Permanent(f"the dtype of a tensor must be one of {', '.join(_DTYPES)}, got {dtype}")
    if wanted is None or own not in _CONVERTED:
        return own
    asked = str(wanted).removeprefix("torch.")
    asked = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}.get(asked, asked)
    if _DTYPES.get(asked) not in _CONVERTED:
        raise Permanent(
            f"dtype: must be bfloat16, float16, float32 or float64, got {wanted}; publish quantized weights and their"
            " scales without dtype"
        )
    return _DTYPES[asked]


def _named(state: Mapping[str, Any], rename: Rename | None, ignore: Sequence[str]) -> Iterator[tuple[str, Any]]:
    tensors = {
        _WRAPPERS.sub("", name): tensor
        for name, tensor in state.items()
        if hasattr(tensor, "stride") and not name.endswith("_extra_state")  # from Transformer Engine
    }
    if tensors and all(name.startswith("module.") for name in tensors):  # DistributedDataParallel
        tensors = {name.removeprefix("module."): tensor for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        if any(name == each or (each.endswith(".") and name.startswith(each)) for each in ignore):
            continue
        named = rename(name) if rename else name
        if named is not None:
            yield named, tensor


def _fault(name: str, tensor: Any, local: Any) -> str:
    if type(tensor).__name__ == "ShardedTensor":
        return f"{name}: must not be a ShardedTensor of FSDP1; use FSDP2 (fully_shard), or a full state dict"
    if local.device.type == "meta":
        return f"{name}: is on the meta device and has no values"
    if str(local.layout) != "torch.strided":
        return f"{name}: must be dense, got {local.layout}"
    if str(local.dtype).removeprefix("torch.") not in _DTYPES:
        return f"{name}: dtype {local.dtype} cannot be published"
    if any(length < 1 for length in tensor.shape):
        return f"{name}: must have no empty axis, got {tuple(tensor.shape)}; gather tensors of DeepSpeed ZeRO-3 first"
    return ""


def _placed(meta: TensorMeta, tensor: Any, local: Any) -> Iterator[TensorPiece]:
    placements = getattr(tensor, "placements", None)
    if placements is None:
        yield TensorPiece(meta, meta.whole, local)
        return
    axes = divided(meta.shape, _cuts(meta, tensor.device_mesh, placements))
    expected = tuple(sum(last - first for first, last in ranges) for ranges in axes)
    if expected != tuple(local.shape):
        raise Permanent(
            f"{meta.name}: the local shape must be {expected}, the part of {meta.shape} for placements {placements} on"
            f" mesh {tuple(tensor.device_mesh.shape)}, got {tuple(local.shape)}"
        )
    for own, whole in blocks(axes):
        yield TensorPiece(meta, whole, local[slices(own)])


def _cuts(meta: TensorMeta, mesh: Any, placements: Sequence[Any]) -> list[AxisCut]:
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise Permanent(f"{meta.name}: this rank has no part of the tensor, because it is not in its device mesh")
    cuts = []
    for dimension, placement in enumerate(placements):
        if placement.is_replicate():
            continue
        if placement.is_partial():
            raise Permanent(f"tensor {meta.name} must not be partial, got {placement}; reduce it before publishing")
        axis = placement.dim % len(meta.shape)
        strided_by = int(getattr(placement, "split_factor", 1))  # _StridedShard, from FSDP2 over TP
        cuts.append(AxisCut(axis, int(mesh.size(dimension)), int(coordinate[dimension]), strided_by))
    return cuts


class TensorCopies:
    """`PieceCopies` for torch tensors. CUDA tensors are copied through two pinned buffers: one buffer is filled from
    the device while the other is copied to the file."""

    def __init__(self) -> None:
        self.offload_s = 0.0
        self._bounce: list[Any] = []

    def copy(self, piece: TensorPiece, into: Bytes) -> None:
        import torch

        dtype = getattr(torch, _TORCH_OF[piece.meta.dtype])
        whole = torch.from_numpy(into).view(dtype).reshape(piece.meta.shape)
        target, source = whole[(*slices(piece.box), ...)], piece.values.detach()
        if source.device.type == "cpu":
            target.copy_(source)
        elif source.device.type == "cuda":
            self._from_cuda(source, target, dtype)
        else:
            began = time.perf_counter()
            host = source.to(dtype).cpu()
            self.offload_s += time.perf_counter() - began
            target.copy_(host)

    def _from_cuda(self, source: Any, target: Any, dtype: Any) -> None:
        import torch

        if source.dim() == 0:
            source, target = source.reshape(1), target.reshape(1)
        row_bytes = DTYPE_BYTES[_DTYPES[str(dtype).removeprefix("torch.")]] * source[:1].numel()
        rows = max(1, BOUNCE_BYTES // row_bytes)
        under_way: list[tuple[Any, Any, Any]] = []  # (target, buffer, event that fires when the buffer is full)
        for number, first in enumerate(range(0, source.shape[0], rows)):
            chunk = source[first : first + rows]
            buffer = self._buffer(number % 2, rows * row_bytes)[: chunk.numel() * row_bytes // source[:1].numel()]
            host = buffer.view(dtype).view(chunk.shape)
            host.copy_(chunk.to(dtype), non_blocking=True)
            full = torch.cuda.Event()
            full.record(torch.cuda.current_stream(source.device))
            under_way.append((target[first : first + rows], host, full))
            if len(under_way) == 2:
                self._arrived(*under_way.pop(0))
        for each in under_way:
            self._arrived(*each)

    def _arrived(self, target: Any, host: Any, full: Any) -> None:
        began = time.perf_counter()
        full.synchronize()
        self.offload_s += time.perf_counter() - began
        target.copy_(host)

    def _buffer(self, number: int, size: int) -> Any:
        import torch

        while len(self._bounce) <= number:
            self._bounce.append(torch.empty(0, dtype=torch.uint8))
        if self._bounce[number].numel() < size:
            self._bounce[number] = torch.empty(max(size, BOUNCE_BYTES), dtype=torch.uint8, pin_memory=True)
        return self._bounce[number]


def named_tensors(
    model: Any, dtype: Any, rename: Rename | None, ignore: Sequence[str]
) -> tuple[dict[str, Any], dict[str, TensorMeta]]:
    """Return the tensors of a module or state dict and their published metadata, each by the name that engines use. A
    tensor with several names is returned only under the first. Raises Permanent if some tensors cannot be published;
    the message lists them."""
    tensors = {name: tensor for name, tensor, _ in _publishable(model, "once", rename, ignore)}
    return tensors, {
        name: TensorMeta(name, published_dtype(tensor.dtype, dtype), tuple(tensor.shape))
        for name, tensor in tensors.items()
    }


def _publishable(
    model: Any, tied: Tied, rename: Rename | None, ignore: Sequence[str]
) -> Iterator[tuple[str, Any, Any]]:
    """Yield the name of each tensor to publish, the tensor, and its local part on this rank. Raises Permanent if some
    tensors cannot be published; the message lists them."""
    faults: list[str] = []
    seen: set[tuple[Any, ...]] = set()
    for name, tensor in _named(state_of(model), rename, ignore):
        local = getattr(tensor, "_local_tensor", tensor)
        if fault := _fault(name, tensor, local):
            faults.append(fault)
            continue
        storage = (local.untyped_storage().data_ptr(), local.storage_offset(), tuple(local.shape), local.stride())
        identity = (local.device, *storage)
        if not local.numel() or tied == "each" or identity not in seen:
            seen.add(identity)
            if not faults:
                yield name, tensor, local
    if faults:
        raise Permanent("; ".join(faults))


def gathered(tensor: Any, meta: TensorMeta) -> Any:
    """Return the whole tensor in its published dtype. If the tensor is sharded, this is a collective call."""
    gather = getattr(tensor, "full_tensor", None)
    whole = gather() if callable(gather) else tensor
    return whole.detach().to(torch_dtype(meta.dtype)).contiguous()


def torch_dtype(ours: str) -> Any:
    import torch

    return getattr(torch, _TORCH_OF[ours])
