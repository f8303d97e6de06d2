"""vLLM's own weight transfer, from the trainer's process into the workers of servers: `nccl`, and any other backend
that vLLM has registered, as one group of the trainer and all servers.

The trainer runs vLLM's trainer-side engine. The calls that this makes of servers go through the daemon, which passes
them on to the servers' peers while it asks for that step, and at no other time. A server's workers come behind those of
servers before it: `rank_offset` goes up by their number. The group is joined before the fence, once for as long as
trainer and servers are the same: workers that wait for it do nothing else, so it is looked first whether the trainer
listens.

Nothing is kept: an engine that fails, or is restarted, waits for the next version; a worker whose update broke off in
the middle may take no other until its server is started again. Only a backend on CPUs has been run;
`nccl` and the others that need GPUs never have.
"""

import asyncio
import dataclasses
import json
import socket
from collections.abc import Iterator, Mapping
from typing import Any

from orchestrrl.core.errors import OrchestrRLError, Permanent
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

JOIN, SEND = "join", "send"  # steps that the trainer takes
KNOWN_OPTIONS = ("backend", "address", "trainer_init")
LISTENS_WITHIN_S = 60.0
LOOK_S = 0.2
# What vLLM's trainer-side engine calls, in which step of ours, and what it is called at engines.
CALLS = {
    "init_weight_transfer_engine": (JOIN, "join"),
    "start_weight_update": (SEND, "start"),
    "update_weights": (SEND, "update"),
    "finish_weight_update": (SEND, "finish"),
}


class VllmTransferBackend:
    def __init__(self) -> None:
        self._joined: tuple[Any, ...] | None = None  # by whom
        self._workers: dict[EngineId, int] = {}
        self._step = ""
        self._outcomes = EngineOutcomes()

    # --- in the daemon

    def faults(self, publication: Publication) -> list[str]:
        faults = [
            f"options.{name}: is not known, got {name!r}" for name in publication.options if name not in KNOWN_OPTIONS
        ]
        if not publication.options.get("backend"):
            faults.append("options.backend: must name vLLM's backend, as servers were started with, got ''")
        return faults

    async def prepare(self, sync: DirectSync) -> None:
        backend = sync.publications[0].options["backend"]
        await self._inspect_workers(sync, backend)
        run = sync.publications[0].run.rpartition("-")[0]  # this start of the trainer
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
            raise Permanent(
                f"{call} is nothing that can be called while the trainer is asked to {self._step or 'wait'}"
            )
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
                why[engine] = f"was started with the backend {told['backend'] or 'none'}, the trainer has {backend}"
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
        """What all servers are told, as one of them is."""
        names = list(self._workers)
        before = sum(self._workers[each] for each in names[: names.index(engine)])
        own = dict(body)
        if "init_info" in own and "rank_offset" in own["init_info"]:
            own["init_info"] = {**own["init_info"], "rank_offset": own["init_info"]["rank_offset"] + before}
        if isinstance(own.get("update_info"), list):  # one for each worker of all
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
                raise Permanent(f"vllm_transfer does nothing called {act!r} at engines")
        return {}

    # --- in the trainer

    def sender(self, model: Any, options: SenderOptions) -> WeightSender:
        try:
            trainer_init = json.loads(options.own.get("trainer_init", "{}"))
        except ValueError as error:
            raise Permanent(f"options.trainer_init: must be JSON: {error}") from error
        return VllmSender(model, options, trainer_init)


async def _listens(init_info: Mapping[str, Any], within_s: float) -> None:
    """Raises Permanent where nobody does: workers would wait for minutes, and answer nothing meanwhile."""
    host, port = init_info.get("master_address"), init_info.get("master_port")
    if host is None or port is None:  # it meets otherwise
        return
    until_s = asyncio.get_running_loop().time() + within_s
    while True:
        try:
            _, writer = await asyncio.wait_for(asyncio.open_connection(host, port), 5.0)
        except (OSError, TimeoutError) as error:
            if asyncio.get_running_loop().time() >= until_s:
                raise Permanent(f"the trainer does not listen at {host}:{port}: {error}") from error
            await asyncio.sleep(LOOK_S)
        else:
            writer.close()
            return


class VllmSender:
    """The trainer's part, of one rank: vLLM's trainer-side engine, whose calls of servers the daemon passes on. The
    first is the sender; the others take part in gathering. It needs vLLM 0.32 or later there."""

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
        self._engine = self._factory.trainer_init(init_info, client=self, source=self.source())

    def source(self) -> Any:
        """Of what the sender has at the time, gathered one after the other."""
        from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

        sender = self

        class Source(WeightSource):  # type: ignore[misc]  # vllm is not there when types are checked
            def metadata(self) -> list[Any]:
                return [ParamMeta(meta.name, torch_dtype(meta.dtype), meta.shape) for meta in sender.tensors]

            def __iter__(self) -> Iterator[tuple[str, Any]]:
                return ((meta.name, gathered(sender._tensors[meta.name], meta)) for meta in sender.tensors)

        return Source()


def _free_port() -> int:
    """Nobody holds it until it is listened at: where another comes between, joining fails and is done again."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
