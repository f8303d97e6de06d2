"""The weight backend for vLLM's own weight transfer, from the trainer's process into the workers of vLLM servers.

It supports `nccl` and any other backend registered in vLLM. The trainer and all servers form one process group. The
trainer runs vLLM's trainer-side engine, whose calls to servers go through the daemon. The daemon forwards a call to the
servers' peers only during the step to which it belongs. The workers of each server have consecutive ranks: the
`rank_offset` of a server is increased by the number of workers of all previous servers. The group is joined before the
fence, and again only when the trainer or the servers change. Workers block while they join, so the peer first checks
that the trainer listens.

Versions are not stored. An engine that fails or restarts must therefore wait for the next version. A worker whose
update was interrupted may reject further updates until its server is restarted. Only a CPU backend has been tested.
`nccl` and the other GPU backends are untested.
"""

import asyncio
import dataclasses
import json
import socket
from collections.abc import Iterator, Mapping
from typing import Any

from orchestrrl.core.errors import OrchestrRLError, Permanent, shorten
from orchestrrl.engines.base import Engine, transfer_engine
from orchestrrl.weights.backends.base import (
    DirectSync,
    EngineOutcomes,
    EnginesFailed,
    ReportStep,
    SenderOptions,
    TrainerStep,
    WeightSender,
)
from orchestrrl.weights.model import TensorMeta
from orchestrrl.weights.publication import Publication
from orchestrrl.weights.trainer.torch_tensors import gathered, named_tensors, torch_dtype
from planner.model import EngineId

JOIN, SEND = "join", "send"  # steps of the trainer
KNOWN_OPTIONS = ("backend", "address", "trainer_init")
LISTENS_WITHIN_S = 60.0
LOOK_S = 0.2
# Each call of vLLM's trainer-side engine: the step in which it is allowed, and the act at engines.
CALLS = {
    "init_weight_transfer_engine": (JOIN, "join"),
    "start_weight_update": (SEND, "start"),
    "update_weights": (SEND, "update"),
    "finish_weight_update": (SEND, "finish"),
}


