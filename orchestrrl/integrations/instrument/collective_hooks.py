"""Hook torch.distributed to record collectives: the methods of process groups, and the paths that bypass them.

The hooks replace methods of the class `ProcessGroup`, which the functions of torch.distributed call. They therefore
also affect callers that imported a function earlier. The Work object that a method returns is followed until it has
completed (work_watch.py). Three paths bypass these methods and have separate hooks: functional collectives are hooked
at their operators, DistributedDataParallel by a communication hook, and the broadcasts of its buffers at
`_broadcast_coalesced`. Collectives that are started by C++ code or a captured CUDA graph are not recorded.
"""

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING or __package__:
    from orchestrrl.integrations.instrument.rings import ASYNCHRONOUS, UNKNOWN, RingWriter, group_id
    from orchestrrl.integrations.instrument.work_watch import DeviceWatch, WorkWatch
else:  # in the traced process, where this folder is on the path
    from rings import ASYNCHRONOUS, UNKNOWN, RingWriter, group_id
    from work_watch import DeviceWatch, WorkWatch


class GroupMethod(NamedTuple):
    """A method of ProcessGroup: the operation to record, the positions of the tensor and peer arguments, and the
    method's names in different versions of torch."""

    op: str
    tensors_at: int | None
    peer_at: int | None
    names: tuple[str, ...]


# The recorded bytes are those of the group's whole data: the output of an all-gather, the input of a reduce-scatter.
# For gather and scatter they are this rank's part.
METHODS = (
    GroupMethod("all_reduce", 0, None, ("allreduce",)),
    GroupMethod("all_reduce", 0, None, ("allreduce_coalesced",)),
    GroupMethod("broadcast", 0, None, ("broadcast",)),
    GroupMethod("reduce", 0, None, ("reduce",)),
    GroupMethod("all_gather", 0, None, ("allgather",)),
    GroupMethod("all_gather", 0, None, ("_allgather_base", "all_gather_single")),
    GroupMethod("all_gather", 0, None, ("allgather_coalesced",)),
    GroupMethod("all_gather", 0, None, ("allgather_into_tensor_coalesced", "all_gather_single_coalesced")),
    GroupMethod("reduce_scatter", 1, None, ("reduce_scatter",)),
    GroupMethod("reduce_scatter", 1, None, ("_reduce_scatter_base", "reduce_scatter_single")),
    GroupMethod("reduce_scatter", 1, None, ("reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced")),
    GroupMethod("all_to_all", 1, None, ("alltoall",)),
    GroupMethod("all_to_all", 1, None, ("alltoall_base", "all_to_all_single")),
    GroupMethod("gather", 1, None, ("gather",)),
    GroupMethod("scatter", 0, None, ("scatter",)),
    GroupMethod("barrier", None, None, ("barrier",)),
    GroupMethod("barrier", None, None, ("monitored_barrier",)),
    GroupMethod("send", 0, 1, ("send",)),
    GroupMethod("recv", 0, 1, ("recv",)),
    GroupMethod("recv", 0, None, ("recv_anysource",)),
)
FUNCTIONAL = {
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
    "broadcast_": "broadcast",
}


class KnownGroup(NamedTuple):
    """The id and the global ranks of a process group, cached by the group's address. `reference` is a weak reference
    whose callback drops the entry when the group is freed."""

    reference: Any
    id: int
    ranks: tuple[int, ...]


class HookedMethod(NamedTuple):
    """The cached data with which the hook of one method of one process group records a collective."""

    writer: RingWriter
    begin: Callable[[int, int, int, int, int], int]
    end: Callable[[int], None]
    code: int
    group: int
    ranks: tuple[int, ...]


