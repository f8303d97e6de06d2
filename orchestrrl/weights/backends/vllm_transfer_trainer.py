"""The trainer's part of `vllm_transfer`: vLLM's trainer-side engine, whose calls of servers the daemon passes on.

It needs vLLM (0.32 or later) in the trainer's environment. Imported there alone.
"""

import dataclasses
import socket
from collections.abc import Iterator, Mapping
from typing import Any

from orchestrrl.core.errors import Permanent
from orchestrrl.weights.backends.base import JOIN, SEND, ReportStep, SenderOptions, TrainerStep
from orchestrrl.weights.model import TensorMeta
from orchestrrl.weights.trainer.torch_tensors import named_tensors, torch_dtype


class VllmSender:
    """One rank's. The first is the sender; the others take part in gathering."""

    def __init__(self, model: Any, options: SenderOptions, trainer_init: Mapping[str, Any]) -> None:
        try:
            from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
        except ImportError as error:
            raise Permanent(
                f"backend 'vllm_transfer' needs vllm 0.32 or later in the trainer's environment: {error}"
            ) from error
        self._factory = WeightTransferTrainerFactory
        self._options = options
        self._own_init = trainer_init
        self._engine: Any = None
        self._group = 0
        self._report_step: ReportStep | None = None
        self.use(model, options)
        self._init_class()

    def use(self, model: Any, options: SenderOptions) -> None:
        """These are the tensors from now on; what was joined stays."""
        self._options = options
        self._tensors, self._metas = named_tensors(model, options.dtype, options.rename, options.ignore)

    @property
    def tensors(self) -> tuple[TensorMeta, ...]:
        return tuple(self._metas.values())

    def act(self, step: TrainerStep, report: ReportStep) -> None:
        self._report_step = report
        if step.step == JOIN:
            self._join(int(step.body["workers"]))
        elif step.step == SEND:
            if self._engine is None:
                if self._options.rank == 0:
                    raise Permanent("nothing was joined by this trainer")
                self._join(0)  # this rank has no connection: it only gathers
            self._engine.send_weights()
        else:
            raise Permanent(f"vllm_transfer of this trainer knows no step {step.step!r}")

    def close(self) -> None:
        if self._engine is not None:
            self._engine.shutdown()
            self._engine = None

    # --- as vLLM's client of servers

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._call("init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        self._call("start_weight_update", {})

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        from vllm.distributed.weight_transfer.clients import _json_safe_update_payload

        self._call("update_weights", {"update_info": _json_safe_update_payload(update_info)})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._call("finish_weight_update", {})

    def shutdown_weight_transfer_engine(self) -> None:
        """Servers let go when they join again."""

    def _call(self, call: str, body: Mapping[str, Any]) -> None:
        assert self._report_step is not None
        self._report_step(call, body)

    # --- inside

    def _init_class(self) -> Any:
        backend = self._options.own.get("backend", "")
        known = self._factory._registry
        if backend not in known:
            raise Permanent(f"options.backend: vLLM's trainer side knows {', '.join(known)}, got {backend!r}")
        return known[backend]().init_info_cls

    def _join(self, workers: int) -> None:
        self.close()
        init_class = self._init_class()
        fields = {field.name for field in dataclasses.fields(init_class)}
        init = dict(self._own_init)
        if "master_address" in fields:
            init.setdefault(
                "master_address", self._options.own.get("address") or socket.gethostbyname(socket.gethostname())
            )
        if "master_port" in fields:
            init.setdefault("master_port", _free_port())
        if "world_size" in fields:
            init.setdefault("world_size", workers + 1)
        try:
            init_info = init_class(rank=self._options.rank, **init)
        except (TypeError, ValueError) as error:
            raise Permanent(f"options.trainer_init: {init_class.__name__} says: {error}") from error
        self._engine = self._factory.trainer_init(init_info, client=self, source=_source(self))

    def metadata(self) -> Iterator[tuple[str, Any, tuple[int, ...]]]:
        for name, meta in self._metas.items():
            yield name, torch_dtype(meta.dtype), meta.shape

    def whole(self) -> Iterator[tuple[str, Any]]:
        """Gathered one after the other: a collective call, where tensors are divided."""
        for name, tensor in self._tensors.items():
            gather = getattr(tensor, "full_tensor", None)
            whole = gather() if callable(gather) else tensor
            yield name, whole.detach().to(torch_dtype(self._metas[name].dtype)).contiguous()


def _source(sender: VllmSender) -> Any:
    """Of what the sender has at the time."""
    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

    class Source(WeightSource):  # type: ignore[misc]  # vllm is not there when types are checked
        def metadata(self) -> list[Any]:
            return [ParamMeta(name, dtype, shape) for name, dtype, shape in sender.metadata()]

        def __iter__(self) -> Iterator[tuple[str, Any]]:
            return sender.whole()

    return Source()


def _free_port() -> int:
    """Nobody holds it until it is listened at: where another comes between, joining fails and is done again."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