class VllmTransferBackend:
    def __init__(self) -> None:
        self._joined: tuple[Any, ...] | None = None  # the members of the joined group
        self._workers: dict[EngineId, int] = {}
        self._step = ""
        self._outcomes = EngineOutcomes()

    # --- in the daemon

    def faults(self, publication: Publication) -> list[str]:
        faults = [
            f"options.{name}: is unknown, got {name!r}" for name in publication.options if name not in KNOWN_OPTIONS
        ]
        if not publication.options.get("backend"):
            faults.append("options.backend: must name the vLLM backend with which servers were started, got ''")
        return faults

    async def prepare(self, sync: DirectSync) -> None:
        backend = sync.publications[0].options["backend"]
        await self._inspect_workers(sync, backend)
        run = sync.publications[0].run.rpartition("-")[0]  # identifies this start of the trainer
        joined = (run, backend, tuple(self._workers.items()))
        if run and self._joined == joined:
            return
        self._joined = None
        await self._request(sync, JOIN, {"workers": sum(self._workers.values())})
        self._joined = joined

    async def install(self, sync: DirectSync) -> Mapping[EngineId, OrchestrRLError | None]:
        self._outcomes = EngineOutcomes(sync.engines)
        try:
            await self._request(sync, SEND, {})
        except OrchestrRLError as error:
            self._outcomes.broke_off(error)
        return self._outcomes.by_engine

    async def relayed(self, sync: DirectSync, call: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        step, act = CALLS.get(call, ("", ""))
        if step != self._step:
            raise Permanent(f"{call} cannot be called while the trainer's step is {self._step or 'none'}")
        bodies = {engine: self._own(engine, body) for engine in sync.engines}
        await self._outcomes.act(sync, act, bodies, first=act in ("join", "start"), last=act == "finish")
        return {}

    def forget(self) -> None:
        self._joined = None

    async def _inspect_workers(self, sync: DirectSync, backend: str) -> None:
        why: dict[EngineId, str] = {}
        self._workers = {}
        for engine in sync.engines:
            try:
                told = await sync.at(engine, "inspect", {})
            except OrchestrRLError as error:
                why[engine] = str(error)
                continue
            if told["backend"] != backend:
                why[engine] = f"was started with backend {told['backend'] or 'none'}, the trainer uses {backend}"
            self._workers[engine] = int(told["workers"])
        if why:
            raise EnginesFailed(why)

    async def _request(self, sync: DirectSync, step: str, body: Mapping[str, Any]) -> None:
        self._step = step
        try:
            await sync.request_trainer(step, body)
        finally:
            self._step = ""

    def _own(self, engine: EngineId, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the body that one server receives for a call to all servers. This body contains the server's rank
        offset and only the entries of the server's workers."""
        names = list(self._workers)
        before = sum(self._workers[each] for each in names[: names.index(engine)])
        own = dict(body)
        if "init_info" in own and "rank_offset" in own["init_info"]:
            own["init_info"] = {**own["init_info"], "rank_offset": own["init_info"]["rank_offset"] + before}
        if isinstance(own.get("update_info"), list):  # one entry per worker of all servers
            own["update_info"] = own["update_info"][before : before + self._workers[engine]]
        return own

    # --- at an engine's peer

    async def at_engine(self, engine: Engine, act: str, version: int, body: Mapping[str, Any]) -> Mapping[str, Any]:
        transfers, within_s = transfer_engine(engine), float(body["within_s"])
        match act:
            case "inspect":
                ends = await transfers.ends()
                return {"backend": ends.backend, "workers": ends.workers}
            case "join":
                await _listens(body["init_info"], min(within_s, LISTENS_WITHIN_S))
                await transfers.join(body["init_info"], within_s)
            case "start":
                await transfers.start()
            case "update":
                await transfers.update(body["update_info"], within_s)
            case "finish":
                await transfers.finish(version, within_s)
            case _:
                raise Permanent(
                    f"backend vllm_transfer does not support action {act!r} on engines; use the same version of"
                    " OrchestrRL for the daemon and the peer"
                )
        return {}

    # --- in the trainer

    def sender(self, model: Any, options: SenderOptions) -> WeightSender:
        try:
            trainer_init = json.loads(options.own.get("trainer_init", "{}"))
        except ValueError as error:
            raise Permanent(
                f"options.trainer_init: must be valid JSON ({error}), got {shorten(options.own['trainer_init'])}"
            ) from error
        return VllmSender(model, options, trainer_init)


async def _listens(init_info: Mapping[str, Any], within_s: float) -> None:
    """Wait until the trainer listens at the address in `init_info`. Raises Permanent if the trainer does not listen
    within `within_s`, because workers that join would then block for minutes without answering calls."""
    host, port = init_info.get("master_address"), init_info.get("master_port")
    if host is None or port is None:  # the backend uses another rendezvous
        return
    until_s = asyncio.get_running_loop().time() + within_s
    while True:
        try:
            _, writer = await asyncio.wait_for(asyncio.open_connection(host, port), 5.0)
        except (OSError, TimeoutError) as error:
            if asyncio.get_running_loop().time() >= until_s:
                raise Permanent(
                    f"cannot connect to the trainer at {host}:{port} within {within_s:g} s:"
                    f" {str(error) or type(error).__name__}"
                ) from error
            await asyncio.sleep(LOOK_S)
        else:
            writer.close()
            return


class VllmSender:
    """The sender of one rank of the trainer. It runs vLLM's trainer-side engine, whose calls to servers the daemon
    forwards. Rank 0 sends the weights. The other ranks only take part in gathering tensors. The trainer's environment
    must contain vLLM 0.32 or later."""

    def __init__(self, model: Any, options: SenderOptions, trainer_init: Mapping[str, Any]) -> None:
        try:
            from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
        except ImportError as error:
            raise Permanent(
                f"backend 'vllm_transfer' needs vllm 0.32 or later in the trainer's environment: {error}"
            ) from error
        self._factory = WeightTransferTrainerFactory
        self._own_init = trainer_init
        self._engine: Any = None
        self._group = 0
        self._report_step: ReportStep | None = None
        self.use(model, options)
        self._init_class()

    def use(self, model: Any, options: SenderOptions) -> None:
        """Use this model's tensors for the next versions. The process group is kept."""
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
                    raise Permanent("rank 0 of the trainer must join a group before it sends weights")
                self._join(0)  # this rank has no connection and only takes part in gathering
            self._engine.send_weights()
        else:
            raise Permanent(
                f"backend vllm_transfer does not support step {step.step!r} in the trainer; use the same version of"
                " OrchestrRL for the daemon and the trainer"
            )

    def close(self) -> None:
        if self._engine is not None:
            self._engine.shutdown()
            self._engine = None

    # --- the client of servers that vLLM's trainer-side engine calls

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
        """Do nothing, because a server leaves its process group when it joins another one."""

    def _call(self, call: str, body: Mapping[str, Any]) -> None:
        assert self._report_step is not None
        self._report_step(call, body)

    # --- inside

    def _init_class(self) -> Any:
        backend = self._options.own.get("backend", "")
        known = self._factory._registry
        if backend not in known:
            raise Permanent(f"options.backend: must be one of {', '.join(known)}, got {backend!r}")
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
            raise Permanent(
                f"options.trainer_init: must be valid arguments of {init_class.__name__} ({error}),"
                f" got {shorten(self._own_init)}"
            ) from error
        self._engine = self._factory.trainer_init(init_info, client=self, source=self.source())

    def source(self) -> Any:
        """Return a vLLM WeightSource over the sender's current tensors. The source gathers one tensor at a time."""
        from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

        sender = self

        class Source(WeightSource):  # type: ignore[misc]  # vllm is not installed where types are checked
            def metadata(self) -> list[Any]:
                return [ParamMeta(meta.name, torch_dtype(meta.dtype), meta.shape) for meta in sender.tensors]

            def __iter__(self) -> Iterator[tuple[str, Any]]:
                return ((meta.name, gathered(sender._tensors[meta.name], meta)) for meta in sender.tensors)

        return Source()


def _free_port() -> int:
    """Return a free TCP port. The port is not reserved. If another process takes it, the attempt to join the group
    fails and is repeated."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