class CollectiveHooks:
    """The hooks in torch.distributed. `install` must be called after torch has been imported. Recording never raises an
    exception into the traced program."""

    def __init__(self, writer: Callable[[], RingWriter | None], warn: Callable[[str], None]) -> None:
        self._writer, self._warn = writer, warn
        self._undo: list[tuple[Any, str, Any, bool]] = []
        self._places: dict[int, KnownGroup] = {}
        self._routes: list[dict[int, HookedMethod]] = []  # for each method, by the address of the group
        self._works = WorkWatch()
        self._functional: dict[int, list[tuple[Any, RingWriter, int]]] = {}  # by the address of the result's memory
        self._coalescing: dict[tuple[int, int], list[tuple[RingWriter, int]]] = {}  # by group and thread
        self._outer: set[int] = set()  # threads inside a call that is recorded as a single collective
        self._device: DeviceWatch | None = None
        self._torch: Any = None
        self._wait_itself: Callable[..., Any] = lambda _: None  # the original Work.wait, once torch is imported
        self._work_type: type = object
        self._hooked_ddp: weakref.WeakSet[Any] = weakref.WeakSet()

    def install(self) -> None:
        import torch
        from torch import distributed

        if not distributed.is_available():
            return
        from torch._C._distributed_c10d import ProcessGroup, Work

        self._torch, self._wait_itself, self._work_type = torch, Work.wait, Work
        for method in METHODS:
            there = [name for name in method.names if hasattr(ProcessGroup, name)]
            for name in there:
                self._replace(ProcessGroup, name, partial(self._method, method))
            if not there:
                self._warn(f"not recorded, because this torch has no method {' or '.join(method.names)}")
        for name, make in (("_start_coalescing", self._start_coalescing), ("_end_coalescing", self._end_coalescing)):
            if hasattr(ProcessGroup, name):
                self._replace(ProcessGroup, name, make)
        self._replace(Work, "wait", self._works.wait)
        if hasattr(distributed, "_broadcast_coalesced"):
            self._replace(distributed, "_broadcast_coalesced", self._broadcast_coalesced)
        self._install_functional(torch)
        self._replace(torch.nn.parallel.DistributedDataParallel, "forward", self._forward)

    def replace(self, owner: Any, methods: Mapping[str, str]) -> None:
        """Hook further methods that communicate. `methods` maps the name of each method to the operation to record. A
        repeated call has no effect.

        `owner` is a class whose objects have `ranks` (global ranks), `rank`, and a `unique_name` common to all ranks.
        """
        for name, op in methods.items():
            if any(done[:2] == (owner, name) for done in self._undo):
                continue
            if hasattr(owner, name):
                self._replace(owner, name, partial(self._outer_method, op))
            else:
                self._warn(f"not recorded, because it does not exist: {owner.__name__}.{name}")

    def remove(self) -> None:
        for owner, name, original, own in reversed(self._undo):
            if own:
                setattr(owner, name, original)
            else:
                delattr(owner, name)
        self._undo.clear()
        self._works.stop()
        if self._device is not None:
            self._device.stop()

    def forked(self) -> None:
        self._places.clear()
        for routes in self._routes:
            routes.clear()
        self._works.forked()
        self._functional.clear()
        self._coalescing.clear()
        self._outer.clear()
        self._device = None

    def _replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        original = getattr(owner, name)
        try:
            made = make(original)
            made.__name__, made.__doc__, made.__wrapped__ = name, getattr(original, "__doc__", None), original
            own = name in vars(owner)
            self._undo.append((owner, name, vars(owner)[name] if own else original, own))
            setattr(owner, name, made)
        except (AttributeError, TypeError) as fault:
            self._warn(f"not recorded: {name}: {fault}")

    # The methods of a process group.

    def _method(self, method: GroupMethod, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return the hook that replaces `original`, a method of ProcessGroup. The code of the hook is inlined instead
        of split into functions, because each function call slows down the traced program."""
        op, tensors_at, peer_at, _ = method
        outer, ident = self._outer, threading.get_ident
        routes: dict[int, HookedMethod] = {}
        self._routes.append(routes)
        tensor_type, work_type = self._torch.Tensor, self._work_type
        wait, follow = self._wait_itself, self._works.follow

        def recorded(pg: Any, *args: Any, **kwargs: Any) -> Any:
            if outer and ident() in outer:
                return original(pg, *args, **kwargs)
            try:
                route = routes.get(id(pg)) or self._route(routes, op, pg)
                if route is None:
                    return original(pg, *args, **kwargs)
                writer, begin, end, code, group, ranks = route
                first = args[tensors_at] if tensors_at is not None and len(args) > tensors_at else ()
                if type(first) is list and len(first) == 1:
                    first = first[0]
                if isinstance(first, tensor_type):
                    n_bytes, on_device = first.nbytes, first.device if first.is_cuda else None
                else:
                    n_bytes, on_device = _sum_bytes(first), self._device_of(first)
                options = kwargs.get("opts") if kwargs else args[-1] if args else None
                flags = ASYNCHRONOUS if getattr(options, "asyncOp", True) else 0
                peer = ranks[args[peer_at]] if peer_at is not None and ranks and len(args) > peer_at else UNKNOWN
                watch = None if on_device is None else self._watch(on_device, writer)
            except Exception as fault:  # noqa: BLE001  # another torch may differ: the program must continue
                self._warn(f"not recorded: {op}: {fault!r}")
                return original(pg, *args, **kwargs)
            if watch is not None:
                return watch.run(
                    partial(original, pg, *args, **kwargs),
                    writer.issue(code, group, n_bytes, flags, peer),
                    bool(flags),
                    self._coalescing.get((id(pg), ident())),
                )
            sequence = begin(code, group, n_bytes, flags, peer)
            try:
                work = original(pg, *args, **kwargs)
                if not flags and work is not None:
                    wait(work)  # the caller would wait as well
            except BaseException:
                end(sequence)
                raise
            if not flags or work is None:
                end(sequence)
            else:
                follow(work, writer, sequence, peer_at is None and type(work) is work_type)
            return work

        return recorded

    def _route(self, routes: dict[int, HookedMethod], op: str, pg: Any) -> HookedMethod | None:
        writer = self._writer()
        if writer is None:
            return None
        place = self._place(pg, writer)
        found = HookedMethod(writer, writer.begin, writer.end, writer.op(op), place.id, place.ranks)
        routes[id(pg)] = found
        return found

    def _start_coalescing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def start(pg: Any, *args: Any, **kwargs: Any) -> Any:
            self._coalescing[id(pg), threading.get_ident()] = []
            return original(pg, *args, **kwargs)

        return start

    def _end_coalescing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def end(pg: Any, *args: Any, **kwargs: Any) -> Any:
            issued = self._coalescing.pop((id(pg), threading.get_ident()), [])
            work = original(pg, *args, **kwargs)
            if issued and self._device is not None:
                self._device.follow(issued, work)
            return work

        return end

    def _place(self, pg: Any, writer: RingWriter) -> KnownGroup:
        known = self._places.get(id(pg))
        if known is not None:
            return known
        distributed = self._torch.distributed
        try:
            ranks = tuple(distributed.get_process_group_ranks(pg))
        except (KeyError, RuntimeError, ValueError):
            ranks = ()  # a group that is not registered with torch.distributed
        if distributed.is_initialized():
            writer.set_rank(distributed.get_rank())
        name = str(getattr(pg, "group_name", "") or "")
        reference = weakref.ref(pg, partial(self._gone, id(pg)))
        found = self._places[id(pg)] = KnownGroup(reference, group_id(ranks, name), ranks)
        return found

    def _gone(self, address: int, _: Any) -> None:
        """Remove a freed group from the caches, because another group may get its address."""
        self._places.pop(address, None)
        for routes in self._routes:
            routes.pop(address, None)

    # Paths that bypass these methods.

    def _outer_method(self, op: str, original: Callable[..., Any]) -> Callable[..., Any]:
        is_compiling = getattr(getattr(self._torch, "compiler", None), "is_compiling", lambda: False)

        def recorded(owner: Any, *args: Any, **kwargs: Any) -> Any:
            if is_compiling() or len(owner.ranks) < 2:
                return original(owner, *args, **kwargs)
            thread = threading.get_ident()
            writer = None if thread in self._outer else self._writer()
            if writer is None:
                return original(owner, *args, **kwargs)
            try:
                group = group_id(owner.ranks, owner.unique_name)
                first = args[0] if args else next(iter(kwargs.values()), ())
                n_bytes = _sum_bytes(first)
                on_device = self._device_of(first)
                watch = self._watch(on_device, writer) if on_device is not None else None
                code = writer.op(op)
                writer.set_rank(owner.rank)
            except Exception as fault:  # noqa: BLE001  # as above
                self._warn(f"not recorded: {op}: {fault!r}")
                return original(owner, *args, **kwargs)
            self._outer.add(thread)
            try:
                if watch is not None:
                    call = partial(original, owner, *args, **kwargs)
                    return watch.run(call, writer.issue(code, group, n_bytes), False, None)
                sequence = writer.begin(code, group, n_bytes)
                try:
                    return original(owner, *args, **kwargs)
                finally:
                    writer.end(sequence)
            finally:
                self._outer.discard(thread)

        return recorded

    def _broadcast_coalesced(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def broadcast(pg: Any, tensors: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
            writer = self._writer()
            if writer is None:
                return original(pg, tensors, *args, **kwargs)
            sequence = writer.begin(writer.op("broadcast"), self._place(pg, writer).id, _sum_bytes(tensors))
            try:
                return original(pg, tensors, *args, **kwargs)
            finally:
                writer.end(sequence)

        return broadcast

    def _install_functional(self, torch: Any) -> None:
        for name, op in FUNCTIONAL.items():
            packet = getattr(torch.ops._c10d_functional, name, None)
            for owner in (packet, getattr(packet, "default", None)):
                if owner is not None and hasattr(owner, "_op"):
                    self._replace(owner, "_op", partial(self._operator, op))
        packet = getattr(torch.ops._c10d_functional, "wait_tensor", None)
        for owner in (packet, getattr(packet, "default", None)):
            if owner is not None and hasattr(owner, "_op"):
                self._replace(owner, "_op", self._wait_tensor)

    def _operator(self, op: str, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return the hook that replaces `original`, the operator of a functional collective. The collective is recorded
        as ended when the program waits for its result or frees it."""

        def recorded(*args: Any, **kwargs: Any) -> Any:
            tensors = args[0] if args else kwargs.get("input", ())
            one = tensors[0] if isinstance(tensors, (list, tuple)) and tensors else tensors
            # Program tracers call this with tensors of other types, and nothing is communicated.
            writer = self._writer() if type(one) in (self._torch.Tensor, self._torch.nn.Parameter) else None
            if writer is None or one.device.type not in ("cpu", "cuda"):
                return original(*args, **kwargs)
            try:
                from torch._C._distributed_c10d import _resolve_process_group

                name = kwargs.get("group_name", args[-1] if args else "")
                pg = _resolve_process_group(name) if isinstance(name, str) else name
                group, n_bytes = self._place(pg, writer).id, _sum_bytes(tensors)
            except Exception as fault:  # noqa: BLE001  # as above
                self._warn(f"not recorded: functional {op}: {fault!r}")
                return original(*args, **kwargs)
            sequence = writer.begin(writer.op(op), group, n_bytes, ASYNCHRONOUS)
            try:
                result = original(*args, **kwargs)
            except BaseException:
                writer.end(sequence)
                raise
            kept: Any = result[-1] if isinstance(result, (list, tuple)) else result  # one of several represents all
            key = kept.data_ptr()
            reference = weakref.ref(kept, partial(self._unwaited, key))
            self._functional.setdefault(key, []).append((reference, writer, sequence))
            return result

        return recorded

    def _wait_tensor(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def wait(*args: Any, **kwargs: Any) -> Any:
            try:
                return original(*args, **kwargs)
            finally:
                if self._functional:
                    tensor: Any = args[0] if args else kwargs.get("tensor")
                    if type(tensor) in (self._torch.Tensor, self._torch.nn.Parameter):
                        for _, writer, sequence in self._functional.pop(tensor.data_ptr(), ()):
                            writer.end(sequence)

        return wait

    def _unwaited(self, key: int, reference: Any) -> None:
        waiting = self._functional.get(key, [])
        for entry in [entry for entry in waiting if entry[0] is reference]:
            waiting.remove(entry)
            entry[1].end(entry[2])
        if not waiting:
            self._functional.pop(key, None)

    def _forward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
            if module not in self._hooked_ddp:
                self._hooked_ddp.add(module)
                try:
                    if not module._comm_hooks:
                        # register_comm_hook checks these annotations.
                        _reduce_bucket.__annotations__["bucket"] = self._torch.distributed.GradBucket
                        _reduce_bucket.__annotations__["return"] = self._torch.futures.Future[self._torch.Tensor]
                        module.register_comm_hook(module.process_group, _reduce_bucket)
                except Exception as fault:  # noqa: BLE001  # as above
                    self._warn(f"not recorded: the gradients of DistributedDataParallel: {fault!r}")
            return original(module, *args, **kwargs)

        return forward

    # Devices.

    def _device_of(self, tensors: Any) -> Any:
        if hasattr(tensors, "is_cuda"):
            return tensors.device if tensors.is_cuda else None
        return self._device_of(tensors[0]) if tensors else None

    def _watch(self, device: Any, writer: RingWriter) -> DeviceWatch | None:
        cuda = self._torch.cuda
        if cuda.is_current_stream_capturing():
            self._warn("not recorded: collectives that are captured into CUDA graphs")
            return None
        if self._device is None or self._device.writer is not writer:
            self._device = DeviceWatch(cuda, writer)
        return self._device


def _reduce_bucket(group: Any, bucket: Any) -> Any:
    """Reduce a gradient bucket exactly as DistributedDataParallel does. The bucket is multiplied by 1 / (number of
    ranks) and then all-reduced."""
    import torch.distributed

    averaged = bucket.buffer().mul_(1.0 / group.size())
    work = torch.distributed.all_reduce(averaged, group=group, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


def _sum_bytes(tensors: Any) -> int:
    if hasattr(tensors, "nbytes"):
        return int(tensors.nbytes)
    return sum(map(_sum_bytes, tensors)) if isinstance(tensors, (list, tuple)) else 0
